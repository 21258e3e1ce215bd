"""What trainers that are built on transformers' Trainer have in common: checkpoints, and columns of all processes."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import bipace_kernels as bk

from ..distributed.ranks import Ranks
from ._settings import Settings
from ._states import States

T, R = TypeVar("T"), TypeVar("R")
STATE_FILE = "bipace_state.json"  # in a checkpoint's folder: States.state_dict()


class KeepsStates:
    """Mixin to stand before such a trainer: what its run has chosen is in its checkpoints."""

    _bipace: States
    args: Any
    accelerator: Any
    state: Any
    _get_output_dir: Any

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        config = self._bipace.settings.config()
        if self.args.should_save and (config.has_epsilon or config.needs_memory):
            # Before the trainer's: if the run ends in between, the checkpoint is not whole for the trainer either.
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            self._bipace.save(folder / STATE_FILE)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]  # of the trainer behind it

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return

        def load() -> dict[str, Any]:
            if self.accelerator.is_main_process:
                self._bipace.load(Path(checkpoint, STATE_FILE))
            return self._bipace.state_dict()

        if self.accelerator.num_processes == 1:
            load()
        else:  # one answer, where not every machine sees the folder, and one error
            self._bipace.load_state_dict(Ranks(None).agree(load, dict)[1][0])


def states_of(trainer: Any, settings: Settings, where: str) -> States:
    """The States of this process of a trainer; only the first process records, and needs the folder for it."""
    records = trainer.accelerator.is_main_process
    return States(settings if records else replace(settings, record_dir=None), where)


def agreed(
    several: bool, read: Callable[[], T], names: Callable[[T], Iterable[str]], make: Callable[[T, set[str]], R]
) -> R:
    """make(read(), names), where the names are those of all processes: each needs what the others have, or one reward
    would mean two things.  An error of one process is raised on all."""
    if not several:
        mine = read()
        return make(mine, set(names(mine)))
    mine, of_ranks = Ranks(None).agree(read, lambda mine: list(names(mine)))
    return Ranks(None).agree(lambda: make(mine, {name for one in of_ranks for name in one}), lambda _: None)[0]


def of_all(several: bool) -> dict[str, Any]:
    """The arguments `run`, `gather` and `agree` of States.advantage(), over all processes if there are several."""
    if not several:
        return {"run": bk.advantage}

    def agree(make: Callable[[], T], kind: Callable[[T], Any] = lambda _: None) -> T:
        mine, kinds = Ranks(None).agree(make, kind)
        if any(one != kinds[0] for one in kinds):
            raise ValueError(f"states must be of one kind on all processes, got {kinds}: set embedder to ngram.")
        return mine

    return {"run": bk.distributed.advantage, "gather": of_all_processes, "agree": agree}


def of_all_processes(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of all processes, one after the other, on the CPU; each has a row for each record of the process."""
    ranks, own = Ranks(None), [column.cpu() for column in columns.values()]
    counts = ranks.rows(torch.tensor([[len(own[0])]]), [1] * ranks.size).flatten().tolist()
    tables = [ranks.rows(c.reshape(len(c), math.prod(c.shape[1:])), counts) for c in own]
    return {name: t.reshape(-1, *c.shape[1:]) for name, c, t in zip(columns, own, tables, strict=True)}
