"""Action keys of token ids on a device, bit for bit those of reference/action_keys.py."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..schema import Tokens
from ._launch import WARP, launch

_MODES = {"first_n": 0, "action_tag": 1, "text": 2}

# As in csrc/cuda/action_keys.cu.
_THREADS = 128
_RING = 2048  # bytes of a warp

LARGEST_TABLE = (2**31 - 1) // WARP  # bytes: the text of 32 tokens is measured in int32


def hash_token_ids(tokens: Tokens, mode: str, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`longest_row` is not used: these kernels ask each row itself."""
    ids, row_offsets, valid, table_offsets, table_bytes, _ = tokens
    flat, n_rows = row_offsets is not None, tokens.n_rows
    keys = torch.empty(n_rows, dtype=torch.int64, device=ids.device)
    parsed = torch.empty(n_rows, dtype=torch.bool, device=ids.device)
    may_open = None
    if mode == "action_tag" and table_offsets is not None and table_bytes is not None:
        may_open = _tokens_with_a_tag(table_offsets, table_bytes)
    outside = torch.full((1,), -1, dtype=torch.int64, device=ids.device)
    mask = ids if valid is None else valid
    rows = _THREADS // WARP
    id_row_stride, valid_row_stride = (0, 0) if flat else (ids.stride(0), mask.stride(0))
    launch(
        "action_keys", -(-n_rows // rows), _THREADS, device=ids.device, shared=rows * _RING,
        ids=ids, valid=valid, row_offsets=row_offsets, table_offsets=table_offsets, table_bytes=table_bytes,
        may_open=may_open, keys=keys, parsed=parsed, outside=outside, n_rows=n_rows,
        n_columns=0 if flat else ids.shape[1], n=n, vocabulary=tokens.vocabulary,
        id_row_stride=id_row_stride, id_column_stride=ids.stride(-1), valid_row_stride=valid_row_stride,
        valid_column_stride=mask.stride(-1), id_bytes=ids.itemsize, id_signed=ids.dtype.is_signed,
        valid_bytes=mask.itemsize, mode=_MODES[mode],
    )  # fmt: skip
    return keys, parsed, outside


# By the table's bytes: the stream, the version of the tensor that was looked at, its offsets, and what was found.
_FOUND: MutableMapping[torch.Tensor, tuple[Any, torch.Tensor]] = WeakTensorKeyDictionary()


def _tokens_with_a_tag(table_offsets: torch.Tensor, table_bytes: torch.Tensor) -> torch.Tensor:
    """[V] bool: whether a token holds a byte that tags begin with.  Most hold none: a tag is found without them.

    A table serves all calls of a run (`TokenBytes.on()` keeps it), so the result is kept as long as its tensor, for the
    stream that computed it.  Inference tensors do not count their changes, so nothing is kept of them.
    """
    counted = not (table_offsets.is_inference() or table_bytes.is_inference())
    stream = torch.cuda.current_stream(table_bytes.device).cuda_stream if table_bytes.is_cuda else 0
    if counted:
        key = (stream, table_bytes._version, table_offsets._version, table_offsets.data_ptr(), table_offsets.numel())
        known: tuple[object, torch.Tensor] | None = _FOUND.get(table_bytes)
        if known is not None and known[0] == key:
            return known[1]
    holds = torch.zeros(table_bytes.numel() + 1, dtype=torch.int32, device=table_bytes.device)
    torch.cumsum(table_bytes == ord("<"), 0, dtype=torch.int32, out=holds[1:])
    opens = holds[table_offsets[1:]] > holds[table_offsets[:-1]]
    # What a graph captures has no values before it is replayed.
    if counted and not (table_bytes.is_cuda and torch.cuda.is_current_stream_capturing()):
        _FOUND[table_bytes] = (key, opens)
    return opens
