"""The episode term by the compiled kernels (csrc/cpu/episode.cpp)."""

from __future__ import annotations

import torch

from .. import threads
from ..masks import Kept, runs
from ..native_loader import load

Tensor = torch.Tensor


def episode_advantage(
    episode_return: Tensor,
    trajectory_offsets: Tensor,
    group_trajectories: Tensor,
    *,
    n_groups: int,
    n_records: int,
    scope: str,
    norm: str,
    lone: str,
    delta: float,
    spoilt: Tensor | None,
) -> Tensor:
    kept = Kept(None if spoilt is None else ~spoilt)
    records = Kept(None)
    if kept.positions is not None and spoilt is not None:  # invalid trajectories are not part of the population
        records = Kept(~spoilt[runs(trajectory_offsets)])
        lengths = kept.rows(trajectory_offsets.diff())  # a trajectory without records keeps its place
        episode_return, trajectory_offsets = (
            kept.rows(episode_return),
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        )
        group_trajectories = kept.offsets(group_trajectories)
    out = torch.empty(int(trajectory_offsets[-1]), dtype=torch.float32)
    load().episode_advantage(
        episode_return.data_ptr(), trajectory_offsets.data_ptr(), group_trajectories.data_ptr(),
        group_trajectories.shape[0] - 1, scope == "step", norm == "std", lone == "raw", delta, out.data_ptr(),
        threads.count(),
    )  # fmt: skip
    return records.spread(out, 0.0)
