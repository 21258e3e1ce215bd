"""Discounted returns, one step after another."""

from itertools import pairwise

import torch
from torch import Tensor

from ..records import Records
from ..schema import LIMIT


def discounted_returns(records: Records, rewards: Tensor, gamma: float) -> Tensor:
    r, offsets = rewards.tolist(), records.trajectory_offsets.tolist()
    steps = None if records.step is None else records.step.tolist()
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


def trajectory_returns(records: Records, rewards: Tensor) -> Tensor:
    r, offsets = rewards.tolist(), records.trajectory_offsets.tolist()
    steps = None if records.step is None else records.step.tolist()
    out = []
    for begin, end in pairwise(offsets):
        total = 0.0
        for i in range(begin, end):
            if i == begin or steps is None or steps[i] != steps[i - 1]:
                total += r[i]
        out.append(total)
    return torch.tensor(out, dtype=torch.float64).to(torch.float32)


def spoilt_trajectories(
    records: Records, step_return: Tensor, trajectory_return: Tensor, bad_record: Tensor | None
) -> Tensor:
    r, own = step_return.tolist(), trajectory_return.tolist()
    bad = [False] * len(r) if bad_record is None else bad_record.tolist()
    out = []
    for t, (begin, end) in enumerate(pairwise(records.trajectory_offsets.tolist())):
        steps = range(begin, end)
        out.append(not abs(own[t]) <= LIMIT or any(bad[i] or not abs(r[i]) <= LIMIT for i in steps))
    return torch.tensor(out, dtype=torch.bool)


def all_returns(
    records: Records, rewards: Tensor, bad_record: Tensor | None, gamma: float
) -> tuple[Tensor, Tensor, Tensor]:
    steps, own = discounted_returns(records, rewards, gamma), trajectory_returns(records, rewards)
    return steps, own, spoilt_trajectories(records, steps, own, bad_record)
