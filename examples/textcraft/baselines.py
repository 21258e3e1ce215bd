"""Plain values of a batch's states, and GAE over them: what a user would try before any estimator of this package.

step_means      mean return of the records of one prompt at one step, shrunk to the prompt's mean; it knows no states
extra_trees     scikit-learn's extremely randomized trees on the hidden states
ridge           ridge regression on the same inputs

Each takes the batch as arrays of one row a command, sorted by trajectory and step, and gives V̂ [N].
As rows of the truth benchmark: PYTHONPATH=examples/textcraft python -m bench truth --estimator
baselines:truth_step_means
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SHRINKAGE = 3.0  # records of the prompt's mean in a mean by step
COMPONENTS = 32  # principal components of the states that a regressor sees


def group_means(returns: Floats, group: Integers) -> Floats:
    """[N] mean return of each record's prompt group."""
    _, number = np.unique(group, return_inverse=True)
    return (np.bincount(number, returns) / np.bincount(number))[number]


def step_means(returns: Floats, group: Integers, step: Integers, shrinkage: float = SHRINKAGE) -> Floats:
    """V̂ = μ + Σ (R − μ) / (n + κ) over the n records of the same prompt and step, μ the prompt's mean, κ =
    `shrinkage`."""
    mean = group_means(returns, group)
    _, number = np.unique(np.stack([group, step]), axis=1, return_inverse=True)
    number = number.reshape(-1)
    return mean + (np.bincount(number, returns - mean) / (np.bincount(number) + shrinkage))[number]


def inputs(states: NDArray[Any], returns: Floats, group: Integers, step: Integers) -> Floats:
    """[N, at most 34] the states' leading principal components, the step, and the prompt's mean return."""
    centred = states.astype(np.float64) - states.mean(axis=0, dtype=np.float64)
    _, directions = np.linalg.eigh(centred.T @ centred)
    components = centred @ directions[:, -COMPONENTS:]
    return np.column_stack([components, step, group_means(returns, group)])


def extra_trees(
    states: NDArray[Any], returns: Floats, group: Integers, step: Integers, *, leaf: int = 5, seed: int = 0
) -> Floats:
    """V̂ of 100 trees with at least `leaf` records a leaf, each split among √34 inputs, fitted to the batch's own
    returns.

    Needs scikit-learn.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    seen = inputs(states, returns, group, step)
    trees = ExtraTreesRegressor(100, min_samples_leaf=leaf, max_features="sqrt", random_state=seed, n_jobs=1)
    value: Floats = trees.fit(seen, returns).predict(seen)
    return value


def ridge(states: NDArray[Any], returns: Floats, group: Integers, step: Integers, penalty: float = 1.0) -> Floats:
    """V̂ of a ridge regression on the standardized inputs, `penalty` times the number of records / 100."""
    seen = inputs(states, returns, group, step)
    seen = (seen - seen.mean(axis=0)) / np.maximum(seen.std(axis=0), 1e-12)
    weight = penalty * len(seen) / 100 * np.eye(seen.shape[1])
    mean = returns.mean()
    return mean + seen @ np.linalg.solve(seen.T @ seen + weight, seen.T @ (returns - mean))


def gae(reward: Floats, value: Floats, trajectory: Integers, *, gamma: float, gae_lambda: float) -> Floats:
    """[N] A = δ + γλ A(next), δ = r + γ V̂(next) − V̂, with V̂ = A = 0 after a trajectory's last record."""
    advantage = np.zeros(len(reward))
    for i in reversed(range(len(reward))):
        more = i + 1 < len(reward) and trajectory[i + 1] == trajectory[i]
        delta = reward[i] + (gamma * value[i + 1] if more else 0.0) - value[i]
        advantage[i] = delta + (gamma * gae_lambda * advantage[i + 1] if more else 0.0)
    return advantage


def truth_step_means(batch: Any) -> Floats:
    return _over(batch, step_means(batch.returns, batch.group, batch.step))


def truth_extra_trees(batch: Any) -> Floats:
    return _over(batch, extra_trees(_states(batch), batch.returns, batch.group, batch.step))


def truth_ridge(batch: Any) -> Floats:
    return _over(batch, ridge(_states(batch), batch.returns, batch.group, batch.step))


def truth_constant(batch: Any) -> Floats:
    """The true advantage's mean over each trajectory: no estimate that is constant along trajectories correlates
    better.

    It reads the truth, so it is a limit and no estimator.
    """
    _, number = np.unique(batch.trajectory, return_inverse=True)
    return (np.bincount(number, batch.truth) / np.bincount(number))[number]


def _states(batch: Any) -> NDArray[Any]:
    states: NDArray[Any] = batch.fingerprint(batch.kinds()[0])
    return states


def _over(batch: Any, value: Floats) -> Floats:
    return gae(batch.reward, value, batch.trajectory, gamma=batch.gamma, gae_lambda=0.5)
