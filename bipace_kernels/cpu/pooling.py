"""States out of a block's output by csrc/cpu/pooling.cpp, which reads the block's output once, where it is."""

from __future__ import annotations

from typing import Any

import torch

from .. import _threads
from .._native_loader import load

Tensor = torch.Tensor

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POOLING = {"last": 0, "mean": 1, "attention": 2}


def pool_rows(
    hidden: Tensor,  # [B, T, D] float32 | bfloat16 | float16, any strides
    batch: Tensor,  # [n] int64
    first: Tensor,  # [n] int64, the first token of the state's prompt
    last: Tensor,  # [n] int64, the token of the state
    *,
    pooling: str,
    unit: bool,
    dtype: torch.dtype,
    attention: Any = None,  # hidden._attention.Scores
) -> Tensor:  # [n, D]
    """States as in reference.pooling; sums in float64 in the order of the tokens, rounded once."""
    out = torch.empty((batch.shape[0], hidden.shape[2]), dtype=dtype)
    scores = query = None
    if pooling == "attention":
        query = attention.query.to(torch.float32).contiguous()
        key = attention.key.flatten(2)  # [B, T, key_heads * head_dim]
        scores = (query.data_ptr(), query.shape[1], _tokens(key), attention.key.shape[2], query.shape[2],
                  attention.scale, attention.softcap)  # fmt: skip
    batch, first, last = batch.contiguous(), first.contiguous(), last.contiguous()
    load().pool_rows(
        _tokens(hidden), batch.data_ptr(), first.data_ptr(), last.data_ptr(), batch.shape[0], _POOLING[pooling], scores,
        unit, _threads.count(), _DTYPES[dtype], out.data_ptr(),
    )  # fmt: skip
    return out


def _tokens(x: Tensor) -> tuple[int, int, int, int, int, int, int, int]:
    """Address, dtype, sizes and strides of a [B, T, D] tensor."""
    (batches, tokens, dim), (batch_stride, token_stride, column_stride) = x.shape, x.stride()
    return x.data_ptr(), _DTYPES[x.dtype], batches, tokens, dim, batch_stride, token_stride, column_stride
