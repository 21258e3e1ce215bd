"""The program `bipace`; docs/cli.md describes every option.  Its packages are those of the extra `cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .. import _optional

MISSING_PACKAGE = 2  # exit status


def main(args: Sequence[str] | None = None) -> None:
    """Runs the program on `args` (None: the command line); ends in SystemExit."""
    # Checked before anything imports them, so that a plain installation gives one sentence and no traceback.
    for name in ("typer", "rich"):
        try:
            _optional.need(name, "the program bipace")
        except _optional.MissingPackageError as error:
            sys.stderr.write(f"error: {error}\n")
            raise SystemExit(MISSING_PACKAGE) from None
    from ._console import stdout_errors
    from .program import app

    with stdout_errors():
        app(list(args) if args is not None else None, prog_name="bipace")
