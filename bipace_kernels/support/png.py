"""Figures in one style, as PNG files that hold what they show: a test sees one that is older than its data or code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure for a file, which no window shows, and its panels [rows, columns]; options as of Figure.subplots()."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(made)
    panels = made.subplots(rows, columns, squeeze=False, **options)
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(True, axis="y", color="#E5E5E5", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(labelsize=9)
    return made, panels


def set_title(figure: Figure, text: str) -> None:
    """The title of a whole figure."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")


def contents(figure: Figure) -> dict[str, list[Any]]:
    """texts: titles, axis and tick labels, legends and notes, by panel; numbers: of its lines and bars, 4 digits."""
    from matplotlib.patches import Rectangle

    texts: list[str] = [figure.get_suptitle()]
    numbers: list[float] = []
    for axes in figure.axes:
        texts += [axes.get_title("left"), axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
        texts += [label.get_text() for label in (*axes.get_yticklabels(), *axes.texts)]
        for line in axes.lines:
            numbers += np.asarray(line.get_ydata(), np.float64).tolist()
        for patch in axes.patches:
            if isinstance(patch, Rectangle):
                numbers += [patch.get_width(), patch.get_height()]
    for legend in [*(axes.get_legend() for axes in figure.axes), *figure.legends]:
        if legend is not None:
            texts += [text.get_text() for text in legend.get_texts()]
    rounded = [float(f"{number:.4g}") for number in numbers if math.isfinite(number)]
    return {"texts": [text for text in texts if text], "numbers": rounded}


def save(figure: Figure, path: Path) -> None:
    """Writes the PNG, its contents as "Description"; without matplotlib's version, which would change its bytes."""
    figure.savefig(path, metadata={"Software": None, "Description": json.dumps(contents(figure))})
