"""Triton kernels: the estimator on the device of the hidden states, on any GPU that Triton supports.

For the stages' inputs and outputs see contract.py.  Nothing here synchronizes.  Kernels are compiled by the user's
Triton (3.6 or newer) at first use; under TRITON_INTERPRET=1 they run on CPU tensors, for tests without a GPU.
"""

import importlib
from types import ModuleType

__all__ = ["action_keys", "clusters", "combine", "critic", "episode", "observations", "returns", "values"]


def __getattr__(name: str) -> ModuleType:
    """Stages are imported at first use, so that a call only loads the kernels that it runs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no stage {name!r}; it has {', '.join(__all__)}.")
    return importlib.import_module(f"{__name__}.{name}")
