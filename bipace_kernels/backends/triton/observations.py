"""Partitions by observations: equal observations, equal histories.  Sorts and prefix sums by torch, all in integers.

A record's cluster is named by the first record of its group that equals it; `numbering` makes dense labels of these.  A
history of k codes is the pair (history of k − 1 codes one step earlier, own code), and a pair of record numbers is one
integer.
"""

import torch
from torch import Tensor

from ..records import Records
from .numbering import dense_labels


def cluster_exact(records: Records, codes: Tensor) -> Tensor:
    return dense_labels(_first_equal(codes, _run_of(records.group_offsets, codes.shape[0]), records.taken))


def cluster_history(records: Records, codes: Tensor, depth: int) -> Tensor:
    m = codes.shape[0]
    if not m:
        return codes.new_empty((depth, 0))
    group = _run_of(records.group_offsets, m)
    own = _first_equal(codes, group, records.taken)
    earlier = _earlier(records.step, records.trajectory_offsets, m)
    first = [own]
    for _ in range(1, depth):
        history = torch.where(earlier >= 0, first[-1][earlier.clamp(min=0)], -1)
        has_one = (history >= 0) & (own >= 0)
        # Both are below m, and m² below 2⁶³ for any batch under 3 · 10⁹ records.
        first.append(_first_equal(history * m + own, group, has_one))
    return dense_labels(torch.stack(first))


def _first_equal(codes: Tensor, group: Tensor, counts: Tensor | None) -> Tensor:
    """[M] int64: the first record of the record's group with its code; −1 if it is ignored."""
    if counts is not None:
        group = torch.where(counts, group, -1)  # ignored records are compared among themselves
    by_code = codes.sort(stable=True).indices
    order = by_code[group[by_code].sort(stable=True).indices]  # equal records contiguous, in processing order
    c, g, place = codes[order], group[order], torch.arange(codes.shape[0], device=codes.device)
    begins = torch.ones_like(place, dtype=torch.bool)
    begins[1:] = (c[1:] != c[:-1]) | (g[1:] != g[:-1])
    start = torch.where(begins, place, 0).cummax(0).values if place.numel() else place
    first = torch.empty_like(place)
    first[order] = order[start]
    return first if counts is None else torch.where(counts, first, -1)


def _earlier(step: Tensor | None, trajectory_offsets: Tensor, m: int) -> Tensor:
    """[M] int64: the first record of the step before the record's in its trajectory; −1: none.

    A step recorded twice is in later histories once, by its first record.
    """
    place = torch.arange(m, device=trajectory_offsets.device)
    begin = trajectory_offsets[_run_of(trajectory_offsets, m)]
    own = place  # the first record of the record's own step
    if step is not None:
        begins = place == begin
        begins[1:] |= step[1:] != step[:-1]
        own = torch.where(begins, place, 0).cummax(0).values
    return torch.where(own > begin, own[(own - 1).clamp(min=0)], -1)


def _run_of(offsets: Tensor, m: int) -> Tensor:
    """[M] int64 number of the run of each position; offsets [S+1], runs may be empty."""
    return torch.searchsorted(offsets, torch.arange(m, device=offsets.device), right=True) - 1
