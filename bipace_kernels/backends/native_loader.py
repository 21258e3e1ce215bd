"""Loads the compiled module once, or gives the full reason why it cannot."""

import functools
import importlib
from types import ModuleType

from ..support import env


@functools.cache
def _import() -> tuple[ModuleType | None, str]:
    try:
        module = importlib.import_module("bipace_kernels._native")
    except ImportError as error:
        return None, f"bipace_kernels._native does not load: {error}"
    isa = env.isa()
    if isa is not None:
        module.set_isa(isa)
    return module, ""


@functools.cache
def reason() -> str:
    """Why the compiled module does not load; empty if it does."""
    return _import()[1]


@functools.cache
def load() -> ModuleType:
    """The compiled module.  ImportError with the reason and what to do if there is none."""
    module, why = _import()
    if module is None:
        raise ImportError(
            f"{why}. Install a wheel for this Python (pip install bipace-kernels), or in a checkout run "
            "`pip install -e .`, which needs a C++17 compiler; backend='reference' works without it."
        )
    return module


def cuda_decision() -> str:
    """What the build decided about CUDA kernels and why; empty if the compiled module does not load."""
    return str(getattr(_import()[0], "cuda_decision", ""))
