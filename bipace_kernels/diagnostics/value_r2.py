"""Value R²: how well a partition predicts held-out returns.  Needs no training."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.signedinteger[Any]]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ValueR2:
    """r2 = 1 − Σ (R_i − R̂_i)² / Σ (R_i − R̄_i)² over the records of groups with two or more trajectories.

    R̂_i is the mean return of the record's cluster over *other* trajectories (peers of its own share its terminal
    reward and would bias R² upwards); where the cluster has none, R̄_i.  R̄_i is the group's mean over other
    trajectories.

    r2         None where the denominator is 0; below 0 the partition predicts worse than no partition at all
    coverage   share of those records that their cluster predicts
    stderr     jackknife, leaving out one prompt group at a time; None where r2 is, or with fewer than two groups
    """

    r2: float | None
    coverage: float
    stderr: float | None


def value_r2(returns: Tensor, labels: Tensor, trajectory: Tensor, group: Tensor, n_groups: int) -> ValueR2:
    """ValueR2 of a partition.

    returns [M] float32, labels [M] int64 ≥ 0, trajectory [M] int64 and group [M] int64 numbers; float64 throughout.
    Definition: docs/estimator.md, section 7.
    """
    r = returns.numpy().astype(np.float64)
    c, t, g = labels.numpy(), trajectory.numpy(), group.numpy()
    if r.size == 0:
        return ValueR2(None, 0.0, None)
    # Σ and count over the cluster, and over (cluster, trajectory).
    cluster_sum, cluster_n = _sums(c, r)
    _, pair = np.unique(np.stack([c, t]), axis=1, return_inverse=True)
    pair = pair.reshape(-1)
    pair_sum, pair_n = _sums(pair, r)

    taken, base = mean_of_others(r, g, t)
    others_in_cluster = cluster_n[c] - pair_n[pair]
    covered = taken & (others_in_cluster > 0)
    prediction = np.where(covered, _ratio(cluster_sum[c] - pair_sum[pair], others_in_cluster), base)
    return judged(r, prediction, base, taken, covered, g, n_groups)


def mean_of_others(r: Floats, g: Ints, t: Ints) -> tuple[Bools, Floats]:
    """[M] whether the record's group has other trajectories, and their mean return."""
    group_sum, group_n = _sums(g, r)
    trajectory_sum, trajectory_n = _sums(t, r)
    others = group_n[g] - trajectory_n[t]
    return others > 0, _ratio(group_sum[g] - trajectory_sum[t], others)


def judged(r: Floats, predicted: Floats, base: Floats, taken: Bools, covered: Bools, g: Ints, n_groups: int) -> ValueR2:
    """ValueR2 of predictions [M] against those of the group's others, over the records taken."""
    if not taken.any():
        return ValueR2(None, 0.0, None)
    error = np.where(taken, (r - predicted) ** 2, 0.0)
    spread = np.where(taken, (r - base) ** 2, 0.0)
    error_of_group = np.bincount(g, weights=error, minlength=n_groups)
    spread_of_group = np.bincount(g, weights=spread, minlength=n_groups)
    total_error, total_spread = float(error_of_group.sum()), float(spread_of_group.sum())
    coverage = float(covered.sum() / taken.sum())
    if total_spread <= 0.0:
        return ValueR2(None, coverage, None)
    r2 = 1.0 - total_error / total_spread
    present = np.unique(g[taken])
    rest = total_spread - spread_of_group[present]
    if present.size < 2 or (rest <= 1e-12 * total_spread).any():
        return ValueR2(r2, coverage, None)
    without = 1.0 - (total_error - error_of_group[present]) / rest
    n = present.size
    stderr = float(np.sqrt((n - 1) / n * np.sum((without - without.mean()) ** 2)))
    return ValueR2(r2, coverage, stderr)


def _sums(index: Ints, r: Floats) -> tuple[Floats, Ints]:
    return np.bincount(index, weights=r).astype(np.float64), np.bincount(index)


def _ratio(sums: Floats, counts: Ints) -> Floats:
    return sums / np.maximum(counts, 1)
