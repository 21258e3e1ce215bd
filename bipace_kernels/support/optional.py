"""Packages of extras, whose absence gives a one-sentence error with the command that installs one; objects by name."""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import near

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
    """The package, by its name in PACKAGES; MissingPackageError where it is not installed.

    purpose   what needs it, as the subject of a sentence: "a progress bar"
    """
    if missing(name):
        package, extra = PACKAGES[name]
        text = f"{purpose} needs the package {package}, which is not installed: {install(extra)}"
        raise MissingPackageError(text, name=name)
    return importlib.import_module(name)


@functools.cache
def _run(file: str, changed: int) -> ModuleType:
    """The module of a file, run again only where that has changed: else its functions could no longer be pickled."""
    spec: Any = importlib.util.spec_from_file_location(file, file)
    module = sys.modules[file] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(text: str) -> Any:
    """The object that "module:NAME" or "folder/file.py:NAME" names now, of a file as it is; ValueError says why not."""
    place, _, name = text.rpartition(":")
    try:
        if place.endswith(".py"):
            file = Path(place).resolve()
            module = _run(str(file), file.stat().st_mtime_ns)
        else:
            module = importlib.import_module(place)
        if not hasattr(module, name):
            raise AttributeError(f"{place} has no attribute {name!r}{near(name, vars(module)).rstrip('.')}")
        return getattr(module, name)
    except Exception as error:  # whatever the user's module raises
        cure = "" if place.endswith(".py") else f"; for a file of the current folder write {place}.py:{name}"
        raise ValueError(f"{text} cannot be loaded, {type(error).__name__}: {error}{cure}.") from error
