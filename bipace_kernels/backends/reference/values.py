"""The step term: Q̂(s, a) − V̂(s) and its relatives, cluster by cluster, in the order of the paper's formulas."""

import math

import numpy as np
import torch
from torch import Tensor

from ..records import Records
from ..schema import Branch
from .episode import centred, mean_and_sigma, mean_of


def step_advantage(
    records: Records, returns: Tensor, labels: Tensor, action_key: Tensor | None, estimator: str, step_norm: str,
    delta: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r = returns.numpy()
    keys = None if action_key is None else action_key.tolist()
    clusters: dict[int, list[int]] = {}
    for i, label in enumerate(labels.tolist()):
        if label >= 0:
            clusters.setdefault(label, []).append(i)
    step = np.zeros(len(r), dtype=np.float32)
    branch = np.full(len(r), int(Branch.SINGLETON), dtype=np.uint8)
    for members in clusters.values():
        if len(members) < 2:
            continue
        values = [float(r[i]) for i in members]
        for i in members:
            branch[i] = Branch.PACE
            if estimator == "mean":
                mean, sigma = mean_and_sigma(values, unbiased=True)
                step[i] = centred(r[i], mean)
                if step_norm == "std":
                    step[i] = np.float32(float(step[i]) / (sigma + delta))
                continue
            assert keys is not None
            same = [float(r[j]) for j in members if keys[j] == keys[i]]
            others = [float(r[j]) for j in members if keys[j] != keys[i]]
            if estimator == "diff_peer" and others:
                step[i] = centred(r[i], mean_of(others))
            elif estimator == "q_style" and len(same) > 1:
                step[i] = np.float32(np.float32(mean_of(same)) - np.float32(mean_of(values)))
            else:
                step[i] = centred(r[i], mean_of([float(r[j]) for j in members if j != i]))
                branch[i] = Branch.LEAVE_ONE_OUT
    return torch.from_numpy(step), torch.from_numpy(branch)


def hgpo_advantage(
    records: Records, returns: Tensor, depth_labels: Tensor, episode_advantage: Tensor, step_norm: str, delta: float,
    alpha: float, base_group: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    r = returns.numpy()
    depth, m = depth_labels.shape
    items: list[list[tuple[int, float]]] = [[] for _ in range(m)]  # (L_k, a_k) of each record
    deepest = np.zeros(m, dtype=np.int64)
    if base_group:
        for i, a in enumerate(episode_advantage.tolist()):
            if a != 0:
                items[i].append((1, a))
    for k in range(1, depth + 1):
        at_depth: dict[int, list[int]] = {}
        for i, label in enumerate(depth_labels[k - 1].tolist()):
            if label >= 0:
                at_depth.setdefault(label, []).append(i)
        for members in at_depth.values():
            if len(members) < 2:
                continue
            mean, sigma = mean_and_sigma([float(r[i]) for i in members], unbiased=False)
            for i in members:
                deepest[i] = k
                difference = centred(r[i], mean)
                if difference == 0:
                    continue
                a = np.float32(float(difference) / (sigma + delta)) if step_norm == "std" else difference
                items[i].append((k + 1, float(a)))
    out = np.zeros(m, dtype=np.float32)
    for i, parts in enumerate(items):
        # w_k = L_k^α / (Σ L^α + δ) with numerator and denominator divided by the largest L^α, to avoid overflow.
        longest = max((length for length, _ in parts), default=1)
        share = [(length / longest) ** alpha for length, _ in parts]
        total = sum(share) + delta * math.pow(longest, -alpha)
        out[i] = np.float32(sum(s / total * a for s, (_, a) in zip(share, parts, strict=True)))
    branch = np.where(deepest > 0, int(Branch.PACE), int(Branch.SINGLETON)).astype(np.uint8)
    return torch.from_numpy(out), torch.from_numpy(deepest), torch.from_numpy(branch)
