"""`bipace bench`: forwards to the benchmarks, which are a separate program."""

import importlib
from collections.abc import Mapping
from typing import Any

import typer

from ._console import CliError

MODULE = "bipace_kernels.bench.__main__"


def run(values: Mapping[str, Any]) -> None:
    """Runs the benchmarks' main(args); its exit status becomes the program's."""
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name is None or not MODULE.startswith(error.name):
            raise
        raise CliError(
            "this installation has no benchmarks; install the wheel, or run `python -m bench` in a checkout."
        ) from None
    raise typer.Exit(module.main(list(values["args"])) or 0)
