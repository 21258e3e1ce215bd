"""The entry point in the group `verl.plugins`: extends verl's modules once verl itself imports them.

verl loads its plugins in every process, including rollout workers, so this file does not import verl.
"""

import importlib
import sys
import warnings
from functools import partial

from ...support.when_imported import when_imported

# verl's module -> our module whose join() extends it
JOINS = {
    "verl.trainer.ppo.core_algos": "estimator",
    "verl.trainer.ppo.ray_trainer": "driver_v0",
    "verl.trainer.ppo.v1": "trainer_v1",
    "verl.workers.engine": "engine",
}


def load(name: str, ours: str) -> None:
    """Imports our module and calls join().  A release of verl without the needed parts only gives a warning."""
    try:
        importlib.import_module(ours)
    except (ImportError, AttributeError) as error:
        text = (
            f"bipace_kernels could not patch {name}: {error}. algorithm.adv_estimator=bipace will not work with this "
            "release of verl; docs/verl.md names the tested ones."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def join(ours: str) -> None:
    sys.modules[ours].join()


for _name, _module in JOINS.items():
    _ours = f"{__package__}.{_module}"
    when_imported(_name, partial(load, _name, _ours))
    when_imported(_ours, partial(join, _ours))  # only once all modules are imported, in any order
