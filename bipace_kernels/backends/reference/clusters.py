"""Greedy online cosine clustering in float64: Algorithm 1 of the paper, with the band of 1e-5 on its two decisions."""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..records import Records
from ..schema import BAND

Floats = npt.NDArray[np.float64]

SMALLEST = 1e-3  # a centroid does not change if its new vector would be shorter


def scan_rows(records: Records, fingerprint: Tensor) -> Tensor:
    state = torch.zeros(records.n_records, dtype=torch.uint8)
    for i, row in enumerate(records.order.tolist()):
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


def cluster_cosine(records: Records, fingerprint: Tensor, epsilon: float) -> Tensor:
    rows, usable = records.order.tolist(), [True] * records.n_records
    if records.usable is not None:
        usable = records.usable.tolist()
    labels: list[int] = []
    count = 0
    for begin, end in itertools.pairwise(records.group_offsets.tolist()):
        x = [fingerprint[row] for row in rows[begin:end]]
        group = _equal(x, usable[begin:end]) if epsilon == 0 else _greedy(x, usable[begin:end], epsilon)
        labels += [count + label for label in group]
        count += max(group, default=-1) + 1
    return torch.tensor(labels, dtype=torch.int64)


def cluster_sweep(records: Records, fingerprint: Tensor, epsilons: Sequence[float]) -> Tensor:
    labels = torch.empty(len(epsilons), records.n_records, dtype=torch.int64)
    for e, epsilon in enumerate(epsilons):
        labels[e] = cluster_cosine(records, fingerprint, epsilon)
    return labels


def _greedy(rows: list[Tensor], usable: list[bool], epsilon: float) -> list[int]:
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
