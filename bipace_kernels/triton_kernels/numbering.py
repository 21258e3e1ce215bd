"""Dense cluster numbers by first appearance, without the host knowing how many clusters there are.

A partition names each record's cluster by the record that began it.  That record's number is the count of beginners
before it: a prefix sum over blocks of records, then over the blocks' totals.  All in integers, so no order matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ._launch import device_guard

Tensor = torch.Tensor

BLOCK = 512  # records of a program
TOTALS = 8  # totals of blocks added up at a time: [BLOCK, TOTALS] values stay in registers
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def dense_labels(first: Tensor) -> Tensor:
    """Clusters numbered over the batch from 0 by first appearance in processing order.

    first   [M] or [E, M] int64   the record that began the record's cluster: first[i] ≤ i and first[first[i]] = first[i];
            −1: the record has no cluster.  Each row of [E, M] is numbered by itself.  Contiguous.
    Returns labels of the same shape, int64; −1 where first is −1.
    """
    labels = torch.empty_like(first)
    n, rows = first.shape[-1], first.numel() // max(first.shape[-1], 1)
    if not first.numel():
        return labels
    blocks = triton.cdiv(n, BLOCK)
    rank = torch.empty(first.shape, dtype=torch.int32, device=first.device)
    totals = torch.empty((rows, blocks), dtype=torch.int32, device=first.device)
    with device_guard(first):
        _rank[(rows * blocks,)](first, rank, totals, n, blocks, BLOCK, **_OPTIONS)
        _label[(rows * blocks,)](first, rank, totals, labels, n, blocks, BLOCK, TOTALS, **_OPTIONS)
    return labels


@triton.jit(do_not_specialize=["n", "blocks"])
def _rank(
    first,  # [E, M] int64
    rank,  # [E, M] int32: beginners before the record in its block
    totals,  # [E, blocks] int32: beginners in each block
    n,
    blocks,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    begins = (tl.load(first + row * n + at, mask=at < n, other=-1) == at).to(tl.int32)
    tl.store(rank + row * n + at, tl.cumsum(begins, axis=0) - begins, mask=at < n)
    tl.store(totals + program, tl.sum(begins, axis=0))


@triton.jit(do_not_specialize=["n", "blocks"])
def _label(
    first,  # [E, M] int64
    rank,  # [E, M] int32
    totals,  # [E, blocks] int32
    labels,  # [E, M] int64
    n,
    blocks,
    BLOCK: tl.constexpr,
    TOTALS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    at = block * BLOCK + tl.arange(0, BLOCK)
    beginner = tl.load(first + row * n + at, mask=at < n, other=-1)
    has_cluster = beginner >= 0
    home = beginner // BLOCK  # ≤ block, for a beginner comes first
    number = tl.load(rank + row * n + beginner, mask=has_cluster, other=0).to(tl.int64)
    for start in range(0, block, TOTALS):
        b = start + tl.arange(0, TOTALS)
        total = tl.load(totals + row * blocks + b, mask=b < block, other=0)
        number += tl.sum(tl.where(b[None, :] < home[:, None], total[None, :], 0), axis=1)
    tl.store(labels + row * n + at, tl.where(has_cluster, number, -1), mask=at < n)


def main_path() -> Iterator[tuple[Any, dict[str, str], dict[str, int], dict[str, Any]]]:
    """(kernel, signature, constexprs, options) of each launch on the main path, for compiling ahead of time."""
    yield (
        _rank,
        {"first": "*i64", "rank": "*i32", "totals": "*i32", "n": "i32", "blocks": "i32"},
        {"BLOCK": BLOCK},
        _OPTIONS,
    )
    yield (
        _label,
        {"first": "*i64", "rank": "*i32", "totals": "*i32", "labels": "*i64", "n": "i32", "blocks": "i32"},
        {"BLOCK": BLOCK, "TOTALS": TOTALS},
        _OPTIONS,
    )
