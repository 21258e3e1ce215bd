"""A value of each record's state, and GAE(λ) over it, by the formulas in NumPy float64."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..records import Records
from ..schema import BLOCK, FLAT, JITTER, LANDMARKS, SMALLEST, TINY, Kernel, signs, state_keys
from .clusters import unit_vector

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


def unit_rows(records: Records, fingerprint: Tensor, width: int, keys: Tensor | None = None) -> Tensor:
    """In float64, not rounded."""
    dim = fingerprint.shape[1]
    folded = min(width or dim, dim)
    if keys is not None:
        keys.copy_(state_keys(fingerprint, records.order))
    sign = signs(dim, folded).to(torch.float64).numpy()
    x = np.full((records.n_records, folded), np.nan)
    for i, row in enumerate(records.order.tolist()):
        of = fingerprint[row]
        if (records.usable is None or records.usable[i]) and of.isfinite().all() and (of != 0).any():
            padded = np.zeros(-(-dim // folded) * folded)
            padded[:dim] = sign * unit_vector(of)
            x[i] = padded.reshape(-1, folded).sum(axis=0)
    return torch.from_numpy(x)


def whitened_rows(records: Records, rows: Tensor, landmarks: Tensor, directions: int) -> Tensor:
    """In float64, not rounded."""
    x = rows.numpy()
    out = np.where(np.isnan(x[:, :1]), np.nan, np.zeros((len(x), directions)))
    y = x[landmarks[landmarks >= 0].numpy()]
    if not len(y):
        return torch.from_numpy(out)
    mean = y.mean(axis=0)
    y = y - mean
    values, vectors = np.linalg.eigh(y @ y.T)
    values, vectors = values[::-1][:directions], vectors[:, ::-1][:, :directions]
    kept = values > SMALLEST * values[0]
    values, vectors = values[kept], vectors[:, kept]
    out[:, : len(values)] += (x - mean) @ (y.T @ (vectors * values**-0.75 * values[:1] ** 0.25))
    return torch.from_numpy(out)


def centred_rows(records: Records, rows: Tensor, share: str) -> Tensor:
    """In float64, not rounded."""
    x, out = rows.numpy(), rows.clone().numpy()
    for begin, end in pairwise(records.group_offsets.tolist() if share == "group" else [0, len(x)]):
        part = _usable(x, begin, end)
        if len(part):
            out[part] = x[part] - x[part].mean(axis=0)
    return torch.from_numpy(out)


def _usable(x: Floats, begin: int, end: int) -> Ints:
    """The records begin : end that have a row."""
    rows: Ints = begin + np.flatnonzero(~np.isnan(x[begin:end, 0]))
    return rows


@np.errstate(under="ignore")  # of kernels far apart in time, whatever np.seterr() says
def kernel_values(
    records: Records, rows: Tensor, inside: Tensor | None, returns: Tensor, landmarks: Tensor | None, kernel: Kernel
) -> Tensor:
    r, t, x = returns.to(torch.float64).numpy(), records.time.to(torch.float64).numpy(), rows.to(torch.float64).numpy()
    own = x if inside is None else inside.to(torch.float64).numpy()
    trajectory = records.trajectory_of_record.numpy() if kernel.luck else np.zeros(len(r), np.int64)
    value, usable, in_groups = np.zeros(len(r)), [], kernel.share == "group"
    for begin, end in pairwise(records.group_offsets.tolist()):
        value[begin:end] = _mean(r[begin:end])
        usable.append(_usable(x, begin, end))
    whole = np.concatenate([np.zeros(0, np.int64), *usable])
    for part, of_part in [(p, [p]) for p in usable] if in_groups else [(whole, usable)]:
        if not len(part):
            continue
        prior = value[part] if in_groups else np.zeros(len(part))
        at = spaced(len(part)) if in_groups else places(landmarks, part)
        sizes = [len(group) for group in of_part]
        c, noise = covariances(x[part], own[part], t[part], trajectory[part], sizes, at, kernel)
        difference = r[part] - prior
        value[part] = prior + difference - noise @ np.linalg.solve(c + noise, difference)
    return torch.from_numpy(value)


def covariances(
    x: Floats, own: Floats, t: Floats, trajectory: Ints, groups: list[int], at: Ints, kernel: Kernel
) -> tuple[Floats, Floats]:
    """[n, n] C of the values and N of the noise: C is exact inside the blocks, and K by landmarks `at` between them."""
    k = kernel_matrix(x, x, t, t, kernel.width, kernel.horizon)
    blocks, c, noise = cut(groups, kernel.longest), k, np.zeros_like(k)
    if len(blocks) > 1:
        c = k[:, at] @ np.linalg.solve(k[np.ix_(at, at)] + JITTER * np.eye(len(at)), k[at])
    for block in blocks:
        c[block, block], noise[block, block] = in_block(
            k[block, block], own[block], t[block], trajectory[block], kernel
        )
    return c, noise


def in_block(k: Floats, own: Floats, t: Floats, trajectory: Ints, kernel: Kernel) -> tuple[Floats, Floats]:
    """C and N of a block, given its K."""
    c = k
    if kernel.share == "batch":
        c = c + kernel.same
        if kernel.inside:
            c = c + kernel.inside * kernel_matrix(own, own, t, t, kernel.width, kernel.horizon)
    later = t - t[:, None]
    # L_ij = γ^(t_j − t_i) from a record to itself and the later ones of its trajectory.
    towards = np.where((trajectory[:, None] == trajectory) & (later >= 0), kernel.gamma ** np.maximum(later, 0.0), 0.0)
    return c, kernel.noise * np.eye(len(k)) + kernel.luck * (towards @ towards.T)


def spaced(n: int) -> Ints:
    """Landmarks of a group by itself: evenly spaced in processing order."""
    m = min(n, LANDMARKS)
    places: Ints = np.arange(m) * n // max(m, 1)
    return places


def places(landmarks: Tensor | None, part: Ints) -> Ints:
    """Indices of landmarks, numbered over all records, among the records `part`; None: the first ones."""
    if landmarks is None:
        return np.arange(min(len(part), LANDMARKS))
    places: Ints = np.searchsorted(part, landmarks[landmarks >= 0].numpy())
    return places


def cut(groups: list[int], longest: int) -> list[slice]:
    """Blocks of the groups' usable records, one after the other: a group, or equal runs of a longer one."""
    blocks, begin = [], 0
    for n in groups:
        runs = 1 if n <= longest else -(-n // BLOCK)
        ends = [begin + k * n // runs for k in range(runs + 1)]
        blocks += [slice(first, last) for first, last in pairwise(ends) if last > first]
        begin += n
    return blocks


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


@np.errstate(under="ignore")
def same_action_advantage(
    records: Records, rows: Tensor, advantage: Tensor, action_key: Tensor, parsed: Tensor | None, kernel: Kernel
) -> Tensor:
    a, t, keys = advantage.numpy(), records.time.to(torch.float64).numpy(), action_key.numpy()
    x = rows.to(torch.float64).numpy()
    known = np.ones(len(a), np.bool_) if parsed is None else parsed.numpy()
    out: Floats = a / (1 + kernel.noise)  # of a record with nothing near
    for begin, end in pairwise(records.group_offsets.tolist()):
        usable = _usable(x, begin, end)
        for block in cut([len(usable)], kernel.longest):
            part = usable[block][known[usable[block]]]
            k = kernel_matrix(x[part], x[part], t[part], t[part], kernel.width, kernel.horizon)
            k = k * (keys[part][:, None] == keys[part])
            out[part] = a[part] - kernel.noise * np.linalg.solve(k + kernel.noise * np.eye(len(part)), a[part])
    return torch.from_numpy(out)


def normed_advantage(records: Records, advantage: Tensor, returns: Tensor, step_norm: str) -> Tensor:
    a, r, limit = advantage.numpy().copy(), returns.to(torch.float64).numpy(), torch.finfo(torch.float32).max
    parts = [slice(*ends) for ends in pairwise(records.group_offsets.tolist()) if ends[0] < ends[1]]
    squares = [float((a[part] ** 2).sum()) for part in parts]
    if step_norm == "batch" and len(a):
        a *= _reciprocal(sum(squares), len(a), float(np.abs(r).max()))
    elif step_norm == "group":
        for square, part in zip(squares, parts, strict=True):
            a[part] *= _reciprocal(square, part.stop - part.start, float(np.abs(r[part]).max()))
    return torch.from_numpy(a).clamp(-limit, limit).to(torch.float32)


def _reciprocal(square: float, n: int, largest: float) -> float:
    size = float(np.sqrt(square / n))
    return 1 / size if size > TINY * max(largest, float(np.finfo(np.float32).tiny)) else 0.0


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
    kernel: Floats = np.exp(exponent)
    return kernel
