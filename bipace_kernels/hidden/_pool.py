"""The stage `pooling`: from a block's output to one vector per state, by whichever backend serves the tensor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _checks, _dispatch, reference
from ..stages import Pooling
from ._attention import Scores

Tensor = torch.Tensor

POOLINGS = ("last", "mean", "attention")
_warned: set[str] = set()


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


def check_poolings(pooling: Any) -> tuple[str, ...]:
    """One or several of POOLINGS."""
    several = (pooling,) if isinstance(pooling, str) else tuple(pooling) if isinstance(pooling, Sequence) else ()
    if not several or any(p not in POOLINGS for p in several) or len(set(several)) < len(several):
        raise ValueError(f"pooling must be {', '.join(map(repr, POOLINGS))}, or several of them, got {pooling!r}.")
    return several


def check_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and dtype not in _checks.FINGERPRINT_DTYPES:
        raise ValueError(f"dtype must be None (the model's) or float32, bfloat16 or float16 of torch, got {dtype!r}.")
    return dtype  # type: ignore[no-any-return]


def pool(
    hidden: Tensor,  # [B, T, D]
    spans: Spans,
    *,
    pooling: str,
    normalize: bool,
    dtype: torch.dtype | None,
    attention: Scores | None = None,
    backend: str = "auto",
) -> Tensor:  # [n, D]
    """The stage itself.  float64 models go the plain way; their rows are float32 unless asked otherwise."""
    out = dtype or (torch.float32 if hidden.dtype == torch.float64 else hidden.dtype)
    first = spans.first
    if attention is not None and attention.window:
        first = torch.maximum(first, spans.last - attention.window + 1)
    plain = hidden.dtype not in _checks.FINGERPRINT_DTYPES
    stage: Pooling = reference.pooling if plain else _stage(backend, hidden.device)
    return stage.pool_rows(
        hidden, spans.batch, first, spans.last, pooling=pooling, unit=normalize, dtype=out, attention=attention,
    )  # fmt: skip


def _stage(backend: str, device: torch.device) -> Pooling:
    try:
        return _dispatch.choose(backend, device).pooling
    except _dispatch.BackendError as error:
        if backend != "auto" or device.type == "cpu":
            raise
        if str(error) not in _warned:
            _warned.add(str(error))
            warnings.warn(
                f"hidden states are pooled by plain torch on {device}, slowly: {error}", RuntimeWarning, stacklevel=3
            )
        return reference.pooling
