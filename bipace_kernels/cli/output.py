"""Writes results so that a reader never sees half a file: a temporary file in the same folder, then one rename."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .. import _optional
from ._console import CliError

PARQUET_SUFFIXES = (".parquet", ".pq")
TABLE_SUFFIXES = (*PARQUET_SUFFIXES, ".csv", ".jsonl", ".jsonl.gz")


def check_table_path(path: str, inputs: list[str]) -> None:
    """CliError, before any work is done, where a table cannot be written to this path."""
    if not path.lower().endswith(TABLE_SUFFIXES):
        raise CliError(f"--out {path} must end in one of {', '.join(TABLE_SUFFIXES)}.")
    if os.path.isdir(path):
        raise CliError(f"--out {path} is a folder; give the path of a file.")
    if os.path.realpath(path) in {os.path.realpath(given) for given in inputs}:
        raise CliError(f"--out {path} is one of the inputs; give another path.")
    check_folder(str(Path(path).parent), "--out")
    if path.lower().endswith(PARQUET_SUFFIXES):
        _optional.need("pyarrow", "a Parquet file")


def check_folder(folder: str, option: str) -> None:
    """CliError where a file cannot be made in this folder, or the folder itself cannot be made."""
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise CliError(f"{option}: {place} is not a folder.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise CliError(f"{option}: the folder {place} is not writable; choose another one.")


@contextmanager
def atomic(path: str) -> Iterator[Path]:
    """A temporary path in the folder of `path`, moved over it at the end, or removed where the block fails."""
    target = Path(path)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        temporary = Path(name)
        os.close(handle)
        yield temporary
        _publish(temporary, target)
        temporary = None
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror or error}.") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _publish(temporary: Path, target: Path) -> None:
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files for the owner's eyes only
    os.replace(temporary, target)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def atomic_folder(folder: str) -> Iterator[Path]:
    """A temporary folder whose files are moved into `folder` at the end, or removed where the block fails.

    Other files of an existing folder stay.
    """
    target = Path(folder)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        inside = target if target.is_dir() else target.parent  # on the same file system either way
        temporary = Path(tempfile.mkdtemp(dir=inside, prefix=f".{target.name}.", suffix=".tmp"))
        yield temporary
        target.mkdir(exist_ok=True)
        for file in sorted(temporary.iterdir()):
            _publish(file, target / file.name)
    except OSError as error:
        raise CliError(f"{folder} cannot be written: {error.strerror or error}.") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def write_table(path: Path, suffix_of: str, columns: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Writes columns (name -> NumPy array or list, all of one length) in the format that `suffix_of` names.

    metadata   JSON-able; Parquet keeps it under the key "bipace", the text formats have no place for it.
    """
    name = suffix_of.lower()
    if name.endswith(PARQUET_SUFFIXES):
        _write_parquet(path, columns, metadata)
    elif name.endswith(".csv"):
        _write_text(path, lambda write: _csv(write, columns))
    elif name.endswith(".gz"):
        with open(path, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:  # no name, no time inside
            _jsonl(lambda text: file.write(text.encode()), columns)
    else:
        _write_text(path, lambda write: _jsonl(write, columns))


def _write_parquet(path: Path, columns: dict[str, Any], metadata: dict[str, Any]) -> None:
    _optional.need("pyarrow", "a Parquet file")
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    table = pa.table(columns)
    table = table.replace_schema_metadata({"bipace": json.dumps(metadata, sort_keys=True)})
    pq.write_table(table, path, compression="zstd")


def _write_text(path: Path, write_rows: Callable[[Callable[[str], Any]], None]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        write_rows(file.write)


def _csv(write: Callable[[str], Any], columns: dict[str, Any]) -> None:
    import csv

    class Sink:
        def write(self, text: str) -> Any:
            return write(text)

    writer = csv.writer(Sink(), lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(_plain(values) for values in columns.values()), strict=True))


def _jsonl(write: Callable[[str], Any], columns: dict[str, Any]) -> None:
    for row in zip(*(_plain(values) for values in columns.values()), strict=True):
        write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False, allow_nan=False) + "\n")


def _plain(values: Any) -> list[Any]:
    """Python values; a float32 as the shortest decimal that reads back to it."""
    if isinstance(values, np.ndarray):
        if values.dtype == np.float32:
            return [float(str(value)) for value in values]
        return list(values.tolist())
    return list(values)
