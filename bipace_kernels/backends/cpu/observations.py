"""Partitions by observations, by the compiled kernels (csrc/cpu/observations.cpp)."""

import torch
from torch import Tensor

from ..native_loader import load
from ..records import Records


def cluster_exact(records: Records, codes: Tensor) -> Tensor:
    labels = torch.empty(codes.shape[0], dtype=torch.int64)
    load().cluster_exact(codes, records.group_offsets, records.n_groups, labels)
    return labels


def cluster_history(records: Records, codes: Tensor, depth: int) -> Tensor:
    r, labels = records, torch.empty((depth, codes.shape[0]), dtype=torch.int64)
    load().cluster_history(
        codes, r.step, r.trajectory_offsets, r.n_trajectories, r.group_offsets, r.n_groups, depth, labels
    )
    return labels
