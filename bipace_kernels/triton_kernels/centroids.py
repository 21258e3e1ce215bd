"""Centroids of long groups as vectors: their similarities to a block of records, and how a block moves them.

Centroids are float32, a sum of three bfloat16; rows are one (bfloat16), two (float16) or three (float32).  So their
products run on tensor cores without rounding (float32 outside of them would take longer than everything else), and STEP
elements of D at a time are summed there, which keeps what tensor cores cut off below 3e-7 of the cosine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from .gram import UNIT, WIDEN
from .scan import NOWHERE

#: Records of a block: fewer would mean more launches, more would cost more inside the block.
BLOCK = UNIT
#: bfloat16 parts of an element, and the elements of D of one sum on tensor cores: parts take registers.
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
STEPS = {1: 64, 2: 32, 3: 32}

# 32 clusters by 64 records: a few hundred clusters still occupy a good part of a GPU.
SIMILAR: dict[str, Any] = {"CLUSTERS": 32, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
# A program moves a piece of one cluster's vector.  Most clusters get one or two of a block's records; 8 rows at a time.
MOVE: dict[str, Any] = {"ROWS": 8, "PIECE": 256, "num_warps": 4}
# A move adds whole numbers: how threads share a sum depends on strides and alignment, and no bit may depend on that.
# Elements and lengths are 1 at most, or hardly more.
FINE = tl.constexpr(2.0**40)
FINER = tl.constexpr(2.0**46)


@triton.jit
def place(places, n_slots, n_blocks, block, slot, BLOCK: tl.constexpr):
    """First record of the block, records from there to the group's end (≤ 0: none), the block's number among all, and
    the group's place among the centroids."""
    start = block.to(tl.int64) * BLOCK
    begin = tl.load(places + slot) + start
    rest = tl.load(places + n_slots + slot) - begin
    base = tl.load(places + n_slots * 2 + slot) - tl.load(places + n_slots * 2)
    return begin, rest, slot * (n_blocks + 1) + block, base


@triton.jit
def _elements(x, rows, there, start, dim, row_stride, column_stride, STEP: tl.constexpr):
    """[R, STEP] elements of rows from `start` on; zeros where a row is not there and beyond D."""
    e = start + tl.arange(0, STEP)
    at = rows[:, None] * row_stride + e[None, :].to(tl.int64) * column_stride
    return tl.load(x + at, mask=there[:, None] & (e < dim)[None, :], other=0.0)


@triton.jit
def _split(x, PARTS: tl.constexpr):
    """Three bfloat16 tensors, of which the first PARTS add up to x exactly."""
    high = x.to(tl.bfloat16)
    middle = high
    low = high
    if PARTS > 1:
        rest = x.to(tl.float32) - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        if PARTS > 2:
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit
def _dot(a, b, part):
    """part + a · b on tensor cores; the interpreter would multiply the bits of bfloat16 as whole numbers."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, part, input_precision="ieee")


@triton.jit
def _add_products(
    total,  # [K, J] float32
    c,  # [K, STEP] float32
    x,  # [J, STEP]
    PARTS: tl.constexpr,
):
    """total + c · xᵀ.  Products of parts that are below 2⁻²⁵ of the whole are left out; the smallest come first."""
    c0, c1, c2 = _split(c, 3)
    x0, x1, x2 = _split(x, PARTS)
    x0 = tl.trans(x0)
    part = _dot(c2, x0, tl.zeros_like(total))
    if PARTS > 1:
        x1 = tl.trans(x1)
        part = _dot(c1, x1, part)
    if PARTS > 2:
        part = _dot(c0, tl.trans(x2), part)
    part = _dot(c1, x0, part)
    if PARTS > 1:
        part = _dot(c0, x1, part)
    return total + _dot(c0, x0, part)


@triton.jit(do_not_specialize=["n_slots", "n_blocks", "block"])
def similar_to_block(
    places,  # [3, n_slots] int64
    n_slots,
    n_blocks,
    block,
    x,  # [N, D]
    order,  # [M] int64
    scale,  # [M] float32
    dim,
    row_stride,
    column_stride,
    reciprocal,  # [blocks, B] float32: 1 / ‖x‖
    centroids,  # [room, D] float32
    lengths,  # [room] float32: 1 / ‖c‖
    clusters,  # [n_slots] int32: K
    state,  # [n_slots, pitch, B] float32, written: S
    pitch,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    CLUSTERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Similarities of some of the block's records to some centroids."""
    dim = dim // ALIGNED * ALIGNED
    row_stride = row_stride // ALIGNED * ALIGNED
    slot = tl.program_id(2).to(tl.int64)
    begin, rest, number, base = place(places, n_slots, n_blocks, block, slot, BLOCK)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first_cluster = tl.program_id(0) * CLUSTERS
    count = tl.load(clusters + slot)
    if (tl.program_id(1) * COLUMNS >= rest) | (first_cluster >= count):
        return
    inside = j < rest
    rows = tl.load(order + begin + j, mask=inside, other=0)
    factor = tl.load(scale + begin + j, mask=inside, other=1.0)
    k = first_cluster + tl.arange(0, CLUSTERS)
    there = k < count
    # bfloat16 rows go straight from memory to the tensor cores where none needs scaling, which one scalar tells; no
    # float16 ever does, and float32 is taken apart anyway.
    far = PARTS == 3
    if PARTS == 1:
        far = tl.max((factor != 1.0).to(tl.int32), 0) > 0
    total = tl.zeros([CLUSTERS, COLUMNS], tl.float32)
    if PARTS < 3:
        for d in range(0, tl.where(far, 0, dim), STEP):
            c = _elements(centroids, base + k, there, d, dim, dim, 1, STEP)
            found = _elements(x, rows, inside, d, dim, row_stride, column_stride, STEP)
            total = _add_products(total, c, found, PARTS)
    if PARTS != 2:
        for d in range(0, tl.where(far, dim, 0), STEP):
            c = _elements(centroids, base + k, there, d, dim, dim, 1, STEP)
            found = _elements(x, rows, inside, d, dim, row_stride, column_stride, STEP)
            found = (found.to(tl.float32) * factor[:, None]).to(found.dtype)  # a power of two: exact
            total = _add_products(total, c, found, PARTS)
    total *= tl.load(lengths + base + k, mask=there, other=0.0)[:, None]
    total *= tl.load(reciprocal + number * BLOCK + j, mask=inside, other=0.0)[None, :]
    at = state + (slot * pitch + k)[:, None] * BLOCK + j[None, :]
    tl.store(at, total, mask=there[:, None] & inside[None, :])


@triton.jit
def _members(order, scale, begin, j, rank, share, first, ROWS: tl.constexpr):
    """Rows (−1: no more) of the members of rank first, first + 1, …, and their [ROWS] shares and factors."""
    mine = rank[None, :] == (first + tl.arange(0, ROWS))[:, None]
    at = tl.max(tl.where(mine, j[None, :], -1), 1)
    rows = tl.load(order + begin + at, mask=at >= 0, other=-1)
    factor = tl.load(scale + begin + at, mask=at >= 0, other=1.0)
    return rows, (tl.sum(tl.where(mine, share[None, :], 0.0), 1), factor)


@triton.jit
def _weighted_sum(x, rows, shares, start, dim, row_stride, column_stride, PIECE: tl.constexpr):
    """Σ share · x over some rows, at PIECE elements from `start` on, in units of 1 / FINE."""
    found = _elements(x, rows, rows >= 0, start, dim, row_stride, column_stride, PIECE).to(tl.float32)
    found = (found * shares[1][:, None]) * shares[0][:, None]
    return tl.sum((found * FINE).to(tl.int64), 0)


@triton.jit(do_not_specialize=["n_slots", "n_blocks", "block"])
def move(
    places,  # [3, n_slots] int64
    n_slots,
    n_blocks,
    block,
    x,  # [N, D]
    order,  # [M] int64
    scale,  # [M] float32
    dim,
    row_stride,
    column_stride,
    reciprocal,  # [blocks, B] float32
    centroids,  # [room, D] float32
    lengths,  # [room] float32: 1 / ‖c‖, written
    squares,  # [n_slots, B] int64: ‖c‖² so far; zeros before and after
    pieces,  # [n_slots, B] int32: how many pieces are in it; zeros before and after
    joined,  # [n_slots, B] int32
    change,  # [n_slots, B] float32: d of a join, −1 of a seed
    weight,  # [n_slots, B] float32: w of a join, 1 of a seed
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A piece of one cluster's vector follows the block's decisions, in a program of the first record that touched it.

    A join is c ← (1 + d) c + w x; those of a block together are c ← keep · c + Σ share · x, with products of 1 + d.
    Whichever program is the last to finish its piece knows the new length, and all have read the old one by then.
    """
    dim = dim // ALIGNED * ALIGNED
    row_stride = row_stride // ALIGNED * ALIGNED
    slot = tl.program_id(2).to(tl.int64)
    begin, rest, number, base = place(places, n_slots, n_blocks, block, slot, BLOCK)
    start = tl.program_id(0) * PIECE
    own = tl.program_id(1)
    if own >= rest:
        return
    joined += slot * BLOCK
    change += slot * BLOCK
    j = BLOCK - 1 - tl.arange(0, BLOCK)  # backwards: a running product is then that of all later ones
    k = tl.load(joined + own)
    cluster = tl.load(joined + j, mask=j < rest, other=NOWHERE)
    earlier = tl.max(((cluster == k) & (j < own)).to(tl.int32), 0)
    if (k == NOWHERE) | (earlier > 0):
        return
    mine = cluster == k
    next_too = tl.load(joined + j + 1, mask=j + 1 < tl.minimum(rest, BLOCK), other=NOWHERE) == k
    later = tl.cumprod(tl.where(next_too, 1.0 + tl.load(change + j + 1, mask=next_too, other=0.0), 1.0), 0)
    w = tl.load(weight + slot * BLOCK + j, mask=mine, other=0.0)
    keep = (1.0 + tl.load(change + own)) * tl.sum(tl.where(j == own, later, 0.0), 0)
    # A cluster that began in this block has no vector yet.
    length = tl.load(lengths + base + k, mask=keep > 0, other=0.0)
    target = centroids + (base + k) * dim
    keep *= length
    kept = tl.where(keep > 0, dim, 0)
    share = w * later * tl.load(reciprocal + number * BLOCK + j, mask=mine, other=0.0)
    rank = tl.where(mine, tl.cumsum(mine.to(tl.int32), 0) - 1, BLOCK)
    count = tl.sum(mine.to(tl.int32), 0)
    joining = tl.zeros([PIECE], tl.int64)
    for r in range(0, count, ROWS):
        rows, shares = _members(order, scale, begin, j, rank, share, r, ROWS)
        joining += _weighted_sum(x, rows, shares, start, dim, row_stride, column_stride, PIECE)
    e = start + tl.arange(0, PIECE)
    c = keep * tl.load(target + e, mask=e < kept, other=0.0) + joining.to(tl.float32) * (1.0 / FINE)
    tl.store(target + e, c, mask=e < dim)
    squares += slot * BLOCK + own
    pieces += slot * BLOCK + own
    tl.atomic_add(squares, tl.sum((c * c * FINER).to(tl.int64), 0))
    if tl.atomic_add(pieces, 1) == tl.num_programs(0) - 1:
        square = tl.atomic_add(squares, 0).to(tl.float32) * (1.0 / FINER)
        tl.store(lengths + base + k, tl.div_rn(1.0, tl.sqrt_rn(square)))
        tl.atomic_xchg(squares, 0)
        tl.atomic_xchg(pieces, 0)


def split(shape: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A launch's constants and options."""
    options = {name: value for name, value in shape.items() if name.islower()}
    constants = {name: value for name, value in shape.items() if not name.islower()}
    return constants, {**options, "enable_fp_fusion": False}


def main_path() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(kernel, signature, constexprs, options) of each launch on the main path, for compiling ahead of time."""
    for dtype, parts in (("*bf16", 1), ("*fp16", 2), ("*fp32", 3)):
        common = {
            "places": "*i64", "n_slots": "i32", "n_blocks": "i32", "block": "i32", "x": dtype, "order": "*i64",
            "scale": "*fp32", "dim": "i32", "row_stride": "i32", "reciprocal": "*fp32", "centroids": "*fp32",
            "lengths": "*fp32",
        }  # fmt: skip
        fixed = {"column_stride": 1, "BLOCK": BLOCK, "ALIGNED": 16}
        constants, options = split(SIMILAR)
        own = {"clusters": "*i32", "state": "*fp32", "pitch": "i32"}
        constants |= {"PARTS": parts, "STEP": STEPS[parts]}
        yield similar_to_block, {**common, **own}, {**fixed, **constants}, options
        constants, options = split(MOVE)
        own = {"squares": "*i64", "pieces": "*i32", "joined": "*i32"}
        common |= {**own, "change": "*fp32", "weight": "*fp32"}
        yield move, common, {**fixed, **constants}, options
