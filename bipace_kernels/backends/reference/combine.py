"""A = episode_weight · A_ep + w · A_S, and the results in the caller's rows, by torch's own operators."""

import torch
from torch import Tensor

from ..records import Records
from ..schema import HUGE, Branch, Terms


def combine(
    records: Records, returns: Tensor, episode: Tensor, terms: Terms, weights: tuple[float, float] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    source, step_term = records.source, terms.step_term
    total = step_term if weights is None else _total(episode, step_term, *weights)
    columns = (total, step_term, episode, returns, terms.labels, terms.branch)
    nothing = (0.0, 0.0, 0.0, 0.0, -1, int(Branch.SINGLETON))
    if not source.numel() or not episode.numel():
        rows = [torch.full(source.shape, empty, dtype=c.dtype) for c, empty in zip(columns, nothing, strict=True)]
    else:
        missing, at = source < 0, source.clamp(min=0)
        rows = [column.index_select(0, at) for column in columns]
        if bool(missing.any()):
            rows = [row.masked_fill_(missing, empty) for row, empty in zip(rows, nothing, strict=True)]
    advantage, step, own, r, cluster, branch = rows
    return advantage, step, own, r, cluster, branch


def _total(episode: Tensor, step_term: Tensor, episode_weight: float, weight: float) -> Tensor:
    """A in float64, rounded once; w = 0 gives A_ep back bit for bit.  Saturates, never overflows."""
    if weight == 0 and episode_weight == 1:
        return episode  # adding 0 would turn −0.0 into 0.0
    scale = HUGE if max(episode_weight, weight) > HUGE else 1.0
    total = episode_weight / scale * episode.to(torch.float64) + weight / scale * step_term.to(torch.float64)
    limit = torch.finfo(torch.float32).max
    return total.mul_(scale).clamp_(-limit, limit).to(torch.float32)
