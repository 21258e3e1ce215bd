"""Plain values of a batch's states, and GAE over them: what a user would try before any estimator of this package.

step_means      mean return of the records of one prompt at one step, shrunk to the prompt's mean; it knows no states
extra_trees     scikit-learn's extremely randomized trees on the hidden states
ridge           ridge regression on the same inputs
value_head      PPO's value head, fitted to the batch that it values; that of rivals.py learns from the batches before

Each takes the batch as arrays of one row a command, sorted by trajectory and step, and gives V̂ [N].
`python -m bench truth` has them among its rows (bench/truth_rivals.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SHRINKAGE = 3.0  # records of the prompt's mean in a mean by step
COMPONENTS = 32  # principal components of the states that a regressor sees, unless it is given another number


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


def inputs(
    states: NDArray[Any], returns: Floats, group: Integers, step: Integers, components: int = COMPONENTS
) -> Floats:
    """[N, `components` + 2] the states' leading principal components, the step, and the prompt's mean return."""
    centred = states.astype(np.float64) - states.mean(axis=0, dtype=np.float64)
    _, directions = np.linalg.eigh(centred.T @ centred)
    return np.column_stack([centred @ directions[:, -components:], step, group_means(returns, group)])


def extra_trees(
    states: NDArray[Any],
    returns: Floats,
    group: Integers,
    step: Integers,
    *,
    leaf: int = 5,
    seed: int = 0,
    components: int = COMPONENTS,
    max_features: str | float = "sqrt",
) -> Floats:
    """V̂ of 100 trees with at least `leaf` records a leaf, fitted to the batch's own returns; needs scikit-learn.

    max_features   inputs among which a split is drawn: the root of their number, or a share of them
    """
    from sklearn.ensemble import ExtraTreesRegressor

    seen = inputs(states, returns, group, step, components)
    trees = ExtraTreesRegressor(100, min_samples_leaf=leaf, max_features=max_features, random_state=seed, n_jobs=1)
    value: Floats = trees.fit(seen, returns).predict(seen)
    return value


def ridge(
    states: NDArray[Any],
    returns: Floats,
    group: Integers,
    step: Integers,
    penalty: float = 1.0,
    components: int = COMPONENTS,
) -> Floats:
    """V̂ of a ridge regression on the standardized inputs, `penalty` times the number of records / 100."""
    seen = inputs(states, returns, group, step, components)
    seen = (seen - seen.mean(axis=0)) / np.maximum(seen.std(axis=0), 1e-12)
    weight = penalty * len(seen) / 100 * np.eye(seen.shape[1])
    mean = returns.mean()
    return mean + seen @ np.linalg.solve(seen.T @ seen + weight, seen.T @ (returns - mean))


def value_head(
    states: NDArray[Any],
    returns: Floats,
    group: Integers,
    step: Integers,
    *,
    rate: float,
    epochs: int,
    seed: int = 0,
    components: int = COMPONENTS,
) -> Floats:
    """V̂ of two layers on the standardized inputs, after `epochs` passes over the batch by Adam, 64 records a step."""
    import torch

    seen = inputs(states, returns, group, step, components)
    seen = (seen - seen.mean(axis=0)) / np.maximum(seen.std(axis=0), 1e-6)
    x, wanted = torch.from_numpy(seen).float(), torch.from_numpy(returns).float()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        head = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        torch.nn.init.zeros_(head[2].weight)
        torch.nn.init.constant_(head[2].bias, float(wanted.mean()))
        optimizer = torch.optim.Adam(head.parameters(), lr=rate)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(head(x[rows])[:, 0], wanted[rows]).backward()
                optimizer.step()
        value: Floats = head(x)[:, 0].detach().double().numpy()
    return value


def gae(reward: Floats, value: Floats, trajectory: Integers, *, gamma: float, gae_lambda: float) -> Floats:
    """[N] A = δ + γλ A(next), δ = r + γ V̂(next) − V̂, with V̂ = A = 0 after a trajectory's last record."""
    advantage = np.zeros(len(reward))
    for i in reversed(range(len(reward))):
        more = i + 1 < len(reward) and trajectory[i + 1] == trajectory[i]
        delta = reward[i] + (gamma * value[i + 1] if more else 0.0) - value[i]
        advantage[i] = delta + (gamma * gae_lambda * advantage[i + 1] if more else 0.0)
    return advantage
