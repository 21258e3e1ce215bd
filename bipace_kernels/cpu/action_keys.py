"""Action keys by csrc/cpu/action_keys.cpp; arguments as in reference/action_keys.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _native_loader

_MODES = {"first_n": 0, "action_tag": 1, "text": 2}


def _array(tensor: torch.Tensor) -> tuple[int, int, list[int]]:
    return tensor.data_ptr(), tensor.element_size(), list(tensor.stride())


def flatten_rows(
    rows: Sequence[Sequence[Any]],
    row_offsets: torch.Tensor,  # [N+1] int64, by the rows' lengths
    *,
    bools: bool,
) -> tuple[torch.Tensor, tuple[int, int] | None]:
    """Flat values [E] int64, and (row, column) of the first item that is no integer of 64 bits (or None)."""
    flat = torch.empty(int(row_offsets[-1]), dtype=torch.int64)
    return flat, _native_loader.load().flatten_rows(rows, row_offsets.data_ptr(), flat.data_ptr(), bools)


def hash_token_ids(
    ids: torch.Tensor,  # [N, T] int32 | int64, any strides, or flat [E] with row_offsets
    row_offsets: torch.Tensor | None,  # [N+1] int64
    mask: torch.Tensor | None,  # like ids: bool | int32 | int64, non-zero = valid
    table: tuple[torch.Tensor, torch.Tensor] | None,  # offsets [V+1] int64, bytes uint8; None: mode "first_n"
    *,
    mode: str,
    n: int,
    num_threads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int] | None]:
    """Keys [N] int64, parsed [N] bool, and the first valid id that the table does not hold (or None)."""
    rows, columns = ids.shape if row_offsets is None else (row_offsets.numel() - 1, 0)
    keys, parsed = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    offsets, data = (0, 0) if table is None else (table[0].data_ptr(), table[1].data_ptr())
    sizes = (0, 0) if table is None else (table[0].numel() - 1, table[1].numel())
    outside = _native_loader.load().token_keys(
        _array(ids), None if mask is None else _array(mask), 0 if row_offsets is None else row_offsets.data_ptr(),
        rows, columns, offsets, data, sizes, _MODES[mode], n, keys.data_ptr(), parsed.data_ptr(), num_threads,
    )  # fmt: skip
    return keys, parsed, outside


def hash_texts(texts: Sequence[str], *, mode: str, num_threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N] int64 and parsed [N] bool of the texts' UTF-8 bytes."""
    keys, parsed = torch.empty(len(texts), dtype=torch.int64), torch.empty(len(texts), dtype=torch.bool)
    _native_loader.load().text_keys(texts, _MODES[mode], keys.data_ptr(), parsed.data_ptr(), num_threads)
    return keys, parsed
