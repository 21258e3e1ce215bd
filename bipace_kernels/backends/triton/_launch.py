"""Shared by all launches of the package."""

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU current, so that a kernel runs there and on its current stream; nothing on the CPU."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def ceil_div(n: int, size: int) -> int:
    """⌈n / size⌉; triton.cdiv takes the host ten times as long."""
    return -(-n // size)
