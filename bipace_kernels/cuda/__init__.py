"""CUDA kernels of the stages that take the time: clusters, values and action keys.

What each stage takes and gives: stages.py.  A function here checks nothing, computes nothing and waits for nothing; it makes
the outputs and launches kernels of csrc/cuda/ by name (_launch.py).  Every other stage is Triton's.
"""

import importlib
from types import ModuleType

__all__ = ["action_keys", "clusters", "values"]


def __getattr__(name: str) -> ModuleType:
    """A stage is imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no stage {name!r}; it has {', '.join(__all__)}.")
    return importlib.import_module(f"{__name__}.{name}")
