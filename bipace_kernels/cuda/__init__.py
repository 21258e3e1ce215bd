"""CUDA kernels: the estimator at the speed of its own dependency chain.

The stages have the names of `cpu/`, `reference/` and `triton_kernels/`, and the last one's arguments: nothing here waits
for the device, so sizes come as ints and rows set aside stay in place behind a mask.  A function here checks nothing and
computes nothing; it makes the outputs and launches kernels of csrc/cuda/ by name (_launch.py).
"""

import importlib
from types import ModuleType

__all__ = [
    "action_keys",
    "clusters",
    "combine",
    "episode",
    "ngrams",
    "observations",
    "pooling",
    "returns",
    "values",
]


def __getattr__(name: str) -> ModuleType:
    """A stage is imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no stage {name!r}; it has {', '.join(__all__)}.")
    return importlib.import_module(f"{__name__}.{name}")
