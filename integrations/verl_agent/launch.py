"""verl-agent's own main with BiPACE's keys, and its trainer with BiPACE's functions while fit() runs."""

import importlib.util
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .._recorder import Recorder
from .._replace import Function, need, replace, replaced
from .._states import States, file_of
from .batch import mark, texts, write_advantages
from .settings import WHERE, Settings, keys

CONFIG = Path(__file__).with_name("config")
UNTESTED = ", so this version of verl-agent was not tested with it: install the commit that docs/verl_agent.md names."
_undo: dict[Any, Function] = {}  # by the class of trainers: undoes its attach()


def added(*searchpaths: str) -> list[str]:
    """Arguments before the user's: folders of recipes and of verl-agent's configurations, and BiPACE's keys.

    searchpaths   the user's own hydra.searchpath=[...], whose folders come first; Hydra reads only one such argument
    """
    verl = Path(str(importlib.util.find_spec("verl").origin)).parent  # type: ignore[union-attr]  # imported before
    folders = [f"file://{verl / 'trainer/config'}", f"file://{CONFIG}"]
    for argument in reversed(searchpaths):
        match = re.fullmatch(r"\[(.*)\]", argument.partition("=")[2].strip(), re.DOTALL)
        if match is None:
            raise ValueError(f"hydra.searchpath must be a list such as [file:///folder], got {argument}; add brackets.")
        folders[:0] = [match[1]] if match[1].strip() else []
    store = importlib.import_module("hydra.core.config_store").ConfigStore.instance()
    store.store(group="bipace", name="keys", node={"algorithm": {"gigpo": keys()}}, package="_global_")
    return [f"hydra.searchpath=[{','.join(folders)}]", "+bipace=keys"]


def attach(trainer: Any, settings: Settings | None) -> None:
    """Makes fit() of a RayPPOTrainer class use BiPACE in this process, without settings not: the last call counts."""
    _undo.pop(trainer, lambda: None)()
    if settings is None:
        return
    module, name = sys.modules[trainer.__module__], "core_gigpo" if settings.hgpo is None else "core_hgpo"
    need(module, (name, "compute_advantage", "compute_data_metrics"), UNTESTED)
    core = getattr(module, name)
    need(core, ("compute_step_discounted_returns",), UNTESTED)
    metrics: dict[str, float] = {}
    states = settings.states()
    kept = () if states is None else keep(trainer, states)
    folder, every = settings.bipace_record_dir, settings.bipace_record_every
    recorder = Recorder(folder, every, f"{WHERE}bipace_") if folder else None

    def fit(inner: Any, self: Any) -> Any:
        def compute_step_discounted_returns(inner: Any, batch: Any, gamma: float) -> Any:
            returns = inner(batch=batch, gamma=gamma)
            mark(batch, settings)
            return returns

        def compute_advantage(inner: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
            metrics.clear()
            if recorder is not None:
                recorder.expect(self.global_steps, partial(texts, data, self.tokenizer))
            metrics.update(write_advantages(data, settings, self.tokenizer, states, recorder))
            return data

        def compute_data_metrics(inner: Any, *args: Any, **kwargs: Any) -> Any:
            return {**inner(*args, **kwargs), **metrics}

        with replaced(core, compute_step_discounted_returns), replaced(module, compute_advantage, compute_data_metrics):
            return inner(self)

    _undo[trainer] = replace(trainer, fit, *kept)


def keep(trainer: Any, states: States) -> tuple[Function, ...]:
    """Functions that include the states' choices and memory in checkpoints of the trainer class."""

    def _save_checkpoint(inner: Any, self: Any) -> Any:
        states.save(file_of(self))
        return inner(self)

    def _load_checkpoint(inner: Any, self: Any) -> Any:
        result = inner(self)
        states.load(file_of(self, resumed=True))
        return result

    need(trainer, ("_save_checkpoint", "_load_checkpoint"), UNTESTED)
    return _save_checkpoint, _load_checkpoint


class Runner:
    """verl-agent's TaskRunner as a Ray actor: prepares its process first."""

    def __init__(self, module: str) -> None:
        self.module = module

    def run(self, config: Any) -> Any:
        main = importlib.import_module(self.module)
        prepare(main, Settings.of(config))
        return main.TaskRunner.__ray_metadata__.modified_class().run(config)


def prepare(main: Any, settings: Settings | None) -> None:
    """Prepares this process for main.TaskRunner().run(); does nothing if BiPACE is not configured."""
    attach(main.RayPPOTrainer, settings)
    if settings is not None and settings.needs_hidden:
        importlib.import_module(".worker", __package__).install()


def run_ppo(main: Any, inner: Any, config: Any) -> None:
    """main.run_ppo(config), prepared; invalid settings raise here, before anything is loaded."""
    settings = Settings.of(config)
    if settings is not None and hasattr(main.TaskRunner, "__ray_metadata__"):
        runner = importlib.import_module("ray").remote(num_cpus=1)(Runner)
        main.TaskRunner = SimpleNamespace(remote=partial(runner.remote, main.__name__))
    else:
        prepare(main, settings)
    inner(config)


def main(argv: list[str]) -> None:
    hgpo = "algorithm.adv_estimator=hgpo" in argv
    entry: Any = importlib.import_module("recipe.hgpo.main_hgpo" if hgpo else "verl.trainer.main_ppo")
    searchpaths = [a for a in argv if a.startswith("hydra.searchpath=")]
    argv = [a for a in argv if a not in searchpaths]
    # Next to the user's own overrides: argparse refuses overrides after a flag (--cfg job) if others precede it.
    at = next((i for i, a in enumerate(argv) if "=" in a and not a.startswith("-")), len(argv))
    # verl-agent's configuration folders are not packages, so Hydra only finds them for scripts; the user's comes first.
    where = f"--config-path={Path(entry.__file__).parent / 'config'}"
    sys.argv = [sys.argv[0], where, *argv[:at], *added(*searchpaths), *argv[at:]]
    entry.run_ppo = partial(run_ppo, entry, entry.run_ppo)
    entry.main()
