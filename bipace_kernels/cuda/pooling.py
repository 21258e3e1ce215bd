"""States out of a block's output: gather, pooling, unit norm and rounding in one launch, a block per state.

A block holds its state in registers, in float64, so the block's output is read once, where it is, and nothing of its size
is ever made.  Sums go in the order of the tokens, as on the CPU: the bits depend on the state's own tokens only.
"""

from __future__ import annotations

from typing import Any

import torch

from ._launch import WARP, launch

Tensor = torch.Tensor

# As in csrc/cuda/pooling.cu.
_COLUMNS = 8  # of a thread
_MOST_THREADS = {torch.float32: 512, torch.bfloat16: 1024, torch.float16: 1024}
_ROOM = 8 * 32  # bytes of shared memory
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
    """States as in reference.pooling.  Attention weights in float32, everything else in float64, rounded once."""
    n, (batches, tokens, dim) = batch.shape[0], hidden.shape
    out = torch.empty((n, dim), dtype=dtype, device=hidden.device)
    query = key = scores = None
    key_strides, heads, key_heads, width, scale, softcap = (0, 0, 0, 0), 0, 1, 0, 1.0, 0.0
    if pooling == "attention":
        query = attention.query.to(torch.float32).contiguous()
        key = attention.key.to(hidden.dtype)  # itself: both come out of one model
        (_, heads, width), key_heads, key_strides = query.shape, key.shape[2], key.stride()
        scale, softcap = float(attention.scale), float(attention.softcap)
        scores = torch.empty((n, 2, tokens), dtype=torch.float32, device=hidden.device)  # of one head, and the weights
    threads = min(_MOST_THREADS[hidden.dtype], WARP * -(-dim // (WARP * _COLUMNS)))
    batch, first, last = batch.contiguous(), first.contiguous(), last.contiguous()
    launch(
        f"pool_{str(hidden.dtype).removeprefix('torch.')}", n if dim else 0, threads,
        hidden, batch, first, last, query, key, scores, out, batches, tokens, dim, *hidden.stride(), *key_strides,
        heads, heads // key_heads, width, key is not None and _in_chunks(key), _in_chunks(hidden),
        _DTYPES[dtype], _in_chunks(out), _POOLING[pooling], unit, scale, softcap, device=hidden.device, shared=_ROOM,
    )  # fmt: skip
    return out


def _in_chunks(x: Tensor) -> bool:
    """Whether every row along the last dimension is whole, aligned chunks of eight."""
    return (
        x.stride(-1) == 1
        and x.shape[-1] % _COLUMNS == 0
        and x.data_ptr() % 16 == 0
        and all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:-1])
    )
