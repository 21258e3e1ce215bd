"""Processes that work together: functions of a test file, which they cannot import by its name, and rank programs."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from paths import HELPERS


def spawn(path: str, name: str, args: tuple[Any, ...], nprocs: int) -> None:
    """Runs the function `name` of the file as name(rank, *args) in each of nprocs processes; raises where one fails."""
    mp.start_processes(_run, (path, name, args), nprocs=nprocs, start_method="spawn")


def _run(rank: int, path: str, name: str, args: tuple[Any, ...]) -> None:
    spec = importlib.util.spec_from_file_location(f"spawned_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, name)(rank, *args)


def run_ranks(script: str, folder: Path, cases: list[str], world: int, timeout: float) -> list[dict[str, Any]]:
    """What `python SCRIPT RANK FOLDER CASE...` writes to FOLDER/RANK.json, for each rank."""
    logs = [folder / f"{rank}.log" for rank in range(world)]
    started = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(HELPERS / script), str(rank), str(folder), *cases]
        with log.open("w") as file:
            how = {"stdout": file, "stderr": subprocess.STDOUT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
            started.append(subprocess.Popen(command, **how))
    try:
        for process in started:
            process.wait(timeout=timeout)
    except subprocess.TimeoutExpired:
        pytest.fail("hung:\n" + "\n".join(log.read_text()[-2000:] for log in logs))
    finally:
        for process in started:
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(world)]
    assert all(file.exists() for file in files), [log.read_text()[-3000:] for log in logs]
    return [json.loads(file.read_text()) for file in files]
