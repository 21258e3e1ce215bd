"""From a block's output to one vector per state, by torch's operators on the block's device.

"last" copies a token.  The others are one matrix product per chunk of tokens, weights [n, tokens] times values
[tokens, D] in float64: the block is never copied whole, states that share tokens read them once, and nothing
synchronizes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..inputs import checks
from .layers import arguments_of, attention_of, unwrap

POOLINGS = ("last", "mean", "attention")
ATTENTIONS = (  # families whose weights were compared with those that eager attention returns
    *("Cohere", "Ernie4_5", "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "Glm4Moe", "Granite", "GraniteMoe", "Llama"),
    *("Mistral", "Mixtral", "Olmo", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"),
)
CHUNK = 1 << 22  # numbers in float64 at a time: 32 MiB, far below a block's own memory


@dataclass(frozen=True)
class Spans:
    """Where the states of one forward are: token last[i] of row batch[i] of the tensor, its prompt from first[i] on."""

    batch: Tensor  # [n] int64
    first: Tensor  # [n] int64
    last: Tensor  # [n] int64; −1: no such token

    def __len__(self) -> int:
        return int(self.batch.shape[0])

    def to(self, device: torch.device) -> Spans:
        if self.last.device == device:
            return self
        return Spans(*(x.to(device, non_blocking=True) for x in (self.batch, self.first, self.last)))


@dataclass(frozen=True)
class Scores:
    """Inputs of the chosen tokens' scores: softcap(scale · q · k), GQA heads in groups."""

    query: Tensor  # [n, heads, head_dim], rotated
    key: Tensor  # [B, T, key_heads, head_dim], rotated
    scale: float
    softcap: float  # 0: none
    window: int  # window of the block's attention, including the token itself; 0: unlimited


def check_poolings(pooling: Any) -> tuple[str, ...]:
    """One or several of POOLINGS."""
    several = (pooling,) if isinstance(pooling, str) else tuple(pooling) if isinstance(pooling, Sequence) else ()
    if not several or any(p not in POOLINGS for p in several) or len(set(several)) < len(several):
        raise ValueError(f"pooling must be {', '.join(map(repr, POOLINGS))}, or several of them, got {pooling!r}.")
    return several


def check_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and dtype not in checks.FINGERPRINT_DTYPES:
        raise ValueError(f"dtype must be None (the model's) or float32, bfloat16 or float16 of torch, got {dtype!r}.")
    return dtype  # type: ignore[no-any-return]


def pool(
    hidden: Tensor,  # [B, T, D] of any floating-point dtype, any strides
    spans: Spans,
    pooling: str,
    normalize: bool = False,
    dtype: torch.dtype | None = None,  # None: the block's, float32 for one in float64
    attention: Scores | None = None,  # for pooling "attention"
) -> Tensor:  # [n, D]
    """The token itself ("last"), the mean over [first, last], or the mean weighted by the token's own attention.

    Sums and norms in float64.  Zeros where a state is outside the tensor or has no token; NaN where a mean has a token
    that is not finite.  Tokens outside a state's own prompt do not affect it, whatever they hold.
    """
    out = dtype or (torch.float32 if hidden.dtype == torch.float64 else hidden.dtype)
    (batches, tokens, width), n = hidden.shape, len(spans)
    if not (n and hidden.numel()):
        return torch.zeros((n, width), dtype=out, device=hidden.device)
    batch, last = spans.batch, spans.last
    first = last if pooling == "last" else spans.first
    if attention is not None and attention.window:
        first = torch.maximum(first, last - attention.window + 1)
    inside = (batch >= 0) & (batch < batches) & (first >= 0) & (first <= last) & (last < tokens)
    at = batch.clamp(0, batches - 1)
    if pooling == "last":
        rows = hidden[at, last.clamp(0, tokens - 1)]
    else:
        token = torch.arange(tokens, device=hidden.device)
        member = inside[:, None] & (token >= first[:, None]) & (token <= last[:, None])  # [n, T]
        if pooling == "mean":
            weight = (last - first + 1).double().reciprocal()[:, None].expand(-1, tokens)
        else:
            assert attention is not None
            weight = _attention_weights(attention, at, member)
        rows = _weighted_sum(hidden, at, member, weight)
    if normalize:
        rows = rows.double()
        norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        rows.div_(norm.masked_fill(norm == 0, 1.0))
    return rows.to(out).masked_fill_(~inside[:, None], 0)


def _weighted_sum(
    hidden: Tensor,  # [B, T, D]
    batch: Tensor,  # [n] int64
    member: Tensor,  # [n, T] bool, the tokens of each state
    weight: Tensor,  # [n, T] float64, read where `member` is set
) -> Tensor:  # [n, D] float64
    (batches, tokens, width), n = hidden.shape, len(batch)
    total = torch.zeros((n, width), dtype=torch.float64, device=hidden.device)
    finite = torch.ones(n, dtype=torch.bool, device=hidden.device)
    chunk = max(1, CHUNK // max(width, n))
    columns = min(tokens, chunk)
    rows = max(1, chunk // columns)
    for b in range(0, batches, rows):
        numbers = torch.arange(b, min(b + rows, batches), device=hidden.device)
        own = batch[:, None, None] == numbers[:, None]  # [n, b, 1]
        for t in range(0, tokens, columns):
            part = (own & member[:, None, t : t + columns]).flatten(1)  # [n, b * t]
            w = weight[:, None, t : t + columns].expand(-1, own.shape[1], -1).flatten(1)
            x = hidden[b : b + rows, t : t + columns].flatten(0, 1)  # [b * t, D]
            # 0 times NaN is NaN: a token that is not finite is left out, and only affects its own states.
            bad = ~(x.abs().amax(1) < torch.inf)
            finite &= ~(part & bad).any(1)
            total.addmm_(torch.where(part, w, 0.0), x.masked_fill(bad[:, None], 0.0).double())
    return total.masked_fill_(~finite[:, None], torch.nan)


def _attention_weights(attention: Scores, batch: Tensor, member: Tensor) -> Tensor:  # [n], [n, T] -> [n, T] float64
    """Softmax of the state's scores over its prompt, mean over the heads."""
    (n, heads, width), (_, tokens, key_heads, _) = attention.query.shape, attention.key.shape
    weight = torch.empty((n, tokens), dtype=torch.float64, device=member.device)
    states = max(1, CHUNK // (tokens * (heads + key_heads * width)))
    for i in range(0, n, states):
        query = attention.query[i : i + states].double().reshape(-1, key_heads, heads // key_heads, width)
        key = attention.key.transpose(1, 2)[batch[i : i + states]]  # [states, key_heads, T, width]
        key = key.to(torch.float64, memory_format=torch.contiguous_format)
        score = (key @ query.mT) * attention.scale  # [states, key_heads, T, heads of the key]
        if attention.softcap:
            score = attention.softcap * torch.tanh(score / attention.softcap)
        score = score.masked_fill(~member[i : i + states, None, :, None], -torch.inf)
        weight[i : i + states] = score.softmax(2).mean((1, 3))
    return weight


def is_known(block: nn.Module) -> bool:
    """Whether a block's attention is of one of the ATTENTIONS."""
    return type(attention_of(block)).__name__.removesuffix("Attention") in ATTENTIONS


def check_block(block: nn.Module) -> None:
    """Raises TypeError for attention that scores_of() might not recompute, as of layers without rotary positions."""
    if not is_known(block):
        raise TypeError(
            f"pooling 'attention' is not for {type(unwrap(block)).__name__}, only for the attention of "
            f"{', '.join(ATTENTIONS)}; use 'last' or 'mean'."
        )


def scores_of(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spans: Spans) -> Scores:
    """Scores of the spans' last tokens at the attention of a block that was called with these arguments.

    Only these tokens need queries, so this is one key projection, far below a hundredth of the block's own work.
    """
    inner, attention = unwrap(block), attention_of(block)
    assert attention is not None
    arguments = arguments_of(inner, args, kwargs)
    cos, sin = _position_embeddings(arguments, attention)  # [B or 1, T, rotated]
    hidden = inner.input_layernorm(arguments["hidden_states"])  # type: ignore[operator]  # [B, T, D]
    at = (spans.batch.clamp(0, hidden.shape[0] - 1), spans.last.clamp(0, hidden.shape[1] - 1))
    config: Any = attention.config
    width = int(attention.head_dim)  # type: ignore[arg-type]
    query, key = _projections(attention, hidden, hidden[at], config, width)
    cos_at, sin_at = (x.expand(hidden.shape[0], -1, -1)[at][:, None] for x in (cos, sin))  # [n, 1, rotated]
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    query = rotate(query[:, :, None], query[:, :, None], cos_at, sin_at)[0][:, :, 0]
    key = rotate(key, key, cos, sin, unsqueeze_dim=2)[1]
    scale: Any = getattr(attention, "scaling", None)
    softcap: Any = getattr(attention, "attn_logit_softcapping", None)
    # Without a window of its own an attention has the model's, unless that is only for blocks of one type.
    common = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    window: Any = getattr(attention, "sliding_window", common)
    return Scores(query, key, float(width**-0.5 if scale is None else scale), float(softcap or 0.0), int(window or 0))


def _position_embeddings(arguments: dict[str, Any], attention: nn.Module) -> tuple[Tensor, Tensor]:
    tables = arguments.get("position_embeddings")
    if tables is None:  # Gemma 3 before transformers 5 passes two
        sliding = getattr(attention, "is_sliding", False)
        tables = arguments["position_embeddings_local" if sliding else "position_embeddings_global"]
    return tables  # type: ignore[no-any-return]


def _projections(
    attention: nn.Module, hidden: Tensor, wanted: Tensor, config: Any, width: int
) -> tuple[Tensor, Tensor]:
    """Queries [n, heads, head_dim] of the chosen tokens and keys [B, T, key_heads, head_dim] of all, not rotated."""
    parts: Any = attention._modules
    training = [module for module in attention.modules() if module.training]
    try:
        for module in training:  # an adapter's dropout would draw random numbers that the forward needs
            module.training = False
        if parts.get("qkv_proj") is not None:
            query_size, key_size = config.num_attention_heads * width, config.num_key_value_heads * width
            query = parts["qkv_proj"](wanted)[..., :query_size]
            key = parts["qkv_proj"](hidden)[..., query_size : query_size + key_size]
        else:
            query, key = parts["q_proj"](wanted), parts["k_proj"](hidden)
    finally:
        for module in training:
            module.training = True
    if clip := getattr(config, "clip_qkv", None):  # OLMo's
        query, key = query.clamp(-clip, clip), key.clamp(-clip, clip)
    query, key = query.unflatten(-1, (-1, width)), key.unflatten(-1, (-1, width))
    query = query if parts.get("q_norm") is None else parts["q_norm"](query)
    key = key if parts.get("k_norm") is None else parts["k_norm"](key)
    return query, key
