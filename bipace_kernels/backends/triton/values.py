"""The step term: Q̂(s, a) − V̂(s) and its relatives, over all pairs inside a cluster.

A lane is a record; it walks over the records of its group and sums the returns of its cluster, of its action, or of
the others, in float64 and in processing order.  So each sum equals that of the reference, without sorting, hashing or
atomics, and without contributions from other clusters.  In long groups the records are first sorted by label (stably,
so that the order of the sums stays the same) and a lane only walks over its own cluster.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import Records
from ..schema import Branch
from ._launch import ceil_div, launch

LANES = 64  # records of a program: at 400 records per group, small programs fill more of the GPU than large ones
UNROLL = 8  # records loaded concurrently
AGGREGATE = 128  # records of a program that sums over depths
SORT_FROM = 4096  # groups longer than this: sorting costs less than walking over other clusters (Triton's kernels)
_OPTIONS = {"LANES": LANES, "UNROLL": UNROLL, "num_warps": 2, "enable_fp_fusion": False}

_SINGLETON = tl.constexpr(int(Branch.SINGLETON))
_PACE = tl.constexpr(int(Branch.PACE))
_LEAVE_ONE_OUT = tl.constexpr(int(Branch.LEAVE_ONE_OUT))


class Values:
    """Host code of the stage, for any kernels.

    launch_step        launches so many blocks for an estimator, with the arguments of _step by name
    launch_aggregate   the same for _aggregate; its blocks are for it to count
    """

    def __init__(self, launch_step: Callable[..., None], launch_aggregate: Callable[..., None]) -> None:
        self._launch_step, self._launch_aggregate = launch_step, launch_aggregate

    def step_advantage(
        self, records: Records, returns: Tensor, labels: Tensor, action_key: Tensor | None, estimator: str,
        step_norm: str, delta: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        divide = step_norm == "std" and estimator == "mean"
        return self._step(records, returns, labels, action_key, estimator, divide, delta, unbiased=True)

    def hgpo_advantage(
        self, records: Records, returns: Tensor, depth_labels: Tensor, episode_advantage: Tensor, step_norm: str,
        delta: float, alpha: float, base_group: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        depth, m = depth_labels.shape
        divide = step_norm == "std"
        term, company = self._step(records, returns, depth_labels, None, "mean", divide, delta, unbiased=False)
        advantage, branch = torch.empty_like(returns), torch.empty(m, dtype=torch.uint8, device=returns.device)
        deepest = torch.empty(m, dtype=torch.int64, device=returns.device)
        if m:
            self._launch_aggregate(
                term=term, company=company, episode_advantage=episode_advantage if base_group else None,
                advantage=advantage, deepest=deepest, branch=branch, depth=depth, m=m, delta=float(delta),
                alpha=float(alpha),
            )  # fmt: skip
        return advantage, deepest, branch

    def _step(
        self,
        records: Records,
        returns: Tensor,  # [M] float32
        labels: Tensor,  # [M] or [E, M] int64
        action_key: Tensor | None,  # [M] int64
        estimator: str,
        divide: bool,
        delta: float,
        *,
        unbiased: bool,
    ) -> tuple[Tensor, Tensor]:
        """The step term [float32] and branch [uint8] of each record under each row of labels, in labels' shape."""
        rows, m = labels.shape if labels.ndim == 2 else (1, labels.shape[0])
        step = torch.empty(labels.shape, dtype=torch.float32, device=returns.device)
        branch = torch.empty(labels.shape, dtype=torch.uint8, device=returns.device)
        if not step.numel():
            return step, branch
        order, segments, longest_group = None, records.n_groups, records.longest_group
        if longest_group > SORT_FROM:
            labels, order = torch.sort(labels, dim=-1, stable=True)
            # Sorted records are cut into blocks regardless of groups, since a cluster is in one group anyway.
            segments, longest_group = 1, m
        blocks = ceil_div(longest_group, LANES)
        self._launch_step(
            rows * segments * blocks, estimator, returns=returns, labels=labels, action_key=action_key, order=order,
            group_offsets=records.group_offsets, step=step, branch=branch, m=m, segments=segments, blocks=blocks,
            delta=float(delta), divide=divide, unbiased=unbiased,
        )  # fmt: skip
        return step, branch


def _launch_step(grid: int, estimator: str, *, returns: Tensor, divide: bool, unbiased: bool, **rest: Any) -> None:
    launch(_step, (grid,), returns, **rest, ESTIMATOR=estimator, DIVIDE=divide, UNBIASED=unbiased, **_OPTIONS)


def _launch_aggregate(*, term: Tensor, m: int, **rest: Any) -> None:
    options = {"LANES": AGGREGATE, "num_warps": 4, "enable_fp_fusion": False}
    launch(_aggregate, (ceil_div(m, AGGREGATE),), term, m=m, **rest, **options)


_stage = Values(_launch_step, _launch_aggregate)
step_advantage, hgpo_advantage = _stage.step_advantage, _stage.hgpo_advantage


@triton.jit(do_not_specialize=["m", "segments", "blocks"])
def _step(
    returns,  # [M] float32
    labels,  # [E, M] int64, by place
    action_key,  # [M] int64
    order,  # [E, M] int64: record at each place, where labels are sorted; None: place and record are the same
    group_offsets,  # [G+1] int64
    step,  # [E, M] float32
    branch,  # [E, M] uint8
    m,
    segments,
    blocks,
    delta: tl.float64,
    ESTIMATOR: tl.constexpr,
    DIVIDE: tl.constexpr,
    UNBIASED: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks // segments * m
    block = program % blocks * LANES
    if order is not None:
        begin, end = block * 0, block * 0 + m
    else:
        group = program // blocks % segments
        begin, end = tl.load(group_offsets + group), tl.load(group_offsets + group + 1)
    place = begin + block + tl.arange(0, LANES)
    live = place < end
    labels += row
    label = tl.load(labels + place, mask=live, other=-2)
    record = place
    if order is not None:
        order += row
        record = tl.load(order + place, mask=live, other=0)
    value = tl.load(returns + record, mask=live, other=0.0)

    # Places [low, high) hold all clusters of the block.
    low, high = begin, tl.where(begin + block < end, end, begin)
    if order is not None:
        low = _first_place(labels, m, tl.maximum(tl.min(tl.where(live, label, 1 << 62), axis=0), 0))
        high = _first_place(labels, m, tl.max(label, axis=0) + 1)
    if ESTIMATOR == "mean":
        n, mean, sigma = _moments(returns, labels, order, label, low, high, DIVIDE, UNBIASED, LANES, UNROLL)
        term = value - mean.to(tl.float32)
        if DIVIDE:
            term = (term.to(tl.float64) / (sigma + delta)).to(tl.float32)
        kind = tl.full((LANES,), _PACE, tl.int32)
    else:
        key = tl.load(action_key + record, mask=live, other=0)
        n, term, kind = _against_peers(
            returns, labels, action_key, order, label, key, value, place, low, high, ESTIMATOR, LANES, UNROLL
        )
    alone = (n < 2) | (label < 0)
    tl.store(step + row + record, tl.where(alone, 0.0, term), mask=live)
    tl.store(branch + row + record, tl.where(alone, _SINGLETON, kind).to(tl.uint8), mask=live)


@triton.jit
def _first_place(labels, m, label):
    """The first place of a label or a higher one: labels [M] are sorted."""
    low, high = label * 0, label * 0 + m
    while low < high:
        middle = (low + high) // 2
        below = tl.load(labels + middle) < label
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _moments(
    returns,
    labels,
    order,
    label,  # [LANES] int64
    low,
    high,
    DIVIDE: tl.constexpr,
    UNBIASED: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Size and mean of each lane's cluster, and its two-pass σ where DIVIDE.

    If all returns are equal, R − mean is exactly 0, and rounding of σ has no effect.
    """
    n = tl.zeros((LANES,), tl.int32)
    total = tl.zeros((LANES,), tl.float64)
    for start in range(low, high, UNROLL):
        theirs, their_return, _ = _load(returns, labels, None, order, start, high, UNROLL)
        for u in tl.static_range(UNROLL):
            same = theirs[u] == label
            n += same.to(tl.int32)
            total += tl.where(same, their_return[u].to(tl.float64), 0.0)
    mean = total / tl.maximum(n, 1).to(tl.float64)
    sigma = tl.zeros((LANES,), tl.float64)
    if DIVIDE:
        squares = tl.zeros((LANES,), tl.float64)
        for start in range(low, high, UNROLL):
            theirs, their_return, _ = _load(returns, labels, None, order, start, high, UNROLL)
            for u in tl.static_range(UNROLL):
                difference = their_return[u].to(tl.float64) - mean
                squares += tl.where(theirs[u] == label, difference * difference, 0.0)
        population = tl.maximum(n - 1, 1) if UNBIASED else tl.maximum(n, 1)
        sigma = tl.sqrt(squares / population.to(tl.float64))
    return n, mean, sigma


@triton.jit
def _against_peers(
    returns,
    labels,
    action_key,
    order,
    label,  # [LANES] int64
    key,  # [LANES] int64
    value,  # [LANES] float32
    place,  # [LANES] int64
    low,
    high,
    ESTIMATOR: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Cluster size, step term and branch by q_style or diff_peer, each with leave-one-out where it has no peers."""
    n, n_chosen = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
    total, rest = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    chosen = tl.zeros((LANES,), tl.float64)  # q_style: the same action; diff_peer: other actions
    for start in range(low, high, UNROLL):
        theirs, their_return, their_key = _load(returns, labels, action_key, order, start, high, UNROLL)
        for u in tl.static_range(UNROLL):
            r = their_return[u].to(tl.float64)
            same = theirs[u] == label
            take = same & ((their_key[u] == key) if ESTIMATOR == "q_style" else (their_key[u] != key))
            n += same.to(tl.int32)
            n_chosen += take.to(tl.int32)
            chosen += tl.where(take, r, 0.0)
            rest += tl.where(same & (place != start + u), r, 0.0)
            if ESTIMATOR == "q_style":
                total += tl.where(same, r, 0.0)
    leave_one_out = value - (rest / tl.maximum(n - 1, 1).to(tl.float64)).to(tl.float32)
    chosen_mean = (chosen / tl.maximum(n_chosen, 1).to(tl.float64)).to(tl.float32)
    if ESTIMATOR == "q_style":
        has_peers = n_chosen > 1
        term = chosen_mean - (total / tl.maximum(n, 1).to(tl.float64)).to(tl.float32)
    else:
        has_peers = n_chosen > 0
        term = value - chosen_mean
    return n, tl.where(has_peers, term, leave_one_out), tl.where(has_peers, _PACE, _LEAVE_ONE_OUT)


@triton.jit
def _load(returns, labels, action_key, order, start, high, UNROLL: tl.constexpr):
    """Labels, returns and keys of the next places: all loads before any sum, so that they overlap."""
    theirs, their_return, their_key = (), (), ()
    for u in tl.static_range(UNROLL):
        inside = start + u < high
        theirs = theirs + (tl.load(labels + start + u, mask=inside, other=-3),)
        record = tl.load(order + start + u, mask=inside, other=0) if order is not None else start + u
        their_return = their_return + (tl.load(returns + record, mask=inside, other=0.0),)
        if action_key is not None:
            their_key = their_key + (tl.load(action_key + record, mask=inside, other=0),)
    return theirs, their_return, their_key


@triton.jit(do_not_specialize=["depth", "m"])
def _aggregate(
    term,  # [H, M] float32: the record's advantage at each depth
    company,  # [H, M] uint8: SINGLETON where it has none
    episode_advantage,  # [M] float32, the item of depth 0; None: there is none
    advantage,  # [M] float32
    deepest,  # [M] int64
    branch,  # [M] uint8
    depth,
    m,
    delta: tl.float64,
    alpha: tl.float64,
    LANES: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = i < m
    deep = tl.zeros((LANES,), tl.int64)
    longest = tl.zeros((LANES,), tl.float64)
    for k in range(0, depth + 1):
        if k > 0:
            offset = (k - 1) * m.to(tl.int64)
            kind = tl.load(company + offset + i, mask=live, other=_SINGLETON)
            deep = tl.where(kind != _SINGLETON, k, deep)
        a = _item(term, episode_advantage, i, live, k, m, LANES)
        longest = tl.where(a != 0.0, 1.0 + k, longest)
    # w_k = L_k^α / (Σ L^α + δ) with numerator and denominator divided by the largest L^α, to avoid overflow.
    scale = tl.maximum(longest, 1.0)
    total = delta * _power(scale, -alpha)
    shares = tl.zeros((LANES,), tl.float64)
    for k in range(0, depth + 1):
        a = _item(term, episode_advantage, i, live, k, m, LANES)
        shares += tl.where(a != 0.0, _power((1.0 + k) / scale, alpha), 0.0)
    total += shares
    result = tl.zeros((LANES,), tl.float64)
    for k in range(0, depth + 1):
        a = _item(term, episode_advantage, i, live, k, m, LANES)
        result += tl.where(a != 0.0, _power((1.0 + k) / scale, alpha) / total * a, 0.0)
    tl.store(advantage + i, result.to(tl.float32), mask=live)
    tl.store(deepest + i, deep, mask=live)
    tl.store(branch + i, tl.where(deep > 0, _PACE, _SINGLETON).to(tl.uint8), mask=live)


@triton.jit
def _item(term, episode_advantage, i, live, k, m, LANES: tl.constexpr):
    """[LANES] float64 advantage at depth k."""
    if k > 0:
        a = tl.load(term + (k - 1) * m.to(tl.int64) + i, mask=live, other=0.0)
    else:
        a = tl.zeros((LANES,), tl.float32)
        if episode_advantage is not None:
            a = tl.load(episode_advantage + i, mask=live, other=0.0)
    return a.to(tl.float64)


@triton.jit
def _power(base, exponent):
    """base^exponent in float64 for base > 0; exactly 1 for base = 1 and for exponent = 0."""
    return tl.exp(exponent * tl.log(base))
