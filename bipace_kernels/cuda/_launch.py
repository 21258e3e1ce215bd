"""launch(): one CUDA kernel by name, whoever compiled it.

A kernel's one argument is a struct of 8-byte fields (csrc/cuda/intrinsics.h), so a launch is a name, a shape and words:
tensors give their address, None gives 0, ints and bools are int64 and floats are double.
"""

from __future__ import annotations

import struct
from typing import Protocol

import torch

from . import _provider

Tensor = torch.Tensor
Word = Tensor | int | float | None

WARP = 32


class Provider(Protocol):
    """What has compiled kernels and can launch them."""

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


def launch(
    kernel: str,
    grid: int | tuple[int, int],
    threads: int,
    *args: Word,
    device: torch.device,
    shared: int = 0,
) -> None:
    """Launches where the tensors are; an empty grid launches nothing."""
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    if x and y:
        _provider.current().launch(kernel, (x, y), threads, shared, pack(args), device)


def pack(args: tuple[Word, ...]) -> bytes:
    """The kernel's struct."""
    form, words = [], []
    for arg in args:
        if isinstance(arg, float):
            form.append("d")
            words.append(arg)
        else:
            form.append("q")
            words.append(0 if arg is None else arg.data_ptr() if isinstance(arg, Tensor) else int(arg))
    return struct.pack("<" + "".join(form), *words)
