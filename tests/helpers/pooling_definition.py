"""Pooling as defined: one state after the other in float64, by loops that read like the definition; and its memory."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tensor = torch.Tensor


def pool_rows(
    hidden: Tensor,  # [B, T, D], any strides, on any device
    batch: Tensor,  # [n] int64
    first: Tensor,  # [n] int64, the first token of the state's prompt
    last: Tensor,  # [n] int64, the token of the state
    *,
    pooling: str,
    unit: bool,
    attention: Any = None,  # hidden._pool.Scores
) -> Tensor:  # [n, D] float64
    """The token itself ("last"), the mean over [first, last], or the mean weighted by the token's own attention.

    Zeros where a state lies outside the tensor or has no token.
    """
    out = torch.zeros((batch.shape[0], hidden.shape[2]), dtype=torch.float64, device=hidden.device)
    spans = zip(batch.tolist(), first.tolist(), last.tolist(), strict=True)
    for i, (b, begin, end) in enumerate(spans):
        begin = end if pooling == "last" else begin
        if not (0 <= b < hidden.shape[0] and 0 <= begin <= end < hidden.shape[1]):
            continue
        tokens = hidden[b, begin : end + 1].double()  # [len, D]
        vector = tokens.mean(0)
        if pooling == "attention":  # softmax of the state's scores over its prompt, mean over the heads
            query = attention.query[i].double()  # [heads, head_dim]
            key = attention.key[b, begin : end + 1].double()  # [len, key_heads, head_dim]
            key = key.repeat_interleave(query.shape[0] // key.shape[1], dim=1)
            score = torch.einsum("hd,thd->ht", query, key) * attention.scale
            if attention.softcap:
                score = attention.softcap * torch.tanh(score / attention.softcap)
            vector = score.softmax(1).mean(0) @ tokens
        if unit:
            norm = vector.norm()
            vector = torch.where(norm > 0, vector / norm, vector)
        out[i] = vector
    return out


class Made(TorchDispatchMode):
    """Bytes of each tensor that an operation makes, whether it is kept or not; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.bytes += [storage.nbytes() for storage in made if storage.data_ptr() not in given]
        return out
