"""Rows of the truth benchmark that need none of the package: GAE over a value that a user could write in an hour.

The regressions are those of examples/textcraft/baselines.py, fitted to the batch's own returns; the trees need
scikit-learn.  Their settings were chosen on the choose sets (bench/truth/FINDINGS.md).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bipace_kernels.support import optional

from .truth_batches import Batch, Floats, deltas, discounted, mean_of

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/textcraft/baselines.py"
Settings = dict[str, Any]
WIDE, COMPONENTS = 1024, 128  # of wider states, so many leading components are what a regression can see
# Where a set has hidden states, and where it has n-grams; there advantages of equal turns are averaged.
REGRESSIONS: dict[str, tuple[str, Settings, Settings]] = {
    "ExtraTrees": (
        "extra_trees",
        {"components": 32, "leaf": 5, "max_features": 0.33, "gae_lambda": 0.2},
        {"components": 64, "leaf": 5, "max_features": 0.33, "gae_lambda": 0.65},
    ),
    "a value head": (
        "value_head",
        {"components": 32, "rate": 3e-4, "epochs": 100, "gae_lambda": 0.3},
        {"components": 128, "rate": 3e-4, "epochs": 30, "gae_lambda": 0.65},
    ),
    "ridge regression": (
        "ridge",
        {"components": 128, "penalty": 30.0, "gae_lambda": 0.5},
        {"components": 64, "penalty": 10.0, "gae_lambda": 0.8},
    ),
}


def rivals() -> dict[str, Callable[[Batch], Floats]]:
    """{name of the row: advantages}."""
    return {f"GAE with {name} on the same states": partial(regression, *of) for name, of in REGRESSIONS.items()}


def regression(name: str, of_hidden: Settings, of_ngrams: Settings, batch: Batch) -> Floats:
    optional.need("sklearn", "a regression of bench truth")
    settings = dict(of_hidden if batch.hidden else of_ngrams)
    gae_lambda, seen = settings.pop("gae_lambda"), batch.once("states", partial(states, batch))
    fit = optional.named(f"{EXAMPLE}:{name}")
    a = gae_over(batch, fit(seen, batch.returns, batch.group, batch.step, **settings), gae_lambda)
    return a if batch.hidden else mean_of(equal_turns(batch), a)


def equal_turns(batch: Batch) -> Any:
    """[3, N] numbers that agree where prompt, observation and action do."""
    return np.stack([batch.group, np.unique(batch.observation, return_inverse=True)[1], batch.action_key])


def states(batch: Batch) -> NDArray[np.float32]:
    """The batch's main fingerprints; of wide ones, the leading components."""
    rows = batch.fingerprint(batch.kinds()[0])
    if rows.shape[1] < WIDE:
        return rows
    from sklearn.decomposition import PCA

    found: NDArray[np.float32] = PCA(COMPONENTS, svd_solver="arpack", random_state=0).fit_transform(rows)
    return found


def gae_over(batch: Batch, value: Floats, gae_lambda: float) -> Floats:
    delta = deltas(batch.reward, value, batch.trajectory, batch.step, batch.gamma)
    return discounted(delta, batch.trajectory, batch.step, gae_lambda * batch.gamma)


def limit(batch: Batch) -> Floats:
    """A*'s mean over each rollout: no estimate that is the same for all turns of a rollout correlates better."""
    return mean_of(batch.trajectory, batch.truth)
