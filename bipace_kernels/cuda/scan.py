"""Decisions of groups in order, out of their Gram matrices: the launches of csrc/cuda/scan.h, and their scratch."""

from __future__ import annotations

import torch

from ..triton_kernels.clusters import on_device
from . import _provider, gram
from ._launch import launch

Tensor = torch.Tensor

MOST_SHARED = 227 << 10  # bytes that a scan asks for at most, where the GPU has them
ROOM = 1 << 28  # float32 values of the Gram matrices that are made at a time: 1 GiB
BAND = 1e-5  # τ
PANEL = 32
_THREADS = 512
# Bytes of csrc/cuda/scan.h's stages, and of the number of clusters.
_STAGES, _COUNT = 3 * (64 * 32 * 4 + 4 * 64 * 4), 16


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
    ) -> None:
        device, e, slots = kind.device, len(lowest), begins.shape[0]
        self.kind, self.begins, self.ends, self.reciprocal = kind, begins, ends, reciprocal
        self.lowest, self.room, self.long_group = lowest, room, long_group
        self.lowest_of = on_device(lowest, device) if e > 1 else None
        self.far_pitch = room + 1
        self.capacity = capacity(device, room)
        self.far_panels = 2 if columns == room else columns // PANEL
        self.similar = None
        if self.capacity < room + 2 * PANEL or self.far_panels > 2:
            shape = (e, slots, self.far_panels, PANEL, self.far_pitch)
            self.similar = torch.empty(shape, dtype=torch.float32, device=device)
        self.decisions = torch.empty((e, slots, 6, room), dtype=torch.float32, device=device)
        self.counts = torch.empty((e, slots), dtype=torch.int32, device=device)
        self.shared = shared_bytes(self.capacity)

    def words(
        self, products: Tensor, first_column: int, first: Tensor | None
    ) -> tuple[Tensor | int | float | None, ...]:
        """`ScanArgs` of csrc/cuda/scan.h."""
        return (
            self.begins, self.ends, self.long_group, first_column, products.shape[2], products, products.shape[1],
            self.reciprocal, self.kind, self.lowest_of, float(self.lowest[0]), self.capacity, self.similar,
            self.far_panels, self.far_pitch, self.decisions, self.room, self.counts, first,
            0 if first is None else first.stride(0),
        )  # fmt: skip

    def run(self, products: Tensor, first_column: int, first: Tensor) -> None:
        """The launch's columns; those before them have been decided."""
        slots, _, columns = products.shape
        arguments = self.words(products, first_column, first)
        if first_column:
            launch(
                "similar_to_columns", (columns // PANEL, slots), _THREADS, *arguments, shared=self.shared,
                device=first.device,
            )  # fmt: skip
        launch("scan_groups", (slots, len(self.lowest)), _THREADS, *arguments, shared=self.shared, device=first.device)


def capacity(device: torch.device, room: int) -> int:
    """Clusters whose similarities fit into a block's shared memory; not positive where not even its stages do."""
    most = min(MOST_SHARED, _provider.current().shared_memory(device)) - _STAGES - _COUNT
    # Odd, so that neither a record's nor a cluster's similarities share a bank.
    return min((most // (2 * PANEL * 4) - 1) | 1, room + 2 * PANEL + 1)


def shared_bytes(clusters: int) -> int:
    """Bytes of shared memory of a scan with room for so many."""
    return _STAGES + 2 * PANEL * clusters * 4 + _COUNT


def side_of(n: int) -> int:
    """The next multiple of gram.UNIT, one at least."""
    return max(1, -(-n // gram.UNIT)) * gram.UNIT
