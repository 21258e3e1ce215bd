"""Rollouts that several tests of the command line read."""

import gzip
import json

import pytest
from paths import ROOT


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """Four prompt groups of scripted ALFWorld rollouts."""
    path = tmp_path_factory.mktemp("games") / "games.jsonl"
    tasks = {}
    with gzip.open(ROOT / "examples/data/alfworld_scripted.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            task = json.loads(line)["task_id"]
            if task not in tasks and len(tasks) == 4:
                break
            tasks.setdefault(task, []).append(line)
    path.write_text("".join(line for lines in tasks.values() for line in lines))
    return path


@pytest.fixture
def undrawn(monkeypatch):
    """Figures as files without a picture: drawing is most of a report's time."""
    from bipace_kernels.cli import figures

    for name in ("step_shares", "epsilon_curve", "embedders"):
        monkeypatch.setattr(figures, name, lambda path, *_: path.write_bytes(b"\x89PNG\r\n\x1a\n"))
