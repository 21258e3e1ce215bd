"""Dense cluster numbers by first appearance; the host need not know the number of clusters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ._launch import TYPES, ceil_div, device_guard

Tensor = torch.Tensor

FEW = 8192  # records that one program numbers by itself: one launch instead of four
LANES = 512  # records of a program where there are more
_OPTIONS_OF_FEW: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": False}
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def dense_labels(first: Tensor) -> Tensor:
    """Clusters numbered over the batch from 0 by first appearance in processing order.

    first   [M] or [E, M] int64   the record that began the record's cluster: first[i] ≤ i and
            first[first[i]] = first[i]; −1: the record has no cluster.  Each row of [E, M] has its own numbering.
    Returns labels of the same shape, int64; −1 where first is −1.
    """
    m, size = first.shape[-1], first.numel()
    labels = torch.empty_like(first)
    if not size:
        return labels
    with device_guard(first):
        if m <= FEW:
            _label_few[(size // m,)](first, labels, m, LANES=FEW, **_OPTIONS_OF_FEW)
        else:
            begun = (first == torch.arange(m, device=first.device)).cumsum(-1)
            _label[(ceil_div(size, LANES),)](first, begun, labels, m, size, LANES=LANES, **_OPTIONS)
    return labels


@triton.jit(do_not_specialize=["m"])
def _label_few(
    first,  # [E, M] int64
    labels,  # [E, M] int64, written
    m,
    LANES: tl.constexpr,  # ≥ M
):
    row = tl.program_id(0).to(tl.int64) * m
    i = tl.arange(0, LANES)
    begin = tl.load(first + row + i, mask=i < m, other=-1).to(tl.int32)
    begun = tl.cumsum((begin == i).to(tl.int32), axis=0)  # clusters begun by this record and those before
    number = tl.where(begin >= 0, tl.gather(begun, tl.maximum(begin, 0), axis=0) - 1, -1)
    tl.store(labels + row + i, number.to(tl.int64), mask=i < m)


@triton.jit(do_not_specialize=["m", "size"])
def _label(
    first,  # [E, M] int64
    begun,  # [E, M] int64: clusters begun by this record and those before
    labels,  # [E, M] int64, written
    m,
    size,
    LANES: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    begin = tl.load(first + at, mask=at < size, other=-1)
    number = tl.load(begun + at // m * m + begin, mask=begin >= 0, other=0) - 1
    tl.store(labels + at, number, mask=at < size)


def main_path() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(kernel, types, constexprs, options) of each launch on the main path, for compiling ahead of time."""
    yield _label_few, TYPES, {"LANES": FEW}, _OPTIONS_OF_FEW
    yield _label, TYPES, {"LANES": LANES}, _OPTIONS
