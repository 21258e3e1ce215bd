"""Figures as PNG files that hold their own texts, so that a test sees a file that is older than the code that draws it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def texts(figure: Figure) -> list[str]:
    """Title of the figure, then titles, axis labels and legend of each panel, then the figure's legends."""
    found = [figure.get_suptitle()]
    for axes in figure.axes:
        found += [axes.get_title("left"), axes.get_title(), axes.get_xlabel(), axes.get_ylabel()]
    for legend in [*(axes.get_legend() for axes in figure.axes), *figure.legends]:
        if legend is not None:
            found += [text.get_text() for text in legend.get_texts()]
    return [text for text in found if text]


def save(figure: Figure, path: Path) -> None:
    """Writes the PNG, its texts as "Description"; without matplotlib's version, so that the same figure has the same bytes."""
    figure.savefig(path, metadata={"Software": None, "Description": json.dumps(texts(figure))})
