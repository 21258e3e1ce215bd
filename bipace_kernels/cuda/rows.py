"""What one look at each fingerprint row tells, and which rows are equal."""

from __future__ import annotations

import torch

from ._launch import launch

Tensor = torch.Tensor

HASH_BITS = 64  # fewer make rows collide, for tests
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/cuda/elements.h
_THREADS, _WARPS = 256, 8


def words(fingerprint: Tensor, order: Tensor) -> tuple[Tensor, Tensor, int, int, int, int]:
    """`Rows` of csrc/cuda/elements.h."""
    row_stride, column_stride = fingerprint.stride()
    return fingerprint, order, fingerprint.shape[1], row_stride, column_stride, DTYPES[fingerprint.dtype]


def look(
    fingerprint: Tensor,  # [N, D] float32 | bfloat16 | float16, any strides
    order: Tensor,  # [M] int64
    *,
    state: Tensor | None = None,  # [M] uint8, written: 0 fine, 1 holds a non-finite value, 2 all zero
    kind: Tensor | None = None,  # [M] uint8, written: 0 usable, 1 alone, 2 not taken
    scale: Tensor | None = None,  # [M] float32, written with kind: power of two that brings the row near 1
    row_hash: Tensor | None = None,  # [M] int64, written: equal for rows that compare equal
    usable: Tensor | None = None,  # [M] bool
    taken: Tensor | None = None,  # [M] bool
) -> None:
    """Reads every row once and writes what was asked for."""
    n = order.shape[0]
    launch(
        "look_at_rows", -(-n // _WARPS), _THREADS,
        *words(fingerprint, order), n, state, kind, scale, row_hash, HASH_BITS, usable, taken,
        device=order.device,
    )  # fmt: skip


def first_equal(
    fingerprint: Tensor,  # [N, D]
    order: Tensor,  # [M] int64
    group_offsets: Tensor,  # [G+1] int64
    kind: Tensor,  # [M] uint8
    row_hash: Tensor,  # [M] int64
    *,
    n_groups: int,
    longest_group: int,
    first: Tensor,  # [M] int64, written: itself where the record is alone, −1 where it is not taken
) -> None:
    """The first record of the group whose row equals this one as given, −0.0 equal to 0.0: the partition of ε = 0."""
    blocks = -(-longest_group // _WARPS)
    launch(
        "first_equal_row", n_groups * blocks, _THREADS,
        *words(fingerprint, order), group_offsets, kind, row_hash, blocks, first, device=order.device,
    )  # fmt: skip
