"""No committed figure is older than the code that draws it: titles, axis labels and legends are those of a new drawing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import committed_figures
import pytest

Image = pytest.importorskip("PIL.Image", reason="reading figures needs Pillow, which comes with matplotlib")
pytest.importorskip("matplotlib", reason="drawing figures needs matplotlib, which is not installed")
ROOT = Path(__file__).resolve().parents[2]


def texts(path: Path) -> list[str]:
    with Image.open(path) as image:
        return json.loads(image.text["Description"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in committed_figures.SLOW))
        for name in committed_figures.FIGURES
    ],
)
def test_a_committed_figure_has_the_texts_of_a_new_one(name: str, tmp_path: Path) -> None:
    for package in committed_figures.NEEDED.get(name, ()):
        pytest.importorskip(package, reason=f"{name} is drawn with {package}, which is not installed")
    committed_figures.FIGURES[name](tmp_path / "new.png", ROOT / name)
    assert texts(ROOT / name) == texts(tmp_path / "new.png"), f"python tests/helpers/committed_figures.py {name}"


def test_every_committed_figure_is_drawn_again() -> None:
    found = subprocess.run(["git", "ls-files", "*.png"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("this is no git checkout, which lists the committed figures")
    assert set(found.stdout.split()) == set(committed_figures.FIGURES)
