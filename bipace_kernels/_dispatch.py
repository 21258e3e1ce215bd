"""Chooses the backend: the argument, then BIPACE_BACKEND, then the device.

backend="auto" may fall back, once, with a warning that gives the reason; a backend asked for by name never does.
"""

from __future__ import annotations

import importlib
import numbers
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from . import _env, _native_loader, _triton_loader

NAMES = ("auto", "reference", "cpu", "triton", "cuda")
_PACKAGES = {"reference": "reference", "cpu": "cpu", "triton": "triton_kernels", "cuda": "cuda"}
_warned: set[str] = set()


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot run here; the message says why."""


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend would run here, and why not."""

    name: str
    available: bool
    reason: str  # empty where available

    def __str__(self) -> str:
        return f"{self.name}: available" if self.available else f"{self.name}: not available ({self.reason})"


def backends() -> dict[str, BackendStatus]:
    """What would run here, by name, and why not the others.

    "reference" is plain Python in float64, "cpu" the compiled C++ kernels, "triton" kernels compiled by Triton for
    tensors on a GPU.  "cuda" is a name kept for compiled CUDA kernels, which this version does not have.
    """
    why_not = {
        "reference": "",
        "cpu": _native_loader.reason(),
        "triton": _triton_loader.reason(),
        "cuda": "this version has no CUDA kernels",
    }
    return {name: BackendStatus(name, not reason, reason) for name, reason in why_not.items()}


def choose(backend: str, device: torch.device | None = None) -> Any:
    """The package (bipace_kernels.reference or bipace_kernels.cpu) whose modules run the stages.

    ValueError for an unknown name, BackendError where the named one cannot run here or not on this device.
    """
    check_name(backend)
    if backend == "auto":
        wanted = _env.backend()
        if wanted is not None:
            if wanted not in NAMES or wanted == "auto":
                raise ValueError(
                    f"BIPACE_BACKEND must be one of {', '.join(NAMES[1:])}, got {wanted!r}; unset it for auto."
                )
            backend = wanted
    if device is not None:
        check_device(device)
    if backend == "auto":
        why = _native_loader.reason()
        if why and why not in _warned:
            _warned.add(why)
            warnings.warn(
                f"bipace_kernels falls back to backend='reference' (plain Python, slow): {why}",
                RuntimeWarning,
                stacklevel=4,
            )
        backend = "reference" if why else "cpu"
    status = backends()[backend]
    if not status.available:
        raise BackendError(f"backend={backend!r} cannot run here: {status.reason}.")
    return importlib.import_module(f"bipace_kernels.{_PACKAGES[backend]}")


def check_device(device: torch.device) -> None:
    """BackendError for tensors that no backend of this version computes on."""
    if device.type != "cpu":
        raise BackendError(
            f"tensors on {device} need a GPU backend, and this version has none; move them with .cpu() (a batch of "
            "6,400 records takes the CPU tens of milliseconds)."
        )


def check_name(backend: object) -> None:
    """ValueError unless backend is one of NAMES."""
    if backend not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {backend!r}.")


def threads(num_threads: Any) -> int:
    """Threads of the cpu backend: the argument, then BIPACE_NUM_THREADS, then torch.get_num_threads()."""
    if num_threads is None:
        from_env = _env.num_threads()
        return _useful(torch.get_num_threads() if from_env is None else from_env)
    if isinstance(num_threads, bool) or not isinstance(num_threads, numbers.Integral) or num_threads < 1:
        raise ValueError(f"num_threads must be None or an int of at least 1, got {num_threads!r}.")
    return _useful(int(num_threads))


def _useful(n: int) -> int:
    """More threads than cores only wait for each other; results are the same at any count."""
    return min(n, max(16, os.cpu_count() or 1))
