"""Provider of the CUDA kernels: compiled by the build, else by CuPy at first use."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch

from .. import cuda_loader


class Provider(Protocol):
    """Compiled kernels and a way to launch them."""

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,  # of a block, a multiple of 32
        shared: int,  # bytes of a block
        words: bytes,
        device: torch.device,
    ) -> None:
        """Puts the kernel on the device's current stream.  RuntimeError names the kernel, its shape and the cause."""

    def shared_memory(self, device: torch.device) -> int:
        """Bytes that a block may ask for."""

    def warpgroups(self, device: torch.device) -> bool:
        """Whether the kernels' code for this GPU has BIPACE_WARPGROUPS (csrc/cuda/intrinsics.h)."""


class Wheel:
    """Kernels compiled when the package was built (bipace_kernels._cuda)."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._capability = functools.cache(torch.cuda.get_device_capability)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        words: bytes,
        device: torch.device,
    ) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        current = torch.cuda.current_device()
        index = current if device.index is None else device.index
        if index == current:
            self._module.launch(kernel, *grid, threads, shared, words, index, stream)
            return
        # The module makes the GPU current to its own CUDA runtime; that torch's is as before, torch sees to.
        with torch.cuda.device(index):
            self._module.launch(kernel, *grid, threads, shared, words, index, stream)

    def shared_memory(self, device: torch.device) -> int:
        return int(self._module.shared_memory(torch.cuda.current_device() if device.index is None else device.index))

    def warpgroups(self, device: torch.device) -> bool:
        return "sm_90a" in self._module.built.split() and self._capability(device) == (9, 0)


stand_in: Provider | None = None  # for the device, where there is none: tests run the kernels on the CPU


def current() -> Provider:
    """The provider in use; RuntimeError where there is none."""
    return _of_this_installation() if stand_in is None else stand_in


@functools.cache
def _of_this_installation() -> Provider:
    module, why = cuda_loader.module()
    if module is not None:
        return Wheel(module)
    if cuda_loader.has_cupy():
        from ._cupy import CuPy

        return CuPy()
    raise RuntimeError(f"{why}, and there is no CuPy to compile them")
