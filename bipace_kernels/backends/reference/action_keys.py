"""Action keys, written as docs/action_keys.md states them."""

import itertools
import operator
import re
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..schema import Tokens
from .xxh64 import signed, xxh64

SEED_FIRST_N, SEED_ACTION_TAG, SEED_TEXT_PREFIX, SEED_TEXT = 1, 2, 3, 4
TEXT_PREFIX_BYTES = 64
ACTION_TAG = re.compile(rb"<action>(.*?)</action>", re.DOTALL)

LARGEST_TABLE = sys.maxsize  # bytes


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
    rows: Sequence[Sequence[Any]], row_offsets: torch.Tensor, *, bools: bool
) -> tuple[torch.Tensor, tuple[int, int] | None]:
    flat = []
    lengths = row_offsets.diff().tolist()
    for r, row in enumerate(map(tuple, rows)):
        if len(row) != lengths[r]:
            return torch.zeros(0, dtype=torch.int64), (r, -1)
        for column, item in enumerate(row):
            fits = hasattr(item, "__index__") and -(2**63) <= operator.index(item) < 2**63
            if not fits or (isinstance(item, bool) and not bools):
                return torch.zeros(0, dtype=torch.int64), (r, column)
            flat.append(operator.index(item))
    return torch.tensor(flat, dtype=torch.int64), None


def hash_token_ids(tokens: Tokens, mode: str, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, row_offsets, valid, table_offsets, table_bytes, _ = tokens
    bounds = [r * ids.shape[1] for r in range(ids.shape[0] + 1)] if row_offsets is None else row_offsets.tolist()
    flat = ids.flatten().tolist()
    flat_valid = [True] * len(flat) if valid is None else valid.ne(0).flatten().tolist()
    rows = [flat[a:b] for a, b in itertools.pairwise(bounds)]
    counts = [flat_valid[a:b] for a, b in itertools.pairwise(bounds)]

    keys = torch.zeros(len(rows), dtype=torch.int64)
    parsed = torch.zeros(len(rows), dtype=torch.bool)
    if mode != "first_n":
        assert table_offsets is not None and table_bytes is not None
        offsets, data = table_offsets.tolist(), bytes(table_bytes.tolist())
        for at, (token, counted) in enumerate(zip(flat, flat_valid, strict=True)):
            if counted and not 0 <= token < len(offsets) - 1:
                return keys, parsed, torch.tensor([at])
    for r, row in enumerate(rows):
        kept = [token for token, counted in zip(row, counts[r], strict=True) if counted]
        body_key = None
        if mode != "first_n":
            body_key = _key_of_bytes(b"".join(data[offsets[v] : offsets[v + 1]] for v in kept), mode)
        first = struct.pack(f"<{len(kept[:n])}q", *kept[:n])
        keys[r], parsed[r] = body_key or (signed(xxh64(first, SEED_FIRST_N)), False)
    return keys, parsed, torch.tensor([-1])


def hash_texts(texts: Sequence[str], *, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.zeros(len(texts), dtype=torch.int64)
    parsed = torch.zeros(len(texts), dtype=torch.bool)
    for r, text in enumerate(texts):
        data = text.encode("utf-8", "surrogatepass")
        body_key = _key_of_bytes(data, mode)
        keys[r], parsed[r] = body_key or (signed(xxh64(data[:TEXT_PREFIX_BYTES], SEED_TEXT_PREFIX)), False)
    return keys, parsed
