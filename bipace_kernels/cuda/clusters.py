"""Greedy cosine clusters where the hidden states are (labels of reference.clusters), without a wait for the device.

    one look at the rows (rows.py) ─► Gram matrix of every group (gram.py) ─► decisions in order (scan_groups) ─► numbers
    long groups: the same, a block of columns after the other                 ε = 0: equal rows; ε > 1.87: cluster_wide

ε is only a threshold in the scan, so a sweep is the same launches with one more grid axis.  A Gram matrix's elements and
the scan's decisions depend on a group's own records, D, dtype and the GPU's architecture alone, whatever the launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import _provider, gram, rows
from ._launch import launch
from .numbering import dense_labels

Tensor = torch.Tensor

LONG_GROUP = 8_192  #: groups of at least so many records go by blocks of columns: a whole matrix would take 256 MB
COLUMNS = 1_024  # of a block; a multiple of gram.UNIT
LONGEST_SWEEP = LONG_GROUP - 1  #: records of a group whose ε share a Gram matrix
MOST_SHARED = 227 << 10  # bytes that a scan asks for at most, where the GPU has them
ROOM = 1 << 28  # float32 values of the Gram matrices that are made at a time: 1 GiB
BAND = 1e-5  # τ
WIDEST = 1.87  #: of ε, for which no two opposite rows join
PANEL = 32
_SCAN_THREADS, _WIDE_THREADS = 512, 256
_WRITTEN = 64  # values that one launch writes
# Bytes of csrc/cuda/scan.h's stages, and of the number of clusters.
_STAGES, _COUNT = 3 * (64 * 32 * 4 + 4 * 64 * 4), 16


def scan_rows(
    fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16, any strides
    order: Tensor,  # [M] int64 row of the record
) -> Tensor:  # [M] uint8
    """0 fine, 1 holds a non-finite value, 2 zero norm (all zeros)."""
    state = torch.empty(order.shape[0], dtype=torch.uint8, device=order.device)
    rows.look(fingerprint, order, state=state)
    return state


def cluster_cosine(
    fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16, any strides
    order: Tensor,  # [M] int64 row of the record, in processing order
    group_offsets: Tensor,  # [G+1] int64
    usable: Tensor | None,  # [M] bool
    epsilon: float,  # 0: equal rows
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,  # [M] bool; False: the record takes part in nothing
) -> Tensor:  # [M] int64
    """Labels 0..C-1 over the batch by first appearance in processing order; −1 where not taken.

    A record that is not usable, or whose row has no direction, is a cluster of its own and touches nobody.
    """
    return cluster_sweep(
        fingerprint,
        order,
        group_offsets,
        usable,
        [epsilon],
        n_groups=n_groups,
        longest_group=longest_group,
        taken=taken,
    )[0]


def cluster_sweep(
    fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16, any strides
    order: Tensor,  # [M] int64
    group_offsets: Tensor,  # [G+1] int64
    usable: Tensor | None,  # [M] bool
    epsilons: Sequence[float],  # E values
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,  # [M] bool
) -> Tensor:  # [E, M] int64
    """cluster_cosine under each ε, with the same bits, from one Gram matrix per group."""
    n, device = order.shape[0], order.device
    first = torch.empty((len(epsilons), n), dtype=torch.int64, device=device)
    if not first.numel():
        return first
    exact = [e for e, epsilon in enumerate(epsilons) if epsilon == 0]
    wide = [e for e, epsilon in enumerate(epsilons) if epsilon > WIDEST]
    rest = [e for e, epsilon in enumerate(epsilons) if 0 < epsilon <= WIDEST]
    kind = torch.empty(n, dtype=torch.uint8, device=device)
    scale = torch.empty(n, dtype=torch.float32, device=device)
    row_hash = torch.empty(n, dtype=torch.int64, device=device) if exact else None
    rows.look(fingerprint, order, kind=kind, scale=scale, row_hash=row_hash, usable=usable, taken=taken)
    batch = Batch(fingerprint, order, group_offsets, kind, scale, n_groups, longest_group)
    for e in exact:
        assert row_hash is not None
        rows.first_equal(
            fingerprint,
            order,
            group_offsets,
            kind,
            row_hash,
            n_groups=n_groups,
            longest_group=longest_group,
            first=first[e],
        )
    for e in wide:
        batch.cluster_wide(epsilons[e], first[e])
    if rest:
        found = first if len(rest) == len(epsilons) else torch.empty((len(rest), n), dtype=torch.int64, device=device)
        batch.cluster([epsilons[e] for e in rest], found)
        if found is not first:
            for e, labels in zip(rest, found, strict=True):
                first[e].copy_(labels)
    return dense_labels(first)


@dataclass(frozen=True)
class Batch:
    """What every launch below is told of the records; the methods write `first`, the record that began each cluster."""

    fingerprint: Tensor  # [N, D]
    order: Tensor  # [M] int64
    group_offsets: Tensor  # [G+1] int64
    kind: Tensor  # [M] uint8
    scale: Tensor  # [M] float32
    n_groups: int
    longest_group: int

    def cluster(self, epsilons: Sequence[float], first: Tensor) -> None:
        """first [E, M] of 0 < ε ≤ 1.87: groups with a whole Gram matrix, then those without."""
        lowest = [1.0 - epsilon - BAND for epsilon in epsilons]
        reciprocal = self._empty(self.order.shape[0])
        side = side_of(min(self.longest_group, LONG_GROUP - 1))
        at_once = min(self.n_groups, max(1, ROOM // side**2))
        begins, ends = self.group_offsets[:-1], self.group_offsets[1:]
        for g in range(0, self.n_groups, at_once):
            part = slice(g, min(g + at_once, self.n_groups))
            products = self._empty(part.stop - g, side, side)
            self._multiply(begins[part], ends[part], products, reciprocal, 0, LONG_GROUP)
            # S of a sweep that does not fit into shared memory, and its decisions.
            sweep = max(1, ROOM // ((part.stop - g) * (2 * PANEL + 6) * side))
            for e in range(0, len(lowest), sweep):
                some = lowest[e : e + sweep]
                scan = Scan(self, begins[part], ends[part], reciprocal, some, side, side, LONG_GROUP)
                scan.run(products, 0, first[e : e + sweep])
        if self.longest_group >= LONG_GROUP:
            self._cluster_long(lowest, reciprocal, first)

    def _cluster_long(self, lowest: list[float], reciprocal: Tensor, first: Tensor) -> None:
        """Long groups, COLUMNS columns of all of them at a time, which the ε share as far as there is room for their S."""
        slots = self.order.shape[0] // LONG_GROUP  # no two long groups begin within LONG_GROUP records
        places = torch.zeros((2, slots), dtype=torch.int64, device=self.order.device)
        launch(
            "find_long_groups", -(-self.n_groups // 256), 256,
            self.group_offsets, self.n_groups, LONG_GROUP, places[0], places[1], device=self.order.device,
        )  # fmt: skip
        longest = side_of(self.longest_group)
        at_once = min(slots, max(1, ROOM // (longest * COLUMNS)))
        sweep = max(1, ROOM // (at_once * longest * COLUMNS))
        for s, e in itertools.product(range(0, slots, at_once), range(0, len(lowest), sweep)):
            begins, ends = places[0, s : s + at_once], places[1, s : s + at_once]
            scans = [
                Scan(self, begins, ends, reciprocal, [value], longest, COLUMNS, longest + 1)
                for value in lowest[e : e + sweep]
            ]
            for column in range(0, longest, COLUMNS):
                n_rows = min(column + COLUMNS, longest)
                products = self._empty(begins.shape[0], n_rows, n_rows - column)
                self._multiply(begins, ends, products, reciprocal, column, longest + 1)
                for i, scan in enumerate(scans, e):
                    scan.run(products, column, first[i : i + 1])

    def _multiply(
        self, begins: Tensor, ends: Tensor, products: Tensor, reciprocal: Tensor, first_column: int, long_group: int
    ) -> None:
        gram.multiply(
            self.fingerprint, self.order, begins, ends, self.scale, products, reciprocal, first_column=first_column,
            long_group=long_group,
        )  # fmt: skip

    def cluster_wide(self, epsilon: float, first: Tensor) -> None:
        """first [M] of an ε so wide that opposite rows may join."""
        dim = self.fingerprint.shape[1]
        at_once = min(self.n_groups, max(1, ROOM // (2 * self.longest_group * dim)))
        centroids = self._empty(at_once, self.longest_group, dim, dtype=torch.float64)
        similar = self._empty(at_once, self.longest_group, dtype=torch.float64)
        members = self._empty(at_once, 2, self.longest_group, dtype=torch.int64)
        for g in range(0, self.n_groups, at_once):
            launch(
                "cluster_wide", min(at_once, self.n_groups - g), _WIDE_THREADS, *rows.words(self.fingerprint, self.order),
                self.scale, self.kind, self.group_offsets, g, self.longest_group, 1.0 - epsilon - BAND, centroids, similar,
                members, first, shared=8 * _WIDE_THREADS // 32, device=first.device,
            )  # fmt: skip

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.order.device)


class Scan:
    """The decisions of some groups under E values of ε, and their scratch."""

    def __init__(
        self,
        batch: Batch,
        begins: Tensor,  # [slots] int64
        ends: Tensor,  # [slots] int64
        reciprocal: Tensor,  # [M] float32
        lowest: list[float],  # E
        room: int,  # ≥ records of a group
        columns: int,  # of a launch, at most
        long_group: int,
        spare: int = 0,  # bytes of shared memory that others of the launch take
    ) -> None:
        device, e, slots = batch.order.device, len(lowest), begins.shape[0]
        self.batch, self.begins, self.ends, self.reciprocal = batch, begins, ends, reciprocal
        self.lowest, self.room, self.long_group = lowest, room, long_group
        self.lowest_of = _on_device(lowest, device) if e > 1 else None
        self.far_pitch = room + 1
        self.capacity = capacity(device, room, spare)
        self.far_panels = 2 if columns == room else columns // PANEL
        self.similar = None
        if self.capacity < room + 2 * PANEL or self.far_panels > 2:
            self.similar = batch._empty(e, slots, self.far_panels, PANEL, self.far_pitch)
        self.decisions = batch._empty(e, slots, 6, room)
        self.counts = batch._empty(e, slots, dtype=torch.int32)
        self.shared = shared_bytes(self.capacity)

    def words(
        self, products: Tensor, first_column: int, first: Tensor | None
    ) -> tuple[Tensor | int | float | None, ...]:
        """`ScanArgs` of csrc/cuda/scan.h."""
        return (
            self.begins, self.ends, self.long_group, first_column, products.shape[2], products, products.shape[1],
            self.reciprocal, self.batch.kind, self.lowest_of, float(self.lowest[0]), self.capacity, self.similar,
            self.far_panels, self.far_pitch, self.decisions, self.room, self.counts, first,
            0 if first is None else first.stride(0),
        )  # fmt: skip

    def run(self, products: Tensor, first_column: int, first: Tensor) -> None:
        """The launch's columns; those before them have been decided."""
        slots, _, columns = products.shape
        arguments = self.words(products, first_column, first)
        if first_column:
            launch(
                "similar_to_columns", (columns // PANEL, slots), _SCAN_THREADS, *arguments, shared=self.shared,
                device=first.device,
            )  # fmt: skip
        launch(
            "scan_groups", (slots, len(self.lowest)), _SCAN_THREADS, *arguments, shared=self.shared, device=first.device
        )


def capacity(device: torch.device, room: int, spare: int = 0) -> int:
    """Clusters whose similarities fit into a block's shared memory; not positive where not even its stages do."""
    most = min(MOST_SHARED, _provider.current().shared_memory(device)) - spare - _STAGES - _COUNT
    # Odd, so that neither a record's nor a cluster's similarities share a bank.
    return min((most // (2 * PANEL * 4) - 1) | 1, room + 2 * PANEL + 1)


def shared_bytes(clusters: int) -> int:
    """Bytes of shared memory of a scan with room for so many."""
    return _STAGES + 2 * PANEL * clusters * 4 + _COUNT


def side_of(n: int) -> int:
    """The next multiple of gram.UNIT, one at least."""
    return max(1, -(-n // gram.UNIT)) * gram.UNIT


def _on_device(values: Sequence[float], device: torch.device) -> Tensor:
    """[E] float32.  A copy from the host would wait, or would have to outlive a captured graph; arguments do neither."""
    out = torch.empty(len(values), dtype=torch.float32, device=device)
    for start in range(0, len(values), _WRITTEN):
        some = values[start : start + _WRITTEN]
        padded = [*some, *[0.0] * (_WRITTEN - len(some))]
        launch("write_values", 1, _WRITTEN, out[start:], len(some), *padded, device=device)
    return out
