"""The episode term by the compiled kernels."""

from __future__ import annotations

import torch

from .._native_loader import load

Tensor = torch.Tensor


def episode_advantage(
    episode_return: Tensor,  # [T] float32, R(τ)
    trajectory_offsets: Tensor,  # [T+1] int64
    group_trajectories: Tensor,  # [G+1] int64
    *,
    scope: str,
    norm: str,
    lone: str,
    delta: float,
    num_threads: int = 1,
) -> Tensor:  # [M] float32
    """A_ep of each record (paper eq. 1)."""
    out = torch.empty(int(trajectory_offsets[-1]), dtype=torch.float32)
    load().episode_advantage(
        episode_return.data_ptr(), trajectory_offsets.data_ptr(), group_trajectories.data_ptr(),
        group_trajectories.shape[0] - 1, scope == "step", norm == "std", lone == "raw", delta, out.data_ptr(), num_threads,
    )  # fmt: skip
    return out
