"""Decisions of groups in order, from their Gram matrices: the launches of csrc/cuda/scan.h, and their scratch."""

from __future__ import annotations

import torch

from ..triton.clusters import on_device
from . import _provider, gram
from ._launch import Word, launch

Tensor = torch.Tensor

PANEL = 32
_THREADS = 512
# Of csrc/cuda/scan.h: bytes that stand before S in shared memory, and the least capacity with room for decide_few.
_BEFORE, _FEW = 38_416, 209


class Scan:
    """The decisions of some groups under E values of ε, and their scratch."""

    def __init__(
        self,
        kind: Tensor,  # [M] uint8
        begins: Tensor,  # [slots] int64
        ends: Tensor,  # [slots] int64
        reciprocal: Tensor,  # [M] float32
        lowest: list[float],  # E
        room: int,  # ≥ records of a group
        columns: int,  # of a launch, at most
        long_group: int,
        most_shared: int,  # bytes
    ) -> None:
        device, e, slots = kind.device, len(lowest), begins.shape[0]
        self.kind, self.begins, self.ends, self.reciprocal = kind, begins, ends, reciprocal
        self.lowest, self.room, self.long_group = lowest, room, long_group
        self.lowest_of = on_device(lowest, device) if e > 1 else None
        self.far_pitch = room + 1
        self.capacity = capacity(device, room, most_shared)
        self.far_panels = 2 if columns == room else columns // PANEL
        self.similar = None
        if self.capacity < room + 2 * PANEL or self.far_panels > 2:
            shape = (e, slots, self.far_panels, PANEL, self.far_pitch)
            self.similar = torch.empty(shape, dtype=torch.float32, device=device)
        self.decisions = torch.empty((e, slots, 6, room), dtype=torch.float32, device=device)
        self.counts = torch.empty((e, slots), dtype=torch.int32, device=device)
        self.shared = shared_bytes(self.capacity)

    def run(self, products: Tensor, first_column: int, first: Tensor) -> None:
        """The launch's columns; those before them have been decided."""
        slots, rows, columns = products.shape
        arguments: dict[str, Word] = {
            "begins": self.begins,
            "ends": self.ends,
            "long_group": self.long_group,
            "first_column": first_column,
            "columns": columns,
            "gram": products,
            "rows": rows,
            "reciprocal": self.reciprocal,
            "kind": self.kind,
            "lowest": self.lowest_of,
            "only_lowest": float(self.lowest[0]),
            "capacity": self.capacity,
            "similar": self.similar,
            "far_panels": self.far_panels,
            "far_pitch": self.far_pitch,
            "decisions": self.decisions,
            "room": self.room,
            "counts": self.counts,
            "first": first,
            "first_stride": first.stride(0),
        }
        shared, device = self.shared, first.device
        if first_column:
            grid = columns // PANEL, slots
            launch("similar_to_columns", grid, _THREADS, shared=shared, device=device, **arguments)
        launch("scan_groups", (slots, len(self.lowest)), _THREADS, shared=shared, device=device, **arguments)


def capacity(device: torch.device, room: int, most_shared: int) -> int:
    """Clusters whose similarities fit into a block's shared memory; not positive where not even its stages do."""
    most = min(most_shared, _provider.current().shared_memory(device)) - _BEFORE
    # Odd, so that neither a record's nor a cluster's similarities share a bank.
    return min((most // (2 * PANEL * 4) - 1) | 1, max(room + 2 * PANEL + 1, _FEW))


def shared_bytes(clusters: int) -> int:
    """Bytes of shared memory of a scan with room for so many."""
    return _BEFORE + 2 * PANEL * clusters * 4


def side_of(n: int) -> int:
    """The next multiple of gram.UNIT, one at least."""
    return max(1, -(-n // gram.UNIT)) * gram.UNIT
