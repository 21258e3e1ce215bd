"""Action keys by csrc/cpu/action_keys.cpp."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from .. import native_loader, threads
from ..schema import Tokens

LARGEST_TABLE = sys.maxsize  # bytes
_MODES = {"first_n": 0, "action_tag": 1, "text": 2}


def flatten_rows(
    rows: Sequence[Sequence[Any]], row_offsets: torch.Tensor, *, bools: bool
) -> tuple[torch.Tensor, tuple[int, int] | None]:
    flat = torch.empty(int(row_offsets[-1]), dtype=torch.int64)
    n = row_offsets.numel() - 1
    return flat, native_loader.load().flatten_rows(tuple(rows), n, row_offsets, flat, bools)


def hash_token_ids(tokens: Tokens, mode: str, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, row_offsets, valid, table_offsets, table_bytes, _ = tokens
    ids, valid, rows = _native(ids), None if valid is None else _native(valid), tokens.n_rows
    keys, parsed = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    sizes = tokens.vocabulary, 0 if table_bytes is None else table_bytes.numel()
    outside = native_loader.load().token_keys(
        ids, valid, row_offsets, rows, table_offsets, table_bytes, sizes, _MODES[mode], n, keys, parsed, threads.count()
    )
    if outside >= 0:
        keys.zero_()
        parsed.zero_()
    return keys, parsed, torch.tensor([outside])


def _native(tensor: torch.Tensor) -> torch.Tensor:
    """Token ids or their mask in a dtype that the kernel takes."""
    return tensor if tensor.dtype in (torch.bool, torch.int32, torch.int64) else tensor.to(torch.int64)


def hash_texts(texts: Sequence[str], *, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    texts = tuple(texts)
    keys, parsed = torch.empty(len(texts), dtype=torch.int64), torch.empty(len(texts), dtype=torch.bool)
    native_loader.load().text_keys(texts, _MODES[mode], keys, parsed, threads.count())
    return keys, parsed
