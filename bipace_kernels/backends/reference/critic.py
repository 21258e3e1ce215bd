"""A value of each record's state, and GAE(λ) over it, by the formulas in NumPy float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from ..masks import Kept
from ..schema import BLOCK, FLAT, JITTER, LANDMARKS, LONGEST, TINY
from .clusters import unit_vector

Tensor = torch.Tensor
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def cluster_values(
    returns: Tensor,
    labels: Tensor | None,
    group_offsets: Tensor,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    shrinkage: float,
) -> Tensor:
    kept = Kept(taken)
    r = kept.rows(returns).to(torch.float64).numpy()
    cluster = None if labels is None else kept.rows(labels).numpy()
    out = np.zeros(len(r))
    for begin, end in pairwise(kept.offsets(group_offsets).tolist()):
        mean = _mean(r[begin:end])
        out[begin:end] = mean
        if cluster is None:
            continue
        for label in set(cluster[begin:end].tolist()):
            members = begin + np.flatnonzero(cluster[begin:end] == label)
            total = 0.0
            for i in members:
                total += r[i] - mean
            out[members] = mean + total / (len(members) + shrinkage)
    return kept.spread(torch.from_numpy(out), 0.0)


def kernel_values(
    fingerprint: Tensor,
    order: Tensor,
    returns: Tensor,
    time: Tensor,
    group_offsets: Tensor,
    usable: Tensor | None,
    landmarks: Tensor | None,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    share: str,
    width: float,
    horizon: float,
    noise: float,
    same: float,
    products: Tensor | None = None,
) -> Tensor:
    kept = Kept(taken)
    r, t = kept.rows(returns).to(torch.float64).numpy(), kept.rows(time).to(torch.float64).numpy()
    rows, good = kept.rows(order), kept.rows(usable)
    groups = [np.arange(begin, end) for begin, end in pairwise(kept.offsets(group_offsets).tolist())]
    value = np.zeros(len(r))
    for group in groups:
        value[group] = _mean(r[group])
    inside = [group if good is None else group[good.numpy()[group]] for group in groups]
    whole = np.concatenate(inside) if inside else np.zeros(0, np.int64)
    for part, blocks in [(p, [p]) for p in inside] if share == "group" else [(whole, inside)]:
        if not len(part):
            continue
        z = np.stack([unit_vector(fingerprint[rows[i]]) for i in part.tolist()])
        z = z - z.mean(axis=0)
        prior = value[part] if share == "group" else np.zeros(len(part))
        kernel = kernel_matrix(z, z, t[part], t[part], width, horizon)
        at = spaced(len(part)) if share == "group" else _places(landmarks, kept, part)
        value[part] = _posterior(kernel, r[part], prior, cut(blocks), at, noise, same if share == "batch" else 0.0)
    return kept.spread(torch.from_numpy(value), 0.0)


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


def _places(landmarks: Tensor | None, kept: Kept, part: Ints) -> Ints:
    """Indices of landmarks, numbered over all records, among the records `part`; None: the first ones."""
    if landmarks is None:
        return np.arange(min(len(part), LANDMARKS))
    chosen = landmarks[landmarks >= 0]
    found: Ints = np.searchsorted(part, kept.places(chosen).numpy())
    return found


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
    rewards: Tensor,
    value: Tensor,
    step: Tensor | None,
    trajectory_offsets: Tensor,
    truncated: Tensor | None,
    gamma: float,
    gae_lambda: float,
    *,
    n_trajectories: int,
    taken: Tensor | None,
) -> Tensor:
    kept = Kept(taken)
    r, v = kept.rows(rewards).tolist(), kept.rows(value).tolist()
    offsets = kept.offsets(trajectory_offsets).tolist()
    steps = None if step is None else kept.rows(step).tolist()
    cut = [False] * len(r) if truncated is None else kept.rows(truncated).tolist()
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
    return kept.spread(torch.tensor(a, dtype=torch.float64), 0.0)


def same_action_advantage(
    fingerprint: Tensor,
    order: Tensor,
    advantage: Tensor,
    time: Tensor,
    action_key: Tensor,
    group_offsets: Tensor,
    usable: Tensor | None,
    parsed: Tensor | None,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    width: float,
    horizon: float,
    noise: float,
    products: Tensor | None = None,
) -> Tensor:
    kept = Kept(taken)
    a, t = kept.rows(advantage).numpy(), kept.rows(time).to(torch.float64).numpy()
    rows, keys, good = kept.rows(order), kept.rows(action_key).numpy(), kept.rows(usable)
    known = np.ones(len(a), np.bool_) if parsed is None else kept.rows(parsed).numpy()
    out: Floats = a / (1 + noise)  # of a record with nothing near
    for begin, end in pairwise(kept.offsets(group_offsets).tolist()):
        group = np.arange(begin, end)
        inside = group if good is None else group[good.numpy()[group]]
        if not len(inside):
            continue
        z = np.stack([unit_vector(fingerprint[rows[i]]) for i in inside.tolist()])
        z = z - z.mean(axis=0)
        for block in cut([inside]):
            with_action = known[inside[block]]
            part, x = inside[block][with_action], z[block][with_action]
            kernel = kernel_matrix(x, x, t[part], t[part], width, horizon) * (keys[part][:, None] == keys[part])
            out[part] = a[part] - noise * np.linalg.solve(kernel + noise * np.eye(len(part)), a[part])
    return kept.spread(torch.from_numpy(out), 0.0)


def normed_advantage(
    advantage: Tensor,
    returns: Tensor,
    group_offsets: Tensor,
    *,
    n_groups: int,
    longest_group: int,
    taken: Tensor | None,
    step_norm: str,
) -> Tensor:
    kept = Kept(taken)
    scaled = _normed(
        kept.rows(advantage).numpy(), kept.rows(returns).to(torch.float64).numpy(),
        kept.offsets(group_offsets).tolist(), step_norm,
    )  # fmt: skip
    limit = torch.finfo(torch.float32).max
    return kept.spread(torch.from_numpy(scaled).clamp(-limit, limit).to(torch.float32), 0.0)


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
