"""Rollouts that several tests of the command line read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from paths import ROOT


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four prompt groups of scripted ALFWorld rollouts."""
    path = tmp_path_factory.mktemp("games") / "games.jsonl"
    tasks: dict[str, list[str]] = {}
    with gzip.open(ROOT / "examples/data/alfworld_scripted.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            task = json.loads(line)["task_id"]
            if task not in tasks and len(tasks) == 4:
                break
            tasks.setdefault(task, []).append(line)
    path.write_text("".join(line for lines in tasks.values() for line in lines))
    return path
