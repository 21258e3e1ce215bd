"""Partition "similar" in C++: difflib's decisions, pairs that cannot reach the threshold skipped."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native_loader


def cluster_similar(
    texts: list[str],  # [M] processing order
    group_offsets: Tensor,  # [G+1] int64
    similarity: float,
    *,
    num_threads: int = 1,
) -> Tensor:
    """Labels [M] int64; see reference.similar.  The same labels as difflib gives, at any thread count."""
    labels = torch.empty(len(texts), dtype=torch.int64)
    _native_loader.load().cluster_similar(
        texts, group_offsets.data_ptr(), group_offsets.numel() - 1, similarity, num_threads, labels.data_ptr()
    )
    return labels
