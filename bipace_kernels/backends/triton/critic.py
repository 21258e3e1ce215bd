"""A value of each record's state, and GAE(λ) over it, on the fingerprints' device, without synchronizing.

    rows to unit length, folded ─► coordinates in the landmarks' directions (torch's float64 products, a Jacobi kernel)
    ─► minus the mean of their group or batch ─► C of every block, float64 ─► torch.linalg's Cholesky, all blocks padded
    to one multiple of 128; between blocks landmarks ─► V̂ ─► a lane walks each trajectory backwards ─► the same kernel,
    where actions are equal, averages A_S

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
from . import rows as scanned
from ._launch import ceil_div, device_guard

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
_JACOBI_OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
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


def unit_rows(records: Records, fingerprint: Tensor, width: int, keys: Tensor | None = None) -> Tensor:
    m, dim, device = records.n_records, fingerprint.shape[1], records.device
    folded = min(width or dim, dim)
    if keys is not None:
        keys.copy_(schema.state_keys(fingerprint, records.order))
    kind = torch.empty(m, dtype=torch.uint8, device=device)
    scale = torch.empty(m, dtype=torch.float32, device=device)
    out = torch.empty((m, folded), dtype=torch.float32, device=device)
    if m:
        scanned.look(fingerprint, records.order, kind=kind, scale=scale, usable=records.usable, taken=records.taken)
        with device_guard(out):
            _unit_rows[(m,)](
                fingerprint, records.order, scale, kind, out, dim, folded, *fingerprint.stride(), FOLDS=folded < dim,
                USABLE=scanned.USABLE, COLUMNS=512, **_OPTIONS,
            )  # fmt: skip
    return out


def whitened_rows(records: Records, rows: Tensor, landmarks: Tensor, directions: int) -> Tensor:
    live = (landmarks >= 0)[:, None]
    y = torch.where(live, rows.index_select(0, landmarks.clamp(min=0)).double(), 0.0)
    mean = y.sum(0) / live.sum().clamp(min=1)
    y = torch.where(live, y - mean, 0.0)
    vectors, values = _eigenvectors(y @ y.mT)
    order = values.argsort(descending=True)[:directions]
    values, vectors = values[order], vectors[order]
    kept = values > SMALLEST * values[:1]
    scale = torch.where(kept, values.clamp(min=1e-300) ** -0.75 * values[:1] ** 0.25, 0.0)
    out = ((rows - mean) @ (y.mT @ (vectors * scale[:, None]).mT)).float()
    return torch.nn.functional.pad(out, (0, directions - out.shape[1]))


def _eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Unit eigenvectors as rows, and eigenvalues, of a symmetric positive semidefinite matrix, in no order."""
    n = matrix.shape[0]
    side = max(triton.next_power_of_2(n), 16)
    turned = torch.nn.functional.pad(matrix, (0, side - n, 0, side - n)).contiguous()
    with device_guard(turned):
        _jacobi[(1,)](turned, SIDE=side, SWEEPS=_SWEEPS, **_JACOBI_OPTIONS)
    values = turned.square().sum(1).sqrt()
    return (turned / torch.where(values > 0, values, 1.0)[:, None])[:, :n], values


def centred_rows(records: Records, rows: Tensor, share: str) -> Tensor:
    m, dim = rows.shape
    sums = torch.empty((records.n_groups, dim + 1), dtype=torch.float64, device=records.device)
    if m:
        with device_guard(rows):
            _sums[(records.n_groups, ceil_div(dim, _SUMS["COLUMNS"]))](
                rows, records.group_offsets, sums, dim, **_SUMS, **_OPTIONS
            )
    if share == "batch":
        sums = sums.sum(0, keepdim=True).expand_as(sums)
    mean = sums[:, :-1] / sums[:, -1:].clamp(min=1)
    at = torch.arange(m, device=records.device)
    return (rows - mean[torch.searchsorted(records.group_offsets, at, right=True) - 1]).float()


def kernel_values(
    records: Records, rows: Tensor, inside: Tensor | None, returns: Tensor, landmarks: Tensor | None, kernel: Kernel
) -> Tensor:
    value = cluster_values(records, returns, None, 0.0)
    m, alone = records.n_records, kernel.share == "group"
    if not m:
        return value
    usable, record, offsets = _compact(records, rows)
    prior = value if alone else torch.zeros_like(value)
    among = _Kernel(
        rows, inside, records.time, returns.to(torch.float64) - prior, replace(kernel, same=0.0) if alone else kernel,
        trajectory=records.trajectory_of_record if kernel.luck > 0 else None,
    )  # fmt: skip
    blocks, longest = _blocks(records, offsets, kernel)
    runs = (blocks.shape[0] - 1) // records.n_groups
    if not alone:
        if landmarks is None:
            landmarks = record[:LANDMARKS]
        else:
            landmarks = torch.where((landmarks >= 0) & usable[landmarks.clamp(min=0)], landmarks, -1)
        gain = among.gain(record, blocks, longest, among.to_landmarks(record, landmarks))
    elif runs == 1:
        gain = among.gain(record, blocks, longest)
    else:
        gain = torch.zeros_like(among.y)
        k, every = (torch.arange(n, device=records.device) for n in (LANDMARKS, records.longest_group))
        for g in range(records.n_groups):
            begin, n = offsets[g], offsets[g + 1] - offsets[g]
            some = n.clamp(1, LANDMARKS)
            at = torch.where(k < n, record[(begin + k.clamp(max=some - 1) * n // some).clamp(max=m - 1)], -1)
            own = torch.where(every < n, record[(begin + every).clamp(max=m - 1)], -1)
            gain += among.gain(record, blocks[g * runs : (g + 1) * runs + 1], longest, among.to_landmarks(own, at))
    return torch.where(usable, prior + gain, value)


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
    records: Records, rows: Tensor, advantage: Tensor, action_key: Tensor, parsed: Tensor | None, kernel: Kernel
) -> Tensor:
    taken = records.taken
    if not records.n_records:
        return torch.empty_like(advantage)
    usable, record, offsets = _compact(records, rows)
    if parsed is not None:  # others are in no block
        record, usable = torch.where(parsed[record], record, -1), usable & parsed
    among = _Kernel(rows, None, records.time, advantage, replace(kernel, same=0.0, luck=0.0), key=action_key)
    averaged = among.gain(record, *_blocks(records, offsets, kernel))
    out = torch.where(usable, averaged, advantage / (1.0 + float(kernel.noise)))
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


def _compact(records: Records, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The records that take part, one after the other.

    usable    [M] bool
    record    [M] int64 which they are; −1 after the last
    offsets   [G+1] int64 of the groups among them
    """
    m, device = records.n_records, records.device
    usable = ~rows[:, 0].isnan()
    place = torch.zeros(m + 1, dtype=torch.int64, device=device)
    place[1:] = usable.cumsum(0)
    record = torch.full((m + 1,), -1, dtype=torch.int64, device=device)
    record.scatter_(0, torch.where(usable, place[:-1], m), torch.arange(m, device=device))
    return usable, record[:-1], place[records.group_offsets]


def _blocks(records: Records, offsets: Tensor, kernel: Kernel) -> tuple[Tensor, int]:
    """[G * runs + 1] int64 where blocks begin, and the longest: a group is one, a long one ⌈n / BLOCK⌉."""
    limit = kernel.longest
    if records.longest_group <= limit:
        return offsets, records.longest_group
    n = offsets.diff()[:, None]
    cuts = torch.where(n <= limit, 1, (n + BLOCK - 1) // BLOCK)
    k = torch.arange(ceil_div(records.longest_group, BLOCK), device=offsets.device)
    return torch.cat([(offsets[:-1, None] + torch.minimum(k, cuts) * n // cuts).flatten(), offsets[-1:]]), limit


@dataclass(frozen=True)
class _Kernel:
    """The records and their kernel.  Lists of records hold −1 where there is none."""

    rows: Tensor  # [M, D] float32, centred
    inside: Tensor | None  # [M, D] float32 minus the group's mean, for the kernel inside groups; None: there is none
    time: Tensor  # [M] int64
    y: Tensor  # [M] float64
    kernel: Kernel
    trajectory: Tensor | None = None  # [M] int64, where luck counts
    key: Tensor | None = None  # [M] int64 actions: K is 0 between records of different ones; None: it is not

    def to_landmarks(self, record: Tensor, landmarks: Tensor) -> Tensor:
        """[M + 1, L] float64 U = K_im L⁻ᵀ of records and landmarks, with L Lᵀ = K_mm + 10⁻³ I; else 0."""
        m, here = self.rows.shape[0], replace(self, inside=None, kernel=replace(self.kernel, same=0.0))
        added = (1.0 + (JITTER - 1.0) * (landmarks >= 0).double()).diag()
        factor = torch.linalg.cholesky_ex(here.covariance(landmarks[None], landmarks[None])[0] + added).L
        across = here.covariance(record[None], landmarks[None])[0]
        out = torch.zeros(m + 1, landmarks.shape[0], dtype=torch.float64, device=self.rows.device)
        out[torch.where(record >= 0, record, m)] = torch.linalg.solve_triangular(factor, across.T, upper=False).T
        return out

    def gain(self, record: Tensor, blocks: Tensor, longest: int, across: Tensor | None = None) -> Tensor:
        """[M] float64 C (C + N)⁻¹ y of the records of the blocks, runs of the list `record`; 0 elsewhere.

        across   U of `to_landmarks`: C = U Uᵀ + D with a block-diagonal D; None: C = D
        """
        m, n_blocks, device = self.rows.shape[0], blocks.shape[0] - 1, blocks.device
        wide = 0 if across is None else across.shape[1]
        side = ceil_div(longest, _SIDE) * _SIDE
        inner = torch.zeros(wide, wide + 1, dtype=torch.float64, device=device)
        y = torch.nn.functional.pad(self.y, (0, 1))
        solved = torch.nn.functional.pad(y[:, None], (wide, 0))  # N (D + N)⁻¹ [U, y]; [0, y] of others
        at_once = min(n_blocks, max(1, ROOM // (side * max(side, wide))))
        for first in range(0, n_blocks, at_once):
            offsets = blocks[first : first + at_once + 1]
            place = offsets[:-1, None] + torch.arange(side, device=device)
            index = torch.where(place < offsets[1:, None], record[place.clamp(max=m - 1)], -1)
            at = torch.where(index >= 0, index, m)
            noise = self.noise(index)
            matrix, right = self.covariance(index, index) + noise, y[at][..., None]
            if across is not None:
                u = across[at]
                matrix, right = torch.baddbmm(matrix, u, u.mT, alpha=-1), torch.cat([u, right], dim=2)
            found = torch.cholesky_solve(right, torch.linalg.cholesky_ex(matrix).L)
            if across is not None:
                inner += (u.mT @ found).sum(0)
            solved[at] = noise @ found
        rest = solved[:, -1]
        if across is not None:
            eye = torch.eye(wide, dtype=torch.float64, device=device)
            weight = torch.cholesky_solve(inner[:, -1:], torch.linalg.cholesky_ex(inner[:, :-1] + eye).L)
            rest = rest - (solved[:, :-1] @ weight)[:, 0]
        return self.y - rest[:-1]

    def noise(self, index: Tensor) -> Tensor:
        """[blocks, side, side] float64 N = β L Lᵀ + ρ I of each block's records; what is none has N of its own."""
        noise = (1.0 + (self.kernel.noise - 1.0) * (index >= 0).double()).diag_embed()
        if self.trajectory is None:
            return noise
        time, own = self.time[index], torch.where(index >= 0, self.trajectory[index], -1)
        steps = (time[:, None] - time[:, :, None]).double()
        later = (own[:, None] == own[:, :, None]) & (steps >= 0)
        towards = torch.where(later, float(self.kernel.gamma) ** steps.clamp(min=0.0), 0.0)
        return torch.baddbmm(noise, towards, towards.mT, alpha=float(self.kernel.luck))

    def covariance(self, first: Tensor, second: Tensor) -> Tensor:
        """[blocks, n, m] float64 C of the records first [blocks, n] and second [blocks, m]; 0 where there is none."""
        kernel, (n_blocks, n), m = self.kernel, first.shape, second.shape[1]
        out = torch.empty((n_blocks, n, m), dtype=torch.float64, device=self.rows.device)
        with device_guard(out):
            _covariance[(ceil_div(n, _TILE), ceil_div(m, _TILE), n_blocks)](
                self.rows, self.inside, self.time, self.key, first, second, out, n, m, self.rows.shape[1],
                1.0 / kernel.width, 1.0 / (kernel.horizon or math.inf), float(kernel.same), float(kernel.inside),
                HAS_INSIDE=self.inside is not None, HAS_KEY=self.key is not None, TILE=_TILE, **_OPTIONS,
            )  # fmt: skip
        return out


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
def _unit_rows(
    x,  # [N, D]
    order,  # [M] int64
    scale,  # [M] float32
    kind,  # [M] uint8
    out,  # [M, width] float32, written: NaN for a row that is not usable
    dim,
    width,
    row_stride,
    column_stride,
    FOLDS: tl.constexpr,
    USABLE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    factor = tl.load(scale + i).to(tl.float64)
    here = x + tl.load(order + i) * row_stride
    total = tl.zeros((COLUMNS,), tl.float64)
    for start in range(0, dim, COLUMNS):
        e = start + tl.arange(0, COLUMNS)
        value = tl.load(here + e.to(tl.int64) * column_stride, mask=e < dim, other=0.0).to(tl.float64) * factor
        total += value * value
    reciprocal = factor / tl.sqrt(tl.sum(total, axis=0))
    usable = tl.load(kind + i) == USABLE
    for begin in range(0, width, COLUMNS):
        j = begin + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), tl.float64)
        for start in range(0, dim, width):
            e = start + j
            mask = (e < dim) & (j < width)
            value = tl.load(here + e.to(tl.int64) * column_stride, mask=mask, other=0.0).to(tl.float64)
            if FOLDS:  # schema.signs
                mixed = (e.to(tl.int64) * 0x9E3779B1) & 0xFFFFFFFF
                mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
                value = tl.where((mixed >> 31) != 0, -value, value)
            total += value
        row = tl.where(usable, total * reciprocal, float("nan"))
        tl.store(out + i * width + j, row.to(tl.float32), mask=j < width)


@triton.jit
def _jacobi(
    a,  # [SIDE, SIDE] float64, symmetric and positive semidefinite; written: eigenvalue times eigenvector, row by row
    SIDE: tl.constexpr,
    SWEEPS: tl.constexpr,
):
    """Rotations of disjoint pairs of rows, until all are orthogonal; SIDE − 1 rounds meet every pair once."""
    PAIRS: tl.constexpr = min(SIDE // 2, 8)  # at a time: no register spills
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
                low, high = 2.0 * between, other - own
                size = tl.abs(high) + tl.sqrt(high * high + low * low)
                tangent = tl.where(turns, tl.where(high < 0.0, -low, low) / tl.where(turns, size, 1.0), 0.0)
                cosine = (1.0 / tl.sqrt(1.0 + tangent * tangent))[:, None]
                sine = cosine * tangent[:, None]
                tl.debug_barrier()  # all rows are read
                tl.store(a + p, cosine * x - sine * y)
                tl.store(a + q, sine * x + cosine * y)
                turned += tl.sum(turns.to(tl.int32), axis=0)
            tl.debug_barrier()
        left = tl.where(turned > 0, left - 1, 0)


@triton.jit
def _sums(
    rows,  # [M, D] float32
    group_offsets,  # [G+1] int64
    sums,  # [G, D + 1] float64, written: of the rows that are not NaN; the last: how many they are
    dim,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    begin, end = _group(group_offsets, g)
    e = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    count = tl.zeros((ROWS, COLUMNS), tl.float64)
    for start in range(begin, end, ROWS):
        i = start + tl.arange(0, ROWS)
        row = tl.load(rows + i[:, None] * dim + e[None, :], mask=(i < end)[:, None] & (e < dim)[None, :], other=0.0)
        there = (row == row) & (i < end)[:, None]
        total += tl.where(there, row.to(tl.float64), 0.0)
        count += there.to(tl.float64)
    tl.store(sums + g * (dim + 1) + e, tl.sum(total, axis=0), mask=e < dim)
    tl.store(sums + g * (dim + 1) + dim + e, tl.sum(count, axis=0), mask=e == 0)


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
    key,  # [M] int64
    first,  # [blocks, n] int64 records, or −1
    second,  # [blocks, m] int64 likewise
    out,  # [blocks, n, m] float64, written: C, exactly 1 on the diagonal of K; 0 for what is no record
    n,
    m,
    dim,
    rate: tl.float64,  # 1/ℓ
    inverse: tl.float64,  # 1/θ, or 0
    same: tl.float64,
    weight: tl.float64,  # of the kernel inside groups
    HAS_INSIDE: tl.constexpr,
    HAS_KEY: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at_i = tl.load(first + block * n + i, mask=i < n, other=-1)
    at_j = tl.load(second + block * m + j, mask=j < m, other=-1)
    live_i, live_j = at_i >= 0, at_j >= 0
    now = tl.load(time + at_i, mask=live_i, other=0)
    then = tl.load(time + at_j, mask=live_j, other=0)
    steps = (now[:, None] - then[None, :]).to(tl.float64) * inverse
    closeness = rate + steps * steps * 0.5
    itself = at_i[:, None] == at_j[None, :]
    cosine = tl.where(itself, 1.0, _cosine(rows, at_i, at_j, dim, TILE))
    found = tl.exp(cosine * rate - closeness) + same
    if HAS_INSIDE:
        cosine = tl.where(itself, 1.0, _cosine(inside, at_i, at_j, dim, TILE))
        found += weight * tl.exp(cosine * rate - closeness)
    if HAS_KEY:
        action_i = tl.load(key + at_i, mask=live_i, other=0)
        action_j = tl.load(key + at_j, mask=live_j, other=0)
        found = tl.where(action_i[:, None] == action_j[None, :], found, 0.0)
    at = (block * n + i)[:, None] * m + j[None, :]
    live = live_i[:, None] & live_j[None, :]
    tl.store(out + at, tl.where(live, found, 0.0), mask=(i < n)[:, None] & (j < m)[None, :])


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
