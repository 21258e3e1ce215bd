"""Whose CUDA kernels are launched: those compiled into the wheel."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ._launch import Provider


class Wheel:
    """Kernels compiled when the package was built (bipace_kernels._cuda)."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        cluster: int,
        words: bytes,
        device: torch.device,
    ) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            self._module.launch(kernel, *grid, threads, shared, cluster, words, stream)


stand_in: Provider | None = None  # for the device, where there is none: tests run the kernels on the CPU


def current() -> Provider:
    """The provider in use; RuntimeError where there is none."""
    if stand_in is not None:
        return stand_in
    module, why = _import()
    if module is None:
        raise RuntimeError(why)
    return Wheel(module)


@functools.cache
def _import() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("bipace_kernels._cuda"), ""
    except ImportError as error:
        return None, f"this build of bipace_kernels has no CUDA kernels ({error})"
