"""Ideas that were tried on the truth sets and not implemented: `python -m bench truth --tried`; FINDINGS.md judges
them.

Each is a function of a Batch that gives [N] advantages, for batches of the sizes of the truth sets only: values by
whole kernel matrices, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import bipace_kernels as bk
from bipace_kernels.backends.reference.clusters import unit_vector
from bipace_kernels.backends.reference.critic import kernel_matrix

from .truth_batches import Batch, Integers, advantages, deltas, discounted, parts

Floats = NDArray[np.float64]
GAE = bk.Config.gae(action_noise=None)
LAMBDAS = tuple(k / 10 for k in range(11))


def tried() -> dict[str, Callable[[Any], Floats]]:
    """{name of the row: advantages}."""
    rows: dict[str, Callable[[Any], Floats]] = {
        "gae, fingerprints half whitened": half_whitened,
        "gae, λ of each batch by the truth itself": lambda_by_truth,
        "gae, λ of each batch by pairs of rollouts": lambda_by_pairs,
        "gae, values without memory (whole kernel)": partial(with_memory, decay=0.0),
    }
    for decay in (0.5, 0.8, 1.0):
        rows[f"gae, values with memory, covariance × {decay:g} (whole kernel)"] = partial(with_memory, decay=decay)
    return rows


def half_whitened(batch: Batch) -> Floats:
    """Fingerprints whose principal components are divided by the fourth root of their variance."""
    x = batch.fingerprint(batch.kinds()[0]).astype(np.float64)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    u, s, v = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    kept = s > 1e-3 * s[0]
    rows = (u[:, kept] * np.sqrt(s[kept])) @ v[kept]
    result = bk.advantage(
        batch.group, batch.trajectory, batch.reward, step=batch.step,
        fingerprint=torch.from_numpy(rows.astype(np.float32)),
        config=GAE,
    )  # fmt: skip
    return result.advantage.numpy().astype(np.float64)


def lambda_by_truth(batch: Batch) -> Floats:
    """The best λ of the batch: the limit of any rule."""
    return max((_default(batch, lam) for lam in LAMBDAS), key=lambda a: _r(a, batch.truth))


def lambda_by_pairs(batch: Batch) -> Floats:
    """The λ whose A_S correlates best with R − V̂ of records of other rollouts with the same observation and action."""
    rows: dict[Any, list[int]] = {}
    for i, key in enumerate(zip(batch.group.tolist(), batch.observation, batch.action, strict=True)):
        rows.setdefault(key, []).append(i)
    pairs = [(i, j) for of in rows.values() for i in of for j in of if batch.trajectory[i] != batch.trajectory[j]]
    if len(pairs) < 50:
        return _default(batch)
    first, second = np.array(pairs).T
    value = advantages(batch, GAE, batch.kinds()[0]).value
    assert value is not None
    residual = batch.returns - value.numpy()
    return max((_default(batch, lam) for lam in LAMBDAS), key=lambda a: _r(a[first], residual[second]))


def with_memory(batch: Batch, decay: float) -> Floats:
    """GAE over a value from the batch and the ones before it, whose covariance with the batch is multiplied by
    `decay`."""
    size = len(np.unique(batch.trajectory)) // len(np.unique(batch.group))
    past = None if batch.past is None or decay == 0 else next(parts(batch.past, size), batch.past)
    both = [batch] if past is None else [batch, past]
    x = np.concatenate([_units(b) for b in both])
    z = x - x.mean(axis=0)
    time = np.concatenate([b.step for b in both]).astype(np.float64)
    returns = np.concatenate([b.returns for b in both])
    group: Integers = np.concatenate([b.group + k * 1_000_000 for k, b in enumerate(both)])
    own = np.arange(len(time)) < len(batch)
    k = kernel_matrix(z, z, time, time, GAE.kernel_width, float(GAE.kernel_time or 0.0))
    k += GAE.kernel_same * (group[:, None] == group)
    k *= np.where(own[:, None] == own, 1.0, decay)
    weight = np.linalg.solve(k + GAE.kernel_noise * np.eye(len(k)), returns)
    value = (k @ weight)[: len(batch)]
    delta = deltas(batch.reward, value, batch.trajectory, batch.step, batch.gamma)
    a = discounted(delta, batch.trajectory, batch.step, GAE.gae_lambda * batch.gamma)
    normed: Floats = a / np.sqrt(np.mean(a**2))
    return normed


def _default(batch: Batch, lam: float = GAE.gae_lambda) -> Floats:
    config = replace(GAE, gae_lambda=lam)
    return advantages(batch, config, batch.kinds()[0]).advantage.numpy().astype(np.float64)


def _units(batch: Batch) -> Floats:
    rows = torch.from_numpy(np.ascontiguousarray(batch.fingerprint(batch.kinds()[0])))
    return np.stack([unit_vector(row) for row in rows])


def _r(a: Floats, b: Floats) -> float:
    return float(np.corrcoef(a, b)[0, 1])
