"""Greedy cosine clusters on the device of the hidden states (labels of reference.clusters), without synchronizing.

    one pass over the rows ─► Gram matrix of every group (gram.py) ─► decisions in order (scan.py) ─► numbers

The pass over the rows, the numbers and equal rows (ε = 0) are Triton's.  ε is only a threshold in the scan, so a sweep
is the same launches with one more grid axis.  A Gram matrix's elements and the scan's decisions depend on a group's
own records, D, dtype and the GPU's architecture, whatever the launch.  A group of n records takes 4 n² bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..records import Records
from ..triton.clusters import Rows, scan_rows, sweep_with
from . import gram, scan

__all__ = ["cluster_cosine", "cluster_sweep", "scan_rows"]


@dataclass(frozen=True)
class Limits:
    """How the work is split among launches; results have the same bits whatever they are."""

    middle: int = 1_024  # groups of at least this many are apart from shorter ones where there are few of them
    room: int = 1 << 28  # float32 values of the Gram matrices that are made at a time, beyond one: 1 GiB
    shared: int = 227 << 10  # bytes of shared memory that a scan asks for at most, where the GPU has them


LIMITS = Limits()


def cluster_cosine(records: Records, fingerprint: Tensor, epsilon: float) -> Tensor:
    """A record whose row has no direction is a cluster of its own even if it is not marked as unusable."""
    return cluster_sweep(records, fingerprint, [epsilon])[0]


def cluster_sweep(
    records: Records, fingerprint: Tensor, epsilons: Sequence[float], limits: Limits | None = None
) -> Tensor:
    """The same bits as cluster_cosine, from one Gram matrix per group."""
    return sweep_with(partial(_decide, limits=limits or LIMITS), records, fingerprint, epsilons)


def _decide(records: Records, rows: Rows, lowest: list[float], first: Tensor, *, limits: Limits) -> None:
    """first [E, M] of ε > 0: the record that began each cluster."""
    offsets, n, longest = records.group_offsets, records.n_records, records.longest_group
    begins, ends, middle = offsets[:-1], offsets[1:], limits.middle
    if longest < middle or n // middle >= records.n_groups:
        _decide_some(records, rows, begins, ends, longest, lowest, first, limits)
        return
    # Few are as long as the longest: matrices of its size for all of them would be many times the memory.
    _decide_some(records, rows, begins, ends, middle - 1, lowest, first, limits)
    # No two of the others begin within `middle` records, so each has a slot, and their number need not be known; short
    # ones share a slot behind them.
    slots = n // middle
    slot = torch.where(ends - begins < middle, slots, begins // middle).expand(2, -1)
    places = offsets.new_zeros((2, slots + 1)).scatter_(1, slot, torch.stack([begins, ends]))[:, :slots]
    _decide_some(records, rows, places[0], places[1], longest, lowest, first, limits)


def _decide_some(
    records: Records,
    rows: Rows,
    begins: Tensor,  # [slots] int64
    ends: Tensor,  # [slots] int64
    longest: int,  # longer groups are left out
    lowest: list[float],
    first: Tensor,
    limits: Limits,
) -> None:
    """As many groups at a time as their Gram matrices have room, and as many ε as their scratch has."""
    device, slots = first.device, begins.shape[0]
    side = max(1, -(-longest // gram.UNIT)) * gram.UNIT
    at_once = min(slots, max(1, limits.room // side**2))
    sweep = max(1, limits.room // (at_once * scan.SCRATCH * side))
    reciprocal = torch.empty(records.n_records, dtype=torch.float32, device=device)
    for slot in range(0, slots, at_once):
        groups = gram.Groups(_some(begins, slot, at_once), _some(ends, slot, at_once), longest + 1)
        products = torch.empty((groups.begins.shape[0], side, side), dtype=torch.float32, device=device)
        gram.multiply(rows.fingerprint, records.order, groups, rows.scale, products, reciprocal)
        for e in range(0, len(lowest), sweep):
            some = _some(first, e, sweep)
            scan.decide(products, rows.kind, groups, reciprocal, lowest[e : e + sweep], some, limits.shared)


def _some(values: Tensor, start: int, count: int) -> Tensor:
    """values[start : start + count]; where that is all, no view of it, which would take the host microseconds."""
    return values if count >= values.shape[0] else values[start : start + count]
