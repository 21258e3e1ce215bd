"""The figure of the truth benchmark: accuracy against rollouts per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bipace_kernels.support import png

from .truth_measures import Found, Summary, interval
from .truth_rows import CONTROL, DEFAULT, EPSILONS, Q_STYLE, SIZES, STEP_ONLY
from .truth_tables import TITLES, families_of

# colours, in drawing order; Q-style at the ε that is best with 8 rollouts, or the most there are, in the panel
PICTURE = {
    "GRPO": "#999999",
    "GiGPO": "#CC79A7",
    Q_STYLE: "#D55E00",
    CONTROL: "#009E73",
    Q_STYLE + STEP_ONLY: "#E69F00",
    DEFAULT: "#0072B2",
}


OWN_COLOURS = ("#000000", "#8C564B", "#6A3D9A", "#17BECF")  # of one's own rows, in turn


IN_LEGEND = {
    Q_STYLE: "BiPACE (best of 4 radii)",
    Q_STYLE + STEP_ONLY: "BiPACE without GRPO's advantage",
    CONTROL: "GAE with one value per prompt",
}


def drawn_row(summary: Summary, sets: Sequence[str], name: str) -> str:
    """The row of the table that a line of the picture shows."""
    if not name.startswith(Q_STYLE):
        return name
    rows = [f"{Q_STYLE} ε {epsilon:g}{name.removeprefix(Q_STYLE)}" for epsilon in EPSILONS]
    for size in (8, *SIZES[::-1]):
        found = {row: point[0] for row in rows if (point := summary.over(sets, row, size)) is not None}
        if found:
            return max(found, key=lambda row: found[row])
    return rows[0]


def draw(sets: list[Found], path: Path, own: Sequence[str]) -> None:
    """Accuracy against rollouts per prompt, a panel for each kind of policy."""
    summary = Summary(sets)
    families = families_of(sets)
    n, mine = len(families), {name: OWN_COLOURS[i % len(OWN_COLOURS)] for i, name in enumerate(own)}
    names_in_legend = len(PICTURE) + len(own)
    figure, axes = png.figure(max(3.2 * n, 6.4), 3.4 + 0.22 * -(-names_in_legend // min(n, 3)), 1, n, sharey=True)
    for axis, (family, names) in zip(axes[0], families.items(), strict=True):
        for line, colour in (PICTURE | mine).items():
            name = drawn_row(summary, names, line)
            points = [(g, found) for g in SIZES if (found := summary.over(names, name, g)) is not None]
            if not points:
                continue
            xs, ys = [g for g, _ in points], [found[0] for _, found in points]
            low, high = np.array([interval(found[1]) for _, found in points]).T
            axis.plot(xs, ys, "o-", color=colour, linewidth=1.8, label=IN_LEGEND.get(line, line))
            axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES, [str(g) for g in SIZES])
        kind, _, role = family.partition(" ")
        axis.set_title(TITLES.get(kind, kind) + f"\n{role}" * (role != "(hold)"), loc="left", fontsize=10)
        axis.set_xlabel("rollouts per prompt")
    axes[0][0].set_ylabel("correlation")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=min(n + 1, 3), frameon=False)
    held = "held-out rollouts, " * all(family.endswith("(hold)") for family in families)
    between = " " if n > 1 else "\n"
    png.set_title(figure, f"Correlation with the true advantage{between}({held}band: 95 % interval)")
    png.save(figure, path)
