"""Gram matrices of the groups, or of some columns of them."""

from __future__ import annotations

import torch

from . import _provider
from ._launch import launch

Tensor = torch.Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/cuda/elements.h
UNIT = 128  # sides of matrices are multiples of it, and of tiles
#: Whether groups of four warps feed the tensor cores of GPUs that have it so (9.0); the bits may differ.
WARPGROUPS = True
TALL_FROM = 384  # rows of a matrix that is cut into tall tiles there: from here on they are fewer (not measured)
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
    kernel, rows_of_tile, threads = "gram_half", UNIT, THREADS
    if fingerprint.dtype == torch.float32:
        kernel = "gram_single"
    elif warpgroups(device) and gram.shape[1] >= TALL_FROM:
        kernel, rows_of_tile, threads = "gram_tall", _TALL, _TALL_THREADS
    launch(
        kernel, (_tiles(first_column, gram.shape[1], gram.shape[2], rows_of_tile), slots), threads, *arguments,
        shared=shared_bytes(device, rows_of_tile), device=device,
    )  # fmt: skip


def _tiles(first_column: int, n_rows: int, columns: int, rows_of_tile: int) -> int:
    """Blocks for a group's matrix: of a whole one the tiles of the triangle, of some columns all of their rows."""
    if first_column:
        return -(-n_rows // rows_of_tile) * (columns // UNIT)
    return sum(-(-(column + 1) * UNIT // rows_of_tile) for column in range(columns // UNIT))


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
        fingerprint, order, fingerprint.shape[1], *fingerprint.stride(), DTYPES[fingerprint.dtype], begins, ends, long_group, first_column, columns, n_rows, gram, reciprocal, scale,
        warpgroups(order.device),
    )  # fmt: skip


def warpgroups(device: torch.device) -> bool:
    """Whether groups of four warps feed the tensor cores (`GramArgs.warpgroups`)."""
    return WARPGROUPS and _provider.current().warpgroups(device)


def shared_bytes(device: torch.device, rows_of_tile: int = UNIT) -> int:
    """Bytes of shared memory of a tile: stages of its rows and columns, 128 bytes each; where they begin; a bit for each."""
    rows_of_stage = rows_of_tile + UNIT
    return rows_of_stage * ((4 if warpgroups(device) else 3) * 128 + 8) + rows_of_stage // 8
