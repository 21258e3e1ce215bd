"""cluster(): which records share a state, by cosine distance of fingerprints."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends import threads
from ..config import Config
from ..inputs import checks
from ..inputs.fingerprints import take_fingerprints
from ..inputs.layout import Layout
from ..settings import EPSILON, RADII


@threads.using()
def cluster(
    fingerprint: Any,
    group: Any = None,
    epsilon: Any = 0.10,
    *,
    trajectory: Any = None,
    step: Any = None,
    layout: Layout | None = None,
    backend: str = "auto",
    check: str = "auto",
    num_threads: int | None = None,
) -> Tensor:
    """Greedy online cosine clustering inside each prompt group (Algorithm 1 of the paper).

    Each record joins the cluster with the most similar centroid where 1 − cos ≤ ε, else it seeds one; a joined
    centroid becomes normalize(c + (x − c)/m).  Ties and the threshold have a band of 1e-5: docs/estimator.md, 3.2.

    fingerprint   [N, D] float32 | bfloat16 | float16, any length: normalised here
    group         [N] prompt-group id
    epsilon       cosine distance, 0 or in [1e-4, 1]; 0 joins rows that are equal as given (−0.0 equals 0.0).  Or a
                  vector of E of them (tensor, array, list): all are clustered from one Gram matrix per group
                  (for the cost see docs/epsilon.md).  A tensor on a GPU synchronizes; a list does not.
    trajectory    [N] trajectory id or None (the records of a group in row order)
    step          [N] int or None, order inside the trajectory
    layout        instead of group, trajectory and step; with it nothing synchronizes with a GPU
    check         "auto" | "now": bad rows (zero, or not finite) raise on the CPU and, with "now", on a GPU, which
                  synchronizes; with "auto" each bad row of a GPU tensor becomes a cluster of its own
    Rows that repeat a (group, trajectory, step) count as separate records.
    Returns [N] int64, dense over the batch, numbered by first appearance in processing order; −1 for padding rows of
    the layout.  For a vector of E epsilons [E, N], each row with its own numbering.  ValueError for bad rows.
    Same input, same bits, at any thread count; the labels of one ε do not depend on the others in its vector, but may
    differ from a call with only that ε where a decision is within 1e-5 of the rule.
    """
    epsilons = _epsilons(epsilon)
    checks.check_check(check)
    rows = take_fingerprints(group, trajectory, step, layout, backend, num_threads, fingerprint=fingerprint)
    usable = rows.usable(check)
    if isinstance(epsilons, float):
        return rows.to_rows(rows.labels(epsilons, usable))
    return rows.to_rows(rows.sweep(epsilons, usable))


def _epsilons(epsilon: Any) -> float | list[float]:
    """One ε, or those of a vector, each checked for its range."""
    vector = isinstance(epsilon, (list, tuple)) or (isinstance(epsilon, (Tensor, np.ndarray)) and epsilon.ndim > 0)
    if not vector:
        one = epsilon.item() if isinstance(epsilon, (Tensor, np.ndarray)) else epsilon
        Config.bigpo(one)  # checks the range and names the field
        return float(one)
    wish = "one number, or a vector of them"
    tensor = checks.to_tensor(epsilon, "epsilon", wish)
    if tensor.ndim != 1:
        raise ValueError(f"epsilon must be {wish} of shape [E], got shape {list(tensor.shape)}; flatten it.")
    if tensor.numel() and (tensor.dtype == torch.bool or tensor.dtype.is_complex):
        raise TypeError(f"epsilon must be {wish}, got entries of {tensor.dtype}.")
    values: list[float] = tensor.to(torch.float64).tolist()
    for e, value in enumerate(values):
        if 0.99999 * RADII[0] < value < RADII[0]:  # the float32 nearest to 1e-4 is below it
            values[e] = RADII[0]
        elif not EPSILON.holds(value):
            raise ValueError(f"epsilon[{e}] must be {EPSILON.text}, got {value:g}.")
    return values
