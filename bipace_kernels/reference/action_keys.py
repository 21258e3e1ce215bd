"""Action keys, written as docs/action_keys.md states them."""

from __future__ import annotations

import itertools
import operator
import re
import struct
from collections.abc import Sequence
from typing import Any

import torch

from .xxh64 import signed, xxh64

SEED_FIRST_N, SEED_ACTION_TAG, SEED_TEXT_PREFIX, SEED_TEXT = 1, 2, 3, 4
TEXT_PREFIX_BYTES = 64
ACTION_TAG = re.compile(rb"<action>(.*?)</action>", re.DOTALL)

Outside = tuple[int, int, int]  # row, column, id


def _key_of_ids(ids: list[int], n: int) -> int:
    first = ids[:n]
    return signed(xxh64(struct.pack(f"<{len(first)}q", *first), SEED_FIRST_N))


def _key_of_bytes(text: bytes, mode: str) -> tuple[int, bool] | None:
    """Key of a text, and True, or None where the text does not parse in this mode."""
    if mode == "text":
        body = text.strip()
        return signed(xxh64(body.lower(), SEED_TEXT)), body != b""
    match = ACTION_TAG.search(text) if mode == "action_tag" else None
    if match is None:
        return None
    return signed(xxh64(match[1].strip().lower(), SEED_ACTION_TAG)), True


def flatten_rows(
    rows: Sequence[Sequence[Any]],
    row_offsets: torch.Tensor,  # [N+1] int64, by the rows' lengths
    *,
    bools: bool,
) -> tuple[torch.Tensor, tuple[int, int] | None]:
    """Flat values [E] int64, and (row, column) of the first item that is no integer of 64 bits (or None).

    A bool is no integer unless bools is True.
    """
    flat = []
    for r, row in enumerate(rows):
        for column, item in enumerate(row):
            fits = hasattr(item, "__index__") and -(2**63) <= operator.index(item) < 2**63
            if not fits or (isinstance(item, bool) and not bools):
                return torch.zeros(0, dtype=torch.int64), (r, column)
            flat.append(operator.index(item))
    return torch.tensor(flat, dtype=torch.int64), None


def hash_token_ids(
    ids: torch.Tensor,  # [N, T] int32 | int64, any strides, or flat [E] with row_offsets
    row_offsets: torch.Tensor | None,  # [N+1] int64
    mask: torch.Tensor | None,  # like ids: bool | int32 | int64, non-zero = valid
    table: tuple[torch.Tensor, torch.Tensor] | None,  # offsets [V+1] int64, bytes uint8; None: mode "first_n"
    *,
    mode: str,
    n: int,
    num_threads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, Outside | None]:
    """Keys [N] int64, parsed [N] bool, and the first valid id that the table does not hold (or None)."""
    if row_offsets is None:
        rows = ids.tolist()
        valid = [[True] * ids.shape[1]] * ids.shape[0] if mask is None else mask.ne(0).tolist()
    else:
        flat, bounds = ids.tolist(), row_offsets.tolist()
        flat_valid = [True] * len(flat) if mask is None else mask.ne(0).tolist()
        rows = [flat[a:b] for a, b in itertools.pairwise(bounds)]
        valid = [flat_valid[a:b] for a, b in itertools.pairwise(bounds)]

    keys = torch.zeros(len(rows), dtype=torch.int64)
    parsed = torch.zeros(len(rows), dtype=torch.bool)
    if mode != "first_n":
        assert table is not None
        offsets, data = table[0].tolist(), bytes(table[1].tolist())
        for r, row in enumerate(rows):
            for column, token in enumerate(row):
                if valid[r][column] and not 0 <= token < len(offsets) - 1:
                    return keys, parsed, (r, column, token)
    for r, row in enumerate(rows):
        tokens = [token for token, is_valid in zip(row, valid[r], strict=True) if is_valid]
        found = None
        if mode != "first_n":
            found = _key_of_bytes(b"".join(data[offsets[v] : offsets[v + 1]] for v in tokens), mode)
        keys[r], parsed[r] = found or (_key_of_ids(tokens, n), False)
    return keys, parsed, None


def hash_texts(texts: Sequence[str], *, mode: str, num_threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [N] int64 and parsed [N] bool of the texts' UTF-8 bytes."""
    keys = torch.zeros(len(texts), dtype=torch.int64)
    parsed = torch.zeros(len(texts), dtype=torch.bool)
    for r, text in enumerate(texts):
        data = text.encode("utf-8", "surrogatepass")
        found = _key_of_bytes(data, mode)
        keys[r], parsed[r] = found or (signed(xxh64(data[:TEXT_PREFIX_BYTES], SEED_TEXT_PREFIX)), False)
    return keys, parsed
