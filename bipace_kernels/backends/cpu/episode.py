"""The episode term by the compiled kernels (csrc/cpu/episode.cpp)."""

from __future__ import annotations

import torch

from .. import threads
from ..native_loader import load
from ..records import Records

Tensor = torch.Tensor


def episode_advantage(
    records: Records, episode_return: Tensor, scope: str, norm: str, lone: str, delta: float
) -> Tensor:
    out = torch.empty(records.n_records, dtype=torch.float32)
    load().episode_advantage(
        episode_return.data_ptr(), records.trajectory_offsets.data_ptr(), records.group_trajectories.data_ptr(),
        records.n_groups, scope == "step", norm == "std", lone == "raw", delta, out.data_ptr(), threads.count(),
    )  # fmt: skip
    return out
