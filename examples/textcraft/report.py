"""Figure and table of the runs that are finished, whichever these are; every number says over how many seeds it is."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from campaign import score
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import MultipleLocator, PercentFormatter
from settings import METHODS, OWN

from bipace_kernels.support import png

LABELS = {
    "grpo": "GRPO", "gigpo": "GiGPO", "hgpo": "HGPO", "bigpo": "BiGPO", "bipace": "BiPACE",
    "bipace-step": "BiPACE without GRPO's advantage", "gae": "Config.gae(), first form",
    "gae-group": "GAE with one value per prompt (control)",
    "gae-cluster": "GAE, clusters", "gae-states": "GAE, hidden states, no averages over actions",
}  # fmt: skip
# Okabe and Ito's colours, as in bench/truth_figure.py, and a line style each, so that no line depends on colour.
STYLES = {
    "grpo": ("#777777", "-"), "gigpo": ("#CC79A7", "--"), "bipace": ("#D55E00", "-."), "gae": ("#0072B2", "-"),
    "gae-group": ("#009E73", ":"), "bipace-step": ("#E69F00", "--"), "hgpo": ("#000000", "-."),
    "bigpo": ("#8A8A00", ":"),
    "gae-cluster": ("#7B3294", "-"), "gae-states": ("#8C564B", ":"),
}  # fmt: skip
# Those of these that have runs are in the first figure, the others in the second.
SHOWN = ("grpo", "bipace", "gae", "gae-group", "bipace-step", "gigpo")
REFERENCE = "gae"  # of the paired differences
LEVELS = (0.35, 0.4, 0.5)
# 97.5 % quantiles of Student's t, by degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Runs = dict[tuple[str, int], dict[int, dict[str, Any]]]  # (method, rollouts of a task): {seed: run}


def read_runs(folder: Path) -> Runs:
    runs: Runs = {}
    for path in sorted(folder.glob("*-seed*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        runs.setdefault((found["method"], found["settings"]["group"]), {})[found["seed"]] = found
    order = list(METHODS)
    return dict(sorted(runs.items(), key=lambda item: (-item[0][1], order.index(item[0][0]))))


def curve(run: dict[str, Any], before: float | None) -> tuple[list[int], list[float]]:
    """Rollouts and success on the test tasks, from the start on, whose success is `before`; None: the run has measured
    it."""
    batch, checks = run["settings"]["batch"], run["checks"]
    if before is not None:
        checks = [{"update": 0, "test": before}, *checks]
    return [c["update"] * batch for c in checks], [c["test"] for c in checks]


def area(run: dict[str, Any], before: float | None) -> float:
    """Mean success on the test tasks over the rollouts of the run, by trapezes."""
    x, y = curve(run, before)
    return float(np.trapezoid(y, x) / x[-1])


def rollouts_to(run: dict[str, Any], before: float | None, level: float) -> float | None:
    """Where the curve, straight between checks, first reaches the level; None where it does not."""
    x, y = curve(run, before)
    for i, value in enumerate(y):
        if value >= level:
            return float(x[i] if i == 0 else x[i - 1] + (x[i] - x[i - 1]) * (level - y[i - 1]) / (value - y[i - 1]))
    return None


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95 % interval over seeds; None for fewer than two."""
    n = len(values)
    half = STUDENT[n - 2] * float(np.std(values, ddof=1)) / n**0.5 if 1 < n <= len(STUDENT) + 1 else None
    return float(np.mean(values)), half


def summary(runs: Runs, before: float | None) -> list[dict[str, Any]]:
    """One row for each method and group size: values by seed, and what is paired with the reference's."""
    rows = []
    for (method, group), found in runs.items():
        seeds = sorted(found)
        wall = sum(found[s]["seconds"]["wall"] for s in seeds)
        row: dict[str, Any] = {
            "method": method, "group": group, "seeds": seeds,
            "final": [found[s]["checks"][-1]["test"] for s in seeds],
            "half-way": [float(np.interp(curve(found[s], before)[0][-1] / 2, *curve(found[s], before))) for s in seeds],
            "area": [round(area(found[s], before), 5) for s in seeds],
            "rollouts_to": {f"{level:g}": [rollouts_to(found[s], before, level) for s in seeds] for level in LEVELS},
            "train_last_10_updates": [float(np.mean([u["train"] for u in found[s]["updates"][-10:]])) for s in seeds],
            "cpu_minutes": [round(found[s]["seconds"]["cpu"] / 60, 2) for s in seeds],
            "share_of_time": {
                name: round(sum(found[s]["seconds"][name] for s in seeds) / wall, 3)
                for name in ("rollouts", "scoring", "checks")
            },
        }  # fmt: skip
        reference = runs.get((REFERENCE, group), {})
        both = [s for s in seeds if s in reference] if method != REFERENCE else []
        if both:
            row["reference_minus_this"] = {
                "seeds": both,
                "final": [reference[s]["checks"][-1]["test"] - found[s]["checks"][-1]["test"] for s in both],
                "area": [area(reference[s], before) - area(found[s], before) for s in both],
            }
            # What share of this method's rollouts the reference needs for its final success.
            shares = [
                (rollouts_to(reference[s], before, found[s]["checks"][-1]["test"]), curve(found[s], before)[0][-1])
                for s in both
            ]
            row["reference_minus_this"]["share_of_rollouts"] = [None if a is None else a / b for a, b in shares]
        rows.append(row)
    return rows


def _percent(values: Sequence[float], sign: str = "") -> str:
    mean, half = interval(values)
    return f"{100 * mean:{sign}.1f}" + ("" if half is None else f" ± {100 * half:.1f}")


def table(rows: Sequence[dict[str, Any]], before: float | None) -> str:
    head = ["method", "G", "seeds", "success half-way, %", "success at the end, %", "area under the curve, %",
            *(f"rollouts to {level:.0%}" for level in LEVELS), "GAE − this: end", "GAE − this: area",
            "GAE's rollouts to its end",
            "scoring, % of time", "CPU minutes"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in rows:
        cells = [
            LABELS[row["method"]],
            str(row["group"]),
            str(len(row["seeds"])),
            *(_percent(row[k]) for k in ("half-way", "final", "area")),
        ]
        for level in LEVELS:
            values = row["rollouts_to"][f"{level:g}"]
            reached = [v for v in values if v is not None]
            text = f"{np.mean(reached):,.0f}" if reached else "–"
            cells.append(text if len(reached) in (0, len(values)) else f"{text} ({len(reached)} of {len(values)})")
        paired = row.get("reference_minus_this")
        if paired is None:
            cells += ["", "", ""]
        else:
            reached = [v for v in paired["share_of_rollouts"] if v is not None]
            share = f"{_percent(reached)} %" if reached else "not reached"
            missing = len(paired["seeds"]) - len(reached)
            cells += [_percent(paired["final"], "+"), _percent(paired["area"], "+"),
                      share + f" (not in {missing} of {len(paired['seeds'])})" * bool(reached and missing)]  # fmt: skip
        cells += [f"{100 * row['share_of_time']['scoring']:.0f}", f"{np.mean(row['cpu_minutes']):.1f}"]
        lines.append("| " + " | ".join(cells).replace(" -", " −") + " |")
    lines += [
        "",
        "Success on test tasks, one episode each, after the same rollouts for all. Means over seeds ± half of a 95 % "
        "interval "
        "(Student's t; none for one seed). Differences are by seed, in points; *GAE's rollouts to its end*: what "
        "share of the "
        "method's rollouts the kernel GAE needed to reach that method's final success; *scoring*: everything between "
        "rollouts "
        "and loss, hidden states and advantages too. "
        + ("" if before is None else f"The warm start solves {before:.1%}."),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def tuning_table(folder: Path) -> str:
    """Markdown: what every tuning run scored, by learning rate, then by λ or ε; empty where there is none."""
    by_rate: dict[str, dict[Any, float]] = {}
    by_own: dict[str, dict[str, dict[Any, float]]] = {}  # name of the parameter, method, value
    for path in folder.glob("*/*-seed*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        method, settings = found["method"], found["settings"]
        name, values = OWN.get(method, ("", ()))
        if not values or settings[name] == values[0]:
            by_rate.setdefault(method, {})[settings["learning_rate"]] = score(found)
        else:
            by_own.setdefault(name, {}).setdefault(method, {})[settings[name]] = score(found)
    if not by_rate:
        return ""
    parts = ["", *_scores("tuning: solved, %", by_rate)]
    for name, of_method in by_own.items():
        for method, scores in of_method.items():  # the default's run is the one at the best learning rate
            scores[OWN[method][1][0]] = max(by_rate.get(method, {0.0: float("nan")}).values())
        parts += ["", *_scores(f"tuning: solved, %, by {name}", of_method)]
    return "\n".join([*parts, "", "Rollouts of the tuning seed, without those of the first updates.", ""])


def _scores(title: str, rows: dict[str, dict[Any, float]]) -> list[str]:
    values = sorted(
        {value for row in rows.values() for value in row}, key=lambda value: (isinstance(value, str), value)
    )
    lines = [f"| {title} | " + " | ".join(f"{value}" for value in values) + " |", "| --- |" + " ---: |" * len(values)]
    for method in (method for method in METHODS if method in rows):
        cells = [f"{100 * rows[method][value]:.1f}" if value in rows[method] else "–" for value in values]
        lines.append("| " + " | ".join([LABELS[method], *cells]) + " |")
    return lines


def oracle_table(folder: Path, runs: Runs) -> str:
    """Markdown: the oracle's runs beside the methods' of the same seed after as many updates; empty where there is
    none."""
    lines = []
    for path in sorted((folder / "oracle").glob("oracle-*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        seed, group, last = found["seed"], found["settings"]["group"], found["checks"][-1]
        beside = {
            method: of_seed[seed] for (method, size), of_seed in runs.items() if size == group and seed in of_seed
        }
        for method, run in {"oracle": found, **beside}.items():
            solved = [row["train"] for row in run["updates"] if row["update"] <= last["update"]]
            test = [check["test"] for check in run["checks"] if check["update"] == last["update"]]
            if test:
                name = LABELS.get(method, f"measured advantages, {found['continuations']} continuations")
                cells = [
                    name,
                    str(seed),
                    str(last["update"]),
                    f"{100 * float(np.mean(solved)):.1f}",
                    f"{100 * test[0]:.1f}",
                ]
                lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return ""
    head = ["", "| oracle: one seed | seed | updates | solved in its rollouts, % | success on the test tasks, % |",
            "| --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    return "\n".join([*head, *lines, ""])


def write_report(folder: Path, start: Path, title: str = "TextCraft") -> list[Path]:
    """results.md, results.json and the figures beside the runs; gives what was written."""
    runs = read_runs(folder)
    if not runs:
        raise ValueError(f"{folder} holds no finished run; make one with `train.py run` or `train.py all`.")
    facts = start / "warm_start.json"
    before = json.loads(facts.read_text(encoding="utf-8"))["test"] if facts.exists() else None
    rows = summary(runs, before)
    (folder / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(
        table(rows, before) + oracle_table(folder, runs) + tuning_table(folder / "tuning"), encoding="utf-8"
    )
    written = [folder / "results.md", folder / "results.json"]
    most = max(group for _, group in runs)
    shown = [method for method in SHOWN if (method, most) in runs]
    others = [key for key in runs if key[1] == most and key[0] not in shown]
    for name, chosen in (
        ("success.png", [key for key in runs if key[1] == most and key[0] in shown]),
        ("others.png", [*others, *(key for key in runs if others and key == (REFERENCE, most))]),
        ("fewer.png", [key for key in runs if key[1] < most]),
    ):
        if chosen:
            _draw(folder / name, {key: runs[key] for key in chosen}, before, title)
            written.append(folder / name)
    return written


def _draw(path: Path, runs: Runs, before: float | None, title: str) -> None:
    groups = sorted({group for _, group in runs}, reverse=True)
    seeds = {len(found) for found in runs.values()}  # in the title where all have as many
    figure, panels = png.figure(9 if len(groups) == 1 else 13, 4.8, 1, len(groups), sharey=True)
    for axis, group in zip(panels[0], groups, strict=True):
        for (method, size), found in runs.items():
            if size == group:
                _line(axis, method, found, before, f" ({len(found)}\u00a0seeds)" * (len(seeds) > 1))
        axis.set_xlabel("rollouts")
        axis.set_title(f"{group} rollouts per task", fontsize=10, loc="left")
        low, high = axis.get_ylim()
        axis.yaxis.set_major_locator(MultipleLocator(0.05 if high - low < 0.4 else 0.1))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    low, high = figure.axes[0].get_ylim()
    figure.axes[0].set_ylim(low, high)
    for axis in figure.axes:
        above = 0.0
        for line in sorted(axis.get_lines(), key=lambda line: line.get_ydata()[-1]):  # labelled beside its end
            name = textwrap.fill(str(line.get_label()), 25)
            half = 0.03 * len(name.splitlines())
            above = max((line.get_ydata()[-1] - low) / (high - low) + half, above + 2 * half)
            place = {"transform": axis.transAxes, "va": "center", "fontsize": 10}
            axis.text(1.01, above - half, name, color=[0.7 * c for c in to_rgb(line.get_color())], **place)
    figure.axes[0].set_ylabel("success on test tasks at temperature 1")
    over = f"{max(seeds)} seeds" if len(seeds) == 1 else "seeds"
    drawn = f" (mean over {over}; band: 95 % interval)" * (max(seeds) > 2)
    png.set_title(figure, f"{title}: test success during training{drawn}")
    png.save(figure, path)


def _line(axis: Axes, method: str, found: dict[int, dict[str, Any]], before: float | None, seeds: str) -> None:
    curves = [curve(run, before) for run in found.values()]
    steps = min((x for x, _ in curves), key=len)
    values = np.array([y[: len(steps)] for _, y in curves])
    colour, style = STYLES[method]
    drawn = {"color": colour, "linestyle": style, "marker": "o", "linewidth": 1.8, "label": LABELS[method] + seeds}
    axis.plot(steps, values.mean(axis=0), **drawn)
    halves = [interval(column)[1] for column in values.T]
    if len(found) > 2 and None not in halves:  # with two seeds the band would fill the panel
        half = np.array(halves, dtype=float)
        axis.fill_between(
            steps, values.mean(axis=0) - half, values.mean(axis=0) + half, color=colour, alpha=0.1, linewidth=0
        )
