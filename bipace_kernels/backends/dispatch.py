"""Chooses the backend: the argument, then BIPACE_BACKEND, then the device; and binds its stages, by one table.

backend="auto" may fall back, once, with a warning that gives the reason; a backend requested by name never does.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..support import env
from ..support.warnings import warn_once
from . import contract as stages, cuda_loader, native_loader, threads, triton_loader

NAMES = ("auto", "reference", "cpu", "triton", "cuda")

HOST = ("similar", "ngrams")  # stages of texts, always on the host
_CUDA = ("clusters", "values", "action_keys")  # stages with CUDA kernels of their own; Triton serves the others
_AUTO = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton")}  # by the tensors' device, best first


def package_of(backend: str, stage: str) -> str:
    """The package whose module runs a stage under a backend; the only such table."""
    if backend in ("triton", "cuda"):
        if stage in HOST:
            return "reference" if native_loader.reason() else "cpu"
        return "cuda" if backend == "cuda" and stage in _CUDA else "triton"
    if stage == "combine":
        return "reference"  # torch's own operators, which nothing on a CPU is faster than
    return backend


class Backend:
    """The stages of one backend.  A stage's module is imported at first use.

    name      "reference" | "cpu" | "triton" | "cuda"
    deferred  it runs on a device and must not synchronize: values are not read, sizes come from the layout
    """

    returns: stages.Returns
    episode: stages.Episode
    clusters: stages.Clusters
    observations: stages.Observations
    similar: stages.Similar
    values: stages.Values
    critic: stages.Critic
    combine: stages.Combine
    action_keys: stages.ActionKeys
    ngrams: stages.Ngrams

    def __init__(self, name: str) -> None:
        self.name = name
        self.deferred = name in ("triton", "cuda")

    def __getattr__(self, stage: str) -> Any:
        if stage not in STAGES:
            raise AttributeError(f"backend {self.name!r} has no stage {stage!r}; stages are {', '.join(STAGES)}.")
        with threads.unforked:  # threads that import modules of one package at once may meet Python's _DeadlockError
            module = importlib.import_module(f"bipace_kernels.backends.{package_of(self.name, stage)}.{stage}")
        setattr(self, stage, module)
        return module

    def __repr__(self) -> str:
        return f"Backend({self.name!r})"


STAGES = tuple(Backend.__annotations__)
_backend = functools.cache(Backend)


class BackendError(RuntimeError):
    """A backend requested by name cannot run here; the message says why."""


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend would run here, and why not.

    name         "reference" | "cpu" | "triton" | "cuda"
    available    whether it runs here at all
    reason       why not; empty where available
    taken_for    devices of tensors, "cpu" and "cuda", for which backend="auto" chooses it (BIPACE_BACKEND included)
    stages       the stages that its own kernels run; others run in the package that `package_of` names
    detail       versions and devices, if any
    """

    name: str
    available: bool
    reason: str
    taken_for: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        can = "available" if self.available else f"not available ({self.reason})"
        return f"{self.name}: {can}; runs {', '.join(self.stages)}"


class Backends(dict[str, BackendStatus]):
    """Backends by name; prints as one line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.values()))


def backends() -> Backends:
    """Which backends can run here, by name, and why the others cannot; `print(bk.backends())` shows one line each.

    "reference" is plain Python in float64, "cpu" the compiled C++ kernels, "triton" kernels compiled by Triton for
    tensors on a GPU, "cuda" kernels compiled when the package was built, or by CuPy, for the stages where CUDA is
    faster, with Triton's for the rest.
    """
    taken = {kind: taken_for(kind)[0] for kind in _AUTO}
    status = Backends()
    for name in NAMES[1:]:
        reason = _why_not(name)
        kinds = tuple(kind for kind, choice in taken.items() if choice == name)
        own = tuple(stage for stage in STAGES if package_of(name, stage) == name)
        detail = {"triton": triton_loader.detail, "cuda": cuda_loader.detail}.get(name, str)()
        status[name] = BackendStatus(name, not reason, reason, kinds, own, detail)
    return status


def taken_for(kind: str) -> tuple[str | None, str]:
    """The backend that backend="auto" chooses for tensors on a device ("cpu" or "cuda"); or None and the reason."""
    try:
        names = _AUTO[kind] if env.backend() is None else (_from_env(),)
    except ValueError as error:
        return None, str(error)
    reasons = {name: _why_not(name) or _why_not_on(name, kind) for name in names}
    fits = next((name for name, reason in reasons.items() if not reason), None)
    return fits, "" if fits else "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def choose(backend: str, device: torch.device | None = None) -> Backend:
    """The backend whose modules run the stages.

    device   where the tensors are; None: there are none, and only the name decides
    ValueError for an unknown name, BackendError where the named one cannot run here or on this device.
    """
    check_name(backend)
    asked = f"backend={backend!r}"
    if backend == "auto" and env.backend() is not None:
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
    return _backend(backend)


def texts(backend: str) -> stages.Texts:
    """The stage of action keys for inputs on the host: never a GPU's."""
    chosen = choose(backend)
    name = _auto("cpu") if chosen.deferred else chosen.name
    return cast(stages.Texts, _backend(name).action_keys)


def _from_env() -> str:
    wanted = env.backend()
    if wanted not in NAMES or wanted == "auto":
        raise ValueError(f"BIPACE_BACKEND must be one of {', '.join(NAMES[1:])}, got {wanted!r}; unset it for auto.")
    return str(wanted)


def _auto(kind: str) -> str:
    """The best backend for tensors on a device.  On the CPU plain Python is the last resort, with a warning."""
    if kind == "cpu":
        why = _why_not("cpu")
        if why:
            text = f"bipace_kernels falls back to backend='reference' (plain Python, slow): {why}"
            warn_once(f"fallback: {why}", text, stacklevel=5)
        return "reference" if why else "cpu"
    name, why = taken_for(kind)
    if name is None:
        raise BackendError(f"no backend here runs on GPU tensors ({why}); install what is missing, or use .cpu().")
    return name


def _why_not(name: str) -> str:
    """Why a backend cannot run here at all; empty where it can."""
    if name == "cpu":
        return native_loader.reason()
    if name == "triton":
        return triton_loader.reason()
    if name == "cuda":
        triton = triton_loader.reason()
        return cuda_loader.reason() or (triton and f"Triton runs all stages except {', '.join(_CUDA)}, and {triton}")
    return ""


def _why_not_on(name: str, kind: str) -> str:
    """Why a backend that runs here cannot take tensors on a device ("cpu" or "cuda")."""
    if kind == "cuda" and name in ("cpu", "reference"):
        return "it computes on the CPU; move the tensors with .cpu(), or leave backend='auto'"
    if kind == "cpu" and name == "cuda":
        return "it computes on a GPU; move the tensors with .cuda(), or leave backend='auto'"
    if kind == "cpu" and name == "triton" and not triton_loader.interpreted():
        return (
            "it computes on a GPU; move the tensors with .cuda(), leave backend='auto', or set TRITON_INTERPRET=1 "
            "before Triton is imported to run its kernels in Triton's interpreter (slow)"
        )
    return ""


def check_device(device: torch.device) -> None:
    """Raises BackendError for tensors on a device without a backend."""
    if device.type not in _AUTO:
        raise BackendError(f"tensors on {device} have no backend; move them with .cpu(), or .cuda() if there is a GPU.")


def check_name(backend: object) -> None:
    """ValueError unless backend is one of NAMES."""
    if not isinstance(backend, str) or backend not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {backend!r}.")
