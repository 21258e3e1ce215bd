"""verl's v1 trainers with BiPACE: hidden states asked for with the log-probs, rows read from TransferQueue."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, trainer_base

from .._rows import Rows
from . import plugin
from .estimator import CLUSTER, EXTRA, HIDDEN, IDS, LABELS, Bipace


def rows_of(batch: Any) -> Rows:
    """The rows of a KVBatchMeta, whose keys are {uid}_{session}_{number of the session's output}."""
    get = partial(tq.kv_batch_get, keys=batch.keys, partition_id=batch.partition_id)
    needed = ("response_mask", "responses", "rm_scores")
    data = get(select_fields=[*needed, "extra_fields", HIDDEN, LABELS])
    for name in needed:
        if name not in data:
            raise ValueError(
                f"{name} is not in TransferQueue, and algorithm.adv_estimator=bipace needs it: agent loops give response_mask and "
                "responses by AgentLoopOutput, and rm_scores by its reward_score."
            )
    dense = data.select(*needed).to_padded_tensor()
    told = data.pop("extra_fields").tolist() if "extra_fields" in data else []
    told = [row if isinstance(row, dict) else {} for row in told]
    extra = {name: [row.get(name) for row in told] for name in EXTRA if any(name in row for row in told)}
    return Rows(
        **ids_of(batch),
        mask=dense["response_mask"],
        scores=dense["rm_scores"],
        responses=dense["responses"],
        prompts=lambda: get(select_fields=["prompts"])["prompts"].unbind(),
        extra=extra,
        hidden=data[HIDDEN].unbind() if HIDDEN in data else None,
        labels=data[LABELS].unbind() if LABELS in data else None,
    )


def ids_of(batch: Any) -> dict[str, Any]:
    """group, trajectory, place and valid of each row, from its key and its tag."""
    uid, session, number = zip(*(key.rsplit("_", 2) for key in batch.keys), strict=True)
    valid = torch.tensor([not tag.get("is_padding", False) for tag in batch.tags])
    return {"group": uid, "trajectory": [int(x) for x in session], "place": [int(x) for x in number], "valid": valid}


def number(group: Sequence[str], trajectory: Sequence[int], place: Sequence[int], valid: torch.Tensor) -> torch.Tensor:
    """[B, 4] int64: the same as integers, in the order that Rows gives them."""
    _, groups = np.unique(np.asarray(group), return_inverse=True)
    _, rollouts = np.unique(np.stack([groups, np.asarray(trajectory)]), axis=1, return_inverse=True)
    return torch.stack([torch.as_tensor(x).long() for x in (groups, rollouts.reshape(-1), place, valid)], 1)


class Trainer:
    """Mixin to stand before a PPOTrainer; for any other adv_estimator it only passes calls on.  bipace: the run's, or None"""

    config: Any
    tokenizer: Any
    global_steps: int
    actor_rollout_wg: Any

    def __init__(self, config: Any) -> None:
        self.bipace = Bipace.of(config)
        super().__init__(config)  # type: ignore[call-arg]

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        request = {} if self.bipace is None else self.bipace.request
        batch.extra_info.update(request)
        if CLUSTER in request:
            ids = TensorDict({IDS: number(**ids_of(batch))}, batch_size=len(batch))
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=ids)
            if batch.fields is not None:
                batch.fields = [*batch.fields, IDS]
        try:
            # verl takes the rollout's log-probs: a forward for the states alone.
            if request and self.bipace is not None and self.bipace.bypass:
                temperature = self.config.actor_rollout_ref.rollout.temperature
                batch.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=temperature)
                self.actor_rollout_wg.compute_log_prob(batch)
            done = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        finally:
            without(batch, request)
        return without(done, request)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        run = super()._compute_advantage  # type: ignore[misc]
        if self.bipace is None:
            return run(batch, metrics)
        with self.bipace.handed_over(rows_of(batch), self.tokenizer):
            done = run(batch, metrics)
        metrics.update(self.bipace.metrics)
        return without(done, self.bipace.request)

    def _save_checkpoint(self) -> None:
        if self.bipace is not None:
            self.bipace.save(self.config.trainer, self.global_steps)
        super()._save_checkpoint()  # type: ignore[misc]

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()  # type: ignore[misc]
        if self.bipace is not None:
            self.bipace.load(self.config.trainer, self.global_steps)


def without(batch: Any, request: dict[str, Any]) -> Any:
    """The batch for the forwards that follow: they tap nothing, and nobody sends them the states."""
    for name in request:
        (batch.extra_info or {}).pop(name, None)
    if request and batch.fields is not None:
        batch.fields = [name for name in batch.fields if name not in (HIDDEN, LABELS, IDS)]
    return batch


def join() -> None:
    """Puts the mixin before verl's own trainers, under their names."""
    registry = trainer_base.TRAINER_REGISTRY
    for stock in (PPOTrainerSync, PPOTrainerColocateAsync, PPOTrainerSeparateAsync):
        for name in [name for name, cls in registry.items() if cls is stock]:
            registry[name] = type(stock.__name__, (Trainer, stock), {"__module__": __name__})


plugin.finish()
