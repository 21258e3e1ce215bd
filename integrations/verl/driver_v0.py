"""verl's RayPPOTrainer with BiPACE: hidden states kept from the log-probs' output, rows read from the DataProto."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import ray_trainer
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from .._rows import Rows
from . import plugin
from .estimator import EXTRA, HIDDEN, NAME, Bipace, is_handed_over

ROW = "bipace_row"  # number of a row before _balance_batch moves it
_stock: dict[str, Any] = {}  # verl's own functions
_trainer: Any = None  # the one of this process, which compute_advantage(), being a function, does not know


def rows_of(data: Any, hidden: Any) -> Rows:
    """The rows of a DataProto: each a trajectory, or a step of `traj_uid` at the place `step`."""
    given, n = data.non_tensor_batch, len(data)
    if "traj_uid" in given and "step" not in given:
        raise ValueError("traj_uid in the batch needs step beside it, the number of the row in its trajectory.")
    if "uid" not in given:
        raise ValueError(
            "uid is missing in the batch, and adv_estimator=bipace needs it: one id for all rollouts of a prompt."
        )
    scores = (
        data.batch["token_level_scores"] if "token_level_scores" in data.batch else data.batch["token_level_rewards"]
    )
    number = list(map(int, given[ROW])) if ROW in given else list(range(n))

    def prompts() -> list[torch.Tensor]:
        ids, attended = data.batch["prompts"], data.batch["attention_mask"]
        return [row[m[: len(row)] != 0] for row, m in zip(ids, attended, strict=True)]

    return Rows(
        mask=data.batch["response_mask"],
        scores=scores,
        responses=data.batch["responses"],
        prompts=prompts,
        group=list(map(str, given["uid"])),
        trajectory=list(map(str, given["traj_uid"])) if "traj_uid" in given else number,
        place=list(map(int, given["step"])) if "traj_uid" in given else [0] * n,
        valid=torch.tensor([not str(uid).startswith("pad") for uid in given["uid"]]),
        extra={name: list(given[name]) for name in EXTRA if name in given},
        hidden=hidden,
    )


def compute_advantage(data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's own, with the rows handed over to the estimator; a trainer of v1 has done so already."""
    run = _stock["compute_advantage"]
    if adv_estimator != NAME or is_handed_over() or _trainer is None:
        return run(data, adv_estimator, *args, **kwargs)
    if "response_mask" not in data.batch:
        data.batch["response_mask"] = ray_trainer.compute_response_mask(data)
    bipace, (uid, hidden) = _trainer.bipace, _trainer.bipace_hidden
    _trainer.bipace_hidden = (None, None)
    if hidden is not None and not np.array_equal(uid, data.non_tensor_batch["uid"]):
        raise ValueError(
            f"{HIDDEN} came for {len(uid)} rows and the batch has {len(data)}, or they stand in another order: rows must stay as "
            "they are between _compute_old_log_prob() and compute_advantage()."
        )
    if hidden is None and bipace.bypass and bipace.request:  # verl took the rollout's log-probs
        ids = left_right_2_no_padding(data.to_tensordict())
        tu.assign_non_tensor(ids, calculate_entropy=False, compute_loss=False, **bipace.request)
        hidden = tu.get(_trainer.actor_rollout_wg.compute_log_prob(ids), HIDDEN)
        hidden = None if hidden is None else hidden.unbind()
    with bipace.handed_over(rows_of(data, hidden), _trainer.tokenizer):
        return run(data, adv_estimator, *args, **kwargs)


def compute_data_metrics(*args: Any, **kwargs: Any) -> Any:
    """verl's own, and those of the estimator's last batch."""
    found = _stock["compute_data_metrics"](*args, **kwargs)
    return found if _trainer is None else {**found, **_trainer.bipace.metrics}


def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    global _trainer
    self.bipace, self.bipace_hidden = Bipace.of(config), (None, None)
    _stock["__init__"](self, config, *args, **kwargs)
    _trainer = self if self.bipace is not None else None


def balance_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if self.bipace is not None:
        batch.non_tensor_batch[ROW] = np.arange(len(batch), dtype=object)
    return _stock["_balance_batch"](self, batch, *args, **kwargs)


def compute_old_log_prob(self: Any, batch: Any) -> Any:
    """verl's own, which drops what it does not know of the workers' output: the states are taken before."""
    run, request = _stock["_compute_old_log_prob"], {} if self.bipace is None else self.bipace.request
    if not request:
        return run(self, batch)
    workers = self.actor_rollout_wg
    ask = workers.compute_log_prob

    def keep(data: Any) -> Any:
        tu.assign_non_tensor(data, **request)
        output = ask(data)
        hidden = tu.get(output, HIDDEN)
        self.bipace_hidden = (batch.non_tensor_batch["uid"].copy(), None if hidden is None else hidden.unbind())
        return output

    workers.compute_log_prob = keep
    try:
        return run(self, batch)
    finally:
        workers.compute_log_prob = ask


def save_checkpoint(self: Any) -> Any:
    if self.bipace is not None:
        self.bipace.save(self.config.trainer, self.global_steps)
    return _stock["_save_checkpoint"](self)


def load_checkpoint(self: Any) -> Any:
    found = _stock["_load_checkpoint"](self)
    if self.bipace is not None:
        self.bipace.load(self.config.trainer, self.global_steps)
    return found


def join() -> None:
    """Puts these in the place of verl's own, which they call."""
    cls = ray_trainer.RayPPOTrainer
    methods: dict[str, Any] = {
        "__init__": init, "_balance_batch": balance_batch, "_compute_old_log_prob": compute_old_log_prob,
        "_save_checkpoint": save_checkpoint, "_load_checkpoint": load_checkpoint,
    }  # fmt: skip
    functions: dict[str, Any] = {f.__name__: f for f in (compute_advantage, compute_data_metrics)}
    for owner, ours in ((cls, methods), (ray_trainer, functions)):
        for name, function in ours.items():
            _stock[name] = getattr(owner, name)
            setattr(owner, name, wraps(_stock[name])(function))


plugin.finish()
