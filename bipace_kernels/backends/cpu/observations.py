"""Partitions by observations, by the compiled kernels (csrc/cpu/observations.cpp)."""

from __future__ import annotations

import torch

from ..masks import Kept
from ..native_loader import load

Tensor = torch.Tensor


def cluster_exact(
    codes: Tensor, group_offsets: Tensor, *, n_groups: int, longest_group: int, taken: Tensor | None
) -> Tensor:
    kept = Kept(taken)
    codes, group_offsets = kept.rows(codes), kept.offsets(group_offsets)
    labels = torch.empty(codes.shape[0], dtype=torch.int64)
    load().cluster_exact(codes.data_ptr(), group_offsets.data_ptr(), group_offsets.shape[0] - 1, labels.data_ptr())
    return kept.spread(labels, -1)


def cluster_history(
    codes: Tensor,
    step: Tensor | None,
    trajectory_offsets: Tensor,
    group_offsets: Tensor,
    depth: int,
    *,
    n_trajectories: int,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
) -> Tensor:
    kept = Kept(taken)
    codes, step = kept.rows(codes), kept.rows(step)
    trajectory_offsets, group_offsets = kept.offsets(trajectory_offsets), kept.offsets(group_offsets)
    labels = torch.empty((depth, codes.shape[0]), dtype=torch.int64)
    load().cluster_history(
        codes.data_ptr(), 0 if step is None else step.data_ptr(), trajectory_offsets.data_ptr(),
        trajectory_offsets.shape[0] - 1, group_offsets.data_ptr(), group_offsets.shape[0] - 1, depth, labels.data_ptr(),
    )  # fmt: skip
    return kept.spread(labels, -1)
