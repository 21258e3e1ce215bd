"""Greedy online cosine clustering in float64: Algorithm 1 of the paper, with the band of 1e-5 on its two decisions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..masks import Kept
from ..schema import BAND

Tensor = torch.Tensor
Floats = npt.NDArray[np.float64]

SMALLEST = 1e-3  # a centroid does not change if its new vector would be shorter


def scan_rows(fingerprint: Tensor, order: Tensor) -> Tensor:
    state = torch.zeros(order.shape[0], dtype=torch.uint8)
    for i, row in enumerate(order.tolist()):
        x = fingerprint[row]
        if not bool(torch.isfinite(x).all()):
            state[i] = 1
        elif not bool(x.any()):
            state[i] = 2
    return state


def unit_vector(row: Tensor) -> Floats:
    """x/‖x‖ in float64, first scaled so that squares neither overflow nor underflow."""
    x: Floats = row.to(torch.float64).numpy()
    x = x / np.abs(x).max()
    return x / np.sqrt(x @ x)


def cluster_cosine(
    fingerprint: Tensor,
    order: Tensor,
    group_offsets: Tensor,
    usable: Tensor | None,
    epsilon: float,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    state: Tensor | None = None,
) -> Tensor:
    if state is not None:
        usable = state.copy_(scan_rows(fingerprint, order)) == 0
    kept = Kept(taken)
    order, usable, group_offsets = kept.rows(order), kept.rows(usable), kept.offsets(group_offsets)
    rows = order.tolist()
    offsets = group_offsets.tolist()
    labels: list[int] = []
    count = 0
    for begin, end in itertools.pairwise(offsets):
        usable_here = [True] * (end - begin) if usable is None else usable[begin:end].tolist()
        x = [fingerprint[row] for row in rows[begin:end]]
        group = _equal(x, usable_here) if epsilon == 0 else _greedy(x, usable_here, epsilon)
        labels += [count + label for label in group]
        count += max(group, default=-1) + 1
    return kept.spread(torch.tensor(labels, dtype=torch.int64), -1)


def cluster_sweep(
    fingerprint: Tensor,
    order: Tensor,
    group_offsets: Tensor,
    usable: Tensor | None,
    epsilons: Sequence[float],
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
) -> Tensor:
    labels = torch.empty(len(epsilons), order.shape[0], dtype=torch.int64)
    for e, epsilon in enumerate(epsilons):
        labels[e] = cluster_cosine(
            fingerprint,
            order,
            group_offsets,
            usable,
            epsilon,
            n_groups=n_groups,
            longest_group=longest_group,
            taken=taken,
        )
    return labels


def _greedy(rows: list[Tensor], usable: list[bool], epsilon: float) -> list[int]:
    """Algorithm 1 over one group."""
    centroids: list[Floats] = []  # 𝒦
    members: list[int] = []  # |ℳ|
    number: list[int] = []  # label of each cluster
    labels: list[int] = []
    count = 0
    for row, good in zip(rows, usable, strict=True):
        if not good:
            labels.append(count)
            count += 1
            continue
        x = unit_vector(row)
        similarity = np.array([c @ x for c in centroids])
        best = similarity.max(initial=-np.inf)
        if best < 1 - epsilon - BAND:
            centroids.append(x)
            members.append(1)
            number.append(count)
            labels.append(count)
            count += 1
        else:
            k = int(np.flatnonzero(similarity >= best - BAND)[0])  # the oldest of the nearest, up to τ
            members[k] += 1
            moved = centroids[k] + (x - centroids[k]) / members[k]
            length = float(np.sqrt(moved @ moved))
            if length >= SMALLEST:
                centroids[k] = moved / length
            labels.append(number[k])
    return labels


def _equal(rows: list[Tensor], usable: list[bool]) -> list[int]:
    """ε = 0: rows equal as given, in their dtype, −0.0 equal to 0.0; no normalisation."""
    first: dict[bytes, int] = {}
    labels: list[int] = []
    count = 0
    for row, good in zip(rows, usable, strict=True):
        key = (row.to(torch.float32) + 0.0).numpy().tobytes()  # every half-width value is a float32; −0.0 + 0.0 = 0.0
        if good and key in first:
            labels.append(first[key])
            continue
        if good:
            first[key] = count
        labels.append(count)
        count += 1
    return labels
