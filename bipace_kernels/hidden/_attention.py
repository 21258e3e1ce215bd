"""Queries and keys of one block, recomputed from its input for attention-weighted pooling.

Only the chosen tokens need queries, so this is one key projection, far below a hundredth of the block's own work.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .layers import arguments_of, attention_of, unwrap

Tensor = torch.Tensor


@dataclass(frozen=True)
class Scores:
    """Inputs of the chosen tokens' scores: softcap(scale · q · k), GQA heads in groups."""

    query: Tensor  # [n, heads, head_dim], rotated
    key: Tensor  # [B, T, key_heads, head_dim], rotated
    scale: float
    softcap: float  # 0: none
    window: int  # window of the block's attention, including the token itself; 0: unlimited


def check_block(block: nn.Module) -> None:
    """Raises TypeError if queries and keys of this kind of block cannot be recomputed, naming what is missing."""
    inner, attention = unwrap(block), attention_of(block)
    missing = []
    if inner._modules.get("input_layernorm") is None:
        missing.append("block.input_layernorm")
    if attention is None:
        missing.append("an attention")
    else:
        names = attention._modules
        if names.get("qkv_proj") is None and (names.get("q_proj") is None or names.get("k_proj") is None):
            missing.append("q_proj and k_proj, or qkv_proj")
        if not hasattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb"):
            missing.append("apply_rotary_pos_emb in the model's module")
        if "sinks" in attention._parameters:
            missing.append("a plain softmax (this one has sinks)")
    if missing:
        raise TypeError(
            f"pooling 'attention' recomputes queries and keys, but {type(inner).__name__} lacks {', '.join(missing)}; use "
            "pooling='last' or 'mean'."
        )


def scores_of(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Tensor, last: Tensor) -> Scores:
    """Scores of tokens (batch [n], last [n]) at the attention of a block that was called with these arguments."""
    inner, attention = unwrap(block), attention_of(block)
    assert attention is not None
    given = arguments_of(inner, args, kwargs)
    cos, sin = _position_embeddings(given, inner, attention)  # [B or 1, T, rotated]
    hidden = inner.input_layernorm(given["hidden_states"])  # type: ignore[operator]  # [B, T, D]
    at = (batch.clamp(0, hidden.shape[0] - 1), last.clamp(0, hidden.shape[1] - 1))
    config: Any = attention.config
    width = int(attention.head_dim)  # type: ignore[arg-type]
    query, key = _projections(attention, hidden, hidden[at], config, width)
    cos_at, sin_at = (x.expand(hidden.shape[0], -1, -1)[at][:, None] for x in (cos, sin))  # [n, 1, rotated]
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    query = rotate(query[:, :, None], query[:, :, None], cos_at, sin_at)[0][:, :, 0]
    key = rotate(key, key, cos, sin, unsqueeze_dim=2)[1]
    scale: Any = getattr(attention, "scaling", None)
    softcap: Any = getattr(attention, "attn_logit_softcapping", None)
    window: Any = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return Scores(query, key, float(width**-0.5 if scale is None else scale), float(softcap or 0.0), int(window or 0))


def _position_embeddings(given: dict[str, Any], block: nn.Module, attention: nn.Module) -> tuple[Tensor, Tensor]:
    found = given.get("position_embeddings")
    if found is None:  # Gemma 3 before transformers 5 passes two
        sliding = getattr(attention, "is_sliding", False)
        found = given.get("position_embeddings_local" if sliding else "position_embeddings_global")
    if found is None:
        raise TypeError(
            f"pooling 'attention' needs the block's position_embeddings, but {type(block).__name__} was called with "
            f"{', '.join(given)}; use pooling='last' or 'mean'."
        )
    cos, sin = found
    return cos, sin


def _projections(
    attention: nn.Module, hidden: Tensor, wanted: Tensor, config: Any, width: int
) -> tuple[Tensor, Tensor]:
    """Queries [n, heads, head_dim] of the chosen tokens and keys [B, T, key_heads, head_dim] of all, not yet rotated."""
    parts: Any = attention._modules
    if parts.get("qkv_proj") is not None:
        query_size, key_size = config.num_attention_heads * width, config.num_key_value_heads * width
        query = parts["qkv_proj"](wanted)[..., :query_size]
        key = parts["qkv_proj"](hidden)[..., query_size : query_size + key_size]
    else:
        query, key = parts["q_proj"](wanted), parts["k_proj"](hidden)
    query, key = query.unflatten(-1, (-1, width)), key.unflatten(-1, (-1, width))
    if parts.get("q_norm") is not None:
        query = parts["q_norm"](query)
    if parts.get("k_norm") is not None:
        key = parts["k_norm"](key)
    return query, key
