"""Cluster sizes under many ε, computed on the labels' device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Sizes:
    """Cluster sizes of a batch under one ε."""

    median: float  # of the cluster sizes; 0 without clusters
    singletons: float  # share of clusters of one record
    clusters: int


def measure_sizes(labels: Tensor) -> list[Sizes]:
    """Sizes under each ε.

    labels   [E, M] int64, dense but for gaps; −1: the record is ignored
    """
    if labels.is_cpu:
        return [_of(np.bincount(row[row >= 0])) for row in labels.numpy()]
    return [  # one synchronizing copy from the device
        Sizes((low + high) / 2, single / count, count) if count else Sizes(0.0, 0.0, 0)
        for low, high, single, count in size_table(labels).tolist()
    ]


def _of(sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Sizes:
    sizes = sizes[sizes > 0]
    if not sizes.size:
        return Sizes(0.0, 0.0, 0)
    return Sizes(float(np.median(sizes)), float((sizes == 1).mean()), int(sizes.size))


def size_table(labels: Tensor) -> Tensor:
    """[E, 4] int64: the two middle sizes, clusters of one, clusters.  Labels [E, M] int64 are not read on the host."""
    n_records = labels.shape[1]
    size = _counts(labels + 1, n_records + 1)
    size[:, 0] = 0  # of the ignored records
    how_many = _counts(size, n_records + 1)  # clusters of each size
    how_many[:, 0] = 0  # numbers without a record
    up_to = how_many.cumsum(1)  # clusters of at most that size
    count = up_to[:, -1:]
    # The two middle ones (equal if the count is odd): the first size whose cumulative count reaches the middle.
    middle = torch.searchsorted(up_to, torch.cat([(count + 1) // 2, count // 2 + 1], dim=1))
    single = how_many[:, 1:2] if n_records else torch.zeros_like(count)
    return torch.cat([middle, single, count], dim=1)


def _counts(values: Tensor, n: int) -> Tensor:
    """[E, n] int64: counts of 0 … n − 1 in each row of values, [E, M] int64."""
    out = torch.zeros(values.shape[0], n, dtype=torch.int64, device=values.device)
    place = values + n * torch.arange(values.shape[0], device=values.device)[:, None]
    # Flat: torch.use_deterministic_algorithms() may refuse sums into rows on a GPU, but accepts this.
    out.view(-1).scatter_add_(0, place.view(-1), torch.ones_like(place).view(-1))
    return out
