"""The greedy decisions of Algorithm 1, at a cost that does not depend on D.

A centroid is a positive combination of its members, so its similarity to any record follows from known numbers.  When
x_i joins cluster k as its m-th member, with s = S[k, i] and the Gram matrix G of the unit rows,

    a = 1 − 1/m,  b = 1/m,  q = 2ab(1 − s) + b²(1 − G[i,i]),  u = √(1 − q),  d = q/(u(1 + u)) − b/u,  w = b/u
    S[k, j] += d · S[k, j] + w · G[i, j]          for all records j still to come

and a seed sets S[k, ·] = G[i, ·].  The plain form r(aS + bG) drifts linearly in float32 (1.5e-4 at 8,192 members); the
increment form does not.

A decision needs the one before it, so the latency of this step times the length of a group is a lower bound of the
whole clustering.  The panel keeps the latency short: decisions among PANEL records only need S of those records, a few
kilobytes that stay in the L1 cache, with one record's similarities contiguous.  S of the records after the
panel is updated later, PANEL decisions at a time, where all loads are known in advance and overlap.  A group runs in a
single warp: its maxima take one instruction and no barrier between warps.

All reductions here are maxima and minima, so the number of warps changes no bit.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import Records
from ..schema import BAND
from .gram import UNIT

PANEL = 32  # records of a panel: S of one cluster at all of them is one line of the cache

_BAND = tl.constexpr(BAND)
NOWHERE = tl.constexpr(-1)  # instead of a cluster: the record affects no other
SEED = tl.constexpr(-1.0)  # d of a record that begins a cluster; no join has it, for a > 0

TILE = {"CLUSTERS": 128, "ROWS": 32, "COLUMNS": 256}  # processed at a time; no decision depends on it
_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


def decide_groups(
    records: Records,
    kind: Tensor,  # [M] uint8
    gram: Tensor,  # [groups, side, side] float32; overwritten where state is gram
    reciprocal: Tensor,  # [groups, side] float32
    state: Tensor,  # [E, groups, side, side] float32, scratch; gram itself for one ε
    first: Tensor,  # [E, M] int64, written
    lowest: Sequence[float],  # E: 1 − ε − τ
    lowest_of: Tensor,  # [E] float32, the same; not read for one ε
    first_group: int,
    tile: dict[str, int] = TILE,
) -> None:
    """Decisions of some groups under some ε."""
    groups, side = reciprocal.shape
    programs = (len(lowest), groups)
    similar = torch.empty((*programs, PANEL, side), dtype=torch.float32, device=first.device)
    clusters = torch.empty((*programs, 2, side), dtype=torch.int32, device=first.device)
    decisions = torch.empty((*programs, 3, PANEL), dtype=torch.int32, device=first.device)
    _scan_groups[(groups, len(lowest))](
        gram, state, reciprocal, side // UNIT, kind, records.group_offsets, similar, clusters, decisions, first,
        first.stride(0), lowest[0], lowest_of, first_group, SWEEP=state is not gram, PANEL=PANEL, UNIT=UNIT,
        **tile, **_OPTIONS,
    )  # fmt: skip


@triton.jit
def in_order(value):
    """int32 that compares as the float32 does: a maximum of integers takes one instruction per warp."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order(key):
    """The float32 again."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def decide(
    similar,  # [count] float32: S[·, i] of the record; room for a multiple of 16
    count,  # clusters so far
    lowest,  # 1 − ε − τ
    CLUSTERS: tl.constexpr,  # taken at a time
):
    """(k, joins): the oldest cluster with s ≥ s* − τ, or, where s* < lowest, a new one (k = count)."""
    k = tl.arange(0, CLUSTERS)
    if count <= CLUSTERS:
        s = _similarities(similar, k, count)
        best = from_order(tl.max(in_order(s), axis=0))
        oldest = tl.min(tl.where(s >= best - _BAND, k, count), axis=0)
    else:
        key = tl.full((CLUSTERS,), -2147483648, tl.int32)
        for start in range(0, count, CLUSTERS):
            key = tl.maximum(key, in_order(_similarities(similar, start + k, count)))
        best = from_order(tl.max(key, axis=0))
        first = tl.full((CLUSTERS,), 2147483647, tl.int32)
        for start in range(0, count, CLUSTERS):
            near = _similarities(similar, start + k, count) >= best - _BAND
            first = tl.minimum(first, tl.where(near, start + k, count))
        oldest = tl.min(first, axis=0)
    joins = best >= lowest
    return tl.where(joins, oldest, count), joins


@triton.jit
def _similarities(similar, k, count):
    """S[k, i], and −∞ beyond the last cluster; a bound that is a multiple of 16 lets four be read at once."""
    s = tl.load(similar + k, mask=k < (count + 15) // 16 * 16, other=0.0)
    return tl.where(k < count, s, -float("inf"))


@triton.jit
def coefficients(
    s,  # S[k, i]
    members,  # m, the record included
    own,  # G[i, i] of the unit row: 1 up to rounding
):
    """(d, w) of a join in float32, by the hardware's own root and divisions.

    Their relative error of 3e-7 moves a similarity by 3e-7 / m, and later members shrink what earlier ones left, so
    neither correct rounding nor float64 would gain anything.
    """
    b = 1.0 / members.to(tl.float32)
    q = 2.0 * (1.0 - b) * b * (1.0 - s) + b * b * (1.0 - own)
    left = 1.0 - q
    r = tl.rsqrt(left)  # 1/u
    w = b * r
    return q * r / (1.0 + left * r) - w, w


@triton.jit
def moved(
    s,  # S[k, j] before; 0 for a seed
    product,  # G[i, j] of the unit rows
    d,
    w,
):
    """S[k, j] after record i."""
    return s + (d * s + w * product)


@triton.jit
def unit(product, reciprocal_i, reciprocal_j):
    """G[i, j] of the unit rows from that of the unnormalised rows."""
    return (product * reciprocal_i) * reciprocal_j


@triton.jit
def decide_panel(
    similar,  # [PANEL, room] float32: S[k, t] at t · room + k, for clusters before the panel; overwritten
    room,  # ≥ clusters at the end of the panel, a multiple of 16
    products,  # [n, n] float32: x_t · x_u for t ≤ u, rows row_stride apart
    row_stride,
    reciprocal,  # [n] float32: 1 / ‖x_t‖
    kind,  # [n] uint8: 0 usable, 1 alone, 2 not taken
    first,  # [n] int64, written: the record that began the cluster; −1 where not taken
    begin,  # number of the panel's first record in the batch
    n,  # records of the panel
    members,  # [room] int32
    leader,  # [room] int32: the record that began the cluster
    joined,  # [PANEL] int32, written: the cluster, or NOWHERE
    change,  # [PANEL] float32, written: d, or SEED
    weight,  # [PANEL] float32, written: w, or 1 for a seed
    count,  # clusters so far
    lowest,  # 1 − ε − τ
    CLUSTERS: tl.constexpr,
    PANEL: tl.constexpr,
):
    """Decides the records of one panel in order; returns the number of clusters."""
    u = tl.arange(0, PANEL)
    reciprocal_u = tl.load(reciprocal + u, mask=u < n, other=0.0)
    kind_u = tl.load(kind + u, mask=u < n, other=2)
    tl.store(first + u, tl.where(kind_u == 1, begin + u, -1).to(tl.int64), mask=u < n)
    tl.store(joined + u, tl.full((PANEL,), NOWHERE, tl.int32))
    tl.debug_barrier()  # also for what the caller has written to `similar`
    # What a step needs whatever is decided comes a step ahead, from places that are always there: nothing waits for it.
    state = tl.load(kind)
    row = tl.load(products + u)
    for t in range(0, n):
        now, product = state, row
        ahead = tl.minimum(t + 1, n - 1)
        state = tl.load(kind + ahead)
        row = tl.load(products + ahead * row_stride + u)
        if now == 0:
            k, joins = decide(similar + t * room, count, lowest, CLUSTERS)
            known = tl.where(joins, n, 0)
            later = (u > t) & (u < n)
            reciprocal_t = tl.load(reciprocal + t)
            product = unit(product, reciprocal_t, reciprocal_u)
            own = unit(tl.load(products + t * row_stride + t), reciprocal_t, reciprocal_t)
            s = tl.load(similar + t * room + k, mask=joins, other=0.0)
            before = tl.load(similar + u * room + k, mask=(u > t) & (u < known), other=0.0)
            m = tl.load(members + k, mask=joins, other=0) + 1
            beginner = tl.load(leader + k, mask=joins, other=0)
            d, w = coefficients(s, m, own)
            d = tl.where(joins, d, SEED)
            w = tl.where(joins, w, 1.0)
            beginner = tl.where(joins, beginner, begin + t)
            after = moved(before, product, d, w)
            tl.debug_barrier()  # the cluster's numbers are read by all threads before one thread writes them
            tl.store(similar + u * room + k, after, mask=later)
            tl.store(members + k, m)
            tl.store(leader + k, beginner)
            tl.store(first + t, beginner.to(tl.int64))
            tl.store(joined + t, k)
            tl.store(change + t, d)
            tl.store(weight + t, w)
            count = tl.maximum(count, k + 1)
        tl.debug_barrier()
    return count


@triton.jit
def apply_panel(
    products,  # [PANEL, stride] float32: the panel's rows of the group's Gram matrix
    state,  # [., stride] float32: S of the group; may be the Gram matrix itself, see _scan_groups
    stride,
    reciprocal,  # [stride] float32 of the group
    panel,  # first record of the panel in the group
    n,  # records of the group
    joined,  # [PANEL]
    change,  # [PANEL]
    weight,  # [PANEL]
    COLUMNS: tl.constexpr,  # taken at a time
    PANEL: tl.constexpr,
):
    """Applies the panel's decisions, in order, to the records after it.

    Four at a time: their eight rows are loaded at once, and if a cluster occurs twice the later decision uses the
    earlier one's result instead of the loaded value.
    """
    end = (n + 31) // 32 * 32  # a multiple of 16, so that loads are wide; values beyond the group are never read
    for start in range(panel + PANEL, n, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        reciprocal_j = tl.load(reciprocal + j, mask=j < end, other=0.0)
        for t in range(0, PANEL, 4):
            k, d, w, stop, g, s, after = (), (), (), (), (), (), ()
            for u in tl.static_range(4):
                cluster = tl.load(joined + t + u)
                k += (cluster,)
                d += (tl.load(change + t + u),)
                w += (tl.load(weight + t + u),)
                stop += (tl.where(cluster >= 0, end, 0),)  # of the columns that it changes: none
            for u in tl.static_range(4):
                row = tl.load(products + (t + u) * stride + j, mask=j < stop[u], other=0.0)
                g += (unit(row, tl.load(reciprocal + panel + t + u), reciprocal_j),)
            for u in tl.static_range(4):
                known = tl.where(d[u] == SEED, 0, stop[u])
                s += (tl.load(state + k[u] * stride + j, mask=j < known, other=0.0),)
            for u in tl.static_range(4):
                before = s[u]  # type: ignore[var-annotated]
                for v in tl.static_range(u):
                    before = tl.where(k[u] == k[v], after[v], before)
                after += (moved(before, g[u], d[u], w[u]),)
            for u in tl.static_range(4):
                tl.store(state + k[u] * stride + j, after[u], mask=j < stop[u])


@triton.jit(do_not_specialize=["units", "first_stride", "first_group"])
def _scan_groups(
    gram,  # [groups of the launch, stride, stride] float32: x_i · x_j for i ≤ j
    state,  # [E, groups of the launch, stride, stride] float32, scratch; one ε: gram itself
    reciprocal,  # [groups of the launch, stride] float32: 1 / ‖x_i‖
    units,  # stride / UNIT
    kind,  # [M] uint8: 0 usable, 1 alone, 2 not taken
    group_offsets,  # [G+1] int64
    similar,  # [E, groups of the launch, PANEL, stride] float32, scratch
    clusters,  # [E, groups of the launch, 2, stride] int32, scratch: members, leader
    decisions,  # [E, groups of the launch, 3, PANEL] 32-bit words, scratch: joined, change, weight
    first,  # [E, M] int64, written: the record that began the record's cluster; −1 where not taken
    first_stride,  # M
    lowest,  # float32: 1 − ε − τ, where SWEEP is off
    lowest_of,  # [E] float32, where it is on
    first_group,
    SWEEP: tl.constexpr,
    CLUSTERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PANEL: tl.constexpr,
    UNIT: tl.constexpr,
):
    """All decisions of one group under one ε, in processing order.

    With one ε, S[k, ·] overwrites G[k, ·]: cluster k is seeded at a record i ≥ k, and the rows up to i are no longer
    needed then, since decisions are applied in order.
    """
    g = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + g
    offset = tl.load(group_offsets + first_group + g)
    n = tl.load(group_offsets + first_group + g + 1) - offset
    n = n.to(tl.int32)
    begin = offset.to(tl.int32)
    stride = units * UNIT
    if SWEEP:
        lowest = tl.load(lowest_of + tl.program_id(1))
    gram += g * stride * stride
    reciprocal += g * stride
    state += slot * stride * stride
    similar += slot * stride * PANEL
    members = clusters + slot * stride * 2
    leader = members + stride
    joined = decisions + slot * PANEL * 3
    change = (joined + PANEL).to(tl.pointer_type(tl.float32), bitcast=True)
    weight = (joined + PANEL * 2).to(tl.pointer_type(tl.float32), bitcast=True)
    kind += offset
    first += tl.program_id(1).to(tl.int64) * first_stride + offset
    count = 0
    for panel in range(0, n, PANEL):
        width = tl.minimum(n - panel, PANEL)
        products = gram + panel * stride
        t = tl.arange(0, PANEL)
        for start in range(0, count, ROWS):  # S of the panel's records, one record's similarities side by side
            k = start + tl.arange(0, ROWS)
            mask = (k < count)[:, None] & (t < width)[None, :]
            s = tl.load(state + panel + k[:, None] * stride + t[None, :], mask=mask)
            tl.store(similar + t[None, :] * stride + k[:, None], s, mask=mask)
        count = decide_panel(
            similar, stride, products + panel, stride, reciprocal + panel, kind + panel, first + panel, begin + panel,
            width, members, leader, joined, change, weight, count, lowest, CLUSTERS, PANEL,
        )  # fmt: skip
        apply_panel(products, state, stride, reciprocal, panel, n, joined, change, weight, COLUMNS, PANEL)
        tl.debug_barrier()
