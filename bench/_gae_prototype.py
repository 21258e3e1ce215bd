"""Critic-free GAE in NumPy float64, with everything that the truth sets were asked about. The package's own estimator replaces it.

    V̂      a value of each record's state, read off the returns of the batch (`value`)
    δ_t    = r_t + γ^Δt V̂(next record) - V̂(s_t), V̂ = 0 behind a trajectory's last record
    A_S    = Σ_k (γλ)^k δ_{t+k}, by step numbers

Rows are sorted by group, trajectory and step. Fingerprints come as the float64 Gram matrix of the rows scaled to unit length, not
centred: centring both sides of it equals centring the rows, and in float64 it costs no accuracy that matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]

GRID = tuple(product((0.1, 0.3, 1.0), (2.0, 4.0, None)))  # (width, time) of kernel="auto"
NOISES = (0.5, 1.0, 2.0, 4.0)
EQUAL = 1e-5  # a centred squared length up to here counts as equal to the mean


@dataclass(frozen=True)
class Gae:
    """Fields of the specification, and below the line what was only tried."""

    value: str = "kernel"  # group | cluster | kernel
    share: str = "group"  # group | batch | memory
    kernel: str = "fixed"  # fixed | auto
    shrinkage: float | None = 3.0  # κ of value="cluster"; None: empirical Bayes
    kernel_width: float = 0.3
    kernel_time: float | None = 4.0
    kernel_noise: float = 2.0
    kernel_same: float = 0.3
    gae_lambda: float = 0.5
    step_norm: str = "batch"  # batch | group | none
    # ---
    prior: str = "mean"  # mean | zero, inside the group
    leave_out: bool = False  # the record's own trajectory takes no part in its value
    landmarks: int | None = None  # rank of a pivoted incomplete Cholesky factor instead of the whole kernel
    stride: bool = False  # landmarks evenly spaced in the batch instead of pivots
    auto_by: str = (
        "batch"  # what chooses the parameters of a shared kernel: the likelihood of the batch, or of its groups
    )
    pooled: bool = False  # one signal variance for all groups of kernel="auto" instead of one each
    trajectory_noise: float = (
        0.0  # σ²: returns of one trajectory share the noise of what follows, C = K + ρ I + σ² Λ Λᵀ
    )
    whiten: float = 0.0  # p: fingerprints' principal axes over the batch scaled by variance^(-p/2) before the cosine
    action_weight: float = 0.0  # b: the value is averaged over equal actions too, GAE smoothed by b K [a = a']
    action_noise: float = 1.0


@dataclass(frozen=True)
class Rows:
    """What a value is read from. `memory` rows come with returns alone and get no advantage."""

    group: Integers  # [N]
    trajectory: Integers  # [N]
    step: Integers  # [N]
    reward: Floats  # [N]
    returns: Floats  # [N]
    gamma: float
    gram: Floats | None = None  # [N, N] of unit rows
    cluster: Integers | None = None  # [N]
    action: Integers | None = None  # [N]
    memory: Bools | None = None  # [N]


def segments(ids: Integers) -> Iterator[slice]:
    """Runs of equal ids."""
    starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    for begin, end in zip(starts, np.append(starts[1:], len(ids)), strict=True):
        yield slice(int(begin), int(end))


def discounted(x: Floats, trajectory: Integers, step: Integers, decay: float) -> Floats:
    """Σ_k decay^Δt x behind each record of its trajectory, the record included."""
    out = x.copy()
    for i in range(len(x) - 2, -1, -1):
        if trajectory[i + 1] == trajectory[i]:
            out[i] += decay ** float(step[i + 1] - step[i]) * out[i + 1]
    return out


def deltas(reward: Floats, value: Floats, trajectory: Integers, step: Integers, gamma: float) -> Floats:
    same = np.append(trajectory[1:] == trajectory[:-1], False)
    gap = np.append(step[1:] - step[:-1], 0)
    return reward + np.where(same, gamma ** np.where(same, gap, 0) * np.append(value[1:], 0.0), 0.0) - value


def cosines(gram: Floats) -> Floats:
    """Cosines of the rows about their mean, from the Gram of the rows as they are."""
    row = gram.mean(axis=1)
    centred = gram - row[:, None] - row[None] + row.mean()
    square = np.diag(centred).copy()
    flat = square <= EQUAL
    length = np.sqrt(np.where(flat, 1.0, square))
    cosine = centred / length[:, None] / length[None]
    cosine[flat] = 0.0
    cosine[:, flat] = 0.0
    cosine[np.ix_(flat, flat)] = 1.0
    np.fill_diagonal(cosine, 1.0)
    return np.minimum(cosine, 1.0)


def kernel_of(cosine: Floats, step: Integers, width: float, time: float | None) -> Floats:
    exponent = (cosine - 1.0) / width
    if time is not None:
        exponent -= (step[:, None] - step[None]) ** 2 / (2.0 * time**2)
    return np.exp(exponent)


def likelihoods(kernel: Floats, y: Floats, noises: Sequence[float]) -> tuple[Floats, Floats]:
    """(yᵀC⁻¹y, log|C|) with C = K + ρ I for each ρ: one factorisation serves all."""
    eigenvalues, vectors = np.linalg.eigh(kernel)
    eigenvalues, z = np.maximum(eigenvalues, 0.0), (vectors.T @ y) ** 2
    c = eigenvalues[None] + np.asarray(noises)[:, None]
    return (z[None] / c).sum(axis=1), np.log(c).sum(axis=1)


def choose(
    rows: Rows, blocks: Sequence[slice | Integers], same: float, prior: str, pooled: bool
) -> tuple[float, float | None, float]:
    """(width, time, noise) of the largest marginal likelihood, the signal's variance profiled out of each block or of all."""
    best, found = -np.inf, (0.3, 4.0, 2.0)
    scores: dict[tuple[float, float | None], list[tuple[int, Floats, Floats]]] = {key: [] for key in GRID}
    for block in blocks:
        y = rows.returns[block]
        if np.ptp(y) == 0.0:
            continue
        y = y - y.mean() if prior == "mean" else y
        assert rows.gram is not None
        cosine = cosines(rows.gram[block][:, block])
        extra = same * (rows.group[block][:, None] == rows.group[block][None])
        for width, time in GRID:
            scores[width, time].append(
                (len(y), *likelihoods(kernel_of(cosine, rows.step[block], width, time) + extra, y, NOISES))
            )
    for key, parts in scores.items():
        if not parts:
            continue
        n = np.array([part[0] for part in parts])[:, None]
        quadratic, logdet = np.stack([p[1] for p in parts]), np.stack([p[2] for p in parts])
        if pooled:
            total = -0.5 * n.sum() * np.log(quadratic.sum(axis=0) / n.sum()) - 0.5 * logdet.sum(axis=0)
        else:
            total = (-0.5 * n * np.log(quadratic / n) - 0.5 * logdet).sum(axis=0)
        if total.max() > best:
            best, found = float(total.max()), (*key, NOISES[int(total.argmax())])
    return found


def pivoted(kernel: Floats, rank: int, stride: bool) -> Floats:
    """[N, m] factor F with F Fᵀ the Nyström approximation of the kernel."""
    n = len(kernel)
    if stride:
        at = np.unique(np.linspace(0, n - 1, min(rank, n)).astype(int))
        eigenvalues, vectors = np.linalg.eigh(kernel[np.ix_(at, at)])
        keep = eigenvalues > 1e-10 * eigenvalues[-1]
        return kernel[:, at] @ (vectors[:, keep] / np.sqrt(eigenvalues[keep]))
    factor, left = np.zeros((n, min(rank, n))), np.diag(kernel).copy()
    for column in range(factor.shape[1]):
        pivot = int(left.argmax())
        if left[pivot] <= 1e-10:
            return factor[:, :column]
        factor[:, column] = (kernel[:, pivot] - factor[:, :column] @ factor[pivot, :column]) / np.sqrt(left[pivot])
        left = np.maximum(left - factor[:, column] ** 2, 0.0)
    return factor


def posterior(kernel: Floats, noise: Floats, y: Floats) -> Floats:
    """K (K + N)⁻¹ y = y - N (K + N)⁻¹ y."""
    lower = np.linalg.cholesky(kernel + noise)
    return y - noise @ np.linalg.solve(lower.T, np.linalg.solve(lower, y))


def noise_of(rows: Rows, block: slice, config: Gae, noise: float) -> Floats:
    """N = ρ I + σ² Λ Λᵀ, Λ_{t,k} = γ^(k-t) for k ≥ t inside a trajectory.

    In a deterministic environment R_t = V(s_t) + Σ_{k≥t} γ^(k-t) A*_k, so this is the noise of returns where the advantages of
    different steps are independent: Gaussian-process temporal differences.
    """
    n = block.stop - block.start
    found = noise * np.eye(n)
    if config.trajectory_noise > 0:
        step = rows.step[block]
        for own in segments(rows.trajectory[block]):
            gap = step[own][None] - step[own][:, None]
            sums = np.where(gap >= 0, rows.gamma ** np.maximum(gap, 0).astype(float), 0.0)
            found[own, own] += config.trajectory_noise * sums @ sums.T
    return found


def whitened(gram: Floats, power: float, floor: float = 1e-3) -> Floats:
    """Gram of the rows with their principal axes scaled by (variance + floor · the largest)^(-power/2), centred."""
    row = gram.mean(axis=1)
    variance, axes = np.linalg.eigh(gram - row[:, None] - row[None] + row.mean())
    variance = np.maximum(variance, 0.0)
    scale = (variance + floor * variance[-1]) ** -power
    return (axes * (variance * scale * variance[-1] ** power)) @ axes.T


def left_out(kernel: Floats, noise: float, returns: Floats, trajectory: Integers, prior: str) -> Floats:
    """Posterior mean of each trajectory's rows given all the others, exactly: y_T - (C⁻¹)_TT⁻¹ (C⁻¹ y)_T."""
    inverse = np.linalg.inv(kernel + noise * np.eye(len(returns)))
    of_returns, of_ones = inverse @ returns, inverse.sum(axis=1)
    out = np.empty(len(returns))
    for t in np.unique(trajectory):
        own = trajectory == t
        mean = returns[~own].mean() if prior == "mean" and not own.all() else 0.0
        y, solved = returns[own] - mean, of_returns[own] - mean * of_ones[own]
        out[own] = mean + y - np.linalg.solve(inverse[np.ix_(own, own)], solved)
    return out


def value_of(rows: Rows, config: Gae) -> Floats:
    """V̂ [N] of each record."""
    returns = rows.returns
    value = np.empty(len(returns))
    if config.value == "group":
        for block in segments(rows.group):
            value[block] = returns[block].mean()
        return value
    if config.value == "cluster":
        return _cluster_value(rows, config)
    assert rows.gram is not None
    if config.whiten > 0:
        rows = replace(rows, gram=whitened(rows.gram, config.whiten))
    width, time, noise = config.kernel_width, config.kernel_time, config.kernel_noise
    blocks = list(segments(rows.group))
    if config.share == "group":
        if config.kernel == "auto":
            width, time, noise = choose(rows, blocks, 0.0, config.prior, config.pooled)
        for block in blocks:
            y = returns[block]
            mean = y.mean() if config.prior == "mean" else 0.0
            if len(np.unique(rows.trajectory[block])) == 1:
                value[block] = y.mean()
                continue
            kernel = kernel_of(cosines(rows.gram[block, block]), rows.step[block], width, time)
            if config.leave_out:
                value[block] = left_out(kernel, noise, y, rows.trajectory[block], config.prior)
            else:
                value[block] = mean + posterior(kernel, noise_of(rows, block, config, noise), y - mean)
        return value
    if config.kernel == "auto":
        if config.auto_by == "batch":
            width, time, noise = choose(rows, [slice(0, len(returns))], config.kernel_same, "zero", False)
        else:
            width, time, noise = choose(rows, blocks, config.kernel_same, "zero", True)
    kernel = kernel_of(cosines(rows.gram), rows.step, width, time)
    same = (rows.group[:, None] == rows.group[None]).astype(float)
    if config.landmarks is not None:
        factor = pivoted(kernel, config.landmarks, config.stride)
        _, number = np.unique(rows.group, return_inverse=True)
        factor = np.hstack([factor, np.sqrt(config.kernel_same) * np.eye(number.max() + 1)[number]])
        inner = factor.T @ factor + noise * np.eye(factor.shape[1])
        return factor @ np.linalg.solve(inner, factor.T @ returns)
    kernel += config.kernel_same * same
    if config.leave_out:
        return left_out(kernel, noise, returns, rows.trajectory, "zero")
    return posterior(kernel, noise_of(rows, slice(0, len(returns)), config, noise), returns)


def _cluster_value(rows: Rows, config: Gae) -> Floats:
    assert rows.cluster is not None
    value = np.empty(len(rows.returns))
    for block in segments(rows.group):
        y = rows.returns[block] - rows.returns[block].mean()
        _, number = np.unique(rows.cluster[block], return_inverse=True)
        size, total = np.bincount(number), np.bincount(number, y)
        kappa = config.shrinkage
        if kappa is None:
            kappa = _empirical_shrinkage(y, number, size, total)
        value[block] = (
            rows.returns[block].mean() + (total / (size + kappa))[number]
            if np.isfinite(kappa)
            else rows.returns[block].mean()
        )
    return value


def _empirical_shrinkage(y: Floats, number: Integers, size: Integers, total: Floats) -> float:
    """κ = variance within clusters / variance between them, by the method of moments; inf where nothing lies between."""
    k, n = len(size), len(y)
    if k < 2 or n == k:
        return 3.0
    within = float(((y - (total / size)[number]) ** 2).sum() / (n - k))
    between = float((size * (total / size) ** 2).sum() - (k - 1) * within) / (n - float((size**2).sum()) / n)
    return within / between if between > 0 else np.inf


def advantage(rows: Rows, config: Gae) -> Floats:
    """A_S after `step_norm`, 0 on rows of memory."""
    return normed(rows, unnormed(rows, value_of(rows, config), config), config.step_norm)


def unnormed(rows: Rows, value: Floats, config: Gae) -> Floats:
    delta = deltas(rows.reward, value, rows.trajectory, rows.step, rows.gamma)
    a = discounted(delta, rows.trajectory, rows.step, rows.gamma * config.gae_lambda)
    return smoothed(rows, a, config) if config.action_weight > 0 else a


def smoothed(rows: Rows, a: Floats, config: Gae) -> Floats:
    """Posterior mean of the advantage under b K_s [a = a'] inside the group, with noise ρ_a."""
    assert rows.gram is not None and rows.action is not None
    out, b, noise = np.empty(len(a)), config.action_weight, config.action_noise
    for block in segments(rows.group):
        kernel = kernel_of(cosines(rows.gram[block, block]), rows.step[block], config.kernel_width, config.kernel_time)
        kernel *= b * (rows.action[block][:, None] == rows.action[block][None])
        out[block] = posterior(kernel, noise * np.eye(len(kernel)), a[block])
    return out


def normed(rows: Rows, a: Floats, norm: str) -> Floats:
    now = np.ones(len(a), bool) if rows.memory is None else ~rows.memory
    tiny = 1e-6 * np.abs(rows.returns).max(initial=0.0)

    def divided(x: Floats) -> Floats:
        rms = float(np.sqrt((x**2).mean())) if len(x) else 0.0
        return x / rms if rms > tiny else np.zeros(len(x))

    out = np.zeros(len(a))
    if norm == "none":
        out[now] = a[now]
    elif norm == "batch":
        out[now] = divided(a[now])
    else:
        for block in segments(rows.group):
            if now[block.start]:
                out[block] = divided(a[block])
    return out


__all__ = ["Gae", "Rows", "advantage", "deltas", "discounted", "normed", "replace", "segments", "unnormed", "value_of"]
