"""The entry point in the group `verl.plugins`: joins verl's modules when, and only when, verl imports them itself.

verl loads its plugins in every process, rollout workers too, so this file imports nothing of verl.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# verl's module -> the one of ours whose join() adds to it
JOINS = {
    "verl.trainer.ppo.core_algos": "estimator",
    "verl.trainer.ppo.ray_trainer": "driver_v0",
    "verl.trainer.ppo.v1": "trainer_v1",
    "verl.workers.engine": "engine",
}


_waiting: list[str] = []


class Joiner(importlib.abc.MetaPathFinder):
    """Lets the other finders find one of those modules, and calls our join() once its own code has run."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in JOINS:
            return None
        found = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
        spec = next((s for s in found if s is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                join(fullname)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec


def join(name: str) -> None:
    """Adds ours to one of verl's modules.  A release that lacks a part we join to is told of, and still trains."""
    try:
        ours = importlib.import_module(f".{JOINS[name]}", __package__)
        if hasattr(ours, "join"):
            ours.join()
        else:  # it is being imported, and it is what imports verl's
            _waiting.append(name)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"bipace_kernels could not join {name}: {error}. algorithm.adv_estimator=bipace will not work with this release "
            "of verl; docs/verl.md names those that were run.",
            RuntimeWarning,
            stacklevel=2,
        )


def finish() -> None:
    """Joins what had to wait for the end of the file of ours that calls this."""
    waiting = [*_waiting]
    _waiting.clear()
    for name in waiting:
        join(name)


def install() -> None:
    """Once per process; modules that are there already are joined at once."""
    if any(isinstance(finder, Joiner) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Joiner())
    for name in JOINS:
        if name in sys.modules:
            join(name)


install()
