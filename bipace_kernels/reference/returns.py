"""Discounted returns, one step after another."""

from __future__ import annotations

from itertools import pairwise

import torch

Tensor = torch.Tensor


def discounted_returns(
    rewards: Tensor, step: Tensor | None, trajectory_offsets: Tensor, gamma: float, *, num_threads: int = 1
) -> Tensor:
    """R_t = Σ_{u≥t} γ^{u−t} r_u in float64, rounded to float32 once; shapes as in cpu/returns.py."""
    r, offsets = rewards.tolist(), trajectory_offsets.tolist()
    steps = None if step is None else step.tolist()
    out = [0.0] * len(r)
    for begin, end in pairwise(offsets):
        for i in reversed(range(begin, end)):
            if i == end - 1:
                out[i] = r[i]
            else:
                gap = 1 if steps is None else steps[i + 1] - steps[i]
                # Equal step numbers are one step recorded twice: its reward counts once.
                out[i] = out[i + 1] if gap == 0 else r[i] + gamma**gap * out[i + 1]
    return torch.tensor(out, dtype=torch.float64).to(torch.float32)


def trajectory_returns(
    rewards: Tensor, step: Tensor | None, trajectory_offsets: Tensor, *, num_threads: int = 1
) -> Tensor:
    """[T] float32: R(τ) = Σ r over the steps of each trajectory, in float64, rounded once."""
    r, offsets = rewards.tolist(), trajectory_offsets.tolist()
    steps = None if step is None else step.tolist()
    out = []
    for begin, end in pairwise(offsets):
        total = 0.0
        for i in range(begin, end):
            if i == begin or steps is None or steps[i] != steps[i - 1]:
                total += r[i]
        out.append(total)
    return torch.tensor(out, dtype=torch.float64).to(torch.float32)
