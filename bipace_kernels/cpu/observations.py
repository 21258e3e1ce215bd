"""Partitions by what was observed, by the compiled kernels."""

from __future__ import annotations

import torch

from .._native_loader import load

Tensor = torch.Tensor


def cluster_exact(
    codes: Tensor,  # [M] int64, equal where the observations are equal
    group_offsets: Tensor,  # [G+1] int64
    *,
    num_threads: int = 1,
) -> Tensor:  # [M] int64
    """Clusters of equal codes inside each group, numbered over the batch by first appearance."""
    labels = torch.empty(codes.shape[0], dtype=torch.int64)
    load().cluster_exact(codes.data_ptr(), group_offsets.data_ptr(), group_offsets.shape[0] - 1, labels.data_ptr())
    return labels


def cluster_history(
    codes: Tensor,  # [M] int64
    step: Tensor | None,  # [M] int64
    trajectory_offsets: Tensor,  # [T+1] int64
    group_offsets: Tensor,  # [G+1] int64
    depth: int,
    *,
    num_threads: int = 1,
) -> Tensor:  # [depth, M] int64
    """Row k−1: clusters by the last k codes, the record's own included; −1 where it has fewer."""
    labels = torch.empty((depth, codes.shape[0]), dtype=torch.int64)
    load().cluster_history(
        codes.data_ptr(), 0 if step is None else step.data_ptr(), trajectory_offsets.data_ptr(),
        trajectory_offsets.shape[0] - 1, group_offsets.data_ptr(), group_offsets.shape[0] - 1, depth, labels.data_ptr(),
    )  # fmt: skip
    return labels
