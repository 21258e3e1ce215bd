"""Discounted returns by the compiled kernels."""

from __future__ import annotations

import torch

from .._native_loader import load

Tensor = torch.Tensor


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def discounted_returns(
    rewards: Tensor,  # [M] float64
    step: Tensor | None,  # [M] int64; None: neighbours are one step apart
    trajectory_offsets: Tensor,  # [T+1] int64
    gamma: float,
    *,
    num_threads: int = 1,
) -> Tensor:  # [M] float32
    """R_t = Σ_{u≥t} γ^{u−t} r_u in float64, rounded to float32 once."""
    out = torch.empty(rewards.shape[0], dtype=torch.float32)
    n_trajectories = trajectory_offsets.shape[0] - 1
    load().discounted_returns(
        rewards.data_ptr(),
        _address(step),
        trajectory_offsets.data_ptr(),
        n_trajectories,
        gamma,
        out.data_ptr(),
        num_threads,
    )
    return out


def trajectory_returns(
    rewards: Tensor,  # [M] float64
    step: Tensor | None,  # [M] int64
    trajectory_offsets: Tensor,  # [T+1] int64
    *,
    num_threads: int = 1,
) -> Tensor:  # [T] float32
    """R(τ) = Σ r over the steps of each trajectory, in float64, rounded once."""
    n_trajectories = trajectory_offsets.shape[0] - 1
    out = torch.empty(n_trajectories, dtype=torch.float32)
    load().trajectory_returns(
        rewards.data_ptr(), _address(step), trajectory_offsets.data_ptr(), n_trajectories, out.data_ptr(), num_threads
    )
    return out
