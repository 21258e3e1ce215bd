"""Gram matrices of the groups, or of some columns of them."""

from __future__ import annotations

import torch

from . import _provider, rows
from ._launch import launch

Tensor = torch.Tensor

UNIT = 128  # sides of matrices are multiples of it, and of tiles
WARPGROUPS = (
    True  #: whether tensor cores are fed by groups of four warps on GPUs that have them (9.0); the bits may differ
)
TALL_FROM = (
    1_025  # rows of a matrix that is cut into tall tiles there: smaller ones have few tiles as it is (not measured)
)
# As in csrc/cuda/gram.h.
THREADS, _TALL_THREADS = 512, 384
_TALL = 192  # rows of a tall tile


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
    arguments = words(fingerprint, order, begins, ends, scale, gram, reciprocal, first_column, long_group)
    first, end = first_column // UNIT, (first_column + gram.shape[2]) // UNIT
    if fingerprint.dtype != torch.float32 and warpgroups(device) and gram.shape[1] >= TALL_FROM:
        tiles = sum(-(-(column + 1) * UNIT // _TALL) for column in range(first, end))
        launch("gram_tall", (tiles, slots), _TALL_THREADS, *arguments, shared=_shared(_TALL, 4), device=device)
        return
    kernel = "gram_single" if fingerprint.dtype == torch.float32 else "gram_half"
    tiles = tiles_before(end) - tiles_before(first)
    launch(kernel, (tiles, slots), THREADS, *arguments, shared=shared_bytes(device), device=device)


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
    return _shared(UNIT, 4 if warpgroups(device) else 3)


def _shared(rows: int, stages: int) -> int:
    """Stages of a tile's rows and columns, 128 bytes each; where they begin, and a bit for each."""
    return (rows + UNIT) * (stages * 128 + 8) + (rows + UNIT) // 8
