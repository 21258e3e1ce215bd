"""Gram matrices of the groups: the launches of csrc/cuda/gram.cu."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ._launch import launch, provider

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/cuda/gram.cu
UNIT = 128  # sides of matrices are multiples of it, and columns of a tile
#: Whether groups of four warps feed the tensor cores of GPUs that have it so (9.0); the bits may differ.
WARPGROUPS = True


class Tile(NamedTuple):
    """A kernel's tile, as in csrc/cuda/gram.cu."""

    kernel: str
    rows: int
    threads: int
    stages: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory: stages of its rows and columns, 128 bytes each; where they begin; a bit for each."""
        rows = self.rows + UNIT
        return rows * (self.stages * 128 + 8) + rows // 8

    def tiles(self, side: int) -> int:
        """Tiles of the triangle of a matrix."""
        return sum(-(-(column + 1) * UNIT // self.rows) for column in range(side // UNIT))


SINGLE, WARPS = Tile("gram_single", UNIT, 512, 3), Tile("gram_half", UNIT, 512, 3)
GROUPS = Tile("gram_tall", 192, 384, 4)


def tile_for(fingerprint: Tensor) -> Tile:
    """Depends only on dtype and architecture, so that a group has its bits in any batch."""
    if fingerprint.dtype == torch.float32:
        return SINGLE
    return GROUPS if warpgroups(fingerprint.device) else WARPS


def warpgroups(device: torch.device) -> bool:
    """Whether the kernels' code for this GPU has BIPACE_WARPGROUPS (csrc/cuda/intrinsics.h), and it is used."""
    if not WARPGROUPS or "sm_90a" not in provider().built.split():
        return False
    return device.type != "cuda" or _capability(device) == (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class Groups(NamedTuple):
    """Some groups, by where their records begin and end."""

    begins: Tensor  # [slots] int64
    ends: Tensor  # [slots] int64
    long_group: int  # groups of this length or more are left out


def multiply(
    fingerprint: Tensor,  # [N, D]
    order: Tensor,  # [M] int64
    groups: Groups,
    scale: Tensor,  # [M] float32
    gram: Tensor,  # [slots, side, side] float32, written
    reciprocal: Tensor,  # [M] float32, written: 1 / ‖x‖
) -> None:
    """G[i, j] = x_i · x_j for i ≤ j of every group."""
    slots, side, _ = gram.shape
    tile = tile_for(fingerprint)
    row_stride, column_stride = fingerprint.stride()
    launch(
        tile.kernel, (tile.tiles(side), slots), tile.threads, device=order.device, shared=tile.shared,
        x=fingerprint, order=order, dim=fingerprint.shape[1], row_stride=row_stride, column_stride=column_stride,
        dtype=DTYPES[fingerprint.dtype], side=side, gram=gram, reciprocal=reciprocal, scale=scale, **groups._asdict(),
    )  # fmt: skip
