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

from . import _cuda_loader, _env, _native_loader, _triton_loader

NAMES = ("auto", "reference", "cpu", "triton", "cuda")
_PACKAGES = {"reference": "reference", "cpu": "cpu", "triton": "triton_kernels", "cuda": "cuda"}
_AUTO = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton")}  # by where the tensors are, best first
_warned: set[str] = set()


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot run here; the message says why."""


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend would run here, and why not.

    name         "reference" | "cpu" | "triton" | "cuda"
    available    whether it runs here at all
    reason       why not; empty where available
    taken_for    kinds of tensors, of "cpu" and "cuda", for which backend="auto" takes it (BIPACE_BACKEND counted in)
    detail       versions and devices, where there is something to say
    """

    name: str
    available: bool
    reason: str
    taken_for: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.name}: available" if self.available else f"{self.name}: not available ({self.reason})"


def backends() -> dict[str, BackendStatus]:
    """What would run here, by name, and why not the others.

    "reference" is plain Python in float64, "cpu" the compiled C++ kernels, "triton" kernels compiled by Triton for
    tensors on a GPU, "cuda" kernels compiled when the package was built, or by CuPy.
    """
    taken = {kind: taken_for(kind)[0] for kind in _AUTO}
    found = {}
    for name in NAMES[1:]:
        reason = _why_not(name)
        kinds = tuple(kind for kind, choice in taken.items() if choice == name)
        found[name] = BackendStatus(name, not reason, reason, kinds, _detail(name))
    return found


def taken_for(kind: str) -> tuple[str | None, str]:
    """The backend that backend="auto" takes for tensors of a kind ("cpu" or "cuda"); or None, and why."""
    try:
        names = _AUTO[kind] if _env.backend() is None else (_from_env(),)
    except ValueError as error:
        return None, str(error)
    reasons = {name: _why_not(name) or _why_not_on(name, kind) for name in names}
    fits = next((name for name, reason in reasons.items() if not reason), None)
    return fits, "" if fits else "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def choose(backend: str, device: torch.device | None = None) -> Any:
    """The package (bipace_kernels.reference, .cpu or .triton_kernels) whose modules run the stages.

    device   where the tensors are; None: there are none, and a name alone decides
    ValueError for an unknown name, BackendError where the named one cannot run here or not on this device.
    """
    check_name(backend)
    asked = f"backend={backend!r}"
    if backend == "auto" and _env.backend() is not None:
        backend = _from_env()
        asked = f"backend={backend!r} (from BIPACE_BACKEND)"
    if device is not None:
        check_device(device)
    kind = "cpu" if device is None else device.type
    if backend == "auto":
        backend = _auto(kind)
    reason = _why_not(backend)
    if reason:
        raise BackendError(f"{asked} cannot run here: {reason}.")
    reason = "" if device is None else _why_not_on(backend, kind)
    if reason:
        raise BackendError(f"{asked} cannot run on tensors on {device}: {reason}.")
    return importlib.import_module(f"bipace_kernels.{_PACKAGES[backend]}")


def defers_checks(kernels: Any) -> bool:
    """Whether a backend's package runs on a device that nobody should wait for."""
    return str(kernels.__name__).rpartition(".")[2] in ("triton_kernels", "cuda")


def choose_on_host(backend: str) -> Any:
    """The package for a stage whose inputs are on the host whatever runs later, such as text: never one of a GPU."""
    kernels = choose(backend)
    return importlib.import_module(f"bipace_kernels.{_PACKAGES[_auto('cpu')]}") if defers_checks(kernels) else kernels


def _from_env() -> str:
    wanted = _env.backend()
    if wanted not in NAMES or wanted == "auto":
        raise ValueError(f"BIPACE_BACKEND must be one of {', '.join(NAMES[1:])}, got {wanted!r}; unset it for auto.")
    return str(wanted)


def _auto(kind: str) -> str:
    """The best backend for tensors of a kind.  On the CPU plain Python is the last resort, with a warning."""
    if kind == "cpu":
        why = _why_not("cpu")
        if why and why not in _warned:
            _warned.add(why)
            warnings.warn(
                f"bipace_kernels falls back to backend='reference' (plain Python, slow): {why}",
                RuntimeWarning,
                stacklevel=5,
            )
        return "reference" if why else "cpu"
    name, why = taken_for(kind)
    if name is None:
        raise BackendError(
            f"no backend runs on tensors on a GPU here ({why}); mend that, or move the tensors with .cpu() (a batch of "
            "6,400 records takes the CPU tens of milliseconds)."
        )
    return name


def _why_not(name: str) -> str:
    """Why a backend cannot run here at all; empty where it can."""
    if name == "cpu":
        return _native_loader.reason()
    if name == "triton":
        return _triton_loader.reason()
    return _cuda_loader.reason() if name == "cuda" else ""


def _detail(name: str) -> str:
    """Versions and devices, of the backends that have any."""
    if name == "triton":
        return _triton_loader.detail()
    return _cuda_loader.detail() if name == "cuda" else ""


def _why_not_on(name: str, kind: str) -> str:
    """Why a backend that runs here cannot take tensors of a kind ("cpu" or "cuda")."""
    if kind == "cuda" and name in ("cpu", "reference"):
        return "it computes on the CPU; move the tensors with .cpu(), or leave backend='auto'"
    if kind == "cpu" and name == "cuda":
        return "it computes on a GPU; move the tensors with .cuda(), or leave backend='auto'"
    if kind == "cpu" and name == "triton" and not _triton_loader.interpreted():
        return (
            "it computes on a GPU; move the tensors with .cuda(), leave backend='auto', or set TRITON_INTERPRET=1 before "
            "Triton is imported to run its kernels in Triton's interpreter (slow)"
        )
    return ""


def check_device(device: torch.device) -> None:
    """BackendError for tensors where no backend computes."""
    if device.type not in _AUTO:
        raise BackendError(f"tensors on {device} have no backend; move them with .cpu(), or .cuda() where a GPU is.")


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
