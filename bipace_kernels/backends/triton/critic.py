"""A value of each record's state, and GAE(λ) over it, on the fingerprints' device, without synchronizing.

    rows to unit length, folded ─► coordinates in the landmarks' directions, found by rotations ─► minus the mean of
    their group or batch ─► C + N of every block, float64 ─► torch.linalg's Cholesky, all blocks padded to one multiple
    of 128; between blocks landmarks ─► V̂ ─► a lane walks each trajectory backwards ─► the same solve where actions are
    equal, averages A_S

The padding depends on the longest group, and libraries choose their kernels by it: a group's values in another batch
agree within 2e-5, not bit for bit.  The host does not know which groups are longer than a block: if one may be, all
groups use landmarks, one after the other under share "group".
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import schema
from ..records import Records
from ..schema import BLOCK, JITTER, LANDMARKS, SMALLEST, TINY, Kernel
from ._launch import ceil_div, launch

FLAT = tl.constexpr(schema.FLAT)
ROOM = 1 << 27  # float64 entries of the kernel matrices made at a time: 1 GiB
LANES = 32  # trajectories of a program
_TILE = 32  # side of a square of K
_SIDE = 128  # of which that of a block is a multiple
_RECORDS = 128  # that a program of a group looks at together
_SUMS = {"ROWS": 8, "COLUMNS": 128}
_SWEEPS = 30  # at most, of rotations; it takes about eight
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_LANE_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
_WIDE_OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
_PAIR_OPTIONS: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": False}
_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)


def cluster_values(records: Records, returns: Tensor, labels: Tensor | None, shrinkage: float) -> Tensor:
    value = torch.empty(returns.shape, dtype=torch.float64, device=returns.device)
    if returns.shape[0]:
        grid = (records.n_groups, ceil_div(records.longest_group, _RECORDS))
        tensors = (returns, labels, records.group_offsets, records.taken, value)
        launch(_cluster_values, grid, *tensors, float(shrinkage), TILE=_RECORDS, **_OPTIONS)
    return value


def unit_rows(records: Records, fingerprint: Tensor, width: int, keys: Tensor | None = None) -> Tensor:
    m, dim = records.n_records, fingerprint.shape[1]
    folded = min(width or dim, dim)
    out = torch.empty((m, folded), dtype=torch.float32, device=records.device)
    if m:
        tensors = (fingerprint, records.order, records.usable, records.taken, out, keys)
        sizes = (dim, folded, *fingerprint.stride())
        launch(_unit_rows, (m,), *tensors, *sizes, FOLDS=folded < dim, COLUMNS=512, **_OPTIONS)
    return out


def whitened_rows(records: Records, rows: Tensor, landmarks: Tensor, directions: int) -> Tensor:
    side = max(triton.next_power_of_2(landmarks.shape[0]), 16)
    live = (landmarks >= 0)[:, None]
    y = torch.where(live, rows[landmarks], 0.0)
    mean = y.sum(0, dtype=torch.float64) / live.sum()  # NaN if there is none: then no row is usable either
    y = torch.where(live, y - mean, 0.0)
    if side > y.shape[0]:
        y = torch.nn.functional.pad(y, (0, 0, 0, side - y.shape[0]))
    basis = torch.zeros((directions, side), dtype=torch.float64, device=rows.device)
    launch(_jacobi, (1,), y @ y.mT, basis, directions, SMALLEST, SIDE=side, SWEEPS=_SWEEPS, **_PAIR_OPTIONS)
    return ((rows - mean) @ (basis @ y).mT).float()


def centred_rows(records: Records, rows: Tensor, share: str) -> Tensor:
    dim, out = rows.shape[1], torch.empty_like(rows)
    sums = torch.empty((records.n_groups, dim + 1), dtype=torch.float64, device=records.device)
    if records.n_records:
        grid = (records.n_groups, ceil_div(dim, _SUMS["COLUMNS"]))
        launch(_centre, grid, rows, records.group_offsets, sums, None, dim, dim + 1, **_SUMS, **_OPTIONS)
        if share == "batch":
            sums = sums.sum(0, keepdim=True).expand_as(sums)
        launch(_centre, grid, rows, records.group_offsets, sums, out, dim, sums.stride(0), **_SUMS, **_OPTIONS)
    return out


def kernel_values(
    records: Records, rows: Tensor, inside: Tensor | None, returns: Tensor, landmarks: Tensor | None, kernel: Kernel
) -> Tensor:
    value, alone = cluster_values(records, returns, None, 0.0), kernel.share == "group"
    if not records.n_records:
        return value
    among = _Kernel(records, rows, replace(kernel, same=0.0) if alone else kernel, inside)
    index, out = among.blocks(), _padded(value)
    all_returns = _padded(returns)[index]
    y = all_returns - out[index] if alone else all_returns  # minus the prior
    if not alone:
        if landmarks is None:
            landmarks = rows[:, 0].isnan().to(torch.uint8).argsort(stable=True)[:LANDMARKS]
        rest = among.noise_of(index, y, landmarks)
    elif index.shape[0] == records.n_groups:
        rest = among.noise_of(index, y)
    else:
        each = zip(index.chunk(records.n_groups), y.chunk(records.n_groups), strict=True)
        rest = _joined([among.noise_of(own, of_own, _spaced(own.flatten())) for own, of_own in each])
    out[index] = all_returns - rest
    return out[:-1]


def gae_advantage(
    records: Records, rewards: Tensor, value: Tensor, truncated: Tensor | None, gamma: float, gae_lambda: float
) -> Tensor:
    advantage = torch.empty_like(rewards)
    if not rewards.shape[0]:
        return advantage
    decay = float(gamma) * float(gae_lambda)
    tensors = (rewards, value, records.step, truncated, records.taken, records.trajectory_offsets, advantage)
    numbers = (float(gamma), _log(gamma), decay, _log(decay), records.n_trajectories)
    launch(_recursion, (ceil_div(records.n_trajectories, LANES),), *tensors, *numbers, LANES=LANES, **_LANE_OPTIONS)
    return advantage


def same_action_advantage(
    records: Records, rows: Tensor, advantage: Tensor, action_key: Tensor, parsed: Tensor | None, kernel: Kernel
) -> Tensor:
    taken = _padded(advantage if records.taken is None else torch.where(records.taken, advantage, 0.0))
    out = taken / (1.0 + float(kernel.noise))
    if records.n_records:
        among = _Kernel(records, rows, replace(kernel, same=0.0, luck=0.0), None, action_key, parsed)
        index = among.blocks()
        y = taken[index]
        out[index] = y - among.noise_of(index, y)
    return out[:-1]


def normed_advantage(records: Records, advantage: Tensor, returns: Tensor, step_norm: str) -> Tensor:
    out = torch.empty(advantage.shape, dtype=torch.float32, device=advantage.device)
    if advantage.shape[0]:
        n_groups, offsets, taken = records.n_groups, records.group_offsets, records.taken
        sums = torch.empty((3, n_groups), dtype=torch.float64, device=advantage.device)
        launch(_squares, (n_groups,), advantage, returns, taken, offsets, sums, n_groups, TILE=_RECORDS, **_OPTIONS)
        if step_norm == "batch":
            sums = torch.cat([sums[:2].sum(1), sums[2:].amax(1)])[:, None].expand_as(sums)
        tensors = (advantage, None if step_norm == "none" else sums, taken, offsets, out)
        grid = (n_groups, ceil_div(records.longest_group, _RECORDS))
        launch(_scaled, grid, *tensors, *sums.stride(), TINY, TILE=_RECORDS, **_OPTIONS)
    return out


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _padded(values: Tensor) -> Tensor:
    """[M + 1] float64, the last for records of blocks that are none."""
    return torch.nn.functional.pad(values.to(torch.float64), (0, 1))


def _joined(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix⁻¹ right.  Not by torch.cholesky_solve: that of torch 2.11 gives a batch to MAGMA, which synchronizes."""
    factor = torch.linalg.cholesky_ex(matrix).L
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    solved: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return solved


def _spaced(index: Tensor) -> Tensor:
    """[LANDMARKS] records of a group, evenly spaced in processing order, or −1.  index: [n] its records, and −1."""
    n, k = (index >= 0).sum(), torch.arange(LANDMARKS, device=index.device)
    some = n.clamp(1, LANDMARKS)
    first = (index < 0).to(torch.uint8).argsort(stable=True)
    return torch.where(k < n, index[first[k.clamp(max=some - 1) * n // some]], -1)


@dataclass(frozen=True)
class _Kernel:
    """The records and their kernel.  Lists of records hold −1 where there is none."""

    records: Records
    rows: Tensor  # [M, D] float32, centred
    kernel: Kernel
    inside: Tensor | None  # [M, D] float32 minus the group's mean, for the kernel inside groups; None: there is none
    key: Tensor | None = None  # [M] int64 actions: K is 0 between records of different ones; None: it is not
    parsed: Tensor | None = None  # [M] bool: an action that was not recognized is like no other

    def blocks(self) -> Tensor:
        """[B, side] usable records of each block: a group is one, a long one ⌈n / BLOCK⌉."""
        records, longest = self.records, self.kernel.longest
        runs = 1 if records.longest_group <= longest else ceil_div(records.longest_group, BLOCK)
        side = ceil_div(min(records.longest_group, longest), _SIDE) * _SIDE
        index = torch.full((records.n_groups * runs, side), -1, dtype=torch.int64, device=records.device)
        sizes = (self.rows.shape[1], side, runs, longest)
        tensors = (self.rows, records.group_offsets, index)
        launch(_blocks, (records.n_groups,), *tensors, *sizes, BLOCK, _RECORDS, **_OPTIONS)
        return index

    def noise_of(self, index: Tensor, y: Tensor, landmarks: Tensor | None = None) -> Tensor:
        """[B, side] float64 N (C + N)⁻¹ y of all blocks: y minus its posterior mean.

        landmarks   C = U Uᵀ + D, U = K_im L⁻ᵀ, L Lᵀ = K_mm + 10⁻³ I, with a block-diagonal D; None: C = D
        """
        pieces, products = [], []
        if landmarks is not None:
            factor = torch.linalg.cholesky_ex(self.covariance(landmarks[None], landmarks[None], JITTER)[0]).L
        at_once = max(1, ROOM // (index.shape[1] * max(index.shape[1], LANDMARKS)))
        for some, right in zip(index.split(at_once), y[..., None].split(at_once), strict=True):
            matrix, noise = self.covariance(some)
            if landmarks is not None:
                across, _ = self.covariance(landmarks[None], some.view(1, -1))
                u = torch.linalg.solve_triangular(factor, across, upper=False).view(-1, *some.shape).permute(1, 2, 0)
                matrix, right = matrix.baddbmm_(u, u.mT, alpha=-1), torch.cat([u, right], dim=2)
            x = _solved(matrix, right)
            if landmarks is not None:
                products.append((u.mT @ x).sum(0))
            pieces.append(self.kernel.noise * x if noise is None else noise @ x)
        solved = _joined(pieces)
        if landmarks is not None:
            inner = sum(products[1:], start=products[0])
            inner.diagonal().add_(1.0)
            solved = solved[..., -1:] - solved[..., :-1] @ _solved(inner[:, :-1], inner[:, -1:])
        return solved[..., 0]

    def covariance(self, first: Tensor, second: Tensor | None = None, added: float = 0.0) -> tuple[Tensor, Any]:
        """[B, n, m] float64, 0 where there is no record: C + N of the blocks first [B, n], and N; None: that is ρ I.

        second   [1, m] records: K of first [1, n] and these instead, with `added` on its diagonal
        """
        kernel, records, (n_blocks, n), whole = self.kernel, self.records, first.shape, second is None
        second = first if second is None else second
        m, luck = second.shape[1], whole and kernel.luck > 0
        out = torch.empty((n_blocks, n, m), dtype=torch.float64, device=self.rows.device)
        noise = torch.empty_like(out) if luck else None
        launch(
            _covariance, (ceil_div(n, _TILE), ceil_div(m, _TILE), n_blocks),
            self.rows, self.inside if whole else None, records.time, records.trajectory_of_record if luck else None,
            self.key, self.parsed, first, second, out, noise, n, m, self.rows.shape[1], 1.0 / kernel.width,
            1.0 / (kernel.horizon or math.inf), float(kernel.same) if whole else 0.0, float(kernel.inside),
            float(kernel.noise) if whole else added, float(kernel.luck), _log(kernel.gamma),
            DIAGONAL=whole or added > 0, TILE=_TILE, **(_WIDE_OPTIONS if luck else _OPTIONS),
        )  # fmt: skip
        return out, noise


@triton.jit
def _group(group_offsets, g):
    begin = tl.load(group_offsets + g)
    return begin, tl.load(group_offsets + g + 1)


@triton.jit
def _live(taken, at, end):
    live = at < end
    if taken is not None:
        live = live & (tl.load(taken + at, mask=live, other=0) != 0)
    return live


@triton.jit
def _cluster_values(
    returns,  # [M] float32
    labels,  # [M] int64, or None: the group's mean
    group_offsets,  # [G+1] int64
    taken,  # [M] bool, or None
    value,  # [M] float64, written
    shrinkage: tl.float64,
    TILE: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    total = tl.zeros((TILE,), tl.float64)
    size = tl.zeros((TILE,), tl.float64)
    low = tl.full((TILE,), float("inf"), tl.float32)
    high = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        live = _live(taken, at, end)
        r = tl.load(returns + at, mask=live, other=0.0)
        total += r.to(tl.float64)
        size += live.to(tl.float64)
        low = tl.where(live, tl.minimum(low, r), low)
        high = tl.where(live, tl.maximum(high, r), high)
    least, most = tl.min(low, axis=0), tl.max(high, axis=0)
    mean = tl.sum(total, axis=0) / tl.maximum(tl.sum(size, axis=0), 1.0)
    mean = tl.where(least == most, least.to(tl.float64), mean)  # exactly
    i = begin + tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = _live(taken, i, end)
    estimate = tl.zeros((TILE,), tl.float64) + mean
    if labels is not None:
        own = tl.load(labels + i, mask=live, other=-1)
        total = tl.zeros((TILE,), tl.float64)
        size = tl.zeros((TILE,), tl.float64)
        for start in range(begin, end, 16):
            j = start + tl.arange(0, 16)
            other = _live(taken, j, end)
            same = (own[:, None] == tl.load(labels + j, mask=other, other=-2)[None, :]) & other[None, :]
            difference = tl.load(returns + j, mask=other, other=0.0).to(tl.float64) - mean
            total += tl.sum(tl.where(same, difference[None, :], 0.0), axis=1)
            size += tl.sum(same.to(tl.float64), axis=1)
        estimate += tl.where(live, total / tl.where(live, size + shrinkage, 1.0), 0.0)
    tl.store(value + i, tl.where(live, estimate, 0.0), mask=i < end)


@triton.jit
def _unit_rows(
    x,  # [N, D]
    order,  # [M] int64
    usable,  # [M] bool, or None
    taken,  # [M] bool, or None
    out,  # [M, width] float32, written: NaN for a row that is not usable
    keys,  # [M] int64, written: schema.state_keys; or None
    dim,
    width,
    row_stride,
    column_stride,
    FOLDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    here = x + tl.load(order + i) * row_stride
    square = tl.zeros((COLUMNS,), tl.float64)  # neither overflows nor underflows
    key = tl.zeros((COLUMNS,), tl.int64)
    for start in range(0, dim, COLUMNS):
        e = (start + tl.arange(0, COLUMNS)).to(tl.int64)
        value = tl.load(here + e * column_stride, mask=e < dim, other=0.0)
        square += value.to(tl.float64) * value.to(tl.float64)
        if keys is not None:
            bits = value.to(tl.int32 if value.dtype == tl.float32 else tl.int16, bitcast=True).to(tl.int64)
            a, c = (((e + 1) * 0x1E3779B97F4A7C15) >> 24).to(tl.int32) | 1, (e + 1) * 0x5851F42D4C957F2D
            b = bits * (((c ^ (c >> 29)) * 0x2545F4914F6CDD1D) >> 32) << (0 if value.dtype == tl.float32 else 16)
            key += tl.where(value.to(tl.float64) == 0.0, 0, bits * a + ((b >> 31) << 31))
    length = tl.sqrt(tl.sum(square, axis=0))
    fits = (length > 0.0) & (length < float("inf"))
    if keys is not None:
        tl.store(keys + i, tl.sum(key, axis=0))
    if usable is not None:
        fits = fits & (tl.load(usable + i) != 0)
    if taken is not None:
        fits = fits & (tl.load(taken + i) != 0)
    for begin in range(0, width, COLUMNS):
        j = begin + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), tl.float64)
        for start in range(0, dim, width):
            e = (start + j).to(tl.int64)
            value = tl.load(here + e * column_stride, mask=(e < dim) & (j < width), other=0.0).to(tl.float64)
            if FOLDS:  # schema.signs
                mixed = (e * 0x9E3779B1) & 0xFFFFFFFF
                mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
                value = tl.where((mixed >> 31) != 0, -value, value)
            total += value
        row = tl.where(fits, total / tl.where(fits, length, 1.0), float("nan"))
        tl.store(out + i * width + j, row.to(tl.float32), mask=j < width)


@triton.jit
def _jacobi(
    a,  # [SIDE, SIDE] float64, symmetric and positive semidefinite; overwritten
    basis,  # [directions, SIDE] float64: rows k < SIDE written, eigenvector k times λ_k^−¾ λ_1^¼; 0 beyond `smallest`
    directions,
    smallest: tl.float64,
    SIDE: tl.constexpr,
    SWEEPS: tl.constexpr,
):
    """Rotations of disjoint pairs of rows, until all are orthogonal: row i is then eigenvalue times eigenvector.
    SIDE − 1 rounds meet every pair once."""
    PAIRS: tl.constexpr = min(SIDE // 2, 32)  # at a time: no register spills with 16 warps
    column = tl.arange(0, SIDE)[None, :]
    left = SWEEPS
    while left > 0:
        turned = 0
        for r in range(0, SIDE - 1):
            for begin in range(0, SIDE // 2, PAIRS):
                k = begin + tl.arange(0, PAIRS)
                p = tl.where(k == 0, SIDE - 1, (r + k) % (SIDE - 1))[:, None] * SIDE + column
                q = tl.where(k == 0, r, (r - k + SIDE - 1) % (SIDE - 1))[:, None] * SIDE + column
                x = tl.load(a + p)
                y = tl.load(a + q)
                own, other, between = tl.sum(x * x, axis=1), tl.sum(y * y, axis=1), tl.sum(x * y, axis=1)
                turns = between * between > 1e-26 * own * other
                turned += tl.sum(turns.to(tl.int32), axis=0)  # later it would spill with Triton 3.6
                low, high = 2.0 * between, other - own
                size = tl.abs(high) + tl.sqrt(high * high + low * low)
                tangent = tl.where(turns, tl.where(high < 0.0, -low, low) / tl.where(turns, size, 1.0), 0.0)
                cosine = (1.0 / tl.sqrt(1.0 + tangent * tangent))[:, None]
                sine = cosine * tangent[:, None]
                tl.debug_barrier()  # all rows are read
                tl.store(a + p, cosine * x - sine * y)
                tl.store(a + q, sine * x + cosine * y)
            tl.debug_barrier()
        left = tl.where(turned > 0, left - 1, 0)
    i = tl.arange(0, SIDE)
    square = tl.zeros((SIDE,), tl.float64)
    for c in range(0, SIDE):
        entry = tl.load(a + i * SIDE + c)
        square += entry * entry
    value = tl.sqrt(square)
    largest = tl.max(value, axis=0)
    place = tl.zeros((SIDE,), tl.int32)
    for c in range(0, SIDE):
        other = tl.sum(tl.where(i == c, value, 0.0), axis=0)
        place += ((other > value) | ((other == value) & (c < i))).to(tl.int32)
    kept = (value > smallest * largest) & (place < directions)
    scale = tl.exp(0.25 * tl.log(largest) - 1.75 * tl.log(tl.where(kept, value, 1.0)))
    for c in range(0, SIDE):
        tl.store(basis + place * SIDE + c, tl.load(a + i * SIDE + c) * scale, mask=kept)


@triton.jit
def _centre(
    rows,  # [M, D] float32
    group_offsets,  # [G+1] int64
    sums,  # [G, D + 1] float64: of the rows that are not NaN; the last: how many they are
    out,  # [M, D] float32, written: rows minus the mean; None: the sums are written
    dim,
    stride,  # of the sums: 0 for those of the batch
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    e = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    count = tl.zeros((ROWS, COLUMNS), tl.float64)
    if out is not None:
        mean = tl.load(sums + g * stride + e, mask=e < dim, other=0.0)
        mean /= tl.maximum(tl.load(sums + g * stride + dim), 1.0)
    for start in range(begin, end, ROWS):
        i = start + tl.arange(0, ROWS)
        at, mask = i[:, None] * dim + e[None, :], (i < end)[:, None] & (e < dim)[None, :]
        row = tl.load(rows + at, mask=mask, other=float("nan")).to(tl.float64)
        if out is not None:
            tl.store(out + at, (row - mean[None, :]).to(tl.float32), mask=mask)
        else:
            total += tl.where(row == row, row, 0.0)
            count += (row == row).to(tl.float64)
    if out is None:
        tl.store(sums + g * stride + e, tl.sum(total, axis=0), mask=e < dim)
        tl.store(sums + g * stride + dim + e, tl.sum(count, axis=0), mask=e == 0)


@triton.jit
def _blocks(
    rows,  # [M, D] float32, NaN for a record that is not usable
    group_offsets,  # [G+1] int64
    index,  # [G, runs, side] int64, written where there is one: the usable records of each block
    dim,
    side,
    runs,
    longest,  # usable records of a group that is one block
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    n = begin * 0
    for start in range(begin, end, TILE):
        n += tl.sum(_usable(rows, start + tl.arange(0, TILE), end, dim), axis=0)
    cuts = tl.where(n <= longest, 1, (n + BLOCK - 1) // BLOCK)
    before = begin * 0
    for start in range(begin, end, TILE):
        i = start + tl.arange(0, TILE)
        usable = _usable(rows, i, end, dim)
        place = before + tl.cumsum(usable, axis=0) - 1
        run = tl.maximum((place + 1) * cuts - 1, 0) // tl.maximum(n, 1)
        tl.store(index + (g * runs + run) * side + place - run * n // cuts, i, mask=usable > 0)
        before += tl.sum(usable, axis=0)


@triton.jit
def _usable(rows, i, end, dim):
    first = tl.load(rows + i * dim, mask=i < end, other=float("nan"))
    return (first == first).to(tl.int64)


@triton.jit
def _cosine(rows, first, second, dim, TILE: tl.constexpr):
    """Cosines of centred rows, from float32 products summed in float64."""
    DEPTH: tl.constexpr = 16
    product = tl.zeros((TILE, TILE), tl.float64)
    square_i = tl.zeros((TILE,), tl.float64)
    square_j = tl.zeros((TILE,), tl.float64)
    for start in range(0, dim, DEPTH):
        e = start + tl.arange(0, DEPTH)
        there = e < dim
        x = tl.load(rows + first[:, None] * dim + e[None, :], mask=(first >= 0)[:, None] & there[None, :], other=0.0)
        y = tl.load(rows + second[None, :] * dim + e[:, None], mask=(second >= 0)[None, :] & there[:, None], other=0.0)
        product += tl.dot(x, y, input_precision="ieee").to(tl.float64)
        square_i += tl.sum(x * x, axis=1).to(tl.float64)
        square_j += tl.sum(y * y, axis=0).to(tl.float64)
    flat_i, flat_j = square_i <= FLAT, square_j <= FLAT
    over_i = tl.where(flat_i, 0.0, 1.0 / tl.sqrt(tl.where(flat_i, 1.0, square_i)))
    over_j = tl.where(flat_j, 0.0, 1.0 / tl.sqrt(tl.where(flat_j, 1.0, square_j)))
    cosine = tl.minimum(product * over_i[:, None] * over_j[None, :], 1.0)  # 0 of a flat row
    return tl.where(flat_i[:, None] & flat_j[None, :], 1.0, cosine)


@triton.jit
def _covariance(
    rows,  # [M, D] float32
    inside,  # [M, D] float32 minus their group's mean, or None
    time,  # [M] int64
    trajectory,  # [M] int64, or None: no luck
    key,  # [M] int64, or None
    parsed,  # [M] bool, or None
    first,  # [blocks, n] int64 records, or −1
    second,  # [blocks, m] int64 likewise
    out,  # [blocks, n, m] float64, written: exactly 1 on the diagonal of K; 0 for what is no record
    noise,  # [blocks, n, n] float64, written where trajectories are given: N
    n,
    m,
    dim,
    rate: tl.float64,  # 1/ℓ
    inverse: tl.float64,  # 1/θ, or 0
    same: tl.float64,
    weight: tl.float64,  # of the kernel inside groups
    added: tl.float64,  # to the diagonal
    luck: tl.float64,
    log_gamma: tl.float64,
    DIAGONAL: tl.constexpr,  # first is second, and 1 on the diagonal of what is no record
    TILE: tl.constexpr,
):
    block = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at_i = tl.load(first + block * n + i, mask=i < n, other=-1)
    at_j = tl.load(second + block * m + j, mask=j < m, other=-1)
    live_i, live_j = at_i >= 0, at_j >= 0
    at = (block * n + i)[:, None] * m + j[None, :]
    mask = (i < n)[:, None] & (j < m)[None, :]
    diagonal = tl.zeros((TILE, TILE), tl.float64)
    if DIAGONAL:
        diagonal = tl.where(i[:, None] == j[None, :], tl.where(live_i, added, 1.0)[:, None], diagonal)
    if trajectory is not None:
        own = tl.load(trajectory + at_i, mask=live_i, other=-1)
        if tl.max((own[:, None] == tl.load(trajectory + at_j, mask=live_j, other=-2)[None, :]).to(tl.int32)) > 0:
            for start in range(0, n, TILE):
                k = tl.load(first + block * n + start + tl.arange(0, TILE))
                ahead_i = _towards(time, trajectory, at_i, k, log_gamma)
                ahead_j = _towards(time, trajectory, at_j, k, log_gamma)
                diagonal += luck * tl.dot(ahead_i, tl.trans(ahead_j), input_precision="ieee")
        tl.store(noise + at, diagonal, mask=mask)
    now = tl.load(time + at_i, mask=live_i, other=0)
    then = tl.load(time + at_j, mask=live_j, other=0)
    steps = (now[:, None] - then[None, :]).to(tl.float64) * inverse
    closeness = rate + steps * steps * 0.5
    itself = at_i[:, None] == at_j[None, :]
    cosine = tl.where(itself, 1.0, _cosine(rows, at_i, at_j, dim, TILE))
    entry = tl.exp(cosine * rate - closeness) + same
    if inside is not None:
        cosine = tl.where(itself, 1.0, _cosine(inside, at_i, at_j, dim, TILE))
        entry += weight * tl.exp(cosine * rate - closeness)
    if key is not None:
        equal = tl.load(key + at_i, mask=live_i, other=0)[:, None] == tl.load(key + at_j, mask=live_j, other=0)[None, :]
        if parsed is not None:
            equal &= (tl.load(parsed + at_i, mask=live_i, other=0) != 0)[:, None]
            equal &= (tl.load(parsed + at_j, mask=live_j, other=0) != 0)[None, :]
        entry = tl.where(equal | itself, entry, 0.0)
    entry = tl.where(live_i[:, None] & live_j[None, :], entry, 0.0)
    if trajectory is not None:
        diagonal = tl.load(noise + at, mask=mask, other=0.0)  # read again: it would take too many registers until here
    tl.store(out + at, entry + diagonal, mask=mask)


@triton.jit
def _towards(time, trajectory, i, k, log_gamma):
    """γ^(t_k − t_i) from a record i to itself and the later ones k of its trajectory, else 0."""
    steps = tl.load(time + k, mask=k >= 0, other=0)[None, :] - tl.load(time + i, mask=i >= 0, other=0)[:, None]
    own = tl.load(trajectory + i, mask=i >= 0, other=-1)[:, None]
    later = (own == tl.load(trajectory + k, mask=k >= 0, other=-2)[None, :]) & (steps >= 0)
    power = tl.where(steps == 0, 1.0, tl.exp(steps.to(tl.float64) * log_gamma))
    return tl.where(later, power, 0.0)


@triton.jit(do_not_specialize=["n_trajectories"])
def _recursion(
    rewards,  # [M] float64
    value,  # [M] float64
    step,  # [M] int64, or None
    truncated,  # [M] bool, or None
    taken,  # [M] bool, or None
    trajectory_offsets,  # [T+1] int64
    out,  # [M] float64, written
    gamma: tl.float64,
    log_gamma: tl.float64,
    decay: tl.float64,  # γλ
    log_decay: tl.float64,
    n_trajectories,
    LANES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    begin = tl.load(trajectory_offsets + t, mask=t < n_trajectories, other=0)
    end = tl.load(trajectory_offsets + t + 1, mask=t < n_trajectories, other=0)
    longest = tl.max(end - begin, axis=0)
    whole = end > begin
    if taken is not None:
        whole = whole & (tl.load(taken + begin, mask=whole, other=0) != 0)  # a trajectory is taken as a whole
    later = _number(step, end - 1, whole)
    nothing = tl.zeros((LANES,), tl.float64)
    next_value = nothing
    next_advantage = nothing
    if truncated is not None:
        # The value after the last step: if it was cut off, the mean of its own values.
        total = nothing
        count = nothing
        cut = tl.zeros((LANES,), tl.int32)
        for k in range(0, longest):
            at = end - 1 - k
            own = whole & (at >= begin)
            own = own & (_number(step, at, own) == later)
            total += tl.load(value + at, mask=own, other=0.0)
            count += own.to(tl.float64)
            cut = cut | tl.load(truncated + at, mask=own, other=0).to(tl.int32)
        next_value = tl.where(cut != 0, total / tl.maximum(count, 1.0), 0.0)
    discount = nothing + gamma
    shrunk = nothing + decay
    values = nothing  # sums over the records of the step `later`
    advantages = nothing
    count = nothing
    for k in range(0, longest):
        at = end - 1 - k
        live = whole & (at >= begin)
        now = _number(step, at, live)
        gap = later - now
        begins = live & (gap != 0)
        some = tl.maximum(gap, 1).to(tl.float64)
        discount = tl.where(begins, tl.where(gap == 1, gamma, tl.exp(some * log_gamma)), discount)
        shrunk = tl.where(begins, tl.where(gap == 1, decay, tl.exp(some * log_decay)), shrunk)
        several = tl.maximum(count, 1.0)
        next_value = tl.where(begins, values / several, next_value)
        next_advantage = tl.where(begins, advantages / several, next_advantage)
        v = tl.load(value + at, mask=live, other=0.0)
        a = tl.load(rewards + at, mask=live, other=0.0) + discount * next_value - v + shrunk * next_advantage
        values = tl.where(begins, 0.0, values) + v
        advantages = tl.where(begins, 0.0, advantages) + a
        count = tl.where(begins, 0.0, count) + 1.0
        later = now
        tl.store(out + at, a, mask=at >= begin)


@triton.jit
def _number(step, at, mask):
    """A record's step; where none is given, its place."""
    return at if step is None else tl.load(step + at, mask=mask, other=0)


@triton.jit
def _squares(
    advantage,  # [M] float64
    returns,  # [M] float32
    taken,  # [M] bool, or None
    group_offsets,  # [G+1] int64
    sums,  # [3, G] float64, written: Σ A², how many records, max |R|
    n_groups,
    TILE: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    total = tl.zeros((TILE,), tl.float64)
    n = tl.zeros((TILE,), tl.float64)
    most = tl.zeros((TILE,), tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        live = _live(taken, at, end)
        a = tl.load(advantage + at, mask=live, other=0.0)
        total += a * a
        n += live.to(tl.float64)
        most = tl.maximum(most, tl.abs(tl.load(returns + at, mask=live, other=0.0)))
    tl.store(sums + g, tl.sum(total, axis=0))
    tl.store(sums + n_groups + g, tl.sum(n, axis=0))
    tl.store(sums + 2 * n_groups + g, tl.max(most, axis=0).to(tl.float64))


@triton.jit
def _scaled(
    advantage,  # [M] float64
    sums,  # [3, G] of _squares: each group's, or by stride 0 the batch's; None: A is not divided
    taken,  # [M] bool, or None
    group_offsets,  # [G+1] int64
    out,  # [M] float32, written
    row_stride,
    stride,
    tiny: tl.float64,
    TILE: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    at = begin + tl.program_id(1) * TILE + tl.arange(0, TILE)
    scaled = tl.load(advantage + at, mask=_live(taken, at, end), other=0.0)
    if sums is not None:
        of = sums + g * stride
        size = tl.sqrt(tl.load(of) / tl.maximum(tl.load(of + row_stride), 1.0))
        counts = size > tiny * tl.maximum(tl.load(of + 2 * row_stride), _LEAST)
        scaled *= tl.where(counts, 1.0 / tl.where(counts, size, 1.0), 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -_FLOAT32_MAX), _FLOAT32_MAX)
    tl.store(out + at, scaled.to(tl.float32), mask=at < end)
