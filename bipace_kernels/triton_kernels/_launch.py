"""Shared by all launches of the package."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU current, so that a kernel runs there and on its current stream; nothing on the CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
