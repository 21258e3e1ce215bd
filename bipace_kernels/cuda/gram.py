"""Gram matrices of the groups, or of some columns of them."""

from __future__ import annotations

import torch

from . import rows
from ._launch import launch

Tensor = torch.Tensor

UNIT = 128  # sides of matrices are multiples of it
_THREADS = 256
_TILE_J = 64
# Three stages of 192 rows of 128 bytes, and where the rows begin; two of 16 elements of 68 float32 rows.
_SHARED_HALF, _SHARED_SINGLE = 3 * 192 * 128 + 192 * 8, 2 * 16 * 68 * 4


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
    arguments = (
        *rows.words(fingerprint, order), begins, ends, long_group, first_column, columns, n_rows, gram, reciprocal,
    )  # fmt: skip
    if fingerprint.dtype == torch.float32:
        tiles = n_rows // _TILE_J * (columns // _TILE_J)
        launch("gram_single", (tiles, slots), _THREADS, *arguments, shared=_SHARED_SINGLE, device=order.device)
    else:
        before, end = first_column // UNIT, (first_column + columns) // UNIT
        tiles = end * (end + 1) - before * (before + 1)
        launch("gram_half", (tiles, slots), _THREADS, *arguments, shared=_SHARED_HALF, device=order.device)
    if fingerprint.dtype != torch.float16:  # whose squares are all float32
        launch("gram_scaled", (n_rows // 8, slots), _THREADS, *arguments, scale, device=order.device)
