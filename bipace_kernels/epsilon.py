"""choose_epsilon(): the paper's search for ε by the median cluster size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _checks
from ._fingerprints import Fingerprints, raise_bad_rows, take_fingerprints
from ._sizes import measure_sizes
from .layout import Layout

LEVELS = 6  # probes read off one sweep: 2⁶ − 1 = 63 nodes
FEWEST_LEVELS = 3  # on the CPU the Gram matrices alone cost as much as two to five clusterings


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
    bounds    of ε, inside [1e-4, 1]; the paper's [0.02, 0.40]
    probes    at most this many clusterings, ≥ 1
    Where no probe lands inside the band, the one nearest to it is taken, the smaller ε on ties.
    The walk is read off one sweep over all ε it could visit, 63 for six probes, and takes the steps that clustering
    probe by probe takes.  One or two probes on the CPU, and groups too long for a sweep, do go probe by probe
    (docs/epsilon.md).  Bad rows are a ValueError on every device, which a GPU is waited for.
    Source: the paper's adaptive ε heuristic; it suggests the first training step's batch.
    """
    band, bounds = pair(band, "band", 1.0, float("inf")), pair(bounds, "bounds", 1e-4, 1.0)
    probes = _checks.integer_at_least(probes, "probes", 1)
    rows = take_fingerprints(fingerprint, group, trajectory, step, layout, backend, num_threads)
    if rows.layout.n_records == 0:
        raise ValueError("fingerprint must have at least one row to choose epsilon from, got none.")
    raise_bad_rows(rows.layout, rows.row_states())

    (low_size, high_size), (low, high) = band, bounds
    tried: list[tuple[float, float]] = []
    while len(tried) < probes:
        levels = min(LEVELS, probes - len(tried))
        if not _sweeps(rows, levels):
            levels = 1
        nodes = _tree(low, high, levels)
        medians = _medians(rows, nodes)
        at = 0
        for _ in range(levels):
            epsilon, size = nodes[at], medians[at]
            tried.append((epsilon, size))
            if low_size <= size <= high_size:
                reason = f"median cluster size {size:g} is inside the band [{low_size:g}, {high_size:g}]"
                return EpsilonChoice(epsilon, tuple(tried), reason)
            if size < low_size:
                low, at = epsilon, 2 * at + 2
            else:
                high, at = epsilon, 2 * at + 1
    epsilon, size = min(tried, key=lambda probe: (max(low_size - probe[1], probe[1] - high_size), probe[0]))
    return EpsilonChoice(
        epsilon,
        tuple(tried),
        f"no probe lands inside the band [{low_size:g}, {high_size:g}]; median cluster size {size:g} is the nearest",
    )


def _sweeps(rows: Fingerprints, levels: int) -> bool:
    """Whether the next levels come from one sweep; probe by probe a GPU would be waited for at each."""
    if rows.layout.longest_group > rows.backend.clusters.LONGEST_SWEEP:
        return False  # without a Gram matrix each node is a clustering
    return rows.backend.deferred or levels >= FEWEST_LEVELS


def _tree(low: float, high: float, levels: int) -> list[float]:
    """The midpoints a binary search of so many levels could visit; below node i lies node 2i + 1, above it 2i + 2."""
    intervals, nodes = [(low, high)], []
    for low, high in intervals:
        middle = (low + high) / 2
        nodes.append(middle)
        if len(intervals) < 2**levels - 1:
            intervals += [(low, middle), (middle, high)]
    return nodes


def _medians(rows: Fingerprints, epsilons: list[float]) -> list[float]:
    """Median cluster size under each ε."""
    labels = rows.labels(epsilons[0], None)[None] if len(epsilons) == 1 else rows.sweep(epsilons, None)
    return [sizes.median for sizes in measure_sizes(labels)]


def pair(value: Any, name: str, low: float, high: float) -> tuple[float, float]:
    """(first, second) in order, both in [low, high]."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name} must be a pair (low, high), got {value!r}.")
    first, second = (_checks.check_number_in(v, f"{name}[{i}]", low, high) for i, v in enumerate(value))
    if first > second:
        raise ValueError(f"{name} must be in order (low, high), got {value!r}.")
    return first, second
