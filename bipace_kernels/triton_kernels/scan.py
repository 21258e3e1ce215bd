"""The greedy decisions of Algorithm 1, with no D in their chain.

A centroid is a positive combination of its members, so its similarity to any record follows from numbers at hand.  When
x_i joins cluster k as its m-th member, with s = S[k, i] and the unit Gram matrix G,

    a = 1 − 1/m,  b = 1/m,  q = 2ab(1 − s) + b²(1 − G[i,i]),  u = √(1 − q),  d = q/(u(1 + u)) − b/u,  w = b/u
    S[k, j] += d · S[k, j] + w · G[i, j]          for all records j still to come

and a seed sets S[k, ·] = G[i, ·].  The plain form r(aS + bG) drifts linearly in float32 (1.5e-4 at 8,192 members); the
increment form does not.  One record's decision needs the one before it, so the latency of this step is the floor of the
whole clustering.  It is kept short by the panel: decisions of PANEL records touch only S[·, those records], a few
kilobytes that stay in the L1 cache, laid out so that one record's similarities lie side by side; the columns beyond the
panel follow afterwards, PANEL decisions at a time, with all threads and no wait between them.

All reductions here are maxima and minima, so the number of threads changes no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

BAND = tl.constexpr(1e-5)  # τ of the two decisions
SMALLEST = tl.constexpr(1e-3)  # a centroid whose new vector is shorter stays
NOWHERE = tl.constexpr(-1)  # in place of a cluster: the record touches nobody
SEED = tl.constexpr(-1.0)  # d of a record that begins a cluster; no join has it, for a > 0


@triton.jit
def in_order(value):
    """int32 that compares as the float32 does: maxima of integers take one instruction per warp."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order(key):
    """The float32 again."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def decide(
    similar,  # [count] float32: S[·, i] of the record
    count,  # clusters so far
    lowest,  # 1 − ε − τ
    CLUSTERS: tl.constexpr,  # taken at a time
):
    """(k, joins): the oldest cluster with s ≥ s* − τ, or, where s* < lowest, a new one (k = count)."""
    k = tl.arange(0, CLUSTERS)
    if count <= CLUSTERS:
        s = tl.load(similar + k, mask=k < count, other=-float("inf"))
        best = from_order(tl.max(in_order(s), axis=0))
        oldest = tl.min(tl.where(s >= best - BAND, k, count), axis=0)
    else:
        key = in_order(tl.load(similar + k))
        for start in range(CLUSTERS, count, CLUSTERS):
            s = tl.load(similar + start + k, mask=start + k < count, other=-float("inf"))
            key = tl.maximum(key, in_order(s))
        best = from_order(tl.max(key, axis=0))
        first = tl.full((CLUSTERS,), 2147483647, tl.int32)
        for start in range(0, count, CLUSTERS):
            s = tl.load(similar + start + k, mask=start + k < count, other=-float("inf"))
            first = tl.minimum(first, tl.where(s >= best - BAND, start + k, count))
        oldest = tl.min(first, axis=0)
    joins = best >= lowest
    return tl.where(joins, oldest, count), joins


@triton.jit
def coefficients(
    s,  # S[k, i]
    members,  # m, the record included
    own,  # G[i, i] of the unit row: 1 up to rounding
):
    """(d, w) of a join in float32; (0, 0) where the centroid stays.

    Their relative error of 3e-7 moves a similarity by 3e-7 / m, and later members shrink what earlier ones left.
    """
    b = tl.div_rn(1.0, members.to(tl.float32))
    q = 2.0 * (1.0 - b) * b * (1.0 - s) + b * b * (1.0 - own)
    stay = 1.0 - q < SMALLEST * SMALLEST
    u = tl.sqrt_rn(tl.where(stay, 1.0, 1.0 - q))
    w = tl.div_rn(b, u)
    d = tl.div_rn(q, u * (1.0 + u)) - w
    return tl.where(stay, 0.0, d), tl.where(stay, 0.0, w)


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
    """G[i, j] of the unit rows from that of the rows as they are."""
    return (product * reciprocal_i) * reciprocal_j


@triton.jit
def decide_panel(
    similar,  # [PANEL, room] float32: S[k, t] at t · room + k, for clusters before the panel; overwritten
    room,  # ≥ clusters at the end of the panel
    products,  # [n, n] float32: x_t · x_u for t ≤ u, rows row_stride apart
    row_stride,
    reciprocal,  # [n] float32: 1 / ‖x_t‖
    kind,  # [n] uint8: 0 usable, 1 alone, 2 not taken
    first,  # [n] int64, written: the record that began the cluster
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
    """Decides the records of one panel in order; clusters at its end.  Barriers stand around every exchange."""
    u = tl.arange(0, PANEL)
    reciprocal_u = tl.load(reciprocal + u, mask=u < n, other=0.0)
    for t in range(0, n):
        state = tl.load(kind + t)
        if state == 0:
            k, joins = decide(similar + t * room, count, lowest, CLUSTERS)
            later = (u > t) & (u < n)
            reciprocal_t = tl.load(reciprocal + t)
            product = unit(tl.load(products + t * row_stride + u, mask=later, other=0.0), reciprocal_t, reciprocal_u)
            own = unit(tl.load(products + t * row_stride + t), reciprocal_t, reciprocal_t)
            s = tl.load(similar + t * room + k, mask=joins, other=0.0)
            before = tl.load(similar + u * room + k, mask=(u > t) & (u < tl.where(joins, n, 0)), other=0.0)
            m = tl.load(members + k, mask=joins, other=0) + 1
            beginner = tl.load(leader + k, mask=joins, other=0)
            d, w = coefficients(s, m, own)
            d = tl.where(joins, d, SEED)
            w = tl.where(joins, w, 1.0)
            beginner = tl.where(joins, beginner, begin + t)
            tl.debug_barrier()  # the cluster's numbers are read by everybody before one thread writes them
            tl.store(similar + u * room + k, moved(before, product, d, w), mask=later)
            tl.store(members + k, m)
            tl.store(leader + k, beginner)
            tl.store(first + t, beginner.to(tl.int64))
            tl.store(joined + t, k)
            tl.store(change + t, d)
            tl.store(weight + t, w)
            count = tl.maximum(count, k + 1)
        else:
            tl.store(first + t, tl.where(state == 1, begin + t, -1).to(tl.int64))
            tl.store(joined + t, NOWHERE)
        tl.debug_barrier()
    return count


@triton.jit
def gather_panel(
    state,  # [., stride] float32: S of the group, from the panel's first column on
    stride,
    similar,  # [PANEL, room] float32, written: the same, one record's similarities side by side
    room,
    n,  # records of the panel
    count,
    PANEL: tl.constexpr,
    ROWS: tl.constexpr,  # clusters taken at a time
):
    """Brings S of the panel's records to where decide_panel works on it."""
    t = tl.arange(0, PANEL)
    for start in range(0, count, ROWS):
        k = start + tl.arange(0, ROWS)
        mask = (k < count)[:, None] & (t < n)[None, :]
        s = tl.load(state + k[:, None] * stride + t[None, :], mask=mask)
        tl.store(similar + t[None, :] * room + k[:, None], s, mask=mask)


@triton.jit
def apply_panel(
    products,  # [PANEL, .] float32: the panel's rows of the group's Gram matrix
    state,  # [., .] float32: S of the group; may be the Gram matrix itself, see scan_groups
    stride,  # of both
    reciprocal,  # [n] float32 of the group
    panel,  # first record of the panel in the group
    n,  # records of the group
    joined,  # [PANEL]
    change,  # [PANEL]
    weight,  # [PANEL]
    COLUMNS: tl.constexpr,  # taken at a time
    PANEL: tl.constexpr,
):
    """The panel's decisions, in order, for the records behind it.

    Four at a time: their eight rows are asked for at once, and where one cluster comes twice the later decision takes
    the earlier one's result instead of what was read.
    """
    for start in range(panel + PANEL, n, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        reciprocal_j = tl.load(reciprocal + j, mask=j < n, other=0.0)
        for t in range(0, PANEL, 4):
            k0, d0, w0, s0, g0 = _decision(
                products, state, stride, reciprocal, panel, t + 0, n, joined, change, weight, j, reciprocal_j
            )
            k1, d1, w1, s1, g1 = _decision(
                products, state, stride, reciprocal, panel, t + 1, n, joined, change, weight, j, reciprocal_j
            )
            k2, d2, w2, s2, g2 = _decision(
                products, state, stride, reciprocal, panel, t + 2, n, joined, change, weight, j, reciprocal_j
            )
            k3, d3, w3, s3, g3 = _decision(
                products, state, stride, reciprocal, panel, t + 3, n, joined, change, weight, j, reciprocal_j
            )
            s0 = moved(s0, g0, d0, w0)
            s1 = moved(tl.where(k1 == k0, s0, s1), g1, d1, w1)
            s2 = moved(tl.where(k2 == k1, s1, tl.where(k2 == k0, s0, s2)), g2, d2, w2)
            s3 = tl.where(k3 == k2, s2, tl.where(k3 == k1, s1, tl.where(k3 == k0, s0, s3)))
            s3 = moved(s3, g3, d3, w3)
            tl.store(state + k0 * stride + j, s0, mask=j < tl.where(k0 >= 0, n, 0))
            tl.store(state + k1 * stride + j, s1, mask=j < tl.where(k1 >= 0, n, 0))
            tl.store(state + k2 * stride + j, s2, mask=j < tl.where(k2 >= 0, n, 0))
            tl.store(state + k3 * stride + j, s3, mask=j < tl.where(k3 >= 0, n, 0))


@triton.jit
def _decision(products, state, stride, reciprocal, panel, t, n, joined, change, weight, j, reciprocal_j):
    """Decision t of the panel, and at columns j the S of its cluster (0 for a seed) and the G of its record."""
    k = tl.load(joined + t)
    d = tl.load(change + t)
    w = tl.load(weight + t)
    used = tl.where(k >= 0, n, 0)
    s = tl.load(state + k * stride + j, mask=j < tl.where(d != SEED, used, 0), other=0.0)
    g = tl.load(products + t * stride + j, mask=j < used, other=0.0)
    return k, d, w, s, unit(g, tl.load(reciprocal + panel + t), reciprocal_j)


@triton.jit
def scan_groups(
    gram,  # [groups of the launch, stride, stride] float32: x_i · x_j for i ≤ j
    state,  # [E, groups of the launch, stride, stride] float32, scratch; one ε: gram itself
    stride,
    reciprocal,  # [M] float32: 1 / ‖x_i‖
    kind,  # [M] uint8
    group_offsets,  # [G+1] int64
    similar,  # [E, groups of the launch, PANEL, stride] float32, scratch
    clusters,  # [E, groups of the launch, 2, stride] int32, scratch: members, leader
    decisions,  # [E, groups of the launch, 3, PANEL] 32-bit words, scratch: joined, change, weight
    first,  # [E, M] int64, written
    first_stride,
    lowest,  # 1 − ε − τ of the only ε
    lowest_of,  # [E] float32, where there are several
    first_group,
    long_group,  # groups of this length or more are not for this kernel
    SWEEP: tl.constexpr,
    CLUSTERS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PANEL: tl.constexpr,
):
    """All decisions of one group under one ε, in processing order.

    With one ε, S[k, ·] overwrites G[k, ·]: cluster k is seeded at a record i ≥ k, and the rows up to i are used up for
    the columns behind the panel by then.
    """
    g = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + g
    begin = tl.load(group_offsets + first_group + g)
    n = tl.load(group_offsets + first_group + g + 1) - begin
    if n >= long_group:
        return
    n = n.to(tl.int32)
    if SWEEP:
        lowest = tl.load(lowest_of + tl.program_id(1))
    gram += g * stride * stride
    state += slot * stride * stride
    similar += slot * stride * PANEL
    members = clusters + slot * stride * 2
    joined = decisions + slot * PANEL * 3
    change = (joined + PANEL).to(tl.pointer_type(tl.float32), bitcast=True)
    weight = (joined + PANEL * 2).to(tl.pointer_type(tl.float32), bitcast=True)
    reciprocal += begin
    kind += begin
    first += tl.program_id(1).to(tl.int64) * first_stride + begin
    count = 0
    for panel in range(0, n, PANEL):
        width = tl.minimum(n - panel, PANEL)
        gather_panel(state + panel, stride, similar, stride, width, count, PANEL, ROWS)
        tl.debug_barrier()
        rows = gram + panel * stride
        count = decide_panel(
            similar, stride, rows + panel, stride, reciprocal + panel, kind + panel, first + panel,
            begin.to(tl.int32) + panel, width, members, members + stride, joined, change, weight, count, lowest,
            CLUSTERS, PANEL,
        )  # fmt: skip
        apply_panel(rows, state, stride, reciprocal, panel, n, joined, change, weight, COLUMNS, PANEL)
        tl.debug_barrier()
