"""kernel_value_r2(): how well the kernel's value predicts returns it has not seen.  Needs no training."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from . import _checks
from .config import Config
from .reference.clusters import unit_vector
from .reference.critic import JITTER, LANDMARKS, cut, kernel_matrix
from .result import AdvantageResult
from .value_r2 import ValueR2, judged, mean_of_others

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def kernel_value_r2(result: AdvantageResult, fingerprint: Any, config: Config) -> ValueR2:
    """`ValueR2` of the values that Config.gae() would give each trajectory's records if it had not seen their returns.

        R̂_T = prior + y_T − [(C + ρ I)⁻¹]_TT⁻¹ [(C + ρ I)⁻¹ y]_T        (y = R − prior; docs/gae.md)

    is the posterior mean of trajectory T's records given all others, exactly; prior is the mean of the group's other
    trajectories with share="group", else 0.  A record without a usable fingerprint is predicted by R̄.

    result        of advantage() on these rows under any configuration with the same γ
    fingerprint   [N, D] float32 | bfloat16 | float16, as given to advantage()
    config        Config.gae(…), value="kernel"; of share="memory" the batch alone

    On the host, in float64: time grows with records · (longest group)².  ValueError for another configuration.
    """
    if not isinstance(config, Config) or config.estimator != "gae" or config.value != "kernel":
        raise ValueError("config must be a Config.gae() with value='kernel'; other values have result.value_r2().")
    records = result._records()
    lay = records.layout
    x = _checks.fingerprint_matrix(fingerprint, lay.n_rows).detach().cpu()
    r, group = records.returns.double().numpy(), lay.group_of_record().numpy()
    trajectory, time = lay.trajectory_of_record().numpy(), lay.time().double().numpy()
    taken, base = mean_of_others(r, group, trajectory)
    rows = x[lay.order]
    usable = (rows.isfinite().all(dim=1) & (rows != 0).any(dim=1)).numpy()
    inside = [np.flatnonzero(usable & (group == g)) for g in range(lay.n_groups)]
    alone = config.share == "group"
    if alone:
        inside = [part[taken[part]] for part in inside]
    prediction, covered = base.copy(), np.zeros(len(r), bool)
    for part, blocks in (
        [(p, [p]) for p in inside] if alone else [(np.concatenate([np.zeros(0, np.int64), *inside]), inside)]
    ):
        if len(part):
            z = np.stack([unit_vector(rows[i]) for i in part.tolist()])
            prior = base[part] if alone else np.zeros(len(part))
            prediction[part] = _left_out(
                z - z.mean(axis=0), time[part], r[part], prior, trajectory[part], cut(blocks), config
            )
            covered[part] = True
    return judged(r, prediction, base, taken, covered & taken, group, lay.n_groups)


def _left_out(
    z: Floats, time: Floats, r: Floats, prior: Floats, trajectory: Ints, blocks: list[slice], config: Config
) -> Floats:
    """[n] R̂ of each trajectory given the others; `prior` [n] is one number for each trajectory."""
    horizon, noise = float(config.kernel_time or 0.0), config.kernel_noise
    same = 0.0 if config.share == "group" else config.kernel_same

    def k(a: Any, b: Any) -> Floats:
        return kernel_matrix(z[a], z[b], time[a], time[b], config.kernel_width, horizon)

    n, several = len(r), len(blocks) > 1
    at = np.arange(min(n, LANDMARKS)) * n // min(n, LANDMARKS) if several else np.zeros(0, np.int64)
    factor = np.linalg.cholesky(k(at, at) + JITTER * np.eye(len(at)))
    across = np.linalg.solve(factor, k(at, slice(None))).T if several else np.zeros((n, 0))  # U
    ones, inverses = np.ones(n), []
    inner, sums = np.eye(len(at)), np.zeros((len(at), 2))
    for block in blocks:  # D⁻¹, and what the blocks know of each other
        u = across[block]
        inverses.append(np.linalg.inv(k(block, block) + same + noise * np.eye(len(u)) - u @ u.T))
        inner += u.T @ inverses[-1] @ u
        sums += u.T @ inverses[-1] @ np.stack([r[block], ones[block]], axis=1)
    out = np.empty(n)
    for block, inverse in zip(blocks, inverses, strict=True):
        solved = inverse @ across[block]
        of = inverse @ np.stack([r[block], ones[block]], axis=1) - solved @ np.linalg.solve(inner, sums)
        for t in np.unique(trajectory[block]):
            own = np.flatnonzero(trajectory[block] == t)
            place = own + block.start
            mean = prior[place[0]]
            within = inverse[np.ix_(own, own)] - solved[own] @ np.linalg.solve(inner, solved[own].T)
            y = r[place] - mean
            out[place] = mean + y - np.linalg.solve(within, of[own, 0] - mean * of[own, 1])
    return out
