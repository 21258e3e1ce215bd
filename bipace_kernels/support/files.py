"""Files that readers never see half written: a temporary folder on the same file system, then renames."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path, renamed to `path` at the end, or removed if the block fails."""
    with _temporary(path.parent, path.name) as folder:
        yield folder / path.name
        _move(folder / path.name, path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder whose files are moved into `path` at the end, or removed if the block fails.

    Other files of an existing folder are kept.
    """
    with _temporary(path if path.is_dir() else path.parent, path.name) as folder:
        yield folder
        path.mkdir(exist_ok=True)
        for file in sorted(folder.iterdir()):
            _move(file, path / file.name)


def _move(file: Path, path: Path) -> None:
    with file.open("rb") as written:
        os.fsync(written.fileno())
    file.replace(path)


@contextmanager
def _temporary(parent: Path, name: str) -> Iterator[Path]:
    """A folder inside `parent`, locked while it is in use: what a killed run left for this name is not, and goes."""
    parent.mkdir(parents=True, exist_ok=True)
    prefix = f".bipace-{zlib.crc32(os.fsencode(name)):08x}."
    for old in parent.glob(f"{prefix}*.tmp"):
        with contextlib.suppress(OSError), locked(old):
            shutil.rmtree(old, ignore_errors=True)
    made = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file system without locks, where leftovers stay
            stack.enter_context(locked(made))
        # Only a locked folder gets the suffix, so that no other run takes it for a leftover.
        folder = made.rename(made.with_name(f"{made.name}.tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock; OSError where another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
