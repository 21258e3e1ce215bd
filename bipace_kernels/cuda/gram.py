"""Gram matrices of the groups, or of some columns of them."""

from __future__ import annotations

import torch

from . import _provider, rows
from ._launch import launch

Tensor = torch.Tensor

UNIT = 128  # sides of matrices are multiples of it, and of tiles
# As in csrc/cuda/gram.h.
THREADS = 512
_STAGE, _ABOUT = 256 * 128, 256 * 8 + 256 // 8  # bytes: 256 rows of 128 each; where rows begin, a bit for each
WARPGROUPS = (
    True  #: whether tensor cores are fed by groups of four warps on GPUs that have them (9.0); the bits may differ
)


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
    slots, device = gram.shape[0], order.device
    tiles = tiles_before((first_column + gram.shape[2]) // UNIT) - tiles_before(first_column // UNIT)
    launch(
        "gram_single" if fingerprint.dtype == torch.float32 else "gram_half", (tiles, slots), THREADS,
        *words(fingerprint, order, begins, ends, scale, gram, reciprocal, first_column, long_group),
        shared=shared_bytes(device), device=device,
    )  # fmt: skip


def words(
    fingerprint: Tensor,
    order: Tensor,
    begins: Tensor,
    ends: Tensor,
    scale: Tensor,
    gram: Tensor,
    reciprocal: Tensor,
    first_column: int,
    long_group: int,
) -> tuple[Tensor | int, ...]:
    """`GramArgs` of csrc/cuda/gram.h."""
    _, n_rows, columns = gram.shape
    return (
        *rows.words(fingerprint, order), begins, ends, long_group, first_column, columns, n_rows, gram, reciprocal, scale,
        warpgroups(order.device),
    )  # fmt: skip


def tiles_before(column: int) -> int:
    """Tiles of a group's triangle in the columns of tiles before this one."""
    return column * (column + 1) // 2


def warpgroups(device: torch.device) -> bool:
    """Whether groups of four warps feed the tensor cores (`GramArgs.warpgroups`)."""
    return WARPGROUPS and _provider.current().warpgroups(device)


def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory of a tile."""
    return (4 if warpgroups(device) else 3) * _STAGE + _ABOUT
