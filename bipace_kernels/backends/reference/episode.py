"""The episode term, group by group."""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..records import Records


def episode_advantage(
    records: Records, episode_return: Tensor, scope: str, norm: str, lone: str, delta: float
) -> Tensor:
    returns = episode_return.numpy()
    offsets = records.trajectory_offsets.tolist()
    out = np.zeros(records.n_records, dtype=np.float32)
    for begin, end in pairwise(records.group_trajectories.tolist()):
        inside = range(begin, end)
        length = [1 if scope == "trajectory" else offsets[t + 1] - offsets[t] for t in inside]
        values = [float(returns[t]) for t, n in zip(inside, length, strict=True) for _ in range(n)]
        if not values:
            continue
        mean, sigma = mean_and_sigma(values, unbiased=True)
        for t in inside:
            if len(values) > 1:
                advantage = centred(returns[t], mean)
            else:
                advantage = returns[t] if lone == "raw" else np.float32(0)
                sigma = 1.0
            if norm == "std":
                advantage = np.float32(float(advantage) / (sigma + delta))
            out[offsets[t] : offsets[t + 1]] = advantage
    return torch.from_numpy(out)


def centred(value: np.float32, mean: float) -> np.float32:
    """R − mean as a float32 difference, the mean rounded to float32 once: equal returns give exactly 0."""
    difference: np.float32 = np.subtract(value, np.float32(mean), dtype=np.float32)
    return difference


def mean_and_sigma(values: list[float], *, unbiased: bool) -> tuple[float, float]:
    """Mean, and two-pass σ about the unrounded mean, in float64; σ is exactly 0 where all values are equal."""
    n, mean = len(values), mean_of(values)
    if n == 1 or max(values) == min(values):
        return mean, 0.0
    squares = 0.0
    for v in values:
        squares += (v - mean) ** 2
    return mean, math.sqrt(squares / (n - 1 if unbiased else n))


def mean_of(values: list[float]) -> float:
    """The mean in float64, summed in order (from Python 3.12 on, sum() compensates)."""
    total = 0.0
    for v in values:
        total += v
    return total / len(values)
