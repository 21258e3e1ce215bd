"""Greedy cosine clusters on the device of the hidden states (labels of reference.clusters), without synchronizing.

    one pass over the rows ─► Gram matrix of every group (gram.py) ─► decisions in order (scan.py) ─► numbers
    long groups: the same, a block of columns after the other

The look, the numbers and equal rows (ε = 0) are Triton's.  ε is only a threshold in the scan, so a sweep is the same
launches with one more grid axis.  A Gram matrix's elements and the scan's decisions depend on a group's own records, D,
dtype and the GPU's architecture, whatever the launch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..records import Records
from ..schema import BAND
from ..triton import clusters as triton_clusters
from . import gram, scan
from ._launch import launch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Limits:
    """How the work is split among launches; results have the same bits whatever they are."""

    # Groups of at least this many records go by blocks of columns: a whole matrix would take 256 MB.
    long_group: int = 8_192
    middle: int = 1_024  # groups of at least this many are apart from shorter ones where there are few of them
    columns: int = 1_024  # of a block; a multiple of gram.UNIT
    room: int = 1 << 28  # float32 values of the Gram matrices that are made at a time: 1 GiB
    shared: int = 227 << 10  # bytes of shared memory that a scan asks for at most, where the GPU has them


LIMITS = Limits()

scan_rows = triton_clusters.scan_rows


def cluster_cosine(records: Records, fingerprint: Tensor, epsilon: float) -> Tensor:
    """A record whose row has no direction is a cluster of its own even if it is not marked as unusable."""
    return cluster_sweep(records, fingerprint, [epsilon])[0]


def cluster_sweep(
    records: Records, fingerprint: Tensor, epsilons: Sequence[float], limits: Limits | None = None
) -> Tensor:
    """The same bits as cluster_cosine, from one Gram matrix per group."""
    batch = partial(Clustering, limits=limits or LIMITS)
    return triton_clusters.sweep_with(batch, records, fingerprint, epsilons)


@dataclass(frozen=True)
class Clustering(triton_clusters.Clustering):
    """A batch by these kernels; the methods write `first`, the record that began each cluster."""

    limits: Limits = LIMITS

    def cluster(self, epsilons: Sequence[float], first: Tensor) -> None:
        """first [E, M] of ε > 0: groups with a whole Gram matrix, and long ones, which have none."""
        lowest = [1.0 - epsilon - BAND for epsilon in epsilons]
        reciprocal = self._empty(self.order.shape[0])
        if self.longest_group >= self.limits.long_group:
            self._cluster_long(lowest, reciprocal, first)
            if self.n_groups == 1:
                return
        offsets, longest = self.group_offsets, min(self.longest_group, self.limits.long_group - 1)
        if longest < self.limits.middle or self.order.shape[0] // self.limits.middle >= self.n_groups:
            self._cluster_whole(offsets[:-1], offsets[1:], longest, self.limits.long_group, lowest, reciprocal, first)
            return
        # Few are as long as the longest: matrices of its size for all of them would be many times the memory.
        self._cluster_whole(
            offsets[:-1], offsets[1:], self.limits.middle - 1, self.limits.middle, lowest, reciprocal, first
        )
        self._cluster_whole(
            *self._longer(self.limits.middle), longest, self.limits.long_group, lowest, reciprocal, first
        )

    def _longer(self, shortest: int) -> tuple[Tensor, Tensor]:
        """Where groups of at least this many records begin and end [slots]: nothing in slots without one.

        No two of them begin within `shortest` records, so each has a slot, and their number need not be known.
        """
        places = torch.zeros((2, self.order.shape[0] // shortest), dtype=torch.int64, device=self.order.device)
        launch(
            "find_long_groups", -(-self.n_groups // 256), 256,
            group_offsets=self.group_offsets, n_groups=self.n_groups, shortest=shortest, begins=places[0], ends=places[1],
            device=self.order.device,
        )  # fmt: skip
        return places[0], places[1]

    def _cluster_whole(
        self,
        begins: Tensor,  # [groups] int64
        ends: Tensor,  # [groups] int64
        longest: int,  # of their records
        long_group: int,  # groups of this length or more are left out
        lowest: list[float],
        reciprocal: Tensor,
        first: Tensor,
    ) -> None:
        """Groups with a whole Gram matrix each, as many at a time as there is room for."""
        side, n_groups = scan.side_of(longest), begins.shape[0]
        at_once = min(n_groups, max(1, self.limits.room // side**2))
        for g in range(0, n_groups, at_once):
            some_begins, some_ends = _some(begins, g, at_once), _some(ends, g, at_once)
            products = self._empty(some_begins.shape[0], side, side)
            self._multiply(some_begins, some_ends, products, reciprocal, 0, long_group)
            # S of a sweep that does not fit into shared memory, and its decisions.
            sweep = max(1, self.limits.room // (products.shape[0] * (2 * scan.PANEL + 6) * side))
            for e in range(0, len(lowest), sweep):
                decisions = scan.Scan(
                    self.kind, some_begins, some_ends, reciprocal, lowest[e : e + sweep], side, side, long_group,
                    self.limits.shared,
                )  # fmt: skip
                decisions.run(products, 0, _some(first, e, sweep))

    def _cluster_long(self, lowest: list[float], reciprocal: Tensor, first: Tensor) -> None:
        """Long groups, some columns of all of them at a time, which the ε share as far as there is room for their S."""
        columns, most, shared = self.limits.columns, self.limits.room, self.limits.shared
        begins_of, ends_of = self._longer(self.limits.long_group)
        slots, longest = begins_of.shape[0], scan.side_of(self.longest_group)
        at_once = min(slots, max(1, most // (longest * columns)))
        sweep = max(1, most // (at_once * longest * columns))
        # Of the matrices, the largest of which is the last.
        room = self._empty(at_once * longest * min(columns, longest))
        for s, e in itertools.product(range(0, slots, at_once), range(0, len(lowest), sweep)):
            begins, ends = begins_of[s : s + at_once], ends_of[s : s + at_once]
            scans = [
                scan.Scan(self.kind, begins, ends, reciprocal, [value], longest, columns, longest + 1, shared)
                for value in lowest[e : e + sweep]
            ]
            for column in range(0, longest, columns):
                n_rows = min(column + columns, longest)
                shape = (begins.shape[0], n_rows, n_rows - column)
                products = room[: math.prod(shape)].view(shape)
                self._multiply(begins, ends, products, reciprocal, column, longest + 1)
                for i, one in enumerate(scans, e):
                    one.run(products, column, first[i : i + 1])

    def _multiply(
        self, begins: Tensor, ends: Tensor, products: Tensor, reciprocal: Tensor, first_column: int, long_group: int
    ) -> None:
        gram.multiply(
            self.fingerprint, self.order, begins, ends, self.scale, products, reciprocal, first_column=first_column,
            long_group=long_group,
        )  # fmt: skip

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.order.device)


def _some(values: Tensor, start: int, count: int) -> Tensor:
    """values[start : start + count]; where that is all, no view of it, which would take the host microseconds."""
    return values if count >= values.shape[0] else values[start : start + count]
