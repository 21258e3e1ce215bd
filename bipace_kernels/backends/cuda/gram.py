"""Gram matrices of the groups, or of some columns of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import _provider
from ._launch import launch

Tensor = torch.Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/cuda/elements.h
UNIT = 128  # sides of matrices are multiples of it, and columns of a tile
#: Whether groups of four warps feed the tensor cores of GPUs that have it so (9.0); the bits may differ.
WARPGROUPS = True


class Tile(NamedTuple):
    """A kernel's tile, as in csrc/cuda/gram.h."""

    kernel: str
    rows: int
    threads: int
    stages: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory: stages of its rows and columns, 128 bytes each; where they begin; a bit for each."""
        rows = self.rows + UNIT
        return rows * (self.stages * 128 + 8) + rows // 8

    def tiles(self, first_column: int, n_rows: int, columns: int) -> int:
        """Tiles of a group's matrix: of a whole one those of the triangle, of some columns all of their rows."""
        if first_column:
            return -(-n_rows // self.rows) * (columns // UNIT)
        return sum(-(-(column + 1) * UNIT // self.rows) for column in range(columns // UNIT))


SINGLE, WARPS = Tile("gram_single", UNIT, 512, 3), Tile("gram_half", UNIT, 512, 3)
GROUPS = Tile("gram_tall", 192, 384, 4)


def tile_for(fingerprint: Tensor) -> Tile:
    """Depends only on dtype and architecture, so that a group has its bits in any batch."""
    if fingerprint.dtype == torch.float32:
        return SINGLE
    return GROUPS if warpgroups(fingerprint.device) else WARPS


def warpgroups(device: torch.device) -> bool:
    """Whether groups of four warps feed the tensor cores."""
    return WARPGROUPS and _provider.current().warpgroups(device)


def multiply(
    fingerprint: Tensor,  # [N, D]
    order: Tensor,  # [M] int64
    begins: Tensor,  # [slots] int64 first record of each group
    ends: Tensor,  # [slots] int64
    scale: Tensor,  # [M] float32
    gram: Tensor,  # [slots, n_rows, columns] float32, written
    reciprocal: Tensor,  # [M] float32, written at these columns: 1 / ‖x‖
    *,
    first_column: int,
    long_group: int,  # groups of this length or more are left out
) -> None:
    """G[i, j] = x_i · x_j for i ≤ j and columns first_column ≤ j < first_column + columns of every group."""
    slots, n_rows, columns = gram.shape
    tile = tile_for(fingerprint)
    launch(
        tile.kernel, (tile.tiles(first_column, n_rows, columns), slots), tile.threads,
        x=fingerprint, order=order, dim=fingerprint.shape[1], row_stride=fingerprint.stride(0),
        column_stride=fingerprint.stride(1), dtype=DTYPES[fingerprint.dtype], begins=begins, ends=ends,
        long_group=long_group, first_column=first_column, columns=columns, n_rows=n_rows, gram=gram,
        reciprocal=reciprocal, scale=scale, shared=tile.shared, device=order.device,
    )  # fmt: skip
