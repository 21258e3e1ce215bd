"""Partition by difflib's ratio, as a plain loop."""

from __future__ import annotations

from difflib import SequenceMatcher

import torch


def cluster_similar(
    texts: list[str], group_offsets: torch.Tensor, similarity: float, *, num_threads: int = 1
) -> torch.Tensor:
    """First fit by ratio >= similarity against each cluster's first member, oldest cluster first."""
    labels: list[int] = []
    n_clusters = 0
    offsets = group_offsets.tolist()
    for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
        clusters: list[tuple[str, int]] = []
        for text in texts[begin:end]:
            for first, label in clusters:
                if SequenceMatcher(None, text, first).ratio() >= similarity:
                    break
            else:
                label, n_clusters = n_clusters, n_clusters + 1
                clusters.append((text, label))
            labels.append(label)
    return torch.tensor(labels, dtype=torch.int64)
