"""The entry point in the group `verl.plugins`: joins verl's modules when, and only when, verl imports them itself.

verl loads its plugins in every process, rollout workers too, so this file imports nothing of verl.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import partial

from ..._when_imported import when_imported

# verl's module -> the one of ours whose join() adds to it
JOINS = {
    "verl.trainer.ppo.core_algos": "estimator",
    "verl.trainer.ppo.ray_trainer": "driver_v0",
    "verl.trainer.ppo.v1": "trainer_v1",
    "verl.workers.engine": "engine",
}


def load(name: str, ours: str) -> None:
    """Imports ours, which then joins.  A release of verl that lacks a part we join to is a warning, and still trains."""
    try:
        importlib.import_module(ours)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"bipace_kernels could not join {name}: {error}. algorithm.adv_estimator=bipace will not work with this release "
            "of verl; docs/verl.md names those that were run.",
            RuntimeWarning,
            stacklevel=2,
        )


def join(ours: str) -> None:
    sys.modules[ours].join()


for _name, _module in JOINS.items():
    _ours = f"{__package__}.{_module}"
    when_imported(_name, partial(load, _name, _ours))
    when_imported(_ours, partial(join, _ours))  # not before all of it is there, whichever comes first
