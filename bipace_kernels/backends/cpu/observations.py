"""Partitions by observations, by the compiled kernels (csrc/cpu/observations.cpp)."""

from __future__ import annotations

import torch

from ..native_loader import load
from ..records import Records
from .clusters import address, groups

Tensor = torch.Tensor


def cluster_exact(records: Records, codes: Tensor) -> Tensor:
    labels = torch.empty(codes.shape[0], dtype=torch.int64)
    load().cluster_exact(codes.data_ptr(), *groups(records), labels.data_ptr())
    return labels


def cluster_history(records: Records, codes: Tensor, depth: int) -> Tensor:
    labels = torch.empty((depth, codes.shape[0]), dtype=torch.int64)
    load().cluster_history(
        codes.data_ptr(), address(records.step), records.trajectory_offsets.data_ptr(), records.n_trajectories,
        *groups(records), depth, labels.data_ptr(),
    )  # fmt: skip
    return labels
