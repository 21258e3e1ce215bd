"""Results of calibrate(): the scan, the choice, and both as Markdown, JSON and YAML."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .._version import __version__

if TYPE_CHECKING:
    from ..hidden import Layer


@dataclass(frozen=True)
class Scanned:
    """One layer, pooling and ε."""

    layer: Layer
    pooling: str
    epsilon: float
    clusters: int
    singletons: float  # share of clusters
    median_size: float
    largest: float  # share of the prompts in the largest cluster of their group
    accuracy: float  # of the linear probe; the same at every ε
    stderr: float
    qualifies: bool  # enough clusters, neither one giant cluster nor all singletons


@dataclass(frozen=True)
class Chosen:
    """The settings to train with."""

    layer: Layer
    pooling: str
    epsilon: float
    accuracy: float
    clusters: int  # at this ε, and so are the next two
    singletons: float
    median_size: float
    probes: tuple[tuple[float, float], ...] = field(repr=False)  # (ε, median size) of choose_epsilon()


@dataclass(frozen=True)
class Calibration:
    """The scan of calibrate() and the choice from it.

    scan      a `Scanned` for each layer, pooling and ε, by depth
    choice    layer, pooling and epsilon; None where nothing qualifies
    reason    why, in words
    seconds   of this call: states, clusters, probes
    reused    prompts whose states were in the folder
    """

    scan: tuple[Scanned, ...]
    choice: Chosen | None
    reason: str
    model: str
    n_prompts: int
    n_distinct: int
    n_groups: int
    n_labels: int
    majority: float  # share of the most frequent label
    folds: int
    min_clusters: int
    seed: int
    reused: int = field(compare=False)
    seconds: dict[str, float] = field(compare=False)

    def slice(self) -> tuple[Scanned, ...]:
        """The layers at one pooling and ε, as in the paper's table: the choice's, at its first ε that qualifies."""
        rows = self.scan
        if self.choice is not None:
            at = (self.choice.layer, self.choice.pooling)
            rows = tuple(row for row in rows if row.qualifies and (row.layer, row.pooling) == at)
        epsilon, pooling = rows[0].epsilon, rows[0].pooling
        return tuple(row for row in self.scan if (row.epsilon, row.pooling) == (epsilon, pooling))

    def is_chosen(self, row: Scanned) -> bool:
        return self.choice is not None and (row.layer, row.pooling) == (self.choice.layer, self.choice.pooling)

    def as_json(self) -> dict[str, Any]:
        """Everything but times, for json.dump()."""
        counts = {name: getattr(self, f"n_{name}") for name in ("prompts", "groups", "labels")}
        counts["distinct_prompts"] = self.n_distinct
        same = {name: getattr(self, name) for name in ("majority", "folds", "min_clusters", "seed", "reason")}
        choice = self.choice and _row_json(self.choice, epsilon_probes=[list(probe) for probe in self.choice.probes])
        scan = [_row_json(row, block=row.layer.block) for row in self.scan]
        return {"version": __version__, "model": self.model, **counts, **same, "choice": choice, "scan": scan}

    def yaml(self) -> str:
        """The keys layer, pooling and epsilon, for a trainer's configuration.  ValueError where nothing was chosen."""
        if self.choice is None:
            raise ValueError(f"a calibration must have a choice to be written as YAML, but {self.reason}")
        layer = layer_value(self.choice.layer)
        value = f'"{layer}"' if isinstance(layer, str) else layer
        return (
            f"# {self.choice.layer} of {self.model}; made by bipace-kernels {__version__}\n"
            f"layer: {value}\npooling: {self.choice.pooling}\nepsilon: {self.choice.epsilon:.6g}\n"
        )

    def markdown(self, image: str | None = None) -> str:
        """The tables; `image` is the heat map's file, if there is one."""
        several = f" in {self.n_groups:,} groups" if self.n_groups > 1 else ", one group"
        parts = [
            f"# Calibration of {markdown_text(self.model)}",
            f"{self.n_prompts:,} prompts ({self.n_distinct:,} distinct{several}), {self.n_labels} labels; always "
            f"predicting the most frequent one would be right for {self.majority:.1%}. Probe accuracy: a logistic "
            f"regression on standardised states, mean of {self.folds} stratified folds that keep identical prompts "
            "together.",
        ]
        if self.choice is None:
            parts.append(f"**Nothing chosen:** {self.reason}")
        else:
            c = self.choice
            parts.append(
                f"**Chosen: {c.layer}, pooling {c.pooling}, ε = {c.epsilon:.4g}** ({c.clusters:,} clusters, "
                f"{c.singletons:.1%} of them singletons, median size {c.median_size:g}).\nWhy: {self.reason}"
            )
        shown = self.slice()[0]
        parts += [f"## Pooling {shown.pooling}, ε = {shown.epsilon:g}", markdown_table(HEADINGS, self.cells())]
        if image:
            parts.append(f"![Heat map of the scan]({image})")
        parts += [
            "## The whole scan",
            "In each ε column: clusters · singleton clusters · median size. † does not qualify: fewer than "
            f"{self.min_clusters} clusters, or 95 % of the prompts in the largest cluster, or 95 % in singletons.",
            markdown_table(*self._whole()),
        ]
        return "\n\n".join(parts) + "\n"

    def cells(self, bold: Callable[[str], Any] = "**{}**".format) -> list[list[Any]]:
        """The lines of the slice; that of the choice in bold."""
        lines = []
        for row in self.slice():
            name = f"{row.layer}{'' if row.qualifies else ' †'}"
            sizes = f"{row.clusters:,}", f"{row.singletons:.1%}", f"{row.median_size:.1f}"
            line = [name, *sizes, f"{row.accuracy:.3f} ± {row.stderr:.3f}"]
            lines.append([bold(cell) for cell in line] if self.is_chosen(row) else line)
        return lines

    def _whole(self) -> tuple[list[str], list[list[str]]]:
        epsilons = sorted({row.epsilon for row in self.scan})
        lines: list[list[str]] = []
        for first in range(0, len(self.scan), len(epsilons)):
            rows = self.scan[first : first + len(epsilons)]
            mark = "**" if self.is_chosen(rows[0]) else ""
            cells = [
                f"{r.clusters:,} · {r.singletons:.0%} · {r.median_size:g}{'' if r.qualifies else ' †'}" for r in rows
            ]
            name = f"{mark}{rows[0].layer}{mark}"
            lines.append([name, rows[0].pooling, f"{rows[0].accuracy:.3f} ± {rows[0].stderr:.3f}", *cells])
        return ["layer", "pooling", "probe accuracy", *(f"ε = {epsilon:g}" for epsilon in epsilons)], lines


HEADINGS = ["layer", "clusters", "singletons", "median size", "probe accuracy"]


def layer_value(layer: Layer) -> int | str:
    """The argument of tap(layer=...): a negative index, or "block 27" for the last block before the norm."""
    if layer.normed:
        return -1
    return f"block {layer.block}" if layer.block == layer.n_blocks - 1 else layer.block - layer.n_blocks


def _row_json(row: Scanned | Chosen, **more: Any) -> dict[str, Any]:
    plain = {f.name: getattr(row, f.name) for f in fields(row) if f.name not in ("layer", "probes")}
    return {"layer": layer_value(row.layer), "name": str(row.layer), **plain, **more}


def markdown_text(text: str) -> str:
    """Any text as one line of Markdown that shows it: neither markup nor HTML."""
    return re.sub(r"([\\`*\[\]|#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; every column but the first is aligned to the right."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    escaped = [[cell.replace("|", "\\|") for cell in cells] for cells in (headings, rule, *rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in escaped)
