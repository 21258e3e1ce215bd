"""Returns by the compiled kernels (csrc/cpu/returns.cpp)."""

import torch
from torch import Tensor

from .. import threads
from ..native_loader import load
from ..records import Records
from ..schema import LIMIT


def discounted_returns(records: Records, rewards: Tensor, gamma: float) -> Tensor:
    r, out = records, torch.empty(rewards.shape[0], dtype=torch.float32)
    load().discounted_returns(rewards, r.step, r.trajectory_offsets, r.n_trajectories, gamma, out, threads.count())
    return out


def trajectory_returns(records: Records, rewards: Tensor) -> Tensor:
    r, out = records, torch.empty(records.n_trajectories, dtype=torch.float32)
    load().trajectory_returns(rewards, r.step, r.trajectory_offsets, r.n_trajectories, out, threads.count())
    return out


def spoilt_trajectories(
    records: Records, step_return: Tensor, trajectory_return: Tensor, bad_record: Tensor | None
) -> Tensor:
    bad, spoilt = ~(step_return.abs() <= LIMIT), ~(trajectory_return.abs() <= LIMIT)
    if bad_record is not None:
        bad |= bad_record
    if bool(bad.any()):
        spoilt[records.trajectory_of_record[bad]] = True
    return spoilt


def all_returns(
    records: Records, rewards: Tensor, bad_record: Tensor | None, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    steps, own = discounted_returns(records, rewards, gamma), trajectory_returns(records, rewards)
    return steps, own, spoilt_trajectories(records, steps, own, bad_record)
