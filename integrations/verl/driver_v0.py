"""verl's RayPPOTrainer with BiPACE: hidden states from the output of log-probs, rows from the DataProto."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import ray_trainer
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from .. import _replace
from .._rollout_rows import RolloutRows, require
from . import estimator
from .estimator import EXTRA, HIDDEN, NAME

ROW = "bipace_row"  # number of a row before _balance_batch moves it, unique over the batches of a process
PADDING = re.compile("pad[0-9a-f]{32}")  # uid of rows that verl adds; other ids may begin so too
_next_number = itertools.count().__next__
_trainer: Any = None  # that trains in this process, for compute_advantage(), which is a function


class Trainer(estimator.TrainerMixin):
    """Mixin of RayPPOTrainer.

    bipace_hidden   states of the batch's rows by their numbers, since rows may be moved
    bipace_masks    their response masks likewise, before rollout correction rejects tokens
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.bipace_hidden: dict[int, torch.Tensor] = {}
        self.bipace_masks: dict[int, torch.Tensor] = {}
        self._take_over()

    def _take_over(self) -> None:
        global _trainer
        _trainer = self if self.bipace is not None else None

    def _load_checkpoint(self) -> Any:  # with which fit() begins; another trainer may have been made since __init__
        self._take_over()
        return super()._load_checkpoint()

    def _balance_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        numbers_of(batch)
        return super()._balance_batch(batch, *args, **kwargs)  # type: ignore[misc]

    def _compute_old_log_prob(self, batch: Any) -> Any:
        """verl's own, which drops unknown fields of the workers' output: the states are taken before."""

        def compute_log_prob(inner: Any, data: Any) -> Any:
            return self.ask(inner, data, batch)

        if self.bipace is not None:
            self.bipace_masks = dict(zip(numbers_of(batch), batch.batch["response_mask"], strict=True))
        with _replace.replaced(self.actor_rollout_wg, compute_log_prob):
            return super()._compute_old_log_prob(batch)  # type: ignore[misc]

    def ask(self, compute_log_prob: Any, data: Any, batch: Any) -> Any:
        """The output of compute_log_prob(data), whose states are kept."""
        if self.bipace is not None and self.bipace.request:
            tu.assign_non_tensor(data, **{NAME: self.bipace.request})
        output = compute_log_prob(data)
        if (hidden := tu.get(output, HIDDEN)) is not None:
            self.bipace_hidden = dict(zip(numbers_of(batch), hidden.unbind(), strict=True))
        return output

    def states_of(self, data: Any) -> list[torch.Tensor] | None:
        """Returns the kept states in the order of the rows, and forgets them."""
        bipace = self.bipace
        if bipace is not None and bipace.bypass and bipace.request:  # verl used the rollout's log-probs
            ids = left_right_2_no_padding(data.to_tensordict())
            tu.assign_non_tensor(ids, calculate_entropy=False, compute_loss=False)
            self.ask(self.actor_rollout_wg.compute_log_prob, ids, data)
        kept, self.bipace_hidden = self.bipace_hidden, {}
        numbers = data.non_tensor_batch.get(ROW, ())
        if kept and (len(numbers) != len(data) or not set(numbers) <= set(kept)):
            raise ValueError(
                f"{HIDDEN} holds states of {len(kept)} rows, but the batch has {len(data)} and their row numbers "
                f"({ROW}) differ: compute_advantage() needs rows of the last _compute_old_log_prob()."
            )
        return [kept[i] for i in numbers] if kept else None


def numbers_of(batch: Any) -> Any:
    """The rows' numbers [B], assigned here to a batch without them."""
    if ROW not in batch.non_tensor_batch:
        batch.non_tensor_batch[ROW] = np.array([_next_number() for _ in range(len(batch))], dtype=object)
    return batch.non_tensor_batch[ROW]


def rows_of(data: Any, hidden: Sequence[torch.Tensor] | None) -> RolloutRows:
    """The rows of a DataProto: each a trajectory, or a step of `traj_uid` at the place `step`."""
    fields, tensors, n = data.non_tensor_batch, data.batch, len(data)
    several = "traj_uid" in fields
    require(
        ["response_mask", "uid", *(["step"] if several else [])],
        {*tensors.keys(), *fields},
        "response_mask is 1 on tokens that the model generated, uid one id for all rollouts of a prompt, step the "
        "number of a row among those of its traj_uid",
    )

    def prompts() -> list[torch.Tensor]:
        return [row[m[: len(row)] != 0] for row, m in zip(tensors["prompts"], tensors["attention_mask"], strict=True)]

    return RolloutRows(
        mask=tensors["response_mask"],
        scores=tensors["token_level_scores" if "token_level_scores" in tensors else "token_level_rewards"],
        responses=tensors["responses"],
        prompts=prompts,
        group=list(map(str, fields["uid"])),
        trajectory=list(map(str, fields["traj_uid"])) if several else list(map(int, fields.get(ROW, range(n)))),
        place=list(map(int, fields["step"])) if several else [0] * n,
        valid=torch.tensor([not PADDING.fullmatch(str(uid)) for uid in fields["uid"]]),
        extra={name: list(fields[name]) for name in EXTRA if name in fields},
        hidden=hidden,
        extra_name="non_tensor_batch",
    )


def compute_advantage(inner: Any, data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's own, with the rows passed to the estimator; a v1 trainer has already done so."""
    if adv_estimator != NAME or estimator.job.get() is not None or _trainer is None:
        return inner(data, adv_estimator, *args, **kwargs)
    rows, masks = rows_of(data, _trainer.states_of(data)), _trainer.bipace_masks
    if len(numbers := data.non_tensor_batch.get(ROW, ())) and set(numbers) <= set(masks):
        rows = replace(rows, mask=torch.stack([masks[i] for i in numbers]))
    with _trainer.bipace.handed_over(rows, _trainer.tokenizer, _trainer.global_steps):
        return inner(data, adv_estimator, *args, **kwargs)


def compute_data_metrics(inner: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's own, and those of the estimator's last batch."""
    return {**inner(*args, **kwargs), **({} if _trainer is None else _trainer.bipace.metrics)}


def join() -> None:
    """Puts the mixin before verl's trainer, under its name, and replaces the functions."""
    _replace.replace(ray_trainer, compute_advantage, compute_data_metrics)
    stock = ray_trainer.RayPPOTrainer
    ray_trainer.RayPPOTrainer = type(stock.__name__, (Trainer, stock), {"__module__": stock.__module__})
