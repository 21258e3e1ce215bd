"""Partitions by what was observed: equal observations, equal histories.

A record's cluster is named by the first record of its group that equals it, found by comparing codes, so no two
observations are ever taken for one; `numbering` makes dense labels of these.  A history of k codes is the pair (history
of k − 1 codes one step earlier, own code), and a pair of record numbers is one integer.
"""

from __future__ import annotations

import torch

from ._launch import WARP, launch
from .numbering import dense_labels

Tensor = torch.Tensor

# As in csrc/cuda/observations.cu.
_THREADS = 128
_SHARED = 8 * 4 * _THREADS  # bytes: four codes a thread


def cluster_exact(
    codes: Tensor,  # [M] int64, equal where the observations are equal
    group_offsets: Tensor,  # [G+1] int64
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,  # [M] bool: False for records set aside
) -> Tensor:  # [M] int64
    """Clusters of equal codes inside each group, numbered over the batch by first appearance; −1: set aside."""
    first = torch.empty_like(codes)
    _first_equal(codes, group_offsets, taken, first, n_groups, longest_group, negative_is_none=False)
    return dense_labels(first)


def cluster_history(
    codes: Tensor,  # [M] int64
    step: Tensor | None,  # [M] int64
    trajectory_offsets: Tensor,  # [T+1] int64
    group_offsets: Tensor,  # [G+1] int64
    depth: int,
    *,
    n_trajectories: int,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,  # [M] bool: False for records set aside, whole trajectories of them
) -> Tensor:  # [depth, M] int64
    """Row k−1: clusters by the last k codes, the record's own included; −1 where it has fewer, or is set aside."""
    m = codes.shape[0]
    first = torch.empty((depth, m), dtype=torch.int64, device=codes.device)
    if not first.numel():
        return first
    _first_equal(codes, group_offsets, taken, first[0], n_groups, longest_group, negative_is_none=False)
    if depth > 1:
        earlier, pairs = torch.empty_like(codes), torch.empty_like(codes)
        launch("earlier_step", n_trajectories, WARP, step, trajectory_offsets, earlier, device=codes.device)
        for k in range(1, depth):
            launch(
                "pair_histories", -(-m // _THREADS), _THREADS, earlier, first[k - 1], first[0], pairs, m,
                device=codes.device,
            )  # fmt: skip
            _first_equal(pairs, group_offsets, None, first[k], n_groups, longest_group, negative_is_none=True)
    return dense_labels(first)


def _first_equal(
    codes: Tensor,  # [M] int64
    group_offsets: Tensor,  # [G+1] int64
    taken: Tensor | None,  # [M] bool
    first: Tensor,  # [M] int64, written
    n_groups: int,
    longest_group: int,
    *,
    negative_is_none: bool,
) -> None:
    blocks = -(-longest_group // _THREADS)
    launch(
        "first_equal", n_groups * blocks, _THREADS, codes, group_offsets, taken, first, blocks, negative_is_none,
        device=codes.device, shared=_SHARED,
    )  # fmt: skip
