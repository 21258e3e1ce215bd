"""The episode term, a program for each group."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import Records
from ._launch import launch

# UNROLL trajectories are loaded concurrently: at 8 the predicates no longer fit and spill.  ROWS × COLUMNS trajectories
# and steps are written at a time.
_OPTIONS = {"UNROLL": 4, "ROWS": 16, "COLUMNS": 32, "num_warps": 4, "enable_fp_fusion": False}


def episode_advantage(
    records: Records, episode_return: Tensor, scope: str, norm: str, lone: str, delta: float
) -> Tensor:
    out = torch.empty(records.n_records, dtype=torch.float32, device=episode_return.device)
    if records.n_groups and records.n_records:
        tensors = (episode_return, records.trajectory_offsets, records.group_trajectories, records.spoilt, out)
        rules = {"OVER_STEPS": scope == "step", "DIVIDE": norm == "std", "LONE_RAW": lone == "raw"}
        launch(_episode, (records.n_groups,), *tensors, float(delta), **rules, **_OPTIONS)
    return out


@triton.jit
def _episode(
    episode_return,  # [T] float32
    trajectory_offsets,  # [T+1] int64
    group_trajectories,  # [G+1] int64
    spoilt,  # [T] bool or None
    out,  # [M] float32
    delta: tl.float64,
    OVER_STEPS: tl.constexpr,
    DIVIDE: tl.constexpr,
    LONE_RAW: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(group_trajectories + group), tl.load(group_trajectories + group + 1)

    # Sums one trajectory after another: an invalid one, with weight 0, then changes no bit for the others.
    n = tl.zeros((1,), tl.int64)
    total = tl.zeros((1,), tl.float64)
    for start in range(begin, end, UNROLL):
        value, weight = _load(episode_return, trajectory_offsets, spoilt, start, end, OVER_STEPS, UNROLL)
        for u in tl.static_range(UNROLL):
            n += weight[u]
            # A trajectory's steps all have its return: length · R(τ) is exact, 24 bits of R and less than 29 of length.
            total += tl.where(weight[u] > 0, value[u].to(tl.float64) * weight[u].to(tl.float64), 0.0)
    mean = total / tl.maximum(n, 1).to(tl.float64)
    sigma = tl.full((1,), 1.0, tl.float64)
    if DIVIDE:
        squares = tl.zeros((1,), tl.float64)
        for start in range(begin, end, UNROLL):
            value, weight = _load(episode_return, trajectory_offsets, spoilt, start, end, OVER_STEPS, UNROLL)
            for u in tl.static_range(UNROLL):
                difference = value[u].to(tl.float64) - mean
                squares += tl.where(weight[u] > 0, difference * difference * weight[u].to(tl.float64), 0.0)
        # If all returns are equal, R − mean is exactly 0, and rounding of σ has no effect.
        sigma = tl.where(n > 1, tl.sqrt(squares / tl.maximum(n - 1, 1).to(tl.float64)), 1.0)

    for start in range(begin, end, ROWS):
        t = start + tl.arange(0, ROWS)
        value, weight = _tile(episode_return, trajectory_offsets, spoilt, t, t < end, OVER_STEPS)
        alone = value if LONE_RAW else tl.zeros((ROWS,), tl.float32)
        advantage = tl.where(n > 1, value - mean.to(tl.float32), alone)
        if DIVIDE:
            advantage = (advantage.to(tl.float64) / (sigma + delta)).to(tl.float32)
        advantage = tl.where(weight > 0, advantage, 0.0)
        first = tl.load(trajectory_offsets + t, mask=t < end, other=0)
        last = tl.load(trajectory_offsets + t + 1, mask=t < end, other=0)
        for column in range(0, tl.max(last - first, axis=0), COLUMNS):
            at = (first + column)[:, None] + tl.arange(0, COLUMNS)[None, :]
            tl.store(out + at, tl.broadcast_to(advantage[:, None], (ROWS, COLUMNS)), mask=at < last[:, None])


@triton.jit
def _tile(episode_return, trajectory_offsets, spoilt, t, inside, OVER_STEPS: tl.constexpr):
    """Returns of some trajectories and their weights in the population: 1, or length; 0 for those that do not count."""
    value = tl.load(episode_return + t, mask=inside, other=0.0)
    counts = inside
    if spoilt is not None:
        counts = inside & (tl.load(spoilt + t, mask=inside, other=1) == 0)
    if OVER_STEPS:
        first = tl.load(trajectory_offsets + t, mask=inside, other=0)
        weight = tl.load(trajectory_offsets + t + 1, mask=inside, other=0) - first
        return value, tl.where(counts, weight, 0)
    return value, counts.to(tl.int64)


@triton.jit
def _load(episode_return, trajectory_offsets, spoilt, start, end, OVER_STEPS: tl.constexpr, UNROLL: tl.constexpr):
    """Returns and weights of the next trajectories: all loads before any sum, so that they overlap."""
    value, weight = (), ()
    for u in tl.static_range(UNROLL):
        v, w = _tile(episode_return, trajectory_offsets, spoilt, start + u, start + u < end, OVER_STEPS)
        value, weight = value + (v,), weight + (w,)
    return value, weight
