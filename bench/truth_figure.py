"""The figure of the truth benchmark: accuracy against rollouts per prompt."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bipace_kernels.support import png

from .truth_measures import Found, Summary
from .truth_rows import CONTROL, DEFAULT, EPSILONS, Q_STYLE, SIZES, STEP_MEANS, STEP_ONLY
from .truth_tables import families_of

# colours, in drawing order; BiPACE at the ε that is best with 8 rollouts, or the most there are, in the panel
PICTURE = {
    "GRPO": "#999999",
    "GiGPO": "#CC79A7",
    Q_STYLE: "#D55E00",
    CONTROL: "#009E73",
    STEP_MEANS: "#56B4E9",
    Q_STYLE + STEP_ONLY: "#E69F00",
    "GAE with ExtraTrees on the same states": "#8A8A00",
    DEFAULT: "#0072B2",
}
OWN_COLOURS = ("#000000", "#8C564B", "#6A3D9A", "#17BECF")  # of one's own rows, in turn


def radii(summary: Summary, sets: Sequence[str], line: str) -> list[str]:
    """The rows of the table that a line of the picture can show, the best one first."""
    rows = [line]
    if line.startswith(Q_STYLE):
        rows = [f"{Q_STYLE} ε {epsilon:g}{line.removeprefix(Q_STYLE)}" for epsilon in EPSILONS]
    for size in (8, *SIZES[::-1]):
        found = {row: point.value for row in rows if (point := summary.over(sets, row, size)) is not None}
        if found:
            return sorted(found, key=lambda row: -found[row])
    return []


def draw(sets: list[Found], path: Path, own: Sequence[str]) -> None:
    """Accuracy against rollouts per prompt, a panel for each kind of policy."""
    summary = Summary(sets)
    families = families_of(sets)
    n, mine = len(families), {name: OWN_COLOURS[i % len(OWN_COLOURS)] for i, name in enumerate(own)}
    columns = min(n, 2) if n < 3 else 3
    height = 3.6 + 0.22 * -(-(len(PICTURE) + len(own)) // columns)
    figure, axes = png.figure(max(3.2 * n, 6.4), height, 1, n, sharey=True)
    for axis, (family, names) in zip(axes[0], families.items(), strict=True):
        for line, colour in (PICTURE | mine).items():
            rows = radii(summary, names, line)
            points = [(g, found) for g in SIZES if rows and (found := summary.over(names, rows[0], g)) is not None]
            if not points:
                continue
            xs, ys = [g for g, _ in points], [found.value for _, found in points]
            low, high = np.array([found.interval for _, found in points]).T
            name = f"{line} (best of {len(rows)} radii)" if len(rows) > 1 else rows[0]
            axis.plot(xs, ys, "o-", color=colour, linewidth=1.8, label=name)
            axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES, [str(g) for g in SIZES])
        axis.set_title(family, loc="left", fontsize=10)
        axis.set_xlabel("rollouts per prompt")
    axes[0][0].set_ylabel("correlation")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=columns, frameon=False)
    held = "held-out rollouts, " * all(found.meta["role"] == "hold" for found in sets)
    between = " " if n > 2 else "\n"
    png.set_title(figure, f"Correlation with the true advantage{between}({held}band: 95 % interval)")
    png.save(figure, path)
