"""results.json, results.md and success.png of a comparison: what stands on its page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
from campaign import write_whole
from comparison import TEMPERATURES, Comparison, finished, mean, success, summary
from matplotlib.ticker import MaxNLocator, PercentFormatter
from report import STYLES, interval

from bipace_kernels.support import png

LABELS = {
    **report.LABELS, "start": "before training", "gae": "Config.gae()", "value-head": "PPO's value head",
    "step-means": "means by (prompt, step)", "trees": "GAE over ExtraTrees",
}  # fmt: skip
COLOURS = {
    "start": "#000000", "value-head": "#56B4E9", "step-means": "#8C564B", "trees": "#7B3294",
    **{method: colour for method, (colour, _) in STYLES.items()},
}  # fmt: skip
NAMES = {"validation": "validation tasks", "test": "test tasks", "new_goals": "new goals"}


def write(of: Comparison, folder: Path) -> list[Path]:
    """The three files; ValueError where no final run is finished."""
    there = finished(folder)
    runs = {method: [there[method][seed] for seed in sorted(there[method])] for method in of.methods if method in there}
    if not runs:
        raise ValueError(f"{folder} holds no finished run; make them with `final`.")
    start = of.start / "warm_start.json"
    if start.exists():
        runs = {"start": [json.loads(start.read_text(encoding="utf-8"))["measured"]], **runs}
    found = summary(of, folder)
    planned = sum(len(of.seeds_of(method)) for method in of.methods)
    paths = [folder / name for name in ("results.json", "results.md", "success.png")]
    write_whole(paths[0], json.dumps(found, indent=1) + "\n")
    write_whole(paths[1], "\n".join(_page(found, runs, planned)) + "\n")
    _draw(paths[2], runs)
    return paths


def of_seeds(runs: Sequence[Sequence[dict[str, Any]]], tasks: str, temperature: float) -> list[float]:
    """Of each run, the mean over its seeds of sampling."""
    return [mean(success(rows, tasks, temperature)) for rows in runs]


def _percent(values: Sequence[float]) -> str:
    middle, half = interval(values)
    return f"{100 * middle:.1f}" + ("" if half is None else f" ± {100 * half:.1f}")


def _page(found: dict[str, Any], runs: dict[str, list[list[dict[str, Any]]]], planned: int) -> list[str]:
    done = sum(len(of) for method, of in runs.items() if method != "start")
    out = [f"# {done} of {planned} final runs", ""]
    if done < planned:
        out += ["Not finished: nothing is concluded from methods whose runs are missing.", ""]
    if "primary" in found:  # once all runs that it needs are finished
        lead, rival = found["primary"], LABELS[found["primary"]["rival"]]
        out += [
            f"**Primary endpoint**: `Config.gae()` minus {rival}, test tasks, each at its temperature: "
            f"{100 * lead['lead']:+.1f} ± {100 * lead['half']:.1f} points, p {lead['p']:.3f} (Welch, two-sided).",
            "",
        ]
    parts = [part for part in NAMES if any(row["tasks"] == part for row in next(iter(runs.values()))[0])]
    out += [
        "Percent solved, mean over seeds and 95 % interval (Student's t over seeds); bold: the method's temperature, "
        "by the validation tasks."
    ]
    for part in parts:
        out += ["", f"| {NAMES[part]} | seeds | T 1 | T 0.3 | T 0 | nats a token, T 1 |", "| --- |" + " ---: |" * 5]
        for method, of in runs.items():
            cells = []
            for t in TEMPERATURES:
                cell = _percent(of_seeds(of, part, t))
                chosen = found["methods"].get(method, {}).get("temperature")
                cells.append(f"**{cell}**" if t == chosen else cell)
            at_one = [row for rows in of for row in rows if (row["tasks"], row["temperature"]) == (part, 1.0)]
            entropy = mean([mean(row["entropy"]) for row in at_one])
            seeds = "" if method == "start" else str(len(of))
            out.append(f"| {LABELS[method]} | {seeds} | {' | '.join(cells)} | {entropy:.3f} |")
    if "exploratory" in found:
        n = len(found["exploratory"])
        head = f"| exploratory: `Config.gae()` minus | tasks | points | p (Holm, of these {n}) |"
        out += ["", head, "| --- | --- | ---: | ---: |"]
        for row in found["exploratory"]:
            points = f"{100 * row['lead']:+.1f} ± {100 * row['half']:.1f}"
            out.append(f"| {LABELS[row['method']]} | {NAMES[row['tasks']]} | {points} | {row['p_holm']:.3f} |")
    return out


def _draw(path: Path, runs: dict[str, list[list[dict[str, Any]]]]) -> None:
    """A panel for the test tasks and one for new goals; in each a column of methods at every temperature."""
    first = next(iter(runs.values()))[0]
    parts = [part for part in ("test", "new_goals") if any(row["tasks"] == part for row in first)]
    figure, panels = png.figure(5.6 * len(parts) + 2.6, 4.6, 1, len(parts))
    apart = 0.8 / len(runs)
    for axis, part in zip(panels[0], parts, strict=True):
        for place, (method, of) in enumerate(runs.items()):
            at = [x + (place - (len(runs) - 1) / 2) * apart for x in range(len(TEMPERATURES))]
            drawn = [interval(of_seeds(of, part, t)) for t in TEMPERATURES]
            label = LABELS[method] + f" ({len(of)} seeds)" * (method != "start")
            axis.errorbar(
                at, [middle for middle, _ in drawn], [half or 0.0 for _, half in drawn], fmt="o", markersize=4,
                capsize=2, color=COLOURS[method], label=label,
            )  # fmt: skip
        axis.set_xticks(range(len(TEMPERATURES)), [f"temperature {t:g}" for t in TEMPERATURES])
        axis.set_title(NAMES[part], fontsize=10, loc="left")
        axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panels[0][0].set_ylabel("solved")
    panels[0][-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)
    png.set_title(figure, "Success after training (mean over seeds; bars: 95 % interval)")
    png.save(figure, path)
