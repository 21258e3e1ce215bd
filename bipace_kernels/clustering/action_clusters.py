"""action_clusters(): action keys where actions are vectors, by clustering them."""

from dataclasses import replace
from typing import Any

import torch

from ..backends import threads
from ..config import Config
from ..inputs import checks
from ..inputs.fingerprints import take_fingerprints
from ..inputs.layout import Layout


@threads.using()
def action_clusters(
    action_fingerprint: Any,
    group: Any = None,
    epsilon: float = 0.10,
    *,
    trajectory: Any = None,
    step: Any = None,
    layout: Layout | None = None,
    on_invalid: str = "raise",
    backend: str = "auto",
    check: str = "auto",
    num_threads: int | None = None,
) -> torch.Tensor:
    """Key of each record's action, equal for actions in one cosine cluster: PACE without a discrete action space.

        key_i = number of the cluster that the greedy rule of `cluster()` puts action i into:
                the nearest centroid of its prompt group where 1 − cos ≤ ε, else a new one

    For text actions as embeddings, or the action vectors of a continuous policy.  A cosine depends only on direction,
    so append a constant to vectors whose length or origin matters: docs/action_keys.md.

    action_fingerprint   [N, D] float32 | bfloat16 | float16 (float64 is rounded), any length: normalised here
    group                [N] prompt-group id; keys of different groups always differ.  Or the labels of `cluster()`:
                         then actions are clustered only among those of one state, in row order
    epsilon              cosine distance, 0 or in [1e-4, 1]; 0 gives equal keys to rows that are equal as given (−0.0
                         equals 0.0, and a row of zeros is an action like others)
    trajectory, step, layout   as in `cluster()`; backend, num_threads as in `advantage()`
    on_invalid           bad rows (not finite; with ε > 0 also zero): "raise", or "singleton": a key of its own for each
    check                "auto" | "now": under "raise", rows on a GPU raise only with "now", which synchronizes; with
                         "auto" they are treated as under "singleton"

    Returns keys [N] int64 for `advantage(action_key=...)`, which hold in this batch only: dense, by first appearance in
    processing order; −1 for padding rows of the layout.  Same input, same bits, at any thread count.
    ValueError for bad rows, which it names; TypeError unless action_fingerprint is a matrix of floats.
    """
    Config.bigpo(epsilon)  # checks the range and names the field
    checks.check_check(check)
    if on_invalid not in ("raise", "singleton"):
        raise ValueError(f'on_invalid must be "raise" or "singleton", got {on_invalid!r}.')
    named = {"action_fingerprint": action_fingerprint}
    rows = take_fingerprints(group, trajectory, step, layout, backend, num_threads, **named)
    if epsilon == 0:  # equality needs no direction: one more equal entry gives each row one
        one = rows.matrix.new_ones(len(rows.matrix), 1)
        rows = replace(rows, matrix=torch.cat([rows.matrix, one], dim=1))
    return rows.to_rows(rows.labels(float(epsilon), rows.usable(check, on_invalid)))
