"""A value of each record's state, and GAE(λ) over it, on the fingerprints' device, without synchronizing.

    rows to unit length, folded ─► coordinates in the landmarks' directions (torch's float64 products, a Jacobi
    kernel), or minus the mean of their group or batch ─► Gram matrix of every block (gram.py) ─► K, float64 ─►
    torch.linalg's Cholesky, all blocks padded to one multiple of 128; between blocks landmarks, in torch's float64
    products ─► V̂ ─► a lane walks each trajectory backwards ─► the same K, where actions are equal, averages A_S

The padding depends on the longest group, and libraries choose their kernels by it: a group's values in another batch
agree within 2e-5, not bit for bit.  The host does not know which groups are longer than a block: if one may be, all
groups use landmarks, one after the other under share "group".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from .. import schema
from ..records import Records
from ..schema import BLOCK, JITTER, LANDMARKS, LONGEST, SMALLEST, TINY, Kernel
from . import gram
from . import rows as scanned
from ._launch import ceil_div, device_guard

Tensor = torch.Tensor

FLAT = tl.constexpr(schema.FLAT)
ROOM = 1 << 27  # float64 entries of the kernel matrices made at a time: 1 GiB
ROWS = 1024  # records that are multiplied with the landmarks at a time
LANES = 32  # trajectories of a program
_TILE = 32  # side of a square of K; records that a program of a group looks at together are 128
_RECORDS = 128
_CENTRE = {"ROWS": 8, "COLUMNS": 128}
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
            _cluster_values[(ceil_div(records.longest_group, _RECORDS), records.n_groups)](
                returns, labels, records.group_offsets, taken, mean, value, float(shrinkage),
                HAS_LABELS=labels is not None, HAS_TAKEN=taken is not None, TILE=_RECORDS, **_OPTIONS,
            )  # fmt: skip
    return value


def unit_rows(records: Records, fingerprint: Tensor, width: int) -> Tensor:
    m, dim, device = records.n_records, fingerprint.shape[1], records.device
    folded = min(width or dim, dim)
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
    y = torch.where(live, y - y.sum(0) / live.sum().clamp(min=1), 0.0)
    vectors, values = _eigenvectors(y @ y.mT)
    order = values.argsort(descending=True)[:directions]
    values, vectors = values[order], vectors[order]
    kept = values > SMALLEST * values[:1]
    scale = torch.where(kept, values.clamp(min=1e-300) ** -0.75 * values[:1] ** 0.25, 0.0)
    usable = ~rows[:, :1].isnan()
    z = torch.where(usable, rows, 0.0).double() @ (y.mT @ (vectors * scale[:, None]).mT)
    mean = z.sum(0) / usable.sum().clamp(min=1)
    out = torch.where(usable, z - mean, float("nan")).float()
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


def kernel_values(records: Records, rows: Tensor, returns: Tensor, landmarks: Tensor | None, kernel: Kernel) -> Tensor:
    value = cluster_values(records, returns, None, 0.0)
    m, device, share = records.n_records, records.device, kernel.share
    if not m:
        return value
    inside, place, record = _compact(records, rows)
    offsets = place[records.group_offsets]
    prior = value if share == "group" else torch.zeros_like(value)
    with_mean = offsets if share == "group" else torch.stack([offsets[0], offsets[-1]])
    has_inside = share == "batch" and kernel.inside > 0
    among = _Kernel(
        rows[record] if kernel.whitened else _centre(rows, record, with_mean),
        _centre(rows, record, offsets) if has_inside else None, records.time[record].contiguous(),
        (returns.to(torch.float64) - prior)[record],
        kernel if share == "batch" else replace(kernel, same=0.0, inside=0.0),
        trajectory=records.trajectory_of_record[record].contiguous() if kernel.luck > 0 else None,
    )  # fmt: skip
    longest_group, limit = records.longest_group, BLOCK if kernel.whitened else LONGEST
    runs = 1 if longest_group <= limit else ceil_div(longest_group, BLOCK)
    blocks, longest = _blocks(offsets, runs, limit), min(longest_group, limit)
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
    records: Records, rows: Tensor, advantage: Tensor, action_key: Tensor, parsed: Tensor | None, kernel: Kernel
) -> Tensor:
    m, taken = records.n_records, records.taken
    if not m:
        return torch.empty_like(advantage)
    inside, place, record = _compact(records, rows)
    offsets = place[records.group_offsets]
    known = torch.ones_like(inside) if parsed is None else parsed
    among = _Kernel(
        rows[record] if kernel.whitened else _centre(rows, record, offsets), None, records.time[record].contiguous(),
        advantage[record], replace(kernel, same=0.0, inside=0.0, luck=0.0), key=action_key[record].contiguous(),
        known=known[record].contiguous(),
    )  # fmt: skip
    longest, limit = records.longest_group, BLOCK if kernel.whitened else LONGEST
    runs = 1 if longest <= limit else ceil_div(longest, BLOCK)
    averaged = among.gain(_blocks(offsets, runs, limit), min(longest, limit))[place[:-1].clamp(max=m - 1)]
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
        _scale[(ceil_div(records.longest_group, _RECORDS), n_groups)](advantage, factor, taken, offsets, out, **masked)
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


def _compact(records: Records, unit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The records that take part, compacted.

    inside   [M] bool
    place    [M+1] int64 where a record is among them; the last: how many there are
    record   [M] int64 which they are; entries after the last are copies of record 0, which may be a bad one
    """
    m, device = records.n_records, records.device
    inside = ~unit[:, 0].isnan()
    for mask in (records.usable, records.taken):
        inside = inside if mask is None else inside & mask
    place = torch.zeros(m + 1, dtype=torch.int64, device=device)
    place[1:] = inside.cumsum(0)
    record = torch.zeros(m + 1, dtype=torch.int64, device=device)
    record.scatter_(0, torch.where(inside, place[:-1], m), torch.arange(m, device=device))
    return inside, place, record[:-1]


def _centre(unit: Tensor, record: Tensor, offsets: Tensor) -> Tensor:
    """[M, D] float32 rows minus the mean of their group, in float64, rounded once."""
    dim, n_groups = unit.shape[1], offsets.shape[0] - 1
    z = torch.zeros_like(unit)
    with device_guard(z):
        _centred[(ceil_div(dim, _CENTRE["COLUMNS"]), n_groups)](unit, record, offsets, z, dim, **_CENTRE, **_OPTIONS)
    return z


def _blocks(offsets: Tensor, runs: int, limit: int) -> Tensor:
    """[G * runs + 1] int64 where blocks begin: a group is one, a long one ⌈n / BLOCK⌉; the others are empty."""
    if runs == 1:
        return offsets
    n = offsets.diff()[:, None]
    cuts = torch.where(n <= limit, 1, (n + BLOCK - 1) // BLOCK)
    k = torch.arange(runs, device=offsets.device)
    return torch.cat([(offsets[:-1, None] + torch.minimum(k, cuts) * n // cuts).flatten(), offsets[-1:]])


@dataclass(frozen=True)
class _Kernel:
    """The records that take part, and their kernel."""

    z: Tensor  # [M, D] float32, centred
    inside: Tensor | None  # [M, D] float32 minus the group's mean, for the kernel inside groups; None: there is none
    time: Tensor  # [M] int64
    y: Tensor  # [M] float64
    kernel: Kernel
    trajectory: Tensor | None = None  # [M] int64, where luck counts
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
        """[M] float64 C (C + N)⁻¹ y of the records of the blocks; 0 elsewhere.

        across   U of `to_landmarks`: C = U Uᵀ + D with a block-diagonal D; None: C = D
        """
        m, n_blocks, device = self.z.shape[0], blocks.shape[0] - 1, self.z.device
        wide = 0 if across is None else across.shape[1]
        side = max(ceil_div(longest, gram.UNIT), 1) * gram.UNIT
        inner = torch.zeros(wide, wide + 1, dtype=torch.float64, device=device)
        solved = torch.zeros(m + 1, wide + 1, dtype=torch.float64, device=device)  # (D + N)⁻¹ [U, y]
        at_once = min(n_blocks, max(1, ROOM // (side * max(side, wide))))
        for first in range(0, n_blocks, at_once):
            offsets = blocks[first : first + at_once + 1]
            matrix = self._matrices(offsets, side)
            place, live = self._places(offsets, side)
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
        noise = self.kernel.noise * rest
        for first in range(0, n_blocks if self.trajectory is not None else 0, at_once):
            offsets = blocks[first : first + at_once + 1]
            place, live = self._places(offsets, side)
            towards = self._towards(offsets, side)
            x = torch.where(live, rest[place], 0.0)[..., None]
            luck = torch.zeros(m + 1, dtype=torch.float64, device=device)
            luck[torch.where(live, place, m)] = (towards @ (towards.mT @ x))[..., 0]
            noise = noise + self.kernel.luck * luck[:-1]
        every = torch.arange(m, device=device)
        return torch.where((every >= blocks[0]) & (every < blocks[-1]), self.y - noise, 0.0)

    def _places(self, offsets: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """[blocks, side] int64 records of the blocks, and whether there are such."""
        place = offsets[:-1, None] + torch.arange(side, device=offsets.device)
        return place.clamp(max=self.z.shape[0] - 1), place < offsets[1:, None]

    def _towards(self, offsets: Tensor, side: int) -> Tensor:
        """[blocks, side, side] float64 L of the noise: γ^(t_j − t_i) from a record to later ones of its trajectory."""
        n_blocks, gamma = offsets.shape[0] - 1, float(self.kernel.gamma)
        out = torch.empty((n_blocks, side, side), dtype=torch.float64, device=self.z.device)
        with device_guard(out):
            _later[(side // _TILE, side // _TILE, n_blocks)](
                self.time, self.trajectory, offsets, out, side, _log(gamma), TILE=_TILE, **_OPTIONS
            )
        return out

    def _matrices(self, offsets: Tensor, side: int) -> Tensor:
        """[blocks, side, side] float64 C + N of each block, padded with the identity."""
        n_blocks, device, kernel = offsets.shape[0] - 1, self.z.device, self.kernel
        matrix = torch.empty((n_blocks, side, side), dtype=torch.float64, device=device)
        with device_guard(self.z):
            products = [self._products(z, offsets, side) for z in (self.z, self.inside)]
            _matrix[(side // _TILE, side // _TILE, n_blocks)](
                *products, self.time, self.key, self.known, offsets, matrix, side, float(kernel.width),
                float(kernel.horizon), float(kernel.noise), float(kernel.same), float(kernel.inside),
                HAS_INSIDE=self.inside is not None, HAS_KEY=self.key is not None, TILE=_TILE, **_OPTIONS,
            )  # fmt: skip
        if self.trajectory is None:
            return matrix
        towards = self._towards(offsets, side)
        return torch.baddbmm(matrix, towards, towards.mT, alpha=float(kernel.luck))

    def _products(self, z: Tensor | None, offsets: Tensor, side: int) -> Tensor | None:
        """[blocks, side, side] float32 products of rows i ≤ j of each block."""
        if z is None:
            return None
        every, n_blocks = torch.arange(z.shape[0], device=z.device), offsets.shape[0] - 1
        one = torch.ones(z.shape[0], dtype=torch.float32, device=z.device)
        products = torch.empty((n_blocks, side, side), dtype=torch.float32, device=z.device)
        reciprocal = torch.empty((n_blocks, side), dtype=torch.float32, device=z.device)
        gram.multiply_groups(z, every, offsets, one, products, reciprocal, first_group=0)
        return products

    def entries(self, i: Tensor, j: Tensor) -> Tensor:
        """[n, m] float64 kernel of the records i [n] and j [m]."""
        x, z = self.z[i].double(), self.z[j].double()
        return _entries(x, z, self.time[i], self.time[j], self.kernel.width, self.kernel.horizon)


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
    g = tl.program_id(1).to(tl.int64)
    begin, end = _group(group_offsets, g)
    i = begin + tl.program_id(0) * TILE + tl.arange(0, TILE)
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
    """Rotations of disjoint pairs of rows, until all are orthogonal; a sweep of SIDE − 1 rounds meets every pair once."""
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
                turns = tl.abs(between) > 1e-13 * tl.sqrt(own * other)
                ratio = (other - own) / (2.0 * tl.where(turns, between, 1.0))
                tangent = tl.where(ratio < 0.0, -1.0, 1.0) / (tl.abs(ratio) + tl.sqrt(1.0 + ratio * ratio))
                tangent = tl.where(turns, tangent, 0.0)
                cosine = (1.0 / tl.sqrt(1.0 + tangent * tangent))[:, None]
                sine = cosine * tangent[:, None]
                tl.debug_barrier()  # all rows are read
                tl.store(a + p, cosine * x - sine * y)
                tl.store(a + q, sine * x + cosine * y)
                turned += tl.sum(turns.to(tl.int32), axis=0)
            tl.debug_barrier()
        left = tl.where(turned > 0, left - 1, 0)


@triton.jit
def _centred(
    x,  # [M, D] float32
    record,  # [M] int64
    offsets,  # [G+1] int64
    z,  # [M, D] float32, written
    dim,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    g = tl.program_id(1).to(tl.int64)
    begin, end = _group(offsets, g)
    e = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for start in range(begin, end, ROWS):
        total += _wide(x, record, start, end, e, dim, ROWS)
    mean = tl.sum(total, axis=0) / tl.maximum(end - begin, 1).to(tl.float64)
    for start in range(begin, end, ROWS):
        row = _wide(x, record, start, end, e, dim, ROWS)
        i = start + tl.arange(0, ROWS)
        mask = (i < end)[:, None] & (e < dim)[None, :]
        tl.store(z + i[:, None] * dim + e[None, :], (row - mean[None, :]).to(tl.float32), mask=mask)


@triton.jit
def _wide(x, record, start, end, e, dim, ROWS: tl.constexpr):
    """Columns e of the rows start … start + ROWS − 1, float64; 0 beyond the group."""
    i = start + tl.arange(0, ROWS)
    at = tl.load(record + i, mask=i < end, other=0) * dim
    mask = (i < end)[:, None] & (e < dim)[None, :]
    return tl.load(x + at[:, None] + e[None, :], mask=mask, other=0.0).to(tl.float64)


@triton.jit
def _later(
    time,  # [M] int64
    trajectory,  # [M] int64
    offsets,  # [blocks + 1] int64
    out,  # [blocks, side, side] float64, written
    side,
    log_gamma: tl.float64,
    TILE: tl.constexpr,
):
    block = tl.program_id(2).to(tl.int64)
    begin, end = _group(offsets, block)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live_i, live_j = i < end - begin, j < end - begin
    steps = (
        tl.load(time + begin + j, mask=live_j, other=0)[None, :]
        - tl.load(time + begin + i, mask=live_i, other=0)[:, None]
    )
    own = tl.load(trajectory + begin + i, mask=live_i, other=-1)[:, None]
    there = (own == tl.load(trajectory + begin + j, mask=live_j, other=-2)[None, :]) & (steps >= 0)
    power = tl.where(steps > 0, tl.exp(tl.maximum(steps, 1).to(tl.float64) * log_gamma), 1.0)
    at = block * side * side + i[:, None].to(tl.int64) * side + j[None, :]
    tl.store(out + at, tl.where(there, power, 0.0))


@triton.jit
def _cosine(base, low, high, i, j, side, live, live_i, live_j):
    """Cosines of a tile of a Gram matrix."""
    product = tl.load(base + low * side + high, mask=live, other=0.0).to(tl.float64)
    square_i = tl.load(base + i * side + i, mask=live_i, other=1.0).to(tl.float64)[:, None]
    square_j = tl.load(base + j * side + j, mask=live_j, other=1.0).to(tl.float64)[None, :]
    flat_i, flat_j = square_i <= FLAT, square_j <= FLAT
    length = tl.sqrt(tl.where(flat_i, 1.0, square_i) * tl.where(flat_j, 1.0, square_j))
    cosine = tl.where(2.0 * product >= square_i + square_j, 1.0, tl.minimum(product / length, 1.0))
    return tl.where(flat_i | flat_j, tl.where(flat_i & flat_j, 1.0, 0.0), cosine)


@triton.jit
def _matrix(
    products,  # [blocks, side, side] float32, i ≤ j
    products_inside,  # the same of rows minus their group's mean, or None
    time,  # [M] int64
    key,  # [M] int64
    known,  # [M] bool
    offsets,  # [blocks + 1] int64
    matrix,  # [blocks, side, side] float64, written: C + ρ I; the identity for what is no record
    side,
    width: tl.float64,
    horizon: tl.float64,
    noise: tl.float64,
    common: tl.float64,  # s
    weight: tl.float64,  # of the kernel inside groups
    HAS_INSIDE: tl.constexpr,
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
    low, high = tl.minimum(i[:, None], j[None, :]), tl.maximum(i[:, None], j[None, :])
    base = group * side * side
    exponent = (_cosine(products + base, low, high, i, j, side, live, live_i, live_j) - 1.0) / width
    closeness = tl.zeros((TILE, TILE), tl.float64)
    if horizon > 0.0:
        now = tl.load(time + begin + i, mask=live_i, other=0)
        then = tl.load(time + begin + j, mask=live_j, other=0)
        steps = (now[:, None] - then[None, :]).to(tl.float64) / horizon
        closeness = steps * steps / 2.0
    same = i[:, None] == j[None, :]
    found = tl.exp(exponent - closeness)
    if HAS_INSIDE:
        inside = (_cosine(products_inside + base, low, high, i, j, side, live, live_i, live_j) - 1.0) / width
        found += weight * tl.exp(inside - closeness)
    if HAS_KEY:
        action_i = tl.load(key + begin + i, mask=live_i, other=0)
        action_j = tl.load(key + begin + j, mask=live_j, other=0)
        known_i = tl.load(known + begin + i, mask=live_i, other=0) != 0
        known_j = tl.load(known + begin + j, mask=live_j, other=0) != 0
        equal = (action_i[:, None] == action_j[None, :]) & known_i[:, None] & known_j[None, :]
        found = tl.where(equal, found, 0.0)
    found = tl.where(live, tl.where(same, 1.0 + weight + noise, found) + common, tl.where(same, 1.0, 0.0))
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
    g = tl.program_id(1).to(tl.int64)
    begin, end = _group(group_offsets, g)
    at = begin + tl.program_id(0) * TILE + tl.arange(0, TILE)
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
    sizes = {"dim": "i32", "width": "i32", "row_stride": "i32"}
    unit = {"x": "*bf16", "order": "*i64", "scale": "*fp32", "kind": "*u8", "out": "*fp32", **sizes}
    yield _unit_rows, unit, {"column_stride": 1, "FOLDS": True, "USABLE": scanned.USABLE, "COLUMNS": 512}, _OPTIONS
    yield _jacobi, {"a": "*fp64"}, {"SIDE": LANDMARKS, "SWEEPS": _SWEEPS}, _JACOBI_OPTIONS
    centred = {"x": "*fp32", "record": "*i64", "offsets": "*i64", "z": "*fp32", "dim": "i32"}
    yield _centred, centred, _CENTRE, _OPTIONS
    later = {
        "time": "*i64",
        "trajectory": "*i64",
        "offsets": "*i64",
        "out": "*fp64",
        "side": "i32",
        "log_gamma": "fp64",
    }
    yield _later, later, {"TILE": _TILE}, _OPTIONS
    numbers = dict.fromkeys(("width", "horizon", "noise", "common", "weight"), "fp64")
    tiles = {
        "products": "*fp32", "products_inside": "*fp32", "time": "*i64", "key": "*i64", "known": "*u1",
        "offsets": "*i64", "matrix": "*fp64", "side": "i32", **numbers,
    }  # fmt: skip
    for has_key in (False, True):
        yield _matrix, tiles, {"HAS_INSIDE": not has_key, "HAS_KEY": has_key, "TILE": _TILE}, _OPTIONS
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
