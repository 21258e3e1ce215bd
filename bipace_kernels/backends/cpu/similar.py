"""Partition "similar" in C++: difflib's decisions at any thread count; pairs that cannot be similar are skipped."""

import torch
from torch import Tensor

from .. import native_loader, threads


def cluster_similar(texts: list[str], group_offsets: Tensor, similarity: float) -> Tensor:
    labels = torch.empty(len(texts), dtype=torch.int64)
    groups = group_offsets.numel() - 1
    native_loader.load().cluster_similar(tuple(texts), group_offsets, groups, similarity, threads.count(), labels)
    return labels
