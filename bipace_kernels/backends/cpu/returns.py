"""Returns by the compiled kernels (csrc/cpu/returns.cpp)."""

from __future__ import annotations

import torch

from .. import threads
from ..native_loader import load
from ..records import Records
from ..schema import LIMIT
from .clusters import address

Tensor = torch.Tensor


def discounted_returns(records: Records, rewards: Tensor, gamma: float) -> Tensor:
    out = torch.empty(rewards.shape[0], dtype=torch.float32)
    load().discounted_returns(
        rewards.data_ptr(), address(records.step), records.trajectory_offsets.data_ptr(), records.n_trajectories, gamma,
        out.data_ptr(), threads.count(),
    )  # fmt: skip
    return out


def trajectory_returns(records: Records, rewards: Tensor) -> Tensor:
    n, out = records.n_trajectories, torch.empty(records.n_trajectories, dtype=torch.float32)
    offsets = records.trajectory_offsets.data_ptr()
    load().trajectory_returns(rewards.data_ptr(), address(records.step), offsets, n, out.data_ptr(), threads.count())
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
