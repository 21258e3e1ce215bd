"""A value of each record's state, and GAE(λ) over it, on the fingerprints' device, without synchronizing.

    rows to unit length, minus the mean of their group or batch (float64) ─► Gram matrix of every block (gram.py) ─► K, float64
    ─► torch.linalg's Cholesky, all blocks padded to one multiple of 128; between blocks landmarks, in torch's float64
    products ─► V̂ ─► a lane walks each trajectory backwards ─► the same K, where actions are equal, averages A_S

The padding depends on the longest group, and libraries choose their kernels by it: a group's values in another batch
agree within 2e-5, not bit for bit.  The host does not know which groups have more than 2,048 usable records: if one may
have, all groups use landmarks, one after the other under share "group".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .. import schema
from ..records import Records
from ..schema import BLOCK, JITTER, LANDMARKS, LONGEST, TINY, Kernel
from . import gram, rows
from ._launch import ceil_div, device_guard

Tensor = torch.Tensor

FLAT = tl.constexpr(schema.FLAT)
ROOM = 1 << 27  # float64 entries of the kernel matrices made at a time: 1 GiB
ROWS = 1024  # records that are multiplied with the landmarks at a time
LANES = 32  # trajectories of a program
_TILE = 32  # side of a square of K; records that a program of a group looks at together are 128
_RECORDS = 128
_CENTRE = {"ROWS": 8, "COLUMNS": 128}
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_LANE_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


def cluster_values(records: Records, returns: Tensor, labels: Tensor | None, shrinkage: float) -> Tensor:
    value = torch.zeros(returns.shape, dtype=torch.float64, device=returns.device)
    if returns.shape[0]:
        taken, mean = records.taken, _means_of(records, returns)
        with device_guard(returns):
            _cluster_values[(records.n_groups, ceil_div(records.longest_group, _RECORDS))](
                returns, labels, records.group_offsets, taken, mean, value, float(shrinkage),
                HAS_LABELS=labels is not None, HAS_TAKEN=taken is not None, TILE=_RECORDS, **_OPTIONS,
            )  # fmt: skip
    return value


def kernel_values(
    records: Records, fingerprint: Tensor, returns: Tensor, landmarks: Tensor | None, kernel: Kernel,
    products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    value = cluster_values(records, returns, None, 0.0)
    m, device, share = records.n_records, records.device, kernel.share
    if not m:
        return value
    inside, place, record, scale = _compact(records, fingerprint)
    offsets = place[records.group_offsets]
    prior = value if share == "group" else torch.zeros_like(value)
    with_mean = offsets if share == "group" else torch.stack([offsets[0], offsets[-1]])
    among = _Kernel(
        _centre(fingerprint, records.order[record].contiguous(), scale, with_mean, with_mean.shape[0] - 1),
        records.time[record].contiguous(), (returns.to(torch.float64) - prior)[record], float(kernel.width),
        float(kernel.horizon), float(kernel.noise), float(kernel.same) if share == "batch" else 0.0,
    )  # fmt: skip
    longest_group = records.longest_group
    runs = 1 if longest_group <= LONGEST else ceil_div(longest_group, BLOCK)
    blocks, longest = _blocks(offsets, runs), min(longest_group, LONGEST)
    if share == "group" and runs == 1:
        gain = among.gain(blocks, longest)
    elif share == "batch":
        if landmarks is None:
            k = torch.arange(min(m, LANDMARKS), device=device)
            at, live = k, k < offsets[-1]
        else:
            live = (landmarks >= 0) & inside[landmarks.clamp(min=0)]
            at = place[landmarks.clamp(min=0)].clamp(max=m - 1)
        gain = among.gain(blocks, longest, among.to_landmarks(at, live, offsets[0], offsets[-1], m))
    else:
        gain = torch.zeros_like(among.y)
        for g in range(records.n_groups):
            n = offsets[g + 1] - offsets[g]
            some = n.clamp(1, LANDMARKS)
            k = torch.arange(LANDMARKS, device=device)
            at = (offsets[g] + k.clamp(max=some - 1) * n // some).clamp(max=m - 1)
            across = among.to_landmarks(at, k < n, offsets[g], offsets[g + 1], longest_group)
            gain += among.gain(blocks[g * runs : (g + 1) * runs + 1], longest, across)
    return torch.where(inside, prior + gain[place[:-1].clamp(max=m - 1)], value)


def gae_advantage(
    records: Records, rewards: Tensor, value: Tensor, truncated: Tensor | None, gamma: float, gae_lambda: float
) -> Tensor:
    advantage = torch.empty_like(rewards)
    if not rewards.shape[0]:
        return advantage
    decay, step, taken = float(gamma) * float(gae_lambda), records.step, records.taken
    with device_guard(rewards):
        _recursion[(ceil_div(records.n_trajectories, LANES),)](
            rewards, value, step, truncated, taken, records.trajectory_offsets, advantage, float(gamma), _log(gamma),
            decay, _log(decay), records.n_trajectories, HAS_STEP=step is not None, HAS_CUT=truncated is not None,
            HAS_TAKEN=taken is not None, LANES=LANES, **_LANE_OPTIONS,
        )  # fmt: skip
    return advantage


def same_action_advantage(
    records: Records, fingerprint: Tensor, advantage: Tensor, action_key: Tensor, parsed: Tensor | None,
    kernel: Kernel, products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    m, taken = records.n_records, records.taken
    if not m:
        return torch.empty_like(advantage)
    inside, place, record, scale = _compact(records, fingerprint)
    offsets = place[records.group_offsets]
    known = torch.ones_like(inside) if parsed is None else parsed
    among = _Kernel(
        _centre(fingerprint, records.order[record].contiguous(), scale, offsets, records.n_groups),
        records.time[record].contiguous(), advantage[record], float(kernel.width), float(kernel.horizon),
        float(kernel.noise), 0.0, action_key[record].contiguous(), known[record].contiguous(),
    )  # fmt: skip
    longest = records.longest_group
    runs = 1 if longest <= LONGEST else ceil_div(longest, BLOCK)
    averaged = among.gain(_blocks(offsets, runs), min(longest, LONGEST))[place[:-1].clamp(max=m - 1)]
    out = torch.where(inside, averaged, advantage / (1.0 + float(kernel.noise)))
    return out if taken is None else torch.where(taken, out, 0.0)


def normed_advantage(records: Records, advantage: Tensor, returns: Tensor, step_norm: str) -> Tensor:
    out = torch.zeros(advantage.shape, dtype=torch.float32, device=advantage.device)
    if not advantage.shape[0]:
        return out
    n_groups, offsets, taken = records.n_groups, records.group_offsets, records.taken
    square, largest, count = torch.empty((3, n_groups), dtype=torch.float64, device=advantage.device).unbind()
    masked: dict[str, Any] = {"HAS_TAKEN": taken is not None, "TILE": _RECORDS, **_OPTIONS}
    with device_guard(advantage):
        _squares[(n_groups,)](advantage, returns, taken, offsets, square, largest, count, **masked)
        factor = _factors(square, largest, count, step_norm)
        _scale[(n_groups, ceil_div(records.longest_group, _RECORDS))](advantage, factor, taken, offsets, out, **masked)
    return out


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _factors(square: Tensor, largest: Tensor, count: Tensor, step_norm: str) -> Tensor:
    """[G] float64 factor of each group's A_S."""
    if step_norm == "none":
        return torch.ones_like(square)
    if step_norm == "batch":
        square, largest, count = (x.expand_as(square) for x in (square.sum(), largest.amax(), count.sum()))
    size = (square / count.clamp(min=1)).sqrt()
    return torch.where((largest > 0) & (size > TINY * largest), 1 / size, 0.0)


def _means_of(records: Records, returns: Tensor) -> Tensor:
    """[G] float64 μ_p of the records taken; exact if all values are equal."""
    mean, taken = torch.empty(records.n_groups, dtype=torch.float64, device=returns.device), records.taken
    with device_guard(returns):
        _means[(records.n_groups,)](
            returns, records.group_offsets, taken, mean, HAS_TAKEN=taken is not None, TILE=_RECORDS, **_OPTIONS
        )
    return mean


def _compact(records: Records, fingerprint: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The records that take part, compacted.

    inside   [M] bool
    place    [M+1] int64 where a record is among them; the last: how many there are
    record   [M] int64 which they are; entries after the last are copies of record 0, which may be a bad one
    scale    [M] float32 factors of their rows
    """
    m, device = records.n_records, records.device
    kind = torch.empty(m, dtype=torch.uint8, device=device)
    scale = torch.empty(m, dtype=torch.float32, device=device)
    rows.look(fingerprint, records.order, kind=kind, scale=scale, usable=records.usable, taken=records.taken)
    inside = kind == rows.USABLE
    place = torch.zeros(m + 1, dtype=torch.int64, device=device)
    place[1:] = inside.cumsum(0)
    record = torch.zeros(m + 1, dtype=torch.int64, device=device)
    record.scatter_(0, torch.where(inside, place[:-1], m), torch.arange(m, device=device))
    return inside, place, record[:-1], scale[record[:-1]].contiguous()


def _centre(fingerprint: Tensor, row: Tensor, scale: Tensor, offsets: Tensor, n_groups: int) -> Tensor:
    """[M, D] float32 rows at unit length minus their group's mean, both in float64, rounded once."""
    m, dim = row.shape[0], fingerprint.shape[1]
    reciprocal = torch.empty(m, dtype=torch.float64, device=row.device)
    z = torch.zeros((m, dim), dtype=torch.float32, device=row.device)
    strides = (fingerprint.stride(0), fingerprint.stride(1))
    with device_guard(row):
        _lengths[(m,)](fingerprint, row, scale, reciprocal, dim, *strides, COLUMNS=1024, **_OPTIONS)
        _centred[(n_groups, ceil_div(dim, _CENTRE["COLUMNS"]))](
            fingerprint, row, reciprocal, offsets, z, dim, *strides, **_CENTRE, **_OPTIONS
        )
    return z


def _blocks(offsets: Tensor, runs: int) -> Tensor:
    """[G * runs + 1] int64 where blocks begin: a group is one, a longer one than LONGEST ⌈n / BLOCK⌉; the others are empty."""
    if runs == 1:
        return offsets
    n = offsets.diff()[:, None]
    cuts = torch.where(n <= LONGEST, 1, (n + BLOCK - 1) // BLOCK)
    k = torch.arange(runs, device=offsets.device)
    return torch.cat([(offsets[:-1, None] + torch.minimum(k, cuts) * n // cuts).flatten(), offsets[-1:]])


@dataclass(frozen=True)
class _Kernel:
    """The records that take part, and their kernel."""

    z: Tensor  # [M, D] float32
    time: Tensor  # [M] int64
    y: Tensor  # [M] float64
    width: float
    horizon: float
    noise: float
    same: float
    key: Tensor | None = None  # [M] int64 actions: K is 0 between records of different ones; None: it is not
    known: Tensor | None = None  # [M] bool, with keys: whether the action is known; K is 0 between others

    def to_landmarks(self, at: Tensor, live: Tensor, begin: Tensor, end: Tensor, longest: int) -> Tensor:
        """[M, L] float64 U = K_im L⁻ᵀ of the records begin : end, at most `longest`, with L Lᵀ = K_mm + 10⁻³ I.

        at, live   [L] the landmarks, and which of them exist
        """
        m, device = at.shape[0], self.z.device
        eye = torch.eye(m, dtype=torch.float64, device=device)
        among = torch.where(live[:, None] & live, self.entries(at, at) + JITTER * eye, eye)
        factor = torch.linalg.cholesky_ex(among).L
        out = torch.zeros(self.z.shape[0] + 1, m, dtype=torch.float64, device=device)
        for first in range(0, longest, ROWS):
            i = begin + torch.arange(first, min(first + ROWS, longest), device=device)
            there = i < end
            across = self.entries(torch.where(there, i, begin).clamp(max=self.z.shape[0] - 1), at) * live
            found = torch.linalg.solve_triangular(factor, across.T, upper=False).T
            out[torch.where(there, i, self.z.shape[0])] = (
                found  # places after the last one share a row that is never read
            )
        return out[:-1]

    def gain(self, blocks: Tensor, longest: int, across: Tensor | None = None) -> Tensor:
        """[M] float64 C (C + ρ I)⁻¹ y of the records of the blocks; 0 elsewhere.

        across   U of `to_landmarks`: C = U Uᵀ + D with a block-diagonal D; None: C = D
        """
        m, n_blocks, device = self.z.shape[0], blocks.shape[0] - 1, self.z.device
        wide = 0 if across is None else across.shape[1]
        side = max(ceil_div(longest, gram.UNIT), 1) * gram.UNIT
        inner = torch.zeros(wide, wide + 1, dtype=torch.float64, device=device)
        solved = torch.zeros(m + 1, wide + 1, dtype=torch.float64, device=device)  # (D + ρ I)⁻¹ [U, y]
        at_once = min(n_blocks, max(1, ROOM // (side * max(side, wide))))
        for first in range(0, n_blocks, at_once):
            offsets = blocks[first : first + at_once + 1]
            matrix = self._matrices(offsets, side)
            place = offsets[:-1, None] + torch.arange(side, device=device)
            live = place < offsets[1:, None]
            place = place.clamp(max=m - 1)
            # Not a product: y may be infinite at a place that is not live, and infinity times 0 is NaN.
            right = torch.where(live, self.y[place], 0.0)[..., None]
            if across is not None:
                u = across[place] * live[..., None]
                matrix = torch.baddbmm(matrix, u, u.mT, alpha=-1)
                right = torch.cat([u, right], dim=2)
            found = torch.cholesky_solve(right, torch.linalg.cholesky_ex(matrix).L)
            if across is not None:
                inner += (u.mT @ found).sum(0)
            solved[torch.where(live, place, m)] = found
        rest = solved[:-1, -1]
        if across is not None:
            eye = torch.eye(wide, dtype=torch.float64, device=device)
            weight = torch.cholesky_solve(inner[:, -1:], torch.linalg.cholesky_ex(inner[:, :-1] + eye).L)
            rest = rest - (solved[:-1, :-1] @ weight)[:, 0]
        every = torch.arange(m, device=device)
        return torch.where((every >= blocks[0]) & (every < blocks[-1]), self.y - self.noise * rest, 0.0)

    def _matrices(self, offsets: Tensor, side: int) -> Tensor:
        """[blocks, side, side] float64 K + s + ρ I of each block, padded with the identity."""
        n_blocks, device = offsets.shape[0] - 1, self.z.device
        every = torch.arange(self.z.shape[0], device=device)
        one = torch.ones(self.z.shape[0], dtype=torch.float32, device=device)
        products = torch.empty((n_blocks, side, side), dtype=torch.float32, device=device)
        reciprocal = torch.empty((n_blocks, side), dtype=torch.float32, device=device)
        matrix = torch.empty((n_blocks, side, side), dtype=torch.float64, device=device)
        with device_guard(self.z):
            gram.multiply_groups(self.z, every, offsets, one, products, reciprocal, first_group=0)
            _matrix[(side // _TILE, side // _TILE, n_blocks)](
                products, self.time, self.key, self.known, offsets, matrix, side, self.width, self.horizon, self.noise, self.same,
                HAS_KEY=self.key is not None, TILE=_TILE, **_OPTIONS,
            )  # fmt: skip
        return matrix

    def entries(self, i: Tensor, j: Tensor) -> Tensor:
        """[n, m] float64 kernel of the records i [n] and j [m]."""
        x, z = self.z[i].double(), self.z[j].double()
        return _entries(x, z, self.time[i], self.time[j], self.width, self.horizon)


def _entries(x: Tensor, z: Tensor, t: Tensor, u: Tensor, width: float, horizon: float) -> Tensor:
    """[n, m] float64 kernel of centred rows x [n, D] and z [m, D] at steps t [n] and u [m]."""
    a, b = (x * x).sum(1)[:, None], (z * z).sum(1)[None, :]
    flat_a, flat_b = a <= FLAT.value, b <= FLAT.value
    cosine = (x @ z.T / (a * b).sqrt().clamp(min=FLAT.value)).clamp(max=1.0)
    cosine = torch.where(cosine > 1 - 1e-12, 1.0, cosine)  # equal rows
    cosine = torch.where(flat_a | flat_b, (flat_a & flat_b).to(cosine.dtype), cosine)
    exponent = (cosine - 1.0) / width
    if horizon > 0:
        exponent = exponent - ((t[:, None] - u[None, :]) / horizon) ** 2 / 2
    return exponent.exp()


@triton.jit
def _group(group_offsets, g):
    begin = tl.load(group_offsets + g)
    return begin, tl.load(group_offsets + g + 1)


@triton.jit
def _live(taken, at, end, HAS_TAKEN: tl.constexpr):
    live = at < end
    if HAS_TAKEN:
        live = live & (tl.load(taken + at, mask=live, other=0) != 0)
    return live


@triton.jit
def _means(
    returns,  # [M] float32
    group_offsets,  # [G+1] int64
    taken,  # [M] bool
    mean,  # [G] float64, written
    HAS_TAKEN: tl.constexpr,
    TILE: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    total = tl.zeros((TILE,), tl.float64)
    count = tl.zeros((TILE,), tl.int32)
    low = tl.full((TILE,), float("inf"), tl.float32)
    high = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        live = _live(taken, at, end, HAS_TAKEN)
        r = tl.load(returns + at, mask=live, other=0.0)
        total += r.to(tl.float64)
        count += live.to(tl.int32)
        low = tl.where(live, tl.minimum(low, r), low)
        high = tl.where(live, tl.maximum(high, r), high)
    least, most, n = tl.min(low, axis=0), tl.max(high, axis=0), tl.sum(count, axis=0)
    found = tl.sum(total, axis=0) / tl.maximum(n, 1).to(tl.float64)
    found = tl.where(least == most, least.to(tl.float64), found)
    tl.store(mean + g, tl.where(n > 0, found, 0.0))


@triton.jit
def _cluster_values(
    returns,  # [M] float32
    labels,  # [M] int64
    group_offsets,  # [G+1] int64
    taken,  # [M] bool
    mean,  # [G] float64
    value,  # [M] float64, written
    shrinkage: tl.float64,
    HAS_LABELS: tl.constexpr,
    HAS_TAKEN: tl.constexpr,
    TILE: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    i = begin + tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = _live(taken, i, end, HAS_TAKEN)
    centre = tl.load(mean + g)
    found = tl.zeros((TILE,), tl.float64) + centre
    if HAS_LABELS:
        own = tl.load(labels + i, mask=live, other=-1)
        total = tl.zeros((TILE,), tl.float64)
        size = tl.zeros((TILE,), tl.float64)
        for start in range(begin, end, 16):
            j = start + tl.arange(0, 16)
            other = _live(taken, j, end, HAS_TAKEN)
            same = (own[:, None] == tl.load(labels + j, mask=other, other=-2)[None, :]) & other[None, :]
            difference = tl.load(returns + j, mask=other, other=0.0).to(tl.float64) - centre
            total += tl.sum(tl.where(same, difference[None, :], 0.0), axis=1)
            size += tl.sum(same.to(tl.float64), axis=1)
        found += tl.where(live, total / tl.where(live, size + shrinkage, 1.0), 0.0)
    tl.store(value + i, found, mask=live)


@triton.jit
def _lengths(
    x,  # [N, D]
    row,  # [M] int64
    scale,  # [M] float32
    reciprocal,  # [M] float64, written: scale / ‖x · scale‖
    dim,
    row_stride,
    column_stride,
    COLUMNS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + i).to(tl.float64)
    here = x + tl.load(row + i) * row_stride
    total = tl.zeros((COLUMNS,), tl.float64)
    for start in range(0, dim, COLUMNS):
        e = start + tl.arange(0, COLUMNS)
        value = tl.load(here + e.to(tl.int64) * column_stride, mask=e < dim, other=0.0).to(tl.float64) * factor
        total += value * value
    tl.store(reciprocal + i, factor / tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def _centred(
    x,  # [N, D]
    row,  # [M] int64
    reciprocal,  # [M] float64
    offsets,  # [G+1] int64
    z,  # [M, D] float32, written
    dim,
    row_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(offsets, g)
    e = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for start in range(begin, end, ROWS):
        total += _unit(x, row, reciprocal, start, end, e, dim, row_stride, column_stride, ROWS)
    mean = tl.sum(total, axis=0) / tl.maximum(end - begin, 1).to(tl.float64)
    for start in range(begin, end, ROWS):
        unit = _unit(x, row, reciprocal, start, end, e, dim, row_stride, column_stride, ROWS)
        i = start + tl.arange(0, ROWS)
        mask = (i < end)[:, None] & (e < dim)[None, :]
        tl.store(z + i[:, None] * dim + e[None, :], (unit - mean[None, :]).to(tl.float32), mask=mask)


@triton.jit
def _unit(x, row, reciprocal, start, end, e, dim, row_stride, column_stride, ROWS: tl.constexpr):
    """Columns e of the rows start … start + ROWS − 1 at unit length, float64; 0 beyond the group."""
    i = start + tl.arange(0, ROWS)
    at = tl.load(row + i, mask=i < end, other=0) * row_stride
    mask = (i < end)[:, None] & (e < dim)[None, :]
    value = tl.load(x + at[:, None] + (e * column_stride)[None, :], mask=mask, other=0.0).to(tl.float64)
    return value * tl.load(reciprocal + i, mask=i < end, other=0.0)[:, None]


@triton.jit
def _matrix(
    products,  # [blocks, side, side] float32, i ≤ j
    time,  # [M] int64
    key,  # [M] int64
    known,  # [M] bool
    offsets,  # [blocks + 1] int64
    matrix,  # [blocks, side, side] float64, written: K + s + ρ I; the identity for what is no record
    side,
    width: tl.float64,
    horizon: tl.float64,
    noise: tl.float64,
    common: tl.float64,  # s
    HAS_KEY: tl.constexpr,
    TILE: tl.constexpr,
):
    group = tl.program_id(2).to(tl.int64)
    begin, end = _group(offsets, group)
    n = end - begin
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live_i, live_j = i < n, j < n
    live = live_i[:, None] & live_j[None, :]
    base = products + group * side * side
    low, high = tl.minimum(i[:, None], j[None, :]), tl.maximum(i[:, None], j[None, :])
    product = tl.load(base + low * side + high, mask=live, other=0.0).to(tl.float64)
    square_i = tl.load(base + i * side + i, mask=live_i, other=1.0).to(tl.float64)[:, None]
    square_j = tl.load(base + j * side + j, mask=live_j, other=1.0).to(tl.float64)[None, :]
    flat_i, flat_j = square_i <= FLAT, square_j <= FLAT
    length = tl.sqrt(tl.where(flat_i, 1.0, square_i) * tl.where(flat_j, 1.0, square_j))
    cosine = tl.where(2.0 * product >= square_i + square_j, 1.0, tl.minimum(product / length, 1.0))
    cosine = tl.where(flat_i | flat_j, tl.where(flat_i & flat_j, 1.0, 0.0), cosine)
    exponent = (cosine - 1.0) / width
    if horizon > 0.0:
        now = tl.load(time + begin + i, mask=live_i, other=0)
        then = tl.load(time + begin + j, mask=live_j, other=0)
        steps = (now[:, None] - then[None, :]).to(tl.float64) / horizon
        exponent -= steps * steps / 2.0
    same = i[:, None] == j[None, :]
    found = tl.exp(exponent)
    if HAS_KEY:
        action_i = tl.load(key + begin + i, mask=live_i, other=0)
        action_j = tl.load(key + begin + j, mask=live_j, other=0)
        known_i = tl.load(known + begin + i, mask=live_i, other=0) != 0
        known_j = tl.load(known + begin + j, mask=live_j, other=0) != 0
        equal = (action_i[:, None] == action_j[None, :]) & known_i[:, None] & known_j[None, :]
        found = tl.where(equal, found, 0.0)
    found = tl.where(live, tl.where(same, 1.0 + noise, found) + common, tl.where(same, 1.0, 0.0))
    tl.store(matrix + group * side * side + i[:, None] * side + j[None, :], found)


@triton.jit(do_not_specialize=["n_trajectories"])
def _recursion(
    rewards,  # [M] float64
    value,  # [M] float64
    step,  # [M] int64
    truncated,  # [M] bool
    taken,  # [M] bool
    trajectory_offsets,  # [T+1] int64
    out,  # [M] float64
    gamma: tl.float64,
    log_gamma: tl.float64,
    decay: tl.float64,  # γλ
    log_decay: tl.float64,
    n_trajectories,
    HAS_STEP: tl.constexpr,
    HAS_CUT: tl.constexpr,
    HAS_TAKEN: tl.constexpr,
    LANES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    begin = tl.load(trajectory_offsets + t, mask=t < n_trajectories, other=0)
    end = tl.load(trajectory_offsets + t + 1, mask=t < n_trajectories, other=0)
    longest = tl.max(end - begin, axis=0)
    whole = end > begin
    if HAS_TAKEN:
        whole = whole & (tl.load(taken + begin, mask=whole, other=0) != 0)  # a trajectory is taken as a whole
    nothing = tl.zeros((LANES,), tl.float64)
    next_value = nothing
    next_advantage = nothing
    if HAS_CUT:
        # The value after the last step: if it was cut off, the mean of its own values.
        total = nothing
        count = nothing
        cut = tl.zeros((LANES,), tl.int32)
        last = tl.zeros((LANES,), tl.int64)
        if HAS_STEP:
            last = tl.load(step + end - 1, mask=whole, other=0)
        for k in range(0, longest):
            at = end - 1 - k
            own = whole & (at >= begin)
            if HAS_STEP:
                own = own & (tl.load(step + at, mask=own, other=-1) == last)
            else:
                own = own & (k == 0)
            total += tl.load(value + at, mask=own, other=0.0)
            count += own.to(tl.float64)
            cut = cut | tl.load(truncated + at, mask=own, other=0).to(tl.int32)
        next_value = tl.where(cut != 0, total / tl.maximum(count, 1.0), 0.0)
    discount = nothing + gamma
    shrunk = nothing + decay
    values = nothing  # sums over the records of the current step
    advantages = nothing
    count = nothing
    later = tl.zeros((LANES,), tl.int64)  # its number
    for k in range(0, longest):
        at = end - 1 - k
        live = whole & (at >= begin)
        r = tl.load(rewards + at, mask=live, other=0.0)
        v = tl.load(value + at, mask=live, other=0.0)
        if k > 0:
            begins = live
            if HAS_STEP:
                now = tl.load(step + at, mask=live, other=0)
                gap = later - now
                begins = live & (gap != 0)
                some = tl.maximum(gap, 1).to(tl.float64)
                discount = tl.where(begins, tl.where(gap == 1, gamma, tl.exp(some * log_gamma)), discount)
                shrunk = tl.where(begins, tl.where(gap == 1, decay, tl.exp(some * log_decay)), shrunk)
                later = now
            several = tl.maximum(count, 1.0)
            next_value = tl.where(begins, values / several, next_value)
            next_advantage = tl.where(begins, advantages / several, next_advantage)
            values = tl.where(begins, 0.0, values)
            advantages = tl.where(begins, 0.0, advantages)
            count = tl.where(begins, 0.0, count)
        else:
            if HAS_STEP:
                later = tl.load(step + at, mask=live, other=0)
        a = r + discount * next_value - v + shrunk * next_advantage
        values += v
        advantages += a
        count += 1.0
        tl.store(out + at, a, mask=live)
    if HAS_TAKEN:
        for k in range(0, longest):
            tl.store(out + end - 1 - k, nothing, mask=(whole == 0) & (end - 1 - k >= begin))


@triton.jit
def _squares(
    advantage,  # [M] float64
    returns,  # [M] float32
    taken,  # [M] bool
    group_offsets,  # [G+1] int64
    square,  # [G] float64, written: Σ A²
    largest,  # [G] float64, written: max |R|
    count,  # [G] float64, written
    HAS_TAKEN: tl.constexpr,
    TILE: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    total = tl.zeros((TILE,), tl.float64)
    n = tl.zeros((TILE,), tl.float64)
    most = tl.zeros((TILE,), tl.float32)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        live = _live(taken, at, end, HAS_TAKEN)
        a = tl.load(advantage + at, mask=live, other=0.0)
        total += a * a
        n += live.to(tl.float64)
        most = tl.maximum(most, tl.abs(tl.load(returns + at, mask=live, other=0.0)))
    tl.store(square + g, tl.sum(total, axis=0))
    tl.store(largest + g, tl.max(most, axis=0).to(tl.float64))
    tl.store(count + g, tl.sum(n, axis=0))


@triton.jit
def _scale(
    advantage,  # [M] float64
    factor,  # [G] float64
    taken,  # [M] bool
    group_offsets,  # [G+1] int64
    out,  # [M] float32, written
    HAS_TAKEN: tl.constexpr,
    TILE: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    at = begin + tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = _live(taken, at, end, HAS_TAKEN)
    found = tl.load(advantage + at, mask=live, other=0.0) * tl.load(factor + g)
    found = tl.minimum(tl.maximum(found, -_FLOAT32_MAX), _FLOAT32_MAX)
    tl.store(out + at, found.to(tl.float32), mask=live)


def main_path() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(kernel, signature, constexprs, options) of each launch on the main path, for compiling ahead of time."""
    masked = {"HAS_TAKEN": True, "TILE": _RECORDS}
    ids = {"group_offsets": "*i64", "taken": "*u1"}
    yield _means, {"returns": "*fp32", **ids, "mean": "*fp64"}, masked, _OPTIONS
    clusters = {"returns": "*fp32", "labels": "*i64", **ids, "mean": "*fp64", "value": "*fp64", "shrinkage": "fp64"}
    yield _cluster_values, clusters, {"HAS_LABELS": True, **masked}, _OPTIONS
    matrix = {"x": "*bf16", "row": "*i64"}
    strides = {"dim": "i32", "row_stride": "i32"}
    yield (
        _lengths,
        {**matrix, "scale": "*fp32", "reciprocal": "*fp64", **strides},
        {"column_stride": 1, "COLUMNS": 1024},
        _OPTIONS,
    )
    centred = {**matrix, "reciprocal": "*fp64", "offsets": "*i64", "z": "*fp32", **strides}
    yield _centred, centred, {"column_stride": 1, **_CENTRE}, _OPTIONS
    numbers = {"width": "fp64", "horizon": "fp64", "noise": "fp64", "common": "fp64"}
    tiles = {
        "products": "*fp32",
        "time": "*i64",
        "key": "*i64",
        "known": "*u1",
        "offsets": "*i64",
        "matrix": "*fp64",
        "side": "i32",
        **numbers,
    }
    for has_key in (False, True):
        yield _matrix, tiles, {"HAS_KEY": has_key, "TILE": _TILE}, _OPTIONS
    yield (
        _recursion,
        {
            "rewards": "*fp64", "value": "*fp64", "step": "*i64", "truncated": "*u1", "taken": "*u1",
            "trajectory_offsets": "*i64", "out": "*fp64", "gamma": "fp64", "log_gamma": "fp64", "decay": "fp64",
            "log_decay": "fp64", "n_trajectories": "i32",
        },
        {"HAS_STEP": True, "HAS_CUT": True, "HAS_TAKEN": True, "LANES": LANES},
        _LANE_OPTIONS,
    )  # fmt: skip
    sums = {"square": "*fp64", "largest": "*fp64", "count": "*fp64"}
    squares = {"advantage": "*fp64", "returns": "*fp32", "taken": "*u1", "group_offsets": "*i64", **sums}
    yield _squares, squares, masked, _OPTIONS
    scale = {"advantage": "*fp64", "factor": "*fp64", "taken": "*u1", "group_offsets": "*i64", "out": "*fp32"}
    yield _scale, scale, masked, _OPTIONS
