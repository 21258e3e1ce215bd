"""kernel_value_r2(): how well the kernel's value predicts held-out returns.  Needs no training.

nearest(): the records that count most in each value.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..backends import threads
from ..backends.schema import BLOCK, JITTER, Kernel
from ..config import Config
from ..estimators.table import kernel_of, kernel_rows
from ..inputs import checks, interop
from ..inputs.layout import Layout
from ..inputs.values import check_kernel_steps
from ..result import AdvantageResult
from .value_r2 import ValueR2, judged, mean_of_others

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@threads.using(alone=True)
@np.errstate(under="ignore")  # of kernels far apart in time, as in the reference
def kernel_value_r2(result: AdvantageResult, fingerprint: Any, config: Config) -> ValueR2:
    """`ValueR2` of the values that Config.gae() gives each trajectory's records without their returns.

        R̂_T = prior + y_T − [(C + N)⁻¹]_TT⁻¹ [(C + N)⁻¹ y]_T        (y = R − prior; docs/gae.md)

    is the posterior mean of trajectory T's records given all others, exactly; prior is the mean of the group's other
    trajectories with share="group", else 0.  A record without a usable fingerprint is predicted by R̄.

    result        of advantage() on these rows under any configuration with the same γ
    fingerprint   [N, D] float32 | bfloat16 | float16, as given to advantage()
    config        Config.gae(…), value="kernel"; with share="memory" only the batch is used

    On the host, in float64: time grows with records · (longest group)².  ValueError for another configuration.
    """
    from ..backends.reference import critic

    if not isinstance(config, Config) or config.estimator != "gae" or config.value != "kernel":
        raise ValueError("config must be a Config.gae() with value='kernel'; other values have result.value_r2().")
    records = result._records()
    lay = records.layout
    r, group = records.returns.double().numpy(), lay.group_of_record().numpy()
    trajectory, time = lay.trajectory_of_record().numpy(), lay.time().double().numpy()
    taken, base = mean_of_others(r, group, trajectory)
    alone, kernel = config.share == "group", kernel_of(config, config.kernel_noise)
    z, own, usable, landmarks = _rows(lay, fingerprint, config)
    inside = [np.flatnonzero(usable & (group == g)) for g in range(lay.n_groups)]
    if alone:
        inside = [part[taken[part]] for part in inside]
    prediction, covered = base.copy(), np.zeros(len(r), bool)
    whole = np.concatenate([np.zeros(0, np.int64), *inside])
    for part, groups in [(p, [p]) for p in inside] if alone else [(whole, inside)]:
        if len(part):
            prior = base[part] if alone else np.zeros(len(part))
            at = critic.spaced(len(part)) if landmarks is None else critic.places(landmarks, part)
            prediction[part] = _left_out(
                z[part], (z if own is None else own)[part], time[part], r[part], prior,
                trajectory[part], [len(group) for group in groups], at, kernel,
            )  # fmt: skip
            covered[part] = True
    return judged(r, prediction, base, taken, covered & taken, group, lay.n_groups)


@threads.using(alone=True)
@np.errstate(under="ignore")
def nearest(
    result: AdvantageResult, fingerprint: Any, config: Config, most: int
) -> list[tuple[list[int], list[float]]]:
    """[N] rows [≤ most] of the records in each row's prompt group that are nearest by the kernel, and their k.

        k_ij = (K_ij + w_g K^g_ij) / (1 + w_g),   K, K^g over the batch's rows and the group's (docs/gae.md)

    Nothing for copies, padding and rows without a usable fingerprint.  Arguments as in kernel_value_r2().
    """
    from ..backends.reference import critic

    lay = result._records().layout
    z, own, usable, _ = _rows(lay, fingerprint, config)
    kernel, time, row_of = kernel_of(config, config.kernel_noise), lay.time().double().numpy(), lay.order.numpy()
    sides = [(z, 1.0)] if own is None else [(z, 1.0), (own, kernel.inside)]
    neighbours: list[tuple[list[int], list[float]]] = [([], [])] * lay.n_rows
    for begin, end in pairwise(lay.group_offsets.tolist()):
        inside = begin + np.flatnonzero(usable[begin:end])
        for some in np.array_split(inside, -(-len(inside) // BLOCK)) if len(inside) else []:
            both = [
                weight
                * critic.kernel_matrix(y[some], y[inside], time[some], time[inside], kernel.width, kernel.horizon)
                for y, weight in sides
            ]
            k = np.sum(both, axis=0) / sum(weight for _, weight in sides)
            k[some[:, None] == inside] = -1.0  # itself
            best = np.argsort(-k, axis=1, kind="stable")[:, : min(most, len(inside) - 1)]
            for i, chosen, own_k in zip(row_of[some].tolist(), best, k, strict=True):
                neighbours[i] = row_of[inside[chosen]].tolist(), own_k[chosen].tolist()
    return neighbours


def _rows(
    lay: Layout, fingerprint: Any, config: Config
) -> tuple[Floats, Floats | None, npt.NDArray[np.bool_], Tensor | None]:
    """Rows [M, d] of the kernel and of the one inside groups, which records are usable [M], and the landmarks."""
    from ..backends.reference import critic

    check_kernel_steps(lay)
    tensor = interop.all_to_torch({"fingerprint": fingerprint})["fingerprint"]
    x = checks.fingerprint_matrix(tensor, lay.n_rows).detach().cpu()
    rows = x[lay.order]
    usable = rows.isfinite().all(dim=1) & (rows != 0).any(dim=1)
    landmarks, (z, own, _) = kernel_rows(critic, config, replace(lay.on(x.device), usable=usable), x, usable)
    return z.numpy(), None if own is None else own.numpy(), usable.numpy(), landmarks


def _left_out(
    z: Floats, own: Floats, time: Floats, r: Floats, prior: Floats, trajectory: Ints, groups: list[int], at: Ints,
    kernel: Kernel,
) -> Floats:  # fmt: skip
    """[n] R̂ of each trajectory given the others; `prior` [n] is one number per trajectory, `at` [m] landmarks."""
    from ..backends.reference.critic import cut, in_block, kernel_matrix

    def k(a: Any, b: Any) -> Floats:
        return kernel_matrix(z[a], z[b], time[a], time[b], kernel.width, kernel.horizon)

    n, blocks = len(r), cut(groups, kernel.longest)
    if len(blocks) == 1:
        at = at[:0]
    factor = np.linalg.cholesky(k(at, at) + JITTER * np.eye(len(at)))
    across = np.linalg.solve(factor, k(at, slice(None))).T if len(at) else np.zeros((n, 0))  # U
    inverses, solved, of = [], np.zeros((n, len(at))), np.zeros((n, 2))
    y = np.stack([r, np.ones(n)], axis=1)
    for block in blocks:  # (D + N)⁻¹, and it times U, R and ones
        u, (c, noise) = across[block], in_block(k(block, block), own[block], time[block], trajectory[block], kernel)
        inverses.append(np.linalg.inv(c + noise - u @ u.T))
        solved[block], of[block] = inverses[-1] @ u, inverses[-1] @ y[block]
    inner = np.eye(len(at)) + across.T @ solved
    of -= solved @ np.linalg.solve(inner, across.T @ of)
    spread = np.linalg.solve(inner, solved.T)  # once, not for each trajectory
    out, starts = np.empty(n), np.array([block.start for block in blocks])
    for t in np.unique(trajectory):
        of_t = np.flatnonzero(trajectory == t)
        within = -solved[of_t] @ spread[:, of_t]
        touched = slice(*np.searchsorted(starts, of_t[[0, -1]], side="right") + (-1, 0))
        for block, inverse in zip(blocks[touched], inverses[touched], strict=True):
            inside = np.flatnonzero((of_t >= block.start) & (of_t < block.stop))
            place = of_t[inside] - block.start
            within[np.ix_(inside, inside)] += inverse[np.ix_(place, place)]
        out[of_t] = r[of_t] - np.linalg.solve(within, of[of_t, 0] - prior[of_t[0]] * of[of_t, 1])
    return out
