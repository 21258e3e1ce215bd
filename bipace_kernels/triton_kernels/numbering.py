"""Dense cluster numbers by first appearance, by a prefix sum in torch; the host need not know the number of clusters."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def dense_labels(first: Tensor) -> Tensor:
    """Clusters numbered over the batch from 0 by first appearance in processing order.

    first   [M] or [E, M] int64   the record that began the record's cluster: first[i] ≤ i and first[first[i]] = first[i];
            −1: the record has no cluster.  Each row of [E, M] has its own numbering.
    Returns labels of the same shape, int64; −1 where first is −1.
    """
    begins = first == torch.arange(first.shape[-1], device=first.device)
    number = begins.cumsum(-1) - 1  # number of the cluster that the record seeds, if any
    return torch.where(first >= 0, number.gather(-1, first.clamp(min=0)), -1)
