"""to_tokens(): a step's advantage on each of its response tokens."""

from typing import Any

import torch
from torch import Tensor

from ..backends import threads
from ..inputs import checks, interop


def to_tokens(advantage: Any, mask: Any) -> Tensor:
    """A[b, t] = advantage[b] where mask[b, t], else 0.

    advantage   [B] real
    mask        [B, T] bool or 0/1   the tokens of the step's response
    Returns [B, T] float32.  ValueError for advantages that are not finite and masks of other numbers, on the CPU; on a
    GPU values are not checked, since that would synchronize.
    """
    if torch.compiler.is_compiling():
        return _to_tokens(advantage, mask, looks=False)
    with threads.using():
        return _to_tokens(advantage, mask, looks=True)


def _to_tokens(advantage: Any, mask: Any, *, looks: bool) -> Tensor:
    """to_tokens(); looks: whether values on the CPU are checked."""
    if hasattr(advantage, "advantage"):
        raise TypeError(f"advantage must be the advantages [B], got {type(advantage).__name__}; pass its `advantage`.")
    device, advantage, mask = interop.tensors(advantage=advantage, mask=mask)
    n = checks.length(advantage, "advantage")
    values = checks.real_vector(advantage, "advantage", n)
    looks = looks and device.type == "cpu"
    if looks:
        checks.check_finite(values, "advantage", None)
    tokens = checks.to_tensor(mask, "mask", "booleans of shape [B, T]")
    if tokens.ndim != 2 or tokens.shape[0] != n:
        raise ValueError(f"mask must have shape [B, T] with B = {n} like advantage, got {list(tokens.shape)}.")
    in_doubt = looks and tokens.dtype != torch.bool
    if tokens.is_complex() or (in_doubt and not bool(((tokens == 0) | (tokens == 1)).all())):
        raise ValueError("mask must hold booleans or 0 and 1 only; apply weights in the loss.")
    on_device = values.to(device=device, dtype=torch.float32).unsqueeze(1)
    return torch.where(tokens.to(device).bool(), on_device, torch.zeros((), dtype=torch.float32, device=device))
