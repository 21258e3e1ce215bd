"""Partitions by observations: equal observations, equal histories."""

from collections.abc import Hashable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..records import Records, runs


def _number(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def cluster_exact(records: Records, codes: Tensor) -> Tensor:
    keys = list(zip(runs(records.group_offsets).tolist(), codes.tolist(), strict=True))
    return torch.tensor(_number(keys), dtype=torch.int64)


def cluster_history(records: Records, codes: Tensor, depth: int) -> Tensor:
    code, group = codes.tolist(), runs(records.group_offsets).tolist()
    steps = None if records.step is None else records.step.tolist()
    m = len(code)
    history: list[tuple[int, ...]] = [()] * m  # codes of the earlier steps of the trajectory, oldest first
    for begin, end in pairwise(records.trajectory_offsets.tolist()):
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
    return labels
