"""cluster(): who shares a state, by cosine distance of fingerprints."""

from __future__ import annotations

from typing import Any

import torch

from . import _checks, _dispatch
from .config import Config
from .layout import Layout
from .layout import layout as make_layout

Tensor = torch.Tensor


def cluster(
    fingerprint: Any,
    group: Any = None,
    epsilon: float = 0.10,
    *,
    trajectory: Any = None,
    step: Any = None,
    layout: Layout | None = None,
    backend: str = "auto",
    num_threads: int | None = None,
) -> Tensor:
    """Greedy online cosine clustering inside each prompt group (Algorithm 1 of the paper).

    Each record joins the cluster with the most similar centroid where 1 − cos ≤ ε, else it seeds one; a joined
    centroid becomes normalize(c + (x − c)/m).  Ties and the threshold have a band of 1e-5: docs/estimator.md, 3.2.

    fingerprint   [N, D] float32 | bfloat16 | float16, any length: normalised here
    group         [N] prompt-group id
    epsilon       cosine distance, 0 or in [1e-4, 2]; 0 joins rows that are equal as given (−0.0 equals 0.0)
    trajectory    [N] trajectory id or None (the records of a group in row order)
    step          [N] int or None, order inside the trajectory
    layout        instead of group, trajectory and step
    Rows that repeat a (group, trajectory, step) count as records of their own.
    Returns [N] int64, dense over the batch, numbered by first appearance in processing order; −1 for padding rows of
    the layout.  ValueError for non-finite or zero rows.  Same input, same bits, at any thread count.
    """
    if fingerprint is None:
        raise ValueError(
            "fingerprint is missing; pass [N, D] features, e.g. hidden states or ngram_fingerprint(texts)."
        )
    Config.bigpo(epsilon)  # checks the range and names the field
    _dispatch.check_name(backend)
    device = _checks.one_device({"fingerprint": fingerprint, "group": group, "trajectory": trajectory, "step": step})
    kernels = _dispatch.choose(backend, device)
    threads = _dispatch.threads(num_threads)
    lay = fingerprint_layout(group, trajectory, step, layout)
    matrix = _checks.fingerprint_matrix(fingerprint, lay.n_rows)
    check_rows(kernels, matrix, lay, threads)
    labels = kernels.clusters.cluster_cosine(
        matrix, lay.order, lay.group_offsets, None, float(epsilon), num_threads=threads
    )
    out = torch.full((lay.n_rows,), -1, dtype=torch.int64)
    out[lay.order] = labels
    return out


def fingerprint_layout(group: Any, trajectory: Any, step: Any, layout: Layout | None) -> Layout:
    """The layout of a call that may leave the trajectories out."""
    if layout is not None:
        if not isinstance(layout, Layout):
            raise TypeError(f"layout must come from bipace_kernels.layout(), got {_checks.type_name(layout)}.")
        for name, value in (("group", group), ("trajectory", trajectory), ("step", step)):
            if value is not None:
                raise ValueError(f"{name} must be None where a layout is given; the layout holds the ids.")
        return layout
    if group is None:
        raise ValueError("group is missing; pass one id per row, or a layout made by bipace_kernels.layout().")
    if trajectory is None:
        if step is not None:
            raise ValueError("trajectory is missing; step numbers need the trajectory that they count in.")
        trajectory = group  # one trajectory per group: the records in row order
    return make_layout(group, trajectory, step)


def check_rows(kernels: Any, matrix: Tensor, lay: Layout, threads: int) -> None:
    """ValueError for fingerprint rows without a direction."""
    state = kernels.clusters.scan_rows(matrix, lay.order, num_threads=threads)
    for code, fact in ((1, "holds a non-finite value"), (2, "is zero, so it has no direction")):
        if bool((state == code).any()):
            rows = torch.zeros(lay.n_rows, dtype=torch.bool)
            rows[lay.order[state == code]] = True
            raise ValueError(
                f"fingerprint must have finite, non-zero rows, but row {_checks.indices_text(rows)} {fact}; mend it or mask "
                "it by valid=False in the layout."
            )
