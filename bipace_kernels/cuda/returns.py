"""Discounted returns, returns of trajectories, and which trajectories are spoilt."""

from __future__ import annotations

import torch

from ..schema import LIMIT
from ._launch import WARP, launch

Tensor = torch.Tensor


def discounted_returns(
    rewards: Tensor,  # [M] float64
    step: Tensor | None,  # [M] int64; None: neighbours are one step apart
    trajectory_offsets: Tensor,  # [T+1] int64
    gamma: float,
    *,
    n_trajectories: int,
) -> Tensor:  # [M] float32
    """R_t = Σ_{u≥t} γ^{u−t} r_u in float64, rounded to float32 once.  Steps of equal number count their reward once."""
    out = torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device)
    launch(
        "discounted_returns", -(-n_trajectories // WARP), WARP,
        rewards, step, trajectory_offsets, n_trajectories, float(gamma), out, device=out.device,
    )  # fmt: skip
    return out


def trajectory_returns(
    rewards: Tensor,  # [M] float64
    step: Tensor | None,  # [M] int64
    trajectory_offsets: Tensor,  # [T+1] int64
    *,
    n_trajectories: int,
) -> Tensor:  # [T] float32
    """R(τ) = Σ r over the steps of each trajectory, in float64, rounded once."""
    out = torch.empty(n_trajectories, dtype=torch.float32, device=rewards.device)
    launch(
        "trajectory_returns", -(-n_trajectories // WARP), WARP,
        rewards, step, trajectory_offsets, n_trajectories, out, device=out.device,
    )  # fmt: skip
    return out


def spoilt_trajectories(
    step_return: Tensor,  # [M] float32
    trajectory_return: Tensor,  # [T] float32
    bad_record: Tensor | None,  # [M] bool: records found bad for another reason
    trajectory_offsets: Tensor,  # [T+1] int64
    *,
    n_trajectories: int,
) -> Tensor:  # [T] bool
    """Trajectories with a return that is not finite or beyond ±1e37, of a step or their own, or with a bad record."""
    out = torch.empty(n_trajectories, dtype=torch.bool, device=step_return.device)
    launch(
        "spoilt_trajectories", n_trajectories, WARP,
        step_return, trajectory_return, bad_record, trajectory_offsets, float(LIMIT), out, device=out.device,
    )  # fmt: skip
    return out
