"""Functions of a test file in processes of their own, which cannot import the file by its name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def spawn(path: str, name: str, args: tuple[Any, ...], nprocs: int) -> None:
    """Runs the function `name` of the file as name(rank, *args) in each of nprocs processes; raises where one fails."""
    mp.start_processes(_run, (path, name, args), nprocs=nprocs, start_method="spawn")


def _run(rank: int, path: str, name: str, args: tuple[Any, ...]) -> None:
    spec = importlib.util.spec_from_file_location(f"spawned_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, name)(rank, *args)
