"""What the pages for developers name is there: paths, commands, stages, folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["docs/development.md", "CONTRIBUTING.md", ".github/pull_request_template.md"])
def test_paths_and_commands_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    paths = set(re.findall(r"`((?:bipace_kernels|csrc|tests|docs|bench|integrations|cmake|\.ci)/[\w./-]*)`", text))
    paths |= set(re.findall(r"`(\w[\w.]*\.(?:toml|yml|py|txt|md|cff))`", text)) - {
        "stages.py",
        "estimators.py",
        "partitions.py",
    }
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "bipace_kernels" / path).exists(), f"{page} names {path}"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in re.findall(r"`make ([\w -]+)`", text):
        assert set(words.split()) <= targets, f"{page} names make {words}"


def test_every_stage_and_backend_is_on_the_map():
    from bipace_kernels.backends.dispatch import STAGES

    text = (ROOT / "docs/development.md").read_text()
    for name in (
        "pipeline.py",
        "backends/contract.py",
        "estimators/table.py",
        "estimators/partitions.py",
        "backends/dispatch.py",
    ):
        assert f"bipace_kernels/{name}`" in text
    for backend in ("reference", "cpu", "triton", "cuda"):
        assert f"{backend}/" in text
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    for folder in folders:
        assert f"`tests/{folder}/`" in text, f"no word on tests/{folder}/"
    assert len(STAGES) >= 9
    for stage in STAGES:
        assert (ROOT / f"bipace_kernels/backends/reference/{stage}.py").is_file(), stage
