"""verl-agent's own main with BiPACE's keys and recipes among its arguments, and its processes prepared."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .driver import attach
from .settings import Settings

CONFIG = Path(__file__).with_name("config")


def added() -> list[str]:
    """Arguments before the user's own: where recipes are, and BiPACE's keys.

    They take the place of the HGPO recipe's own search path, which names verl-agent's configuration too.
    """
    verl = Path(str(importlib.util.find_spec("verl").origin)).parent  # type: ignore[union-attr]  # imported before
    return [f"hydra.searchpath=[file://{verl / 'trainer/config'},file://{CONFIG}]", "+bipace=keys"]


class Runner:
    """verl-agent's TaskRunner where Ray runs it in a process of its own: that process is prepared first."""

    def __init__(self, module: str) -> None:
        self.module = module

    def run(self, config: Any) -> Any:
        main = importlib.import_module(self.module)
        prepare(main, Settings.of(config))
        return main.TaskRunner.__ray_metadata__.modified_class().run(config)


def prepare(main: Any, settings: Settings | None) -> None:
    """Readies this process for main.TaskRunner().run(); does nothing where nothing is asked for."""
    attach(main.RayPPOTrainer, settings)
    if settings is not None and settings.needs_hidden:
        from . import worker

        worker.install()


def run_ppo(main: Any, inner: Any, config: Any) -> None:
    """main.run_ppo(config), prepared; settings that make no sense stop it here, before anything is loaded."""
    settings = Settings.of(config)
    if settings is not None and hasattr(main.TaskRunner, "__ray_metadata__"):
        import ray

        remote = ray.remote(num_cpus=1)(Runner)
        main.TaskRunner = SimpleNamespace(remote=partial(remote.remote, main.__name__))
    else:
        prepare(main, settings)
    inner(config)


def main(argv: list[str]) -> None:
    hgpo = "algorithm.adv_estimator=hgpo" in argv
    entry: Any = importlib.import_module("recipe.hgpo.main_hgpo" if hgpo else "verl.trainer.main_ppo")
    # Beside the user's own overrides: argparse takes those behind a flag (--cfg job) for strangers if others stand before it.
    at = next((i for i, a in enumerate(argv) if "=" in a and not a.startswith("-")), len(argv))
    # verl-agent's folders of configurations are no packages, so hydra finds them for scripts alone; a user's own wins.
    where = f"--config-path={Path(entry.__file__).parent / 'config'}"
    sys.argv = [sys.argv[0], where, *argv[:at], *added(), *argv[at:]]
    entry.run_ppo = partial(run_ppo, entry, entry.run_ppo)
    entry.main()
