"""kernel_value_r2(): how well the kernel's value predicts held-out returns.  Needs no training."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..backends.schema import JITTER
from ..config import Config
from ..estimators.landmarks import choose_landmarks
from ..inputs import checks, interop
from ..result import AdvantageResult
from .value_r2 import ValueR2, judged, mean_of_others

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def kernel_value_r2(result: AdvantageResult, fingerprint: Any, config: Config) -> ValueR2:
    """`ValueR2` of the values that Config.gae() gives each trajectory's records without their returns.

        R̂_T = prior + y_T − [(C + ρ I)⁻¹]_TT⁻¹ [(C + ρ I)⁻¹ y]_T        (y = R − prior; docs/gae.md)

    is the posterior mean of trajectory T's records given all others, exactly; prior is the mean of the group's other
    trajectories with share="group", else 0.  A record without a usable fingerprint is predicted by R̄.

    result        of advantage() on these rows under any configuration with the same γ
    fingerprint   [N, D] float32 | bfloat16 | float16, as given to advantage()
    config        Config.gae(…), value="kernel"; with share="memory" only the batch is used

    On the host, in float64: time grows with records · (longest group)².  ValueError for another configuration.
    """
    from ..backends.reference.clusters import unit_vector
    from ..backends.reference.critic import cut, spaced

    if not isinstance(config, Config) or config.estimator != "gae" or config.value != "kernel":
        raise ValueError("config must be a Config.gae() with value='kernel'; other values have result.value_r2().")
    records = result._records()
    lay = records.layout
    given = interop.all_to_torch({"fingerprint": fingerprint})["fingerprint"]
    x = checks.fingerprint_matrix(given, lay.n_rows).detach().cpu()
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
            if alone:
                at = spaced(len(part))
            else:
                chosen = choose_landmarks(x, lay.order, lay.time(), torch.from_numpy(usable))
                at = np.searchsorted(part, chosen[chosen >= 0].numpy())
            prediction[part] = _left_out(
                z - z.mean(axis=0), time[part], r[part], prior, trajectory[part], cut(blocks), at, config
            )
            covered[part] = True
    return judged(r, prediction, base, taken, covered & taken, group, lay.n_groups)


def _left_out(
    z: Floats, time: Floats, r: Floats, prior: Floats, trajectory: Ints, blocks: list[slice], at: Ints, config: Config
) -> Floats:
    """[n] R̂ of each trajectory given the others; `prior` [n] is one number for each trajectory, `at` [m] the landmarks."""
    from ..backends.reference.critic import kernel_matrix

    horizon, noise = float(config.kernel_time or 0.0), config.kernel_noise
    same = 0.0 if config.share == "group" else config.kernel_same

    def k(a: Any, b: Any) -> Floats:
        return kernel_matrix(z[a], z[b], time[a], time[b], config.kernel_width, horizon)

    n = len(r)
    if len(blocks) == 1:
        at = at[:0]
    factor = np.linalg.cholesky(k(at, at) + JITTER * np.eye(len(at)))
    across = np.linalg.solve(factor, k(at, slice(None))).T if len(at) else np.zeros((n, 0))  # U
    inverses, solved, of = [], np.zeros((n, len(at))), np.zeros((n, 2))
    y = np.stack([r, np.ones(n)], axis=1)
    for block in blocks:  # (D + ρ I)⁻¹, and it times U, R and ones
        u = across[block]
        inverses.append(np.linalg.inv(k(block, block) + same + noise * np.eye(len(u)) - u @ u.T))
        solved[block], of[block] = inverses[-1] @ u, inverses[-1] @ y[block]
    inner = np.eye(len(at)) + across.T @ solved
    of -= solved @ np.linalg.solve(inner, across.T @ of)
    out, starts = np.empty(n), np.array([block.start for block in blocks])
    for t in np.unique(trajectory):
        own = np.flatnonzero(trajectory == t)
        within = -solved[own] @ np.linalg.solve(inner, solved[own].T)
        touched = slice(*np.searchsorted(starts, own[[0, -1]], side="right") + (-1, 0))
        for block, inverse in zip(blocks[touched], inverses[touched], strict=True):
            inside = np.flatnonzero((own >= block.start) & (own < block.stop))
            place = own[inside] - block.start
            within[np.ix_(inside, inside)] += inverse[np.ix_(place, place)]
        mean = prior[own[0]]
        out[own] = r[own] - np.linalg.solve(within, of[own, 0] - mean * of[own, 1])
    return out
