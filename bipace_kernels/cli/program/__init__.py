"""The program `bipace`; docs/cli.md describes every option.

Installed as bipace_cli, beside bipace_kernels: importing that takes seconds (it imports torch), and help should not.
"""

import errno
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

BAD_INPUT = 2  # exit status, also of a missing package
# Errors of a write to stdout: no reader, a full disk, a closed descriptor.
_LOST = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the program on `args` (None: the command line); ends in SystemExit."""
    # Checked before anything imports them, so that a plain installation gives one sentence and no traceback.
    for name in ("typer", "rich"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name != name:
                raise
            _stop_without(name)
    from .commands import app

    with stdout_errors():
        app(list(args) if args is not None else None, prog_name="bipace")


def _stop_without(package: str) -> NoReturn:
    from bipace_kernels.support import optional

    try:
        optional.need(package, "the program bipace")
    except optional.MissingPackageError as error:
        sys.stderr.write(f"error: {error}\n")
    raise SystemExit(BAD_INPUT)


@contextmanager
def stdout_errors() -> Iterator[None]:
    """Around the program: SystemExit with status 2 and one sentence if results cannot be written to stdout."""
    if sys.stdout is None:
        _stop("it is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may lack ε, or a file's name that is not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno not in _LOST or error.filename is not None:
            raise
        # The rest of the buffer would be written again at exit, and fail again.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        _stop(error.strerror or str(error))


def _stop(reason: str) -> NoReturn:
    if sys.stderr is not None:
        sys.stderr.write(f"error: stdout cannot be written: {reason}; redirect it (> FILE, or > /dev/null).\n")
    raise SystemExit(BAD_INPUT)
