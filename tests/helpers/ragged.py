"""Seeded ragged layouts, and outputs with sentinels around them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sized import Sized

Tensor = torch.Tensor

BACKEND = os.environ.get("BIPACE_TEST_BACKEND", "triton")  # whose kernels are tested: "triton" or "cuda"
# Whether they run on the CPU: in Triton's interpreter, or by the emulator of the CUDA kernels.
ON_CPU = os.environ.get({"triton": "TRITON_INTERPRET", "cuda": "BIPACE_EMULATOR"}[BACKEND]) == "1"
if BACKEND == "cuda" and ON_CPU:
    os.environ["TRITON_INTERPRET"] = "1"  # for the stages that CUDA leaves to Triton, which is not imported yet
OF_CUDA = ("_launch", "action_keys", "clusters", "gram", "scan", "values")
PATTERN = 0xA5
# Elements before and after each output; odd, so that outputs are not aligned either, but for the CUDA kernels, which
# copy 16 bytes at a time out of scratch that torch always aligns.
MARGIN = 17 if BACKEND == "triton" else 32


def stage(name: str) -> Any:
    """A stage's module of the backend under test, by flat arguments; Triton's where CUDA has none."""
    package = "cuda" if BACKEND == "cuda" and name in OF_CUDA else "triton"
    return Sized(importlib.import_module(f"bipace_kernels.backends.{package}.{name}"))


def room(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[n] elements of which a CPU's memory holds only those that are touched; skips where there is no such room."""
    size = n * dtype.itemsize
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < size + 2**28:
        pytest.skip(
            f"needs {size >> 20} MB of the GPU's memory, {torch.cuda.mem_get_info(device)[0] >> 20} MB are free"
        )
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


def unaligned(tensor: Tensor | None) -> Tensor | None:
    """The same values in a view that starts one element into its storage."""
    if tensor is None:
        return None
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape) if tensor.numel() else tensor


@dataclass
class Ragged:
    """Records in processing order: offsets of groups and trajectories, and a step number for each record."""

    group_offsets: Tensor
    trajectory_offsets: Tensor
    group_trajectories: Tensor
    step: Tensor

    @property
    def n_records(self) -> int:
        return self.step.numel()

    @property
    def n_groups(self) -> int:
        return self.group_offsets.numel() - 1

    @property
    def n_trajectories(self) -> int:
        return self.trajectory_offsets.numel() - 1

    @property
    def longest_group(self) -> int:
        return int(self.group_offsets.diff().max()) if self.n_groups else 0

    def trajectory_of_record(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.n_trajectories), self.trajectory_offsets.diff())

    def group_of_record(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.n_groups), self.group_offsets.diff())

    def without(self, gone: Tensor) -> Ragged:
        """The layout without some trajectories (gone [T] bool); groups stay, empty where nothing is left."""
        lengths = self.trajectory_offsets.diff()
        group = torch.repeat_interleave(torch.arange(self.n_groups), self.group_trajectories.diff())
        counts = [int((~gone & (group == g)).sum()) for g in range(self.n_groups)]
        keep = ~gone[self.trajectory_of_record()]
        return from_lengths(lengths[~gone].tolist(), counts, self.step[keep])


def from_lengths(lengths: list[int], trajectories: list[int], step: Tensor | None = None) -> Ragged:
    """Trajectories of the given lengths; group g has trajectories[g] of them."""
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    of_group = torch.tensor([0, *np.cumsum(trajectories)], dtype=torch.int64)
    if step is None:
        step = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.empty(0, dtype=torch.int64)
    return Ragged(offsets[of_group], offsets, of_group, step)


def ragged(seed: int, groups: int = 5, trajectories: int = 5, longest: int = 9, *, gaps: bool = False) -> Ragged:
    """Random lengths, some groups of one record; `gaps`: step numbers with holes and repeats."""
    rng = np.random.default_rng(seed)
    counts = [1 if rng.random() < 0.2 else int(rng.integers(1, trajectories + 1)) for _ in range(groups)]
    lengths = [1 if rng.random() < 0.2 else int(rng.integers(1, longest + 1)) for _ in range(sum(counts))]
    made = from_lengths(lengths, counts)
    if gaps:
        jumps = [np.cumsum(rng.choice([0, 1, 1, 1, 2, 7], n)) for n in lengths]
        made.step = torch.from_numpy(np.concatenate(jumps)) if jumps else made.step
    return made


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


def states(seed: int = 0, n: int = 24, dim: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """[n, dim] float32 rows, six to a state, and two groups; few of them, as the interpreter is slow."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n // 6, dim)).repeat(6, axis=0) + 0.35 * rng.normal(size=(n, dim)) + 1.0
    return x.astype(np.float32), np.arange(n) // (n // 2)


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
