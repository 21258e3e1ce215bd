"""Table and curves of finished runs: means over seeds, with the smallest and largest seed as interval."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from settings import METHODS

LABELS = {
    "grpo": "GRPO", "gigpo": "GiGPO", "hgpo": "HGPO", "bigpo": "BiGPO", "bipace_first": "BiPACE, first token",
    "bipace_tag": "BiPACE, action tag", "bipace_q": "BiPACE, Q-style",
}  # fmt: skip
# Okabe and Ito's colours, and a line style each: nothing is told apart by colour alone.
STYLES = {
    "grpo": ("#000000", "-"), "gigpo": ("#E69F00", "--"), "hgpo": ("#009E73", "-."), "bigpo": ("#56B4E9", ":"),
    "bipace_first": ("#CC79A7", "--"), "bipace_tag": ("#0072B2", "-."), "bipace_q": ("#D55E00", "-"),
}  # fmt: skip
WINDOW = 5  # updates in the mean of noisy curves
LAST = 10  # updates at the end that the table's train success is over

Runs = dict[str, list[dict[str, Any]]]


def read_runs(folder: Path) -> Runs:
    """{method: its finished runs by seed}, in the order of METHODS."""
    runs: Runs = {method: [] for method in METHODS}
    for path in sorted(folder.glob("*-seed*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        runs[found["method"]].append(found)
    for found in runs.values():
        found.sort(key=lambda run: run["seed"])
    return {method: found for method, found in runs.items() if found}


def write_report(folder: Path) -> list[Path]:
    """results.md, results.json, success.png and partitions.png beside the runs; gives what was written."""
    runs = read_runs(folder)
    if not runs:
        raise ValueError(f"{folder} holds no finished run; make one with `train.py run` or `train.py all`.")
    seeds = [{run["seed"] for run in found} for found in runs.values()]
    common, some = set.intersection(*seeds), set.union(*seeds)
    if common:  # methods are compared on equal seeds
        runs = {method: [run for run in found if run["seed"] in common] for method, found in runs.items()}
    rows = {method: summary(found) for method, found in runs.items()}
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    left_out = (
        f"\nSeeds left out, as not every method has run them: {sorted(some - common)}.\n" if common < some else ""
    )
    (folder / "results.md").write_text(table(rows) + left_out * bool(common), encoding="utf-8")
    draw_success(folder / "success.png", runs)
    draw_partitions(folder / "partitions.png", runs)
    return [folder / name for name in ("results.md", "results.json", "success.png", "partitions.png")]


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One method's numbers, one per seed each."""

    def last(run: dict[str, Any], name: str) -> float | None:
        values = [row[name] for row in run["updates"][-LAST:] if row.get(name) is not None]
        return round(float(np.mean(values)), 4) if values else None

    def checked(run: dict[str, Any], name: str) -> list[float]:
        return [check[name] for check in run["checks"] if name in check]

    facts: dict[str, Any] = {
        "seeds": [run["seed"] for run in found],
        "train_last_updates": [last(run, "train") for run in found],
        "held_out_before": [checked(run, "held_out")[0] for run in found],
        "held_out_after": [checked(run, "held_out")[-1] for run in found],
        "held_out_mean_of_checks": [round(float(np.mean(checked(run, "held_out")[1:])), 4) for run in found],
        "train_after": [checked(run, "train")[-1] for run in found],
        "cpu_minutes": [round(run["cpu_seconds"] / 60, 2) for run in found],
    }
    for name in ("singleton_cluster_fraction", "value_r2", "epsilon"):
        values = [last(run, name) for run in found]
        if any(value is not None for value in values):
            facts[name] = values
    return facts


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: mean (smallest to largest seed)."""

    def cell(row: dict[str, Any], name: str, form: str) -> str:
        values = [value for value in row.get(name, []) if value is not None]
        if not values:
            return "–"
        text = format(float(np.mean(values)), form)
        if len(values) > 1:
            text += f" ({min(values):{form}} to {max(values):{form}})"
        return text.replace("-", "−")

    head = ["method", "seeds", f"train, last {LAST} updates", "train tasks, after", "held-out, after",
            "held-out, mean of checks", "singletons", "value R²", "CPU minutes"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for method, row in rows.items():
        cells = [LABELS[method], str(len(row["seeds"]))]
        cells += [cell(row, name, ".1%") for name in
                  ("train_last_updates", "train_after", "held_out_after", "held_out_mean_of_checks",
                   "singleton_cluster_fraction")]  # fmt: skip
        cells += [cell(row, "value_r2", ".3f"), cell(row, "cpu_minutes", ".1f")]
        lines.append("| " + " | ".join(cells) + " |")
    before = {value for row in rows.values() for value in row["held_out_before"]}
    text = "\n".join(lines) + "\n\nMeans over seeds (smallest to largest seed). "
    return text + f"Held-out success of the warm start: {', '.join(f'{v:.1%}' for v in sorted(before))}.\n"


def curve(found: Sequence[dict[str, Any]], part: str, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Updates [U], and values [seeds, U] of one method, NaN where there are none."""
    steps = sorted({row["update"] for run in found for row in run[part]})
    values = np.full((len(found), len(steps)), np.nan)
    for i, run in enumerate(found):
        for row in run[part]:
            if row.get(name) is not None:
                values[i, steps.index(row["update"])] = row[name]
    return np.array(steps), values


def smooth(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Mean of the last WINDOW updates, fewer at the beginning."""
    windows = (values[:, max(0, i + 1 - WINDOW) : i + 1] for i in range(values.shape[1]))
    return np.stack([_mean(window, 1) for window in windows], axis=1)


def _mean(values: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    """Mean of what is not NaN; NaN where all is."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: npt.NDArray[Any] = np.where(there, values, 0).sum(axis) / there.sum(axis)
    return mean


def draw_success(path: Path, runs: Runs) -> None:
    """A column for each method: success in training above, on held-out tasks below; GRPO's mean in all of them."""
    figure = Figure(figsize=(2.1 * len(runs) + 0.8, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(runs), sharex=True, sharey="row", squeeze=False)
    seeds = sorted({run["seed"] for found in runs.values() for run in found})
    for row, (part, name) in enumerate((("updates", "train"), ("checks", "held_out"))):
        for column, (method, found) in enumerate(runs.items()):
            axis = axes[row, column]
            if "grpo" in runs and method != "grpo":
                steps, values = curve(runs["grpo"], part, name)
                mean = _mean(smooth(values) if row == 0 else values, 0)
                axis.plot(steps, mean, color="#8A8A8A", linewidth=1.2, label="GRPO, mean")
            _line(axis, found, part, name, method, smoothed=row == 0)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
            axis.grid(alpha=0.25)
            if row == 0:
                axis.set_title(LABELS[method], fontsize=10, fontweight="bold", loc="left")
            else:
                axis.set_xlabel("updates")
    axes[0, 0].set_ylabel(f"train success\n(mean of {WINDOW} updates)")
    axes[1, 0].set_ylabel("held-out success")
    figure.suptitle(
        f"Success on TextCraft: mean over {len(seeds)} seed{'s' * (len(seeds) > 1)}, band from smallest to largest; "
        "grey: GRPO's mean", x=0.01, ha="left", fontsize=11,
    )  # fmt: skip
    figure.savefig(path, metadata={"Software": None})


def draw_partitions(path: Path, runs: Runs) -> None:
    """What the partitions look like while the policy changes: singletons and value R²."""
    shown = {method: found for method, found in runs.items() if "singleton_cluster_fraction" in found[0]["updates"][0]}
    figure = Figure(figsize=(11, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for method, found in shown.items():
        _line(left, found, "updates", "singleton_cluster_fraction", method, smoothed=True)
        _line(right, found, "updates", "value_r2", method, smoothed=True)
    left.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    left.set_title("Singletons: clusters without a peer", fontsize=10, fontweight="bold", loc="left")
    right.set_title("Value R²: returns predicted from other rollouts", fontsize=10, fontweight="bold", loc="left")
    right.axhline(0, color="#8A8A8A", linewidth=0.8)
    for axis in (left, right):
        axis.set_xlabel(f"updates (mean of {WINDOW})")
        axis.grid(alpha=0.25)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Software": None})


def _line(axis: Axes, found: Sequence[dict[str, Any]], part: str, name: str, method: str, *, smoothed: bool) -> None:
    steps, values = curve(found, part, name)
    if smoothed:
        values = smooth(values)
    colour, style = STYLES[method]
    axis.fill_between(steps, np.fmin.reduce(values), np.fmax.reduce(values), color=colour, alpha=0.18, linewidth=0)
    axis.plot(steps, _mean(values, 0), color=colour, linestyle=style, linewidth=1.8, label=LABELS[method])
