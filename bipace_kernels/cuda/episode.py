"""The episode term, a block for each group."""

from __future__ import annotations

import torch

from ._launch import launch

Tensor = torch.Tensor

_THREADS = 128  # kThreads of csrc/cuda/episode.cu


def episode_advantage(
    episode_return: Tensor,  # [T] float32, R(τ)
    trajectory_offsets: Tensor,  # [T+1] int64
    group_trajectories: Tensor,  # [G+1] int64
    *,
    n_groups: int,
    n_records: int,
    scope: str,
    norm: str,
    lone: str,
    delta: float,
    spoilt: Tensor | None,  # [T] bool
) -> Tensor:  # [M] float32
    """A_ep of each record (paper eq. 1).  Spoilt trajectories are no part of the population, and get 0."""
    out = torch.empty(n_records, dtype=torch.float32, device=episode_return.device)
    launch(
        "episode_advantage", n_groups if n_records else 0, _THREADS,
        episode_return, trajectory_offsets, group_trajectories, spoilt, out, float(delta),
        scope == "step", norm == "std", lone == "raw", device=out.device,
    )  # fmt: skip
    return out
