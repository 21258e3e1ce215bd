"""Shared by all launches of the package."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU current, so that a kernel runs there and on its current stream; nothing on the CPU."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def launch(kernel: Any, grid: tuple[int, ...], on: torch.Tensor, /, *arguments: Any, **options: Any) -> None:
    """Launches a Triton kernel on the GPU of its first argument."""
    with device_guard(on):
        kernel[grid](on, *arguments, **options)


def ceil_div(n: int, size: int) -> int:
    """⌈n / size⌉; triton.cdiv takes the host ten times as long."""
    return -(-n // size)
