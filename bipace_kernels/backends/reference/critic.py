"""A value of each record's state, and GAE(λ) over it, by the formulas in NumPy float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..records import Records
from ..schema import BLOCK, FLAT, JITTER, LANDMARKS, LONGEST, TINY, Kernel
from .clusters import unit_vector

Tensor = torch.Tensor
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def cluster_values(records: Records, returns: Tensor, labels: Tensor | None, shrinkage: float) -> Tensor:
    r = returns.to(torch.float64).numpy()
    out = np.zeros(len(r))
    for begin, end in pairwise(records.group_offsets.tolist()):
        mean = _mean(r[begin:end])
        out[begin:end] = mean
        if labels is None:
            continue
        cluster = labels[begin:end].numpy()
        for label in set(cluster.tolist()):
            members = begin + np.flatnonzero(cluster == label)
            total = 0.0
            for i in members:
                total += r[i] - mean
            out[members] = mean + total / (len(members) + shrinkage)
    return torch.from_numpy(out)


def kernel_values(
    records: Records, fingerprint: Tensor, returns: Tensor, landmarks: Tensor | None, kernel: Kernel,
    products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r, t = returns.to(torch.float64).numpy(), records.time.to(torch.float64).numpy()
    groups = [np.arange(begin, end) for begin, end in pairwise(records.group_offsets.tolist())]
    value = np.zeros(len(r))
    for group in groups:
        value[group] = _mean(r[group])
    inside = [_usable(records, group) for group in groups]
    whole = np.concatenate(inside) if inside else np.zeros(0, np.int64)
    in_groups = kernel.share == "group"
    for part, blocks in [(p, [p]) for p in inside] if in_groups else [(whole, inside)]:
        if not len(part):
            continue
        z = _centred(records, fingerprint, part)
        prior = value[part] if in_groups else np.zeros(len(part))
        k = kernel_matrix(z, z, t[part], t[part], kernel.width, kernel.horizon)
        at = spaced(len(part)) if in_groups else _places(landmarks, part)
        same = 0.0 if in_groups else kernel.same
        value[part] = _posterior(k, r[part], prior, cut(blocks), at, kernel.noise, same)
    return torch.from_numpy(value)


def _usable(records: Records, group: Ints) -> Ints:
    return group if records.usable is None else group[records.usable.numpy()[group]]


def _centred(records: Records, fingerprint: Tensor, part: Ints) -> Floats:
    """[n, D] rows of some records at unit length, minus their mean."""
    z = np.stack([unit_vector(fingerprint[records.order[i]]) for i in part.tolist()])
    centred: Floats = z - z.mean(axis=0)
    return centred


def _posterior(
    kernel: Floats, y: Floats, prior: Floats, blocks: list[slice], at: Ints, noise: float, same: float
) -> Floats:
    """prior + C (C + ρ I)⁻¹ (y − prior): C is K + s inside the blocks, and K by landmarks between them."""
    n = len(y)
    if len(blocks) == 1:
        c = kernel + same
    else:
        c = kernel[:, at] @ np.linalg.solve(kernel[np.ix_(at, at)] + JITTER * np.eye(len(at)), kernel[at])
        for block in blocks:
            c[block, block] = kernel[block, block] + same
    difference = y - prior
    out: Floats = prior + difference - noise * np.linalg.solve(c + noise * np.eye(n), difference)
    return out


def spaced(n: int) -> Ints:
    """Landmarks of a group by itself: evenly spaced in processing order."""
    m = min(n, LANDMARKS)
    found: Ints = np.arange(m) * n // max(m, 1)
    return found


def _places(landmarks: Tensor | None, part: Ints) -> Ints:
    """Indices of landmarks, numbered over all records, among the records `part`; None: the first ones."""
    if landmarks is None:
        return np.arange(min(len(part), LANDMARKS))
    places: Ints = np.searchsorted(part, landmarks[landmarks >= 0].numpy())
    return places


def cut(groups: list[Ints]) -> list[slice]:
    """Blocks of the groups' usable records, one after the other: a group, or equal runs of a longer one."""
    found, begin = [], 0
    for group in groups:
        n = len(group)
        runs = 1 if n <= LONGEST else -(-n // BLOCK)
        ends = [begin + k * n // runs for k in range(runs + 1)]
        found += [slice(first, last) for first, last in pairwise(ends) if last > first]
        begin += n
    return found


def gae_advantage(
    records: Records, rewards: Tensor, value: Tensor, truncated: Tensor | None, gamma: float, gae_lambda: float
) -> Tensor:
    r, v, offsets = rewards.tolist(), value.tolist(), records.trajectory_offsets.tolist()
    steps = None if records.step is None else records.step.tolist()
    cut = [False] * len(r) if truncated is None else truncated.tolist()
    a = [0.0] * len(r)
    for begin, end in pairwise(offsets):
        later: list[int] = []  # the records of the next step
        i = end
        while i > begin:
            first = i - 1
            while steps is not None and first > begin and steps[first - 1] == steps[first]:
                first -= 1
            now = list(range(first, i))
            gap = 1 if not later or steps is None else steps[later[0]] - steps[first]
            next_value = next_advantage = 0.0
            if later:
                next_value = sum(v[j] for j in reversed(later)) / len(later)
                next_advantage = sum(a[j] for j in reversed(later)) / len(later)
            elif any(cut[j] for j in now):
                next_value = sum(v[j] for j in reversed(now)) / len(now)
            for j in now:
                delta = r[j] + gamma**gap * next_value - v[j]
                a[j] = delta + (gamma * gae_lambda) ** gap * next_advantage
            later, i = now, first
    return torch.tensor(a, dtype=torch.float64)


def same_action_advantage(
    records: Records, fingerprint: Tensor, advantage: Tensor, action_key: Tensor, parsed: Tensor | None,
    kernel: Kernel, products: Tensor | None = None,
) -> Tensor:  # fmt: skip
    a, t, keys = advantage.numpy(), records.time.to(torch.float64).numpy(), action_key.numpy()
    known = np.ones(len(a), np.bool_) if parsed is None else parsed.numpy()
    out: Floats = a / (1 + kernel.noise)  # of a record with nothing near
    for begin, end in pairwise(records.group_offsets.tolist()):
        inside = _usable(records, np.arange(begin, end))
        if not len(inside):
            continue
        z = _centred(records, fingerprint, inside)
        for block in cut([inside]):
            with_action = known[inside[block]]
            part, x = inside[block][with_action], z[block][with_action]
            k = kernel_matrix(x, x, t[part], t[part], kernel.width, kernel.horizon)
            k = k * (keys[part][:, None] == keys[part])
            out[part] = a[part] - kernel.noise * np.linalg.solve(k + kernel.noise * np.eye(len(part)), a[part])
    return torch.from_numpy(out)


def normed_advantage(records: Records, advantage: Tensor, returns: Tensor, step_norm: str) -> Tensor:
    r, offsets = returns.to(torch.float64).numpy(), records.group_offsets.tolist()
    scaled = _normed(advantage.numpy(), r, offsets, step_norm)
    limit = torch.finfo(torch.float32).max
    return torch.from_numpy(scaled).clamp(-limit, limit).to(torch.float32)


def _normed(a: Floats, returns: Floats, group_offsets: list[int], step_norm: str) -> Floats:
    """a / its root mean square over the batch or its group; 0 where that is rounding."""
    if step_norm == "none" or not len(a):
        return a
    squares = [float((a[begin:end] ** 2).sum()) for begin, end in pairwise(group_offsets)]
    if step_norm == "batch":
        return a * _reciprocal(sum(squares), len(a), float(np.abs(returns).max()))
    out = np.zeros(len(a))
    for square, (begin, end) in zip(squares, pairwise(group_offsets), strict=True):
        out[begin:end] = a[begin:end] * _reciprocal(square, end - begin, float(np.abs(returns[begin:end]).max()))
    return out


def _reciprocal(square: float, n: int, largest: float) -> float:
    size = float(np.sqrt(square / n))
    return 1 / size if largest > 0 and size > TINY * largest else 0.0


def _mean(values: Floats) -> float:
    """In processing order; exact if all values are equal."""
    if values.min() == values.max():
        return float(values[0])
    total = 0.0
    for v in values.tolist():
        total += v
    return total / len(values)


def kernel_matrix(x: Floats, y: Floats, t: Floats, u: Floats, width: float, horizon: float) -> Floats:
    """[n, m] of centred rows x [n, D] and y [m, D] at steps t [n] and u [m]."""
    square_x, square_y = (x * x).sum(axis=1), (y * y).sum(axis=1)
    flat_x, flat_y = square_x <= FLAT, square_y <= FLAT
    product = x @ y.T
    length = np.sqrt(np.outer(np.where(flat_x, 1.0, square_x), np.where(flat_y, 1.0, square_y)))
    cosine = np.minimum(product / length, 1.0)
    cosine = np.where(cosine > 1 - 1e-12, 1.0, cosine)  # equal rows
    cosine = np.where(flat_x[:, None] | flat_y, np.where(flat_x[:, None] & flat_y, 1.0, 0.0), cosine)
    exponent = (cosine - 1.0) / width
    if horizon > 0:
        exponent = exponent - ((t[:, None] - u) / horizon) ** 2 / 2
    with np.errstate(under="ignore"):
        kernel: Floats = np.exp(exponent)
    return kernel


def nearest(rows: Tensor, group: Ints, time: Floats, config: Any, most: int) -> tuple[list[Ints], list[Floats]]:
    """Each record's nearest ones in its prompt group by the kernel: indices [≤ most] and k; none of a bad row.

    rows     [n, D] fingerprints, centred over the group for share "group", else over all n; group, time [n]
    config   of "gae", for its kernel
    """
    usable = np.flatnonzero((rows.isfinite().all(dim=1) & (rows != 0).any(dim=1)).numpy())
    near: list[Ints] = [np.zeros(0, np.int64) for _ in rows]
    kernel: list[Floats] = [np.zeros(0) for _ in rows]
    if not len(usable):
        return near, kernel
    inside, horizon = config.share == "group", float(config.kernel_time or 0.0)
    centre = 0.0 if inside else sum(unit_vector(rows[i]) for i in usable.tolist()) / len(usable)
    for own in (usable[group[usable] == number] for number in np.unique(group[usable])):
        z = np.stack([unit_vector(rows[i]) for i in own.tolist()]) - centre
        z = z - z.mean(axis=0) if inside else z
        for some in np.array_split(np.arange(len(own)), -(-len(own) // BLOCK)):
            k = kernel_matrix(z[some], z, time[own[some]], time[own], config.kernel_width, horizon)
            k[np.arange(len(some)), some] = -1.0  # itself
            best = np.argsort(-k, axis=1, kind="stable")[:, : min(most, len(own) - 1)]
            for i, chosen, row in zip(own[some].tolist(), best, k, strict=True):
                near[i], kernel[i] = own[chosen], row[chosen]
    return near, kernel
