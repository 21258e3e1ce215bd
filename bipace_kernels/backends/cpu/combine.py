"""A = episode_weight · A_ep + w · A_S, and the results in the caller's rows: torch's own operators."""

from __future__ import annotations

import torch

from ..schema import Branch

Tensor = torch.Tensor


def combine(
    episode: Tensor,
    step_term: Tensor,
    returns: Tensor,
    labels: Tensor,
    branch: Tensor,
    source: Tensor,
    taken: Tensor | None,
    *,
    weight: float,
    total_is_step: bool,
    n_rows: int,
    episode_weight: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    total = step_term if total_is_step else _total(episode, step_term, weight, episode_weight)
    if not source.numel() or not episode.numel():
        nothing = [torch.zeros(source.shape, dtype=torch.float32) for _ in range(4)]
        alone = torch.full(source.shape, int(Branch.SINGLETON), dtype=torch.uint8)
        return nothing[0], nothing[1], nothing[2], nothing[3], torch.full(source.shape, -1), alone
    at = source.clamp(min=0)
    missing = source < 0
    if taken is not None:
        missing |= ~taken.index_select(0, at)
    absent = missing if bool(missing.any()) else None

    def rows(values: Tensor, nothing: float) -> Tensor:
        out = values.index_select(0, at)
        return out if absent is None else out.masked_fill_(absent, nothing)

    return (
        rows(total, 0.0), rows(step_term, 0.0), rows(episode, 0.0), rows(returns, 0.0), rows(labels, -1),
        rows(branch, int(Branch.SINGLETON)),
    )  # fmt: skip


def _total(episode: Tensor, step_term: Tensor, weight: float, episode_weight: float) -> Tensor:
    """A in float64, rounded once; w = 0 gives A_ep back bit for bit.  Saturates, never overflows."""
    if weight == 0 and episode_weight == 1:
        return episode  # adding 0 would turn −0.0 into 0.0
    total = episode_weight * episode.to(torch.float64) + weight * step_term.to(torch.float64)
    limit = torch.finfo(torch.float32).max
    return total.clamp_(-limit, limit).to(torch.float32)
