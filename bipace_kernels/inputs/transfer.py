"""Copies between host and GPU: asynchronous where possible, otherwise with one synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 128  # bytes: a transaction of the device; Triton compiles one kernel for all pointers so aligned


def capturing() -> bool:
    """Whether the current CUDA stream records a graph instead of running."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def to_device(tensor: Tensor, device: torch.device, name: str) -> Tensor:
    """The tensor on a device; a host tensor is copied through pinned memory, without synchronizing."""
    return tensor if tensor.device == device else to_device_together([tensor], device, name)[0]


def to_device_together(tensors: Sequence[Tensor], device: torch.device, name: str) -> list[Tensor]:
    """Host tensors on a device by one copy, as parts of one buffer.  On the CPU they are unchanged.

    ValueError while a CUDA graph is captured: the graph would keep the address of host memory that is gone at replay.
    """
    if device.type == "cpu":
        return list(tensors)
    if capturing():
        raise ValueError(f"{name} must be on {device} before a CUDA graph is captured; for layouts call .on(device).")
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, start in zip(tensors, starts, strict=True):
        _part(staging, start, tensor).copy_(tensor)
    moved = staging.to(device, non_blocking=True)
    return [_part(moved, start, tensor) for tensor, start in zip(tensors, starts, strict=True)]


@dataclass(frozen=True)
class Copied:
    """The copy that to_device_together just started on the current stream, for use on any stream."""

    device: torch.device
    stream: Any
    event: Any

    @staticmethod
    def to(device: torch.device) -> Copied | None:
        """None on the CPU, where nothing is copied."""
        if device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(device)
        return Copied(device, stream, stream.record_event())

    def wait(self, tensor: Tensor) -> None:
        """Makes the current stream wait for the copy, if another stream made it; the host does not wait.

        tensor   any of those copied together, since one buffer holds them all
        """
        if capturing():
            return  # a capture begins with the device idle
        current = torch.cuda.current_stream(self.device)
        if current != self.stream:
            current.wait_event(self.event)
            tensor.record_stream(current)


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes of a buffer [B] uint8 from start on, as a tensor of another's shape and dtype."""
    size = like.numel() * like.element_size()
    return buffer[start : start + size].view(like.dtype).view(like.shape)


def to_host(values: Sequence[Any]) -> list[Any]:
    """The same values with every GPU tensor copied to the CPU; synchronizes at most once."""
    device = next((v.device for v in values if isinstance(v, Tensor) and v.is_cuda), None)
    if device is None:
        return list(values)
    out = [v.detach().to("cpu", non_blocking=True) if isinstance(v, Tensor) and v.is_cuda else v for v in values]
    torch.cuda.current_stream(device).synchronize()
    return out
