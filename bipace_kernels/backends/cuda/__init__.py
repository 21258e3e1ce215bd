"""CUDA kernels of the expensive stages: clusters, values and action keys.

For the stages' inputs and outputs see contract.py.  A function here does not check or synchronize; it allocates
the outputs and launches kernels of csrc/cuda/ by name (_launch.py).  All other stages run in Triton.
"""

import importlib
from types import ModuleType

__all__ = ["action_keys", "clusters", "values"]


def __getattr__(name: str) -> ModuleType:
    """Stages are imported at first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no stage {name!r}; it has {', '.join(__all__)}.")
    return importlib.import_module(f"{__name__}.{name}")
