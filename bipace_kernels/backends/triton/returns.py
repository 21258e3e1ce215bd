"""Discounted returns, returns of trajectories, and which trajectories are invalid.

A lane is a trajectory, and walks it step by step like the other backends: float64, the same operations in the same
order, so the float32 results are the same, and equal rewards give equal returns anywhere in the batch.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import Records, out_of_range
from ..schema import LIMIT
from ._launch import ceil_div, launch

LANES = 32  # trajectories of a program: one warp, so that many small programs spread over the GPU
UNROLL = 8  # steps loaded concurrently; a step's arithmetic is short compared with its load
_OPTIONS = {"LIMIT": LIMIT, "LANES": LANES, "UNROLL": UNROLL, "num_warps": 1, "enable_fp_fusion": False}


def discounted_returns(records: Records, rewards: Tensor, gamma: float) -> Tensor:
    out = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    _walk(records, rewards, gamma, step_return=out)
    return out


def trajectory_returns(records: Records, rewards: Tensor) -> Tensor:
    out = torch.empty(records.n_trajectories, dtype=torch.float32, device=rewards.device)
    _walk(records, rewards, 1.0, trajectory_return=out)
    return out


def all_returns(
    records: Records, rewards: Tensor, bad_record: Tensor | None, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By one launch."""
    device = rewards.device
    step_return = torch.empty(rewards.shape, dtype=torch.float32, device=device)
    trajectory_return = torch.empty(records.n_trajectories, dtype=torch.float32, device=device)
    spoilt = torch.empty(records.n_trajectories, dtype=torch.bool, device=device)
    _walk(records, rewards, gamma, bad_record, step_return, trajectory_return, spoilt)
    return step_return, trajectory_return, spoilt


def _walk(
    records: Records,
    rewards: Tensor,
    gamma: float,
    bad_record: Tensor | None = None,
    step_return: Tensor | None = None,  # written, as are the next two; None: not wanted
    trajectory_return: Tensor | None = None,
    spoilt: Tensor | None = None,  # with both others only
) -> None:
    n = records.n_trajectories
    if not n:
        return
    log_gamma = math.log(gamma) if gamma > 0 else -math.inf
    tensors = (rewards, records.step, bad_record, records.trajectory_offsets, step_return, trajectory_return, spoilt)
    launch(_returns, (ceil_div(n, LANES),), *tensors, float(gamma), log_gamma, n, **_OPTIONS)


def spoilt_trajectories(
    records: Records, step_return: Tensor, trajectory_return: Tensor, bad_record: Tensor | None
) -> Tensor:
    bad = out_of_range(step_return)
    if bad_record is not None:
        bad |= bad_record
    upto = torch.nn.functional.pad(bad.cumsum(0), (1, 0))[records.trajectory_offsets]
    return (upto[1:] > upto[:-1]) | out_of_range(trajectory_return)


@triton.jit(do_not_specialize=["n_trajectories"])
def _returns(
    rewards,  # [M] float64
    step,  # [M] int64 or None
    bad_record,  # [M] bool or None
    trajectory_offsets,  # [T+1] int64
    step_return,  # [M] float32, written, as are the next two; None: not wanted
    trajectory_return,  # [T] float32, written
    spoilt,  # [T] bool, written
    gamma: tl.float64,
    log_gamma: tl.float64,
    n_trajectories,
    LIMIT: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    begin = tl.load(trajectory_offsets + t, mask=t < n_trajectories, other=0)
    end = tl.load(trajectory_offsets + t + 1, mask=t < n_trajectories, other=0)
    longest = tl.max(end - begin, axis=0)
    bad = tl.zeros((LANES,), tl.int1)
    if step_return is not None:
        value = tl.zeros((LANES,), tl.float64)  # R of the next record, unrounded
        later = tl.zeros((LANES,), tl.int64)  # its step number
        for start in range(0, longest, UNROLL):
            # Loads first: the compiler moves none above a store, and waiting for one load at a time would dominate.
            reward, now = (), ()
            for u in tl.static_range(UNROLL):
                at = end - 1 - start - u
                reward = reward + (tl.load(rewards + at, mask=at >= begin, other=0.0),)
                if step is not None:
                    now = now + (tl.load(step + at, mask=at >= begin, other=0),)
                if bad_record is not None:
                    bad |= tl.load(bad_record + at, mask=at >= begin, other=0) != 0
            for u in tl.static_range(UNROLL):
                at = end - 1 - start - u
                if step is not None:
                    gap = later - now[u]
                    # A gap of one multiplies by γ itself, as the other backends do.
                    factor = tl.where(gap == 1, gamma, tl.exp(tl.maximum(gap, 1).to(tl.float64) * log_gamma))
                    # Equal step numbers are one step recorded twice: its reward counts once.
                    discounted = tl.where(gap == 0, value, reward[u] + factor * value)
                    later = now[u]
                else:
                    discounted = reward[u] + gamma * value
                value = tl.where(at == end - 1, reward[u], discounted)
                rounded = value.to(tl.float32)
                tl.store(step_return + at, rounded, mask=at >= begin)
                if spoilt is not None:
                    bad |= (at >= begin) & ((tl.abs(rounded) <= LIMIT) == 0)  # so NaN is beyond it
    if trajectory_return is not None:
        total = tl.zeros((LANES,), tl.float64)
        before = tl.zeros((LANES,), tl.int64)
        for start in range(0, longest, UNROLL):
            for u in tl.static_range(UNROLL):
                at = begin + start + u
                live = at < end
                counts = live
                if step is not None:
                    number = tl.load(step + at, mask=live, other=0)
                    counts = live & ((at == begin) | (number != before))
                    before = number
                total += tl.load(rewards + at, mask=counts, other=0.0)
        own = total.to(tl.float32)
        tl.store(trajectory_return + t, own, mask=t < n_trajectories)
        if spoilt is not None:
            tl.store(spoilt + t, bad | ((tl.abs(own) <= LIMIT) == 0), mask=t < n_trajectories)
