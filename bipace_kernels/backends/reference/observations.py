"""Partitions by observations: equal observations, equal histories."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch

from ..masks import Kept

Tensor = torch.Tensor


def _number(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _group_of(group_offsets: Tensor) -> list[int]:
    return torch.repeat_interleave(torch.arange(group_offsets.numel() - 1), group_offsets.diff()).tolist()


def cluster_exact(
    codes: Tensor, group_offsets: Tensor, *, n_groups: int, longest_group: int, taken: Tensor | None
) -> Tensor:
    kept = Kept(taken)
    keys = list(zip(_group_of(kept.offsets(group_offsets)), kept.rows(codes).tolist(), strict=True))
    return kept.spread(torch.tensor(_number(keys), dtype=torch.int64), -1)


def cluster_history(
    codes: Tensor,
    step: Tensor | None,
    trajectory_offsets: Tensor,
    group_offsets: Tensor,
    depth: int,
    *,
    n_trajectories: int,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
) -> Tensor:
    kept = Kept(taken)
    codes, step = kept.rows(codes), kept.rows(step)
    trajectory_offsets, group_offsets = kept.offsets(trajectory_offsets), kept.offsets(group_offsets)
    code, group = codes.tolist(), _group_of(group_offsets)
    steps = None if step is None else step.tolist()
    m = len(code)
    history: list[tuple[int, ...]] = [()] * m  # codes of the earlier steps of the trajectory, oldest first
    offsets = trajectory_offsets.tolist()
    for begin, end in pairwise(offsets):
        for i in range(begin + 1, end):
            # A step recorded twice is in later histories once, by its first record.
            repeat = steps is not None and steps[i] == steps[i - 1]
            earlier = i - 1
            while steps is not None and earlier > begin and steps[earlier] == steps[earlier - 1]:
                earlier -= 1
            history[i] = history[i - 1] if repeat else history[i - 1] + (code[earlier],)
    labels = torch.full((depth, m), -1, dtype=torch.int64)
    for k in range(1, depth + 1):
        tuples = {i: (group[i], (*history[i], code[i])[-k:]) for i in range(m) if len(history[i]) + 1 >= k}
        labels[k - 1, list(tuples)] = torch.tensor(_number(list(tuples.values())), dtype=torch.int64)
    return kept.spread(labels, -1)
