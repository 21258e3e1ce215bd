"""States out of a block's output: gather, pooling, unit norm and rounding in one kernel, a program per state.

A program holds its whole state in registers, in float64, so the block's output is read once, where it is, and nothing of
its size is ever made.  Sums go in the order of the tokens, as on the CPU: the bits depend on the state's own tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ._launch import device_guard

Tensor = torch.Tensor

COLUMNS_PER_WARP = 256  # 8 sums per thread: 16 registers, beside the loads that are under way and their addresses
UNROLL = 2  # tokens whose loads are under way together
TILE = 32  # tokens whose scores are made together
_POOLING = {"last": 0, "mean": 1, "attention": 2}
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


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
    if not n or not dim:
        return out
    block = triton.next_power_of_2(dim)
    query = key = scores = None
    key_strides, heads, key_heads, width, scale, softcap = (0, 0, 0, 0), 0, 1, 0, 1.0, 0.0
    if pooling == "attention":
        query, key = attention.query.contiguous(), attention.key
        (_, heads, width), key_heads, key_strides = query.shape, key.shape[2], key.stride()
        scale, softcap = float(attention.scale), float(attention.softcap)
        scores = torch.empty((n, 2, tokens), dtype=torch.float32, device=hidden.device)  # of one head, and the weights
    with device_guard(hidden):
        _pool[(n,)](
            hidden, batch.contiguous(), first.contiguous(), last.contiguous(), query, key, scores, out, batches, tokens,
            dim, *hidden.stride(), *key_strides, scale, softcap, heads, heads // key_heads,
            ADJACENT=hidden.stride(2) == 1, POOLING=_POOLING[pooling],
            UNIT=unit, SOFTCAP=softcap != 0.0, WIDTH=width, BLOCK=block, WIDTH_BLOCK=triton.next_power_of_2(max(width, 1)),
            UNROLL=_unroll(block), TILE=TILE, num_warps=_warps(block), **_OPTIONS,
        )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return min(max(block // COLUMNS_PER_WARP, 1), 32)


def _unroll(block: int) -> int:
    """32 warps leave 64 registers to a thread, too few for the loads of two tokens."""
    return UNROLL if _warps(block) < 32 else 1


@triton.jit
def _attention_weights(
    query,  # [heads, WIDTH] of the state
    key,  # [length, key_heads, WIDTH] of its prompt
    token_stride,
    head_stride,
    column_stride,
    score,  # [length] float32: room for one head's scores
    weight,  # [length] float32, written
    length,
    scale,
    softcap,
    heads,
    heads_per_key,
    SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Softmax of the token's scores over its prompt, mean over the heads."""
    e = tl.arange(0, WIDTH_BLOCK)
    tile = tl.arange(0, TILE)
    for h in range(heads):
        q = tl.load(query + h * WIDTH + e, mask=e < WIDTH, other=0.0).to(tl.float32)
        own = key + tl.cast(h // heads_per_key, tl.int64) * head_stride
        most, total = -float("inf"), 0.0
        for start in range(0, length, TILE):
            t = start + tile
            k = tl.load(
                own + t[:, None] * token_stride + e[None, :].to(tl.int64) * column_stride,
                mask=(t < length)[:, None] & (e < WIDTH)[None, :],
                other=0.0,
            ).to(tl.float32)
            s = tl.sum(k * q[None, :], axis=1) * scale
            if SOFTCAP:
                s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (s / softcap)) + 1.0))  # tanh
            tl.store(score + t, s, mask=t < length)
            s = tl.where(t < length, s, -float("inf"))
            peak = tl.maximum(most, tl.max(s, axis=0))
            total = total * tl.exp(most - peak) + tl.sum(tl.exp(s - peak), axis=0)
            most = peak
        tl.debug_barrier()
        share = 1.0 / (total * heads)
        for start in range(0, length, TILE):
            t = start + tile
            s = tl.load(score + t, mask=t < length, other=-float("inf"))
            before = tl.load(weight + t, mask=t < tl.where(h > 0, length, 0), other=0.0)
            tl.store(weight + t, before + tl.exp(s - most) * share, mask=t < length)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["batches", "tokens"])
def _pool(
    hidden,  # [batches, tokens, dim]
    batch,  # [n] int64
    first,  # [n] int64
    last,  # [n] int64
    query,  # [n, heads, WIDTH]
    key,  # [batches, tokens, key_heads, WIDTH]
    scores,  # [n, 2, tokens] float32
    out,  # [n, dim]
    batches,
    tokens,
    dim,
    batch_stride,
    token_stride,
    column_stride,
    key_batch_stride,
    key_token_stride,
    key_head_stride,
    key_column_stride,
    scale,
    softcap,
    heads,
    heads_per_key,
    ADJACENT: tl.constexpr,  # column_stride is 1
    POOLING: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    b, end = tl.load(batch + i), tl.load(last + i)
    begin = end if POOLING == 0 else tl.load(first + i)
    length = end - begin + 1
    inside = (b >= 0) & (b < batches) & (begin >= 0) & (end < tokens) & (length > 0)
    length = tl.where(inside, length, 0)  # a state that is not there reads nothing
    column = tl.arange(0, BLOCK)
    # Of neighbours the number is the offset: 64 bits for each column would take the registers that the sums need.
    offset = column if ADJACENT else column.to(tl.int64) * column_stride
    token = hidden + b * batch_stride + begin * token_stride
    if POOLING == 2:
        weight = scores + (2 * i + 1) * tokens
        _attention_weights(
            query + i * heads * WIDTH, key + b * key_batch_stride + begin * key_token_stride, key_token_stride,
            key_head_stride, key_column_stride, scores + 2 * i * tokens, weight, length, scale, softcap, heads,
            heads_per_key, SOFTCAP, WIDTH, WIDTH_BLOCK, TILE,
        )  # fmt: skip
    if POOLING == 0:
        state = tl.load(token + offset, mask=column < tl.where(length > 0, dim, 0), other=0.0).to(tl.float64)
    else:
        state = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, length, UNROLL):
            x = ()
            for u in tl.static_range(UNROLL):
                there = column < tl.where(start + u < length, dim, 0)
                x = x + (tl.load(token + (start + u) * token_stride + offset, mask=there, other=0.0),)
            for u in tl.static_range(UNROLL):
                if POOLING == 1:
                    state += x[u].to(tl.float64)
                else:
                    state += tl.load(weight + start + u, mask=start + u < length, other=0.0).to(tl.float64) * x[u].to(
                        tl.float64
                    )
    if UNIT:
        norm = tl.sqrt(tl.sum(state * state, axis=0))
        state *= tl.where(norm > 0.0, 1.0 / norm, 0.0)  # NaN and infinity stay to be seen, as NaN
    elif POOLING == 1:
        state *= 1.0 / tl.maximum(length, 1).to(tl.float64)
    tl.store(out + i * dim + column, state.to(tl.float32).to(out.dtype.element_ty), mask=column < dim)


def main_path() -> Iterator[tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]]:
    """(kernel, signature, constexprs, options) of each launch on the main path, for compiling ahead of time."""
    where = {"batch": "*i64", "first": "*i64", "last": "*i64"}
    sizes = dict.fromkeys(
        ["batches", "tokens", "dim", "batch_stride", "token_stride", "key_batch_stride", "key_token_stride",
         "key_head_stride", "heads", "heads_per_key"], "i32",
    )  # fmt: skip
    floats = {"scale": "fp32", "softcap": "fp32"}
    tiles = {"WIDTH": 128, "WIDTH_BLOCK": 128, "TILE": TILE, "SOFTCAP": False, "ADJACENT": True,
             "column_stride": 1, "key_column_stride": 1}  # fmt: skip
    for dim in (3584, 8192):
        block = triton.next_power_of_2(dim)
        for element in ("*bf16", "*fp32"):
            tensors = {"hidden": element, "query": element, "key": element, "scores": "*fp32", "out": element}
            for pooling in _POOLING.values():
                yield (
                    _pool,
                    {**tensors, **where, **sizes, **floats},
                    {**tiles, "POOLING": pooling, "UNIT": True, "BLOCK": block, "UNROLL": _unroll(block)},
                    {"num_warps": _warps(block), **_OPTIONS},
                )
