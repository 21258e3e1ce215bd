"""Triton kernels: the estimator where the hidden states are, on any GPU that Triton serves.

What each stage takes and gives: stages.py.  Nothing here waits for the device.  Kernels are compiled by the user's Triton
(3.6 or newer) at first use; under TRITON_INTERPRET=1 they run on CPU tensors, which is how they are tested without a GPU.
"""

import importlib
from types import ModuleType

__all__ = ["action_keys", "clusters", "combine", "critic", "episode", "ngrams", "observations", "returns", "values"]


def __getattr__(name: str) -> ModuleType:
    """A stage is imported when it is first asked for: a call pays for the kernels that it runs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no stage {name!r}; it has {', '.join(__all__)}.")
    return importlib.import_module(f"{__name__}.{name}")
