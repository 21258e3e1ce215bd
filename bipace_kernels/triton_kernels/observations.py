"""Partitions by what was observed: equal observations, equal histories.

A record's cluster is named by the first record of its group that equals it, found by comparing codes, so no two
observations are ever taken for one; `numbering` makes dense labels of these.  A history of k codes is the pair (history
of k − 1 codes one step earlier, own code), and a pair of record numbers is one integer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ._launch import device_guard
from .numbering import dense_labels

Tensor = torch.Tensor

LANES = 64  # records of a program
TILE = 64  # earlier records compared with at a time
STEPS = 64  # records of a trajectory scanned at a time
PAIRS = 256  # records of a program that pairs
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_SCAN_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}


def cluster_exact(
    codes: Tensor, group_offsets: Tensor, *, n_groups: int, longest_group: int, taken: Tensor | None
) -> Tensor:
    first = torch.empty_like(codes)
    _launch_first(codes, group_offsets, taken, first, n_groups, longest_group, signed=True)
    return dense_labels(first)


def cluster_history(
    codes: Tensor,
    step: Tensor | None,
    trajectory_offsets: Tensor,
    group_offsets: Tensor,
    depth: int,
    *,
    n_trajectories: int,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
) -> Tensor:
    m = codes.shape[0]
    first = torch.empty((depth, m), dtype=torch.int64, device=codes.device)
    if not first.numel():
        return first
    _launch_first(codes, group_offsets, taken, first[0], n_groups, longest_group, signed=True)
    if depth > 1:
        earlier, pairs = torch.empty_like(codes), torch.empty_like(codes)
        with device_guard(codes):
            _earlier[(n_trajectories,)](
                step, trajectory_offsets, earlier, HAS_STEP=step is not None, STEPS=STEPS, **_SCAN_OPTIONS
            )
            for k in range(1, depth):
                _pair[(triton.cdiv(m, PAIRS),)](earlier, first[k - 1], first[0], pairs, m, LANES=PAIRS, **_OPTIONS)
                _launch_first(pairs, group_offsets, None, first[k], n_groups, longest_group, signed=False)
    return dense_labels(first)


def _launch_first(
    codes: Tensor,  # [M] int64
    group_offsets: Tensor,  # [G+1] int64
    taken: Tensor | None,  # [M] bool
    first: Tensor,  # [M] int64, written
    n_groups: int,
    longest_group: int,
    *,
    signed: bool,  # False: a negative code is none
) -> None:
    blocks = triton.cdiv(longest_group, LANES)
    if n_groups and blocks:
        with device_guard(codes):
            _first[(n_groups * blocks,)](
                codes, group_offsets, taken, first, blocks,
                HAS_TAKEN=taken is not None, SIGNED=signed, LANES=LANES, TILE=TILE, **_OPTIONS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["blocks"])
def _first(
    codes,  # [M] int64
    group_offsets,  # [G+1] int64
    taken,  # [M] bool
    first,  # [M] int64: the first record of the group with the record's code; −1: it has none
    blocks,
    HAS_TAKEN: tl.constexpr,
    SIGNED: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    group = program // blocks
    begin, end = tl.load(group_offsets + group), tl.load(group_offsets + group + 1)
    lane = begin + program % blocks * LANES + tl.arange(0, LANES)
    code, counts = _code(codes, taken, lane, lane < end, HAS_TAKEN, SIGNED)
    # Places in the group are 32-bit: half the work of a comparison is finding the smallest.
    nowhere = 0x7FFFFFFF
    found = tl.where(counts, nowhere, -1)
    stop = tl.minimum(end, begin + (program % blocks + 1) * LANES)
    start = begin
    # Tiles come in order, so what is found is the first; with few codes the first tile has them all.
    while (start < stop) & (tl.max(found, axis=0) == nowhere):
        other = start + tl.arange(0, TILE)
        their_code, theirs = _code(codes, taken, other, other < stop, HAS_TAKEN, SIGNED)
        equal = (their_code[None, :] == code[:, None]) & theirs[None, :]
        place = (other - begin).to(tl.int32)
        found = tl.minimum(found, tl.min(tl.where(equal, place[None, :], nowhere), axis=1))
        start += TILE
    tl.store(first + lane, tl.where(counts, begin + found, -1), mask=lane < end)


@triton.jit
def _code(codes, taken, record, inside, HAS_TAKEN: tl.constexpr, SIGNED: tl.constexpr):
    """Codes of some records, and whether they have one."""
    code = tl.load(codes + record, mask=inside, other=-1)
    counts = inside
    if HAS_TAKEN:
        counts = counts & (tl.load(taken + record, mask=inside, other=0) != 0)
    if not SIGNED:
        counts = counts & (code >= 0)
    return code, counts


@triton.jit
def _earlier(
    step,  # [M] int64
    trajectory_offsets,  # [T+1] int64
    earlier,  # [M] int64: the first record of the step before the record's in its trajectory; −1: none
    HAS_STEP: tl.constexpr,
    STEPS: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(trajectory_offsets + t), tl.load(trajectory_offsets + t + 1)
    lane = tl.arange(0, STEPS)
    last = tl.full((STEPS,), -1, tl.int64)  # the step begun last before the tile, and the one before it
    before = tl.full((STEPS,), -1, tl.int64)
    for start in range(begin, end, STEPS):
        record = start + lane
        inside = record < end
        begins = inside
        if HAS_STEP:
            # A step recorded twice stands in later histories once, by its first record.
            now = tl.load(step + record, mask=inside, other=0)
            then = tl.load(step + record - 1, mask=inside & (record > begin), other=0)
            begins = inside & ((record == begin) | (now != then))
        newest, second = tl.associative_scan((tl.where(begins, record, -1), lane.to(tl.int64) * 0 - 1), 0, _two_newest)
        newest, second = _two_newest(last, before, newest, second)
        tl.store(earlier + record, second, mask=inside)
        last = last * 0 + tl.max(newest, axis=0)
        before = before * 0 + tl.max(second, axis=0)


@triton.jit
def _two_newest(newest, second, later_newest, later_second):
    """The two newest of two runs of records, the second run being later; −1: none."""
    both = tl.where(later_newest >= 0, newest, second)
    return tl.where(later_newest >= 0, later_newest, newest), tl.where(later_second >= 0, later_second, both)


@triton.jit(do_not_specialize=["m"])
def _pair(
    earlier,  # [M] int64
    shorter,  # [M] int64: first record with the record's history of one step less
    own,  # [M] int64: first record with the record's code
    pairs,  # [M] int64: one integer for (shorter history a step earlier, own code); −1: no such history
    m,
    LANES: tl.constexpr,
):
    record = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    before = tl.load(earlier + record, mask=record < m, other=-1)
    history = tl.load(shorter + before, mask=before >= 0, other=-1)
    code = tl.load(own + record, mask=record < m, other=-1)
    # Both are below m, and m² below 2⁶³ for any batch under 3 · 10⁹ records.
    tl.store(pairs + record, tl.where((history >= 0) & (code >= 0), history * m + code, -1), mask=record < m)


def main_path() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(kernel, signature, constexprs, options) of each launch on the main path, for compiling ahead of time."""
    for has_taken, signed in ((True, True), (False, False)):
        yield (
            _first,
            {"codes": "*i64", "group_offsets": "*i64", "taken": "*u1", "first": "*i64", "blocks": "i32"},
            {"HAS_TAKEN": has_taken, "SIGNED": signed, "LANES": LANES, "TILE": TILE},
            _OPTIONS,
        )
    yield (
        _earlier,
        {"step": "*i64", "trajectory_offsets": "*i64", "earlier": "*i64"},
        {"HAS_STEP": True, "STEPS": STEPS},
        _SCAN_OPTIONS,
    )
    yield (
        _pair,
        {"earlier": "*i64", "shorter": "*i64", "own": "*i64", "pairs": "*i64", "m": "i32"},
        {"LANES": PAIRS},
        _OPTIONS,
    )
