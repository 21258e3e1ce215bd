"""Seeded ragged layouts, and outputs with sentinels around them."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from batches import spread_out
from sized import Sized

import bipace_kernels as bk

Tensor = torch.Tensor

BACKEND = os.environ.get("BIPACE_TEST_BACKEND", "triton")  # whose kernels are tested: "triton" or "cuda"
# Whether they run on the CPU: in Triton's interpreter, or by the emulator of the CUDA kernels.
ON_CPU = os.environ.get({"triton": "TRITON_INTERPRET", "cuda": "BIPACE_EMULATOR"}[BACKEND]) == "1"
if BACKEND == "cuda" and ON_CPU:
    os.environ["TRITON_INTERPRET"] = "1"  # for the stages that CUDA leaves to Triton, which is not imported yet
OF_CUDA = ("_launch", "action_keys", "clusters", "gram", "scan", "values")
PATTERN = 0xA5
# Elements before and after each output, more than a tile's columns and rows; odd, so that outputs are not aligned
# either, but for the CUDA kernels, which copy 16 bytes at a time out of scratch that torch always aligns.  Under
# sanitizers, which have their own: reading beyond is an error too.
MARGIN = 0 if os.environ.get("BIPACE_EMULATOR_SANITIZE") == "1" else 8193 if BACKEND == "triton" else 8192


def stage(name: str) -> Any:
    """A stage's module of the backend under test, by flat arguments; Triton's where CUDA has none."""
    package = "cuda" if BACKEND == "cuda" and name in OF_CUDA else "triton"
    return Sized(importlib.import_module(f"bipace_kernels.backends.{package}.{name}"))


def room(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n] elements of which a CPU's memory holds only those that are touched; skips where there is no such room."""
    size = n * dtype.itemsize
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < size + 2**28:
        pytest.skip(f"needs {size >> 20} MB of the GPU's memory, which are not free")
    try:
        return torch.empty(n, dtype=dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"the system gives no {size >> 20} MB of room: {error}")


@contextmanager
def sentinels() -> Iterator[None]:
    """Allocations inside are filled with garbage and lie between margins, which must be whole afterwards.

    So a kernel that writes beside its output, or leaves a part of it unwritten, is found out.
    """
    real, buffers = torch.empty, []

    def empty(*size, dtype=torch.float32, device=None, pin_memory=False):
        if pin_memory:  # of the host: no kernel writes there
            return real(*size, dtype=dtype, pin_memory=True)
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        n, item = shape.numel(), real((), dtype=dtype).element_size()
        raw = real((n + 2 * MARGIN) * item, dtype=torch.uint8, device=device).fill_(PATTERN)
        buffers.append((raw, MARGIN * item))
        return raw.view(dtype)[MARGIN : MARGIN + n].view(shape)

    def empty_like(tensor, *, dtype=None):
        return empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)

    with mock.patch.object(torch, "empty", empty), mock.patch.object(torch, "empty_like", empty_like):
        yield
    for raw, margin in buffers:
        edges = torch.cat([raw[:margin], raw[raw.numel() - margin :]])
        assert bool((edges == PATTERN).all()), "a kernel wrote beside its output"


def unaligned(tensor: Tensor | None, device: torch.device | None = None) -> Tensor | None:
    """The same values, on a device, in a view that starts one element into its storage."""
    if tensor is None or not tensor.numel():
        return tensor if tensor is None else tensor.to(device)
    flat = tensor.to(device).flatten()
    return torch.cat([flat[:1], flat])[1:].view(tensor.shape)


def from_lengths(lengths: list[int], trajectories: list[int], step: Any = None) -> bk.Layout:
    """Trajectories of the given lengths; group g has trajectories[g] of them."""
    trajectory = np.repeat(np.arange(len(lengths)), lengths)
    group = np.repeat(np.arange(len(trajectories)), trajectories)[trajectory]
    places = [np.arange(n) for n in lengths] if step is None else step
    return bk.layout(group, trajectory, np.concatenate([*places, np.zeros(0, np.int64)]))


def ragged(seed: int, groups: int = 5, trajectories: int = 5, longest: int = 9, *, gaps: bool = False) -> bk.Layout:
    """Random lengths, some groups of one record; `gaps`: step numbers with holes and repeats."""
    rng = np.random.default_rng(seed)
    counts = [1 if rng.random() < 0.2 else int(rng.integers(1, trajectories + 1)) for _ in range(groups)]
    lengths = [1 if rng.random() < 0.2 else int(rng.integers(1, longest + 1)) for _ in range(sum(counts))]
    steps = [np.cumsum(rng.choice([0, 1, 1, 1, 2, 7], n)) for n in lengths] if gaps else None
    return from_lengths(lengths, counts, steps)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in every bit, the sign of zero included."""
    one, other = one.cpu(), other.cpu()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point():
        whole = torch.int32 if one.element_size() == 4 else torch.int64
        return torch.equal(one.view(whole), other.view(whole))
    return torch.equal(one, other)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """The table of the definition: 2e-5 for values of order 1, 2e-6 of larger ones."""
    torch.testing.assert_close(got.cpu(), wanted.cpu(), rtol=2e-6, atol=2e-5)


def states() -> tuple[np.ndarray, np.ndarray]:
    """[24, 8] float32 rows, six to a state, and two groups; few of them, as the interpreter is slow."""
    return spread_out(n=24, dim=8)[0], np.arange(24) // 12


@contextmanager
def nothing_waits(device: torch.device) -> Iterator[None]:
    """On a GPU whatever waits for it raises."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
