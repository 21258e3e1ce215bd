"""Packages of extras.  A missing one gives a one-sentence error with the command that installs it."""

from __future__ import annotations

import importlib
from types import ModuleType

# Name in `import` -> name on PyPI, extra that has it.
PACKAGES = {
    "typer": ("typer", "cli"),
    "rich": ("rich", "cli"),
    "matplotlib": ("matplotlib", "cli"),
    "jinja2": ("Jinja2", "cli"),
    "pyarrow": ("pyarrow", "parquet"),
    "sklearn": ("scikit-learn", "calibrate"),
    "transformers": ("transformers", "hidden"),
    "sentence_transformers": ("sentence-transformers", "sentence"),
}


class MissingPackageError(ImportError):
    """A package of an extra is not installed; the message names both."""


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f'pip install "bipace-kernels[{extra}]"'


def missing(name: str) -> bool:
    """Whether the package is not installed.  One that is installed but fails to import raises its own error."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != name:
            raise
        return True
    return False


def need(name: str, purpose: str) -> ModuleType:
    """The package; MissingPackageError where it is not installed.

    name      as in `import`, one of PACKAGES
    purpose   what needs it, as the subject of a sentence: "a progress bar"
    """
    if missing(name):
        package, extra = PACKAGES[name]
        raise MissingPackageError(
            f"{purpose} needs the package {package}, which is not installed: {install(extra)}", name=name
        )
    return importlib.import_module(name)
