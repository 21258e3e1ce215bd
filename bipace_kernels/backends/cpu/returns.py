"""Returns by the compiled kernels (csrc/cpu/returns.cpp)."""

from __future__ import annotations

import torch

from .. import threads
from ..masks import out_of_range, runs
from ..native_loader import load

Tensor = torch.Tensor


def discounted_returns(
    rewards: Tensor, step: Tensor | None, trajectory_offsets: Tensor, gamma: float, *, n_trajectories: int
) -> Tensor:
    out = torch.empty(rewards.shape[0], dtype=torch.float32)
    load().discounted_returns(
        rewards.data_ptr(), 0 if step is None else step.data_ptr(), trajectory_offsets.data_ptr(), n_trajectories,
        gamma, out.data_ptr(), threads.count(),
    )  # fmt: skip
    return out


def trajectory_returns(
    rewards: Tensor, step: Tensor | None, trajectory_offsets: Tensor, *, n_trajectories: int
) -> Tensor:
    out = torch.empty(n_trajectories, dtype=torch.float32)
    load().trajectory_returns(
        rewards.data_ptr(), 0 if step is None else step.data_ptr(), trajectory_offsets.data_ptr(), n_trajectories,
        out.data_ptr(), threads.count(),
    )  # fmt: skip
    return out


def spoilt_trajectories(
    step_return: Tensor,
    trajectory_return: Tensor,
    bad_record: Tensor | None,
    trajectory_offsets: Tensor,
    *,
    n_trajectories: int,
) -> Tensor:
    bad, spoilt = out_of_range(step_return), out_of_range(trajectory_return)
    if bad_record is not None:
        bad |= bad_record
    if bool(bad.any()):
        spoilt[runs(trajectory_offsets)[bad]] = True
    return spoilt


def all_returns(
    rewards: Tensor,
    step: Tensor | None,
    bad_record: Tensor | None,
    trajectory_offsets: Tensor,
    gamma: float,
    *,
    n_trajectories: int,
) -> tuple[Tensor, Tensor, Tensor]:
    found = discounted_returns(rewards, step, trajectory_offsets, gamma, n_trajectories=n_trajectories)
    own = trajectory_returns(rewards, step, trajectory_offsets, n_trajectories=n_trajectories)
    spoilt = spoilt_trajectories(found, own, bad_record, trajectory_offsets, n_trajectories=n_trajectories)
    return found, own, spoilt
