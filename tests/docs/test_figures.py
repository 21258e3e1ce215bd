"""No committed figure is older than its data or the code that draws it: it shows what a new drawing shows."""

import json
import re
import subprocess

import committed_figures
import pytest
from paths import ROOT

Image = pytest.importorskip("PIL.Image", reason="reading figures needs Pillow, which comes with matplotlib")
pytest.importorskip("matplotlib", reason="drawing figures needs matplotlib, which is not installed")


NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?")


def shown(path):
    """Texts with # for each number, and all numbers, of texts, lines and bars."""
    with Image.open(path) as image:
        found = json.loads(image.text["Description"])
    numbers = [n for text in found["texts"] for n in NUMBER.findall(text)]
    values = [float(n.replace(",", "").replace("−", "-")) for n in numbers]
    return [NUMBER.sub("#", text) for text in found["texts"]], values + found["numbers"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in committed_figures.SLOW))
        for name in committed_figures.FIGURES
    ],
)
def test_a_committed_figure_shows_what_a_new_one_does(name, tmp_path):
    for package in committed_figures.NEEDED.get(name, ()):
        pytest.importorskip(package, reason=f"{name} is drawn with {package}, which is not installed")
    committed_figures.FIGURES[name](tmp_path / "new.png", ROOT / name)
    (texts, numbers), (new_texts, new_numbers) = shown(ROOT / name), shown(tmp_path / "new.png")
    again = f"python tests/helpers/committed_figures.py {name}"
    assert texts == new_texts, again
    # Some are measured with a model: another instruction set or library moves them a little.
    assert numbers == pytest.approx(new_numbers, rel=0.05, abs=0.02), again


def test_every_committed_figure_is_drawn_again():
    found = subprocess.run(["git", "ls-files", "*.png"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("this is no git checkout, which lists the committed figures")
    assert set(found.stdout.split()) == set(committed_figures.FIGURES)
