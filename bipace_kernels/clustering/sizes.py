"""Cluster sizes under many ε."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """Cluster sizes of a batch under one ε."""

    median: float  # of the cluster sizes; 0 without clusters
    singletons: float  # share of clusters of one record
    clusters: int


def measure_sizes(labels: Tensor) -> list[Sizes]:
    """Sizes under each ε; labels on a GPU are copied to the host, which synchronizes.

    labels   [E, M] int64, dense but for gaps; −1: the record is ignored
    """
    measured = []
    for row in labels.cpu().numpy():
        sizes = np.bincount(row[row >= 0])
        sizes = sizes[sizes > 0]
        if sizes.size:
            measured.append(Sizes(float(np.median(sizes)), float((sizes == 1).mean()), int(sizes.size)))
        else:
            measured.append(Sizes(0.0, 0.0, 0))
    return measured
