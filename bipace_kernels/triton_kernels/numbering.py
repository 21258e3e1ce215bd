"""Dense cluster numbers by first appearance, by a prefix sum in torch; the host need not know the number of clusters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ._launch import ceil_div, device_guard

Tensor = torch.Tensor

LANES = 512  # records of a program
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def dense_labels(first: Tensor) -> Tensor:
    """Clusters numbered over the batch from 0 by first appearance in processing order.

    first   [M] or [E, M] int64   the record that began the record's cluster: first[i] ≤ i and first[first[i]] = first[i];
            −1: the record has no cluster.  Each row of [E, M] has its own numbering.
    Returns labels of the same shape, int64; −1 where first is −1.
    """
    m, size = first.shape[-1], first.numel()
    begun = (first == torch.arange(m, device=first.device)).cumsum(-1)  # clusters begun by this record and those before
    labels = torch.empty_like(first)
    if size:
        with device_guard(first):
            _label[(ceil_div(size, LANES),)](first, begun, labels, m, size, LANES=LANES, **_OPTIONS)
    return labels


@triton.jit(do_not_specialize=["m", "size"])
def _label(
    first,  # [E, M] int64
    begun,  # [E, M] int64
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
    """(kernel, signature, constexprs, options) of each launch on the main path, for compiling ahead of time."""
    pointers = {"first": "*i64", "begun": "*i64", "labels": "*i64"}
    yield _label, {**pointers, "m": "i32", "size": "i32"}, {"LANES": LANES}, _OPTIONS
