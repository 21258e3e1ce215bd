"""The episode term by the compiled kernels (csrc/cpu/episode.cpp)."""

import torch
from torch import Tensor

from .. import threads
from ..native_loader import load
from ..records import Records


def episode_advantage(
    records: Records, episode_return: Tensor, scope: str, norm: str, lone: str, delta: float
) -> Tensor:
    r, out = records, torch.empty(records.n_records, dtype=torch.float32)
    options = scope == "step", norm == "std", lone == "raw"
    load().episode_advantage(
        episode_return, r.trajectory_offsets, r.group_trajectories, r.n_groups, *options, delta, out, threads.count()
    )
    return out
