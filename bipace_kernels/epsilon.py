"""choose_epsilon(): the paper's search for ε by the median cluster size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _checks, _dispatch
from .clusters import check_rows, fingerprint_layout
from .layout import Layout


@dataclass(frozen=True)
class EpsilonChoice:
    """The ε chosen, the probes on the way, and why.

    probes   ((ε, median cluster size), …) in the order they were tried
    """

    epsilon: float
    probes: tuple[tuple[float, float], ...]
    reason: str


def choose_epsilon(
    fingerprint: Any,
    group: Any = None,
    *,
    band: tuple[float, float] = (4, 8),
    bounds: tuple[float, float] = (0.02, 0.40),
    probes: int = 6,
    trajectory: Any = None,
    step: Any = None,
    layout: Layout | None = None,
    backend: str = "auto",
    num_threads: int | None = None,
) -> EpsilonChoice:
    """Binary search on the median cluster size, midpoint first: below the band ε goes up, above it down.

    fingerprint, group, trajectory, step, layout   as in `cluster()`
    band      wanted median size, inclusive; the paper's [4, 8]
    bounds    of ε, inside [1e-4, 2]; the paper's [0.02, 0.40]
    probes    at most this many clusterings, ≥ 1
    Where no probe lands inside the band, the one nearest to it is taken, the smaller ε on ties.
    Source: the paper's adaptive ε heuristic; it suggests the first training step's batch.
    """
    low_size, high_size = _pair(band, "band", 1.0, float("inf"))
    low, high = _pair(bounds, "bounds", 1e-4, 2.0)
    probes = _checks.integer_at_least(probes, "probes", 1)
    _dispatch.check_name(backend)
    device = _checks.one_device({"fingerprint": fingerprint, "group": group, "trajectory": trajectory, "step": step})
    kernels = _dispatch.choose(backend, device)
    threads = _dispatch.threads(num_threads)
    lay = fingerprint_layout(group, trajectory, step, layout)
    if lay.n_records == 0:
        raise ValueError("fingerprint must have at least one row to choose epsilon from, got none.")
    matrix = _checks.fingerprint_matrix(fingerprint, lay.n_rows)
    check_rows(kernels, matrix, lay, threads)

    tried: list[tuple[float, float]] = []
    for _ in range(probes):
        epsilon = (low + high) / 2
        labels = kernels.clusters.cluster_cosine(
            matrix, lay.order, lay.group_offsets, None, epsilon, num_threads=threads
        )
        size = float(np.median(np.bincount(labels.numpy())))
        tried.append((epsilon, size))
        if low_size <= size <= high_size:
            return EpsilonChoice(
                epsilon, tuple(tried), f"median cluster size {size:g} is inside the band [{low_size:g}, {high_size:g}]"
            )
        if size < low_size:
            low = epsilon
        else:
            high = epsilon
    epsilon, size = min(tried, key=lambda probe: (max(low_size - probe[1], probe[1] - high_size), probe[0]))
    return EpsilonChoice(
        epsilon,
        tuple(tried),
        f"no probe lands inside the band [{low_size:g}, {high_size:g}]; median cluster size {size:g} is the nearest",
    )


def _pair(value: Any, name: str, low: float, high: float) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} must be a pair (low, high), got {value!r}.")
    first, second = (_checks.check_number_in(v, f"{name}[{i}]", low, high) for i, v in enumerate(value))
    if first > second:
        raise ValueError(f"{name} must be in order (low, high), got {value!r}.")
    return first, second
