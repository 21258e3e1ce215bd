"""One partition of some records, and its cells in tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import bipace_kernels as bk

from ..features.embedders import EMBEDDERS
from ._console import number

BAND = (4, 8)  # target median cluster size; that of bk.choose_epsilon()
Z95 = 1.96  # standard errors to both sides of value R²
PACE_METRICS = ("pace_row_fraction", "leave_one_out_row_fraction", "mean_unique_actions")  # need action keys


@dataclass(frozen=True)
class Outcome:
    """One partition of the records of a section.

    key        its name in report.json
    settings   what differs between partitions: partition, state, epsilon, ...
    metrics    of AdvantageResult.metrics(), without the prefix "bipace/"
    actions    whether the records have action keys
    choice     how ε was chosen, for an embedder
    """

    key: str
    label: str
    settings: dict[str, Any]
    metrics: dict[str, float]
    value_r2: bk.ValueR2
    result: Any = field(default=None, repr=False)
    actions: bool = True
    choice: bk.EpsilonChoice | None = None

    @property
    def in_band(self) -> bool:
        return BAND[0] <= self.metrics["median_cluster_size"] <= BAND[1]

    def interval(self) -> tuple[float, float] | None:
        """95 % of value R²."""
        r2 = self.value_r2
        if r2.r2 is None or r2.stderr is None:
            return None
        return r2.r2 - Z95 * r2.stderr, r2.r2 + Z95 * r2.stderr

    def as_json(self) -> dict[str, Any]:
        r2 = self.value_r2
        value_r2 = {"r2": r2.r2, "stderr": r2.stderr, "coverage": r2.coverage}
        content = {"label": self.label, **self.settings, "metrics": self.metrics, "value_r2": value_r2}
        if self.choice is None:
            return content
        choice = {"epsilon_reason": self.choice.reason, "epsilon_probes": self.choice.probes}
        return content | choice | {"value_r2_interval95": self.interval()}


def format_r2(value_r2: bk.ValueR2) -> str:
    """'0.083 ± 0.021 (92 %)'; '–' where returns do not differ."""
    if value_r2.r2 is None:
        return "–"
    error = "" if value_r2.stderr is None else f" ± {value_r2.stderr:.3f}"
    return f"{number(value_r2.r2, '.3f')}{error} ({value_r2.coverage:.0%})"


def _metric(name: str, form: str) -> Callable[[Outcome], str]:
    def cell(outcome: Outcome) -> str:
        known = name in outcome.metrics and (outcome.actions or name not in PACE_METRICS)
        return number(outcome.metrics[name], form) if known else "–"

    return cell


def _interval(outcome: Outcome) -> str:
    interval = outcome.interval()
    return "–" if interval is None else f"{number(interval[0], '.3f')} … {number(interval[1], '.3f')}"


# Heading -> the cell of an outcome.
CELLS: dict[str, Callable[[Outcome], str]] = {
    "partition": lambda o: o.label,
    "embedder": lambda o: EMBEDDERS[o.key].label,
    "state": lambda o: str(o.settings["state"]),
    "ε": lambda o: f"{o.settings['epsilon']:.3g}",
    "singleton clusters": _metric("singleton_cluster_fraction", ".1%"),
    "clusters": _metric("cluster_count", ",.0f"),
    "mean size": _metric("mean_cluster_size", ".1f"),
    "median size": lambda o: f"{o.metrics['median_cluster_size']:g}{'' if o.choice is None or o.in_band else ' *'}",
    "P90 size": _metric("p90_cluster_size", ".1f"),
    "matched pairs": _metric("pairs", ",.0f"),
    "mean Δt": _metric("mean_delta_t", ".1f"),
    "PACE rows": _metric("pace_row_fraction", ".1%"),
    "leave-one-out rows": _metric("leave_one_out_row_fraction", ".1%"),
    "singleton rows": _metric("singleton_row_fraction", ".1%"),
    "actions per cluster": _metric("mean_unique_actions", ".2f"),
    "value R²": lambda o: "–" if o.value_r2.r2 is None else number(o.value_r2.r2, ".3f"),
    "value R² (coverage)": lambda o: format_r2(o.value_r2),
    "95 % interval": _interval,
    "coverage": lambda o: f"{o.value_r2.coverage:.0%}",
}
SIZES = ("singleton clusters", "clusters", "mean size", "P90 size", "matched pairs", "mean Δt")
BRANCHES = ("PACE rows", "leave-one-out rows", "singleton rows", "actions per cluster")
PARTITIONS = ("partition", *SIZES, *BRANCHES, "value R² (coverage)")
CURVE = ("state", "ε", "singleton clusters", "median size", "mean size", "P90 size", "value R² (coverage)")
ACCURACY = ("value R²", "95 % interval", "coverage")
EMBEDDED = ("embedder", "ε", "singleton clusters", "median size", "mean size", *ACCURACY)
# At the terminal, within 100 characters.
TERMINAL = ("partition", "singleton clusters", "singleton rows", "mean size", "value R² (coverage)")


def table_rows(headings: Sequence[str], outcomes: Sequence[Outcome]) -> list[list[str]]:
    """A line of cells for each outcome."""
    return [[CELLS[heading](outcome) for heading in headings] for outcome in outcomes]
