"""choose_epsilon(): the paper's search for ε by the median cluster size."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..backends import threads
from ..inputs import checks
from ..inputs.fingerprints import take_fingerprints
from ..inputs.layout import Layout
from ..settings import RADII


@dataclass(frozen=True)
class EpsilonChoice:
    """The chosen ε, the probes, and the reason.

    probes   ((ε, median cluster size), …) in the order they were tried
    """

    epsilon: float
    probes: tuple[tuple[float, float], ...]
    reason: str


@threads.using()
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
    band      target median size, inclusive; the paper's [4, 8]
    bounds    of ε, inside [1e-4, 1]; the paper's [0.02, 0.40]
    probes    at most this many clusterings, ≥ 1
    Where no probe is inside the band, the nearest one is taken, the smaller ε on ties.
    Each probe clusters the batch once and synchronizes with a GPU: use the search on the first batch of a training.
    Bad rows are a ValueError on every device.
    Source: the paper's adaptive ε heuristic; it suggests the first training step's batch.
    """
    band, bounds = pair(band, "band", 1.0, float("inf")), pair(bounds, "bounds", *RADII)
    probes = checks.integer_at_least(probes, "probes", 1)
    rows = take_fingerprints(group, trajectory, step, layout, backend, num_threads, fingerprint=fingerprint)
    if rows.layout.n_records == 0:
        raise ValueError("fingerprint must have at least one row to choose epsilon from, got none.")
    rows.usable("now")

    (low_size, high_size), (low, high) = band, bounds
    tried: list[tuple[float, float]] = []
    for _ in range(probes):
        epsilon = (low + high) / 2
        (sizes,) = measure_sizes(rows.labels(epsilon, None)[None])
        size = sizes.median
        tried.append((epsilon, size))
        if low_size <= size <= high_size:
            reason = f"median cluster size {size:g} is inside the band [{low_size:g}, {high_size:g}]"
            return EpsilonChoice(epsilon, tuple(tried), reason)
        low, high = (epsilon, high) if size < low_size else (low, epsilon)
    epsilon, size = min(tried, key=lambda probe: (max(low_size - probe[1], probe[1] - high_size), probe[0]))
    reason = f"no probe is inside the band [{low_size:g}, {high_size:g}]; median cluster size {size:g} is the nearest"
    return EpsilonChoice(epsilon, tuple(tried), reason)


def pair(value: Any, name: str, low: float, high: float) -> tuple[float, float]:
    """(first, second) in order, both in [low, high]."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} must be a pair (low, high), got {value!r}.")
    first, second = (checks.check_number_in(v, f"{name}[{i}]", low, high) for i, v in enumerate(value))
    if first > second:
        raise ValueError(f"{name} must be in order (low, high), got {value!r}.")
    return first, second


@dataclass(frozen=True)
class Sizes:
    """Cluster sizes of a batch under one ε."""

    median: float  # of the cluster sizes; 0 without clusters
    singletons: float  # share of clusters of one record
    clusters: int


def measure_sizes(labels: Tensor) -> list[Sizes]:
    """Sizes under each ε; labels on a GPU are copied to the host, which synchronizes.

    labels   [E, M] int64, dense but for gaps; −1: the record is ignored
    """
    measured = []
    for row in labels.cpu().numpy():
        sizes = np.bincount(row[row >= 0])
        sizes = sizes[sizes > 0]
        if sizes.size:
            measured.append(Sizes(float(np.median(sizes)), float((sizes == 1).mean()), int(sizes.size)))
        else:
            measured.append(Sizes(0.0, 0.0, 0))
    return measured
