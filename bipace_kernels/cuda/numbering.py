"""Dense cluster numbers by first appearance, without the host knowing how many clusters there are."""

from __future__ import annotations

import torch

from ._launch import WARP, launch

Tensor = torch.Tensor

# As in csrc/cuda/numbering.cu.
_THREADS = 256
_CHUNK = 4 * _THREADS
_ROOM = 4 * _THREADS // WARP  # bytes

MOST_BLOCKS = 4096  # of a row: a block keeps their totals in shared memory, 16 KB, and has longer parts of longer rows


def dense_labels(first: Tensor) -> Tensor:
    """Clusters numbered over the batch from 0 by first appearance in processing order.

    first   [M] or [E, M] int64   the record that began the record's cluster: first[i] ≤ i and first[first[i]] = first[i];
            −1: the record has no cluster.  Each row of [E, M] is numbered by itself.  Contiguous.
    Returns labels of the same shape, int64; −1 where first is −1.
    """
    labels = torch.empty_like(first)
    if not first.numel():
        return labels
    n = first.shape[-1]
    rows = first.numel() // n
    per_block = _CHUNK * -(-n // (_CHUNK * MOST_BLOCKS))
    blocks = -(-n // per_block)
    rank = torch.empty(first.shape, dtype=torch.int32, device=first.device)
    totals = torch.empty((rows, blocks), dtype=torch.int32, device=first.device)
    grid = rows * blocks
    launch(
        "rank_beginners", grid, _THREADS, first, rank, totals, n, blocks, per_block, device=first.device, shared=_ROOM
    )
    launch(
        "number_clusters", grid, _THREADS, first, rank, totals, labels, n, blocks, per_block, device=first.device,
        shared=_ROOM + 4 * blocks,
    )  # fmt: skip
    return labels
