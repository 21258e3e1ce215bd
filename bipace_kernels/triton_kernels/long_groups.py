"""Greedy cosine clusters of groups too long for a Gram matrix: block by block of records, the vectors kept.

For each block of B = 128 records of a group with K clusters so far

    S[k, j] = c_k · x_j    similarities of the block's records to the centroids                 (centroids.py)
    decide in order; a join moves S[k, ·] on by a row of the block's own Gram matrix            (_scan, by scan.py)
    c_k ← keep_k · c_k + Σ_j share_j · x_j    for the clusters that the block touched           (centroids.py)

The blocks' Gram matrices come first, from gram.py, as if each block were a group.  N · D · (K + B) products instead of
N² · D, and no D in the chain of decisions.  What depends on data (which groups are long, how many clusters there are) is
read on the device: the host launches three kernels per block up to the longest group, and a program beyond its group or
beyond its clusters ends at once.  32,768 records are 256 blocks: 770 launches.

Accuracy.  A block rounds a touched centroid once, which turns it by 6e-8 at most, and later members shrink what came
before: n records gather at most 6e-8 · n / 2B, 8e-6 at 32,768 if all roundings pulled the same way, 1e-7 where they do
not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from . import gram
from ._launch import device_guard
from .centroids import BLOCK, MOVE, PARTS, SIMILAR, STEPS, move, place, similar_to_block, split
from .scan import BAND, PANEL, apply_panel, decide_panel, gather_panel

Tensor = torch.Tensor

#: Groups of at least so many records take this path: the Gram matrix of 8,192 takes 256 MB.
LONG_GROUP = 8_192
_FIND: dict[str, Any] = {"CHUNK": 1024, "num_warps": 4}
# Up to 1,024 clusters the scan reads a record's similarities once, eight to a thread.
_SCAN: dict[str, Any] = {"CLUSTERS": 1024, "ROWS": 64, "COLUMNS": BLOCK, "num_warps": 4}


@dataclass(frozen=True)
class Cut:
    """How the work is cut among launches and programs; no label depends on it."""

    scratch: int = 4 << 30  # bytes of the groups that are worked on together; more only where a single one takes more
    grams: int = 1 << 15  # Gram matrices of one launch: grids end at 65,535
    scan: dict[str, Any] = field(default_factory=lambda: _SCAN)
    move: dict[str, Any] = field(default_factory=lambda: MOVE)


CUT = Cut()


def cluster_long(
    fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16, any strides
    order: Tensor,  # [M] int64 row of the record, in processing order
    group_offsets: Tensor,  # [G+1] int64
    kind: Tensor,  # [M] uint8: 0 usable, 1 alone, 2 not taken
    scale: Tensor,  # [M] float32: powers of two, 1 for nearly all
    epsilons: Sequence[float],  # E values > 0
    *,
    n_groups: int,
    longest_group: int,
    first: Tensor,  # [E, M] int64, written: the record that began the record's cluster; −1: not taken
    shortest: int = LONG_GROUP,
    cut: Cut = CUT,
) -> None:
    """Clusters of every group of `shortest` records or more; `first` of shorter groups is left as it is.

    One ε after another: they share the blocks' Gram matrices, but each moves centroids of its own.  No synchronisation,
    and any number of clusters up to the group's length.  Bits depend on the group's own records, D, dtype and GPU
    architecture alone.

    Scratch: 4D + 12 bytes per record of the long groups, and 1,152 for each of them per record of the longest.  Groups
    share it as far as the cut's `scratch` allows and take turns beyond.  32,768 records of 3,584 elements: 0.5 GB.
    """
    n_slots = min(n_groups, order.shape[0] // shortest)  # no more groups can be long
    if longest_group < shortest or n_slots == 0:
        return
    places = torch.zeros((3, n_slots), dtype=torch.int64, device=order.device)
    at_once = max(1, cut.scratch // (longest_group * (4 * fingerprint.shape[1] + 8 * BLOCK + 4 * PANEL + 12)))
    with device_guard(order):
        _find_long[(1,)](group_offsets, places, n_groups, n_slots, shortest, **_FIND, enable_fp_fusion=False)
        for slot in range(0, n_slots, at_once):
            found = places[:, slot : slot + at_once].contiguous()
            _cluster_slots(fingerprint, order, found, kind, scale, epsilons, longest_group, first, cut)


def _cluster_slots(
    x: Tensor,  # [N, D]
    order: Tensor,  # [M] int64
    places: Tensor,  # [3, n] int64
    kind: Tensor,  # [M] uint8
    scale: Tensor,  # [M] float32
    epsilons: Sequence[float],  # E
    longest: int,
    first: Tensor,  # [E, M] int64, written
    cut: Cut,
) -> None:
    """The long groups of n places, side by side."""
    n, dim, device = places.shape[1], x.shape[1], order.device
    n_blocks = triton.cdiv(longest, BLOCK)
    room, pitch = min(order.shape[0], n * longest), triton.cdiv(longest, 32) * 32
    products, reciprocal = _block_grams(x, order, places, scale, n_blocks, cut.grams)
    centroids, lengths = _scratch(device, room, dim), _scratch(device, room)
    members, leader = _scratch(device, 2, room, dtype=torch.int32)
    state, similar = _scratch(device, n, pitch, BLOCK), _scratch(device, n, PANEL, pitch)
    change, weight = _scratch(device, 2, n, BLOCK)
    joined, clusters = _scratch(device, n, BLOCK, dtype=torch.int32), _scratch(device, n, dtype=torch.int32)
    squares = torch.zeros((n, BLOCK), dtype=torch.int64, device=device)
    pieces = torch.zeros((n, BLOCK), dtype=torch.int32, device=device)

    rows = (x, order, scale, dim, *x.stride())
    decisions = (joined, change, weight)
    parts = PARTS[x.dtype]
    # Told that strides and D are multiples of this, the compiler loads many elements at once.
    common = {"BLOCK": BLOCK, "ALIGNED": math.gcd(16, dim, x.stride(0))}
    for e, block in itertools.product(range(len(epsilons)), range(n_blocks)):
        where = (places, n, n_blocks, block)
        lowest = 1.0 - epsilons[e] - BAND.value
        if block > 0:
            tiles = triton.cdiv(min(block * BLOCK, longest), SIMILAR["CLUSTERS"])
            similar_to_block[(tiles, BLOCK // SIMILAR["COLUMNS"], n)](
                *where, *rows, reciprocal, centroids, lengths, clusters, state, pitch,
                PARTS=parts, STEP=STEPS[parts], **SIMILAR, **common, enable_fp_fusion=False,
            )  # fmt: skip
        _scan[(n,)](
            *where, kind, first[e], products, reciprocal, state, similar, pitch, members, leader, *decisions, clusters,
            lowest, PANEL=PANEL, BLOCK=BLOCK, **cut.scan, enable_fp_fusion=False,
        )  # fmt: skip
        if block + 1 < n_blocks:
            move[(triton.cdiv(dim, cut.move["PIECE"]), BLOCK, n)](
                *where, *rows, reciprocal, centroids, lengths, squares, pieces, *decisions, **cut.move, **common,
                enable_fp_fusion=False,
            )  # fmt: skip


def _scratch(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _block_grams(
    x: Tensor, order: Tensor, places: Tensor, scale: Tensor, n_blocks: int, at_once: int
) -> tuple[Tensor, Tensor]:
    """Gram matrices [n · (n_blocks + 1), B, B] of the groups' blocks, and 1/‖x‖ [., B]; the last of a group is unused."""
    ends = places[0, :, None] + torch.arange(n_blocks + 1, device=order.device) * BLOCK
    offsets = torch.minimum(ends, places[1, :, None]).reshape(-1)
    blocks = offsets.shape[0] - 1
    products, reciprocal = _scratch(order.device, blocks, BLOCK, BLOCK), _scratch(order.device, blocks, BLOCK)
    for b in range(0, blocks, at_once):
        # From one group's end to the next one's start is no block: too long, or nobody reads what comes of it.
        gram.multiply_groups(
            x, order, offsets, scale, products[b : b + at_once], reciprocal[b : b + at_once], first_group=b,
            long_group=BLOCK + 1,
        )  # fmt: skip
    return products, reciprocal


@triton.jit(do_not_specialize=["n_groups", "n_slots", "shortest"])
def _find_long(
    offsets,  # [G+1] int64
    places,  # [3, n_slots] int64, written: begin and end of a long group, records of the long groups before it
    n_groups,
    n_slots,
    shortest,
    CHUNK: tl.constexpr,
):
    """The long groups in order; what is left over stays a group of no records."""
    found = tl.zeros([], tl.int64)
    before = tl.zeros([], tl.int64)
    for start in range(0, n_groups, CHUNK):
        group = start + tl.arange(0, CHUNK)
        begin = tl.load(offsets + group, mask=group < n_groups, other=0)
        end = tl.load(offsets + group + 1, mask=group < n_groups, other=0)
        size = tl.where(end - begin >= shortest, end - begin, 0)
        slot = places + found + tl.cumsum((size > 0).to(tl.int64), 0) - 1
        tl.store(slot, begin, mask=size > 0)
        tl.store(slot + n_slots, end, mask=size > 0)
        tl.store(slot + n_slots * 2, before + tl.cumsum(size, 0) - size, mask=size > 0)
        found += tl.sum((size > 0).to(tl.int64), 0)
        before += tl.sum(size, 0)


@triton.jit(do_not_specialize=["n_slots", "n_blocks", "block"])
def _scan(
    places,  # [3, n_slots] int64
    n_slots,
    n_blocks,
    block,
    kind,  # [M] uint8
    first,  # [M] int64, written
    products,  # [blocks, B, B] float32
    reciprocal,  # [blocks, B] float32
    state,  # [n_slots, pitch, B] float32, moved on
    similar,  # [n_slots, PANEL, pitch] float32, scratch
    pitch,
    members,  # [room] int32
    leader,  # [room] int32
    joined,  # [n_slots, B] int32, written
    change,  # [n_slots, B] float32, written
    weight,  # [n_slots, B] float32, written
    clusters,  # [n_slots] int32
    lowest,  # 1 − ε − τ
    CLUSTERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PANEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The decisions of one block of each group, in order, panel by panel as in scan.py."""
    slot = tl.program_id(0).to(tl.int64)
    begin, rest, number, base = place(places, n_slots, n_blocks, block, slot, BLOCK)
    if rest <= 0:
        return
    n = tl.minimum(rest, BLOCK).to(tl.int32)
    pitch = tl.cast(pitch, tl.int64)  # 64 bits: there is no limit to a group's length
    stride = tl.cast(BLOCK, tl.int64)
    kind += begin
    first += begin
    products += number * (BLOCK * BLOCK)
    reciprocal += number * BLOCK
    state += slot * pitch * BLOCK
    similar += slot * pitch * PANEL
    members += base
    leader += base
    joined += slot * BLOCK
    change += slot * BLOCK
    weight += slot * BLOCK
    record = begin.to(tl.int32)
    count = tl.load(clusters + slot, mask=block > 0, other=0)
    for panel in range(0, n, PANEL):
        width = tl.minimum(n - panel, PANEL)
        row = products + panel * BLOCK
        gather_panel(state + panel, stride, similar, pitch, width, count, ROWS, PANEL)
        tl.debug_barrier()
        count = decide_panel(
            similar, pitch, row + panel, stride, reciprocal + panel, kind + panel, first + panel, record + panel, width,
            members, leader, joined + panel, change + panel, weight + panel, count, lowest, CLUSTERS, PANEL,
        )  # fmt: skip
        apply_panel(
            row, state, stride, reciprocal, panel, n, joined + panel, change + panel, weight + panel, COLUMNS, PANEL
        )
        tl.debug_barrier()
    tl.store(clusters + slot, count)


def main_path() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(kernel, signature, constexprs, options) of each launch on the main path, for compiling ahead of time."""
    find = {"offsets": "*i64", "places": "*i64", "n_groups": "i32", "n_slots": "i32", "shortest": "i32"}
    yield _find_long, find, *split(_FIND)
    scan = {
        "places": "*i64", "n_slots": "i32", "n_blocks": "i32", "block": "i32", "kind": "*u8", "first": "*i64", "products": "*fp32",
        "reciprocal": "*fp32", "state": "*fp32", "similar": "*fp32", "pitch": "i32", "members": "*i32",
        "leader": "*i32", "joined": "*i32", "change": "*fp32", "weight": "*fp32", "clusters": "*i32", "lowest": "fp32",
    }  # fmt: skip
    constants, options = split(_SCAN)
    yield _scan, scan, {"BLOCK": BLOCK, "PANEL": PANEL, **constants}, options
