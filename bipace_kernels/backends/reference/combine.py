"""A = episode_weight · A_ep + w · A_S, row by row."""

from __future__ import annotations

import torch

from ..schema import Branch

Tensor = torch.Tensor
_LARGEST = torch.finfo(torch.float32).max


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
    numbers = torch.zeros(4, n_rows, dtype=torch.float32)
    cluster = torch.full((n_rows,), -1, dtype=torch.int64)
    kind = torch.full((n_rows,), int(Branch.SINGLETON), dtype=torch.uint8)
    for row, i in enumerate(source.tolist()):
        if i < 0 or (taken is not None and not taken[i]):
            continue
        total = episode_weight * float(episode[i]) + weight * float(step_term[i])
        numbers[0, row] = max(-_LARGEST, min(_LARGEST, total))
        if total_is_step or (weight == 0 and episode_weight == 1):
            numbers[0, row] = step_term[i] if total_is_step else episode[i]
        numbers[1, row], numbers[2, row], numbers[3, row] = step_term[i], episode[i], returns[i]
        cluster[row], kind[row] = labels[i], branch[i]
    return numbers[0], numbers[1], numbers[2], numbers[3], cluster, kind
