"""verl's v1 trainers with BiPACE: hidden states requested with the log-probs, rows read from TransferQueue."""

from functools import partial
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, trainer_base

from .._rollout_rows import RolloutRows, extra_of, numbered, require
from . import estimator
from .estimator import EXTRA, HIDDEN, IDS, LABELS, NAME


def ids_of(batch: Any) -> dict[str, Any]:
    """group, trajectory, place and valid of each row of a KVBatchMeta: its key {uid}_{session}_{number} and its tag."""
    uid, session, number = zip(*(key.rsplit("_", 2) for key in batch.keys), strict=True)
    valid = torch.tensor([not tag.get("is_padding", False) for tag in batch.tags])
    return {"group": uid, "trajectory": [int(x) for x in session], "place": [int(x) for x in number], "valid": valid}


def rows_of(batch: Any) -> RolloutRows:
    """The rows of a KVBatchMeta: outputs of agent loops' sessions."""
    get = partial(tq.kv_batch_get, keys=batch.keys, partition_id=batch.partition_id)
    needed = ("response_mask", "responses", "rm_scores")
    data = get(select_fields=[*needed, "extra_fields", HIDDEN, LABELS])
    require(needed, data.keys(), "AgentLoopOutput of agent loops has response_mask, responses and reward_score")
    dense = data.select(*needed).to_padded_tensor()
    fields = data.pop("extra_fields").tolist() if "extra_fields" in data else []
    fields = [row if isinstance(row, dict) else {} for row in fields]
    return RolloutRows(
        **ids_of(batch),
        mask=dense["response_mask"],
        scores=dense["rm_scores"],
        responses=dense["responses"],
        prompts=lambda: get(select_fields=["prompts"])["prompts"].unbind(),
        extra=extra_of(fields, EXTRA),
        hidden=data[HIDDEN].unbind() if HIDDEN in data else None,
        labels=data[LABELS].unbind() if LABELS in data else None,
    )


class Trainer(estimator.TrainerMixin):
    """Mixin before a PPOTrainer."""

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        run = super()._compute_old_log_prob  # type: ignore[misc]
        request = {} if self.bipace is None else self.bipace.request
        if not request:
            return run(batch, metrics)
        batch.extra_info[NAME] = request
        if "cluster" in request:
            rows = rows_of(batch)
            valid = rows.taking_part(self.bipace.states)
            ids = torch.stack([*numbered(rows.group, rows.trajectory), torch.tensor(rows.place), valid.long()], 1)
            fields = TensorDict({IDS: ids}, batch_size=len(batch))
            tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
            batch.fields = batch.fields and [*batch.fields, IDS]
        try:
            if request["early_exit"]:  # verl uses the rollout's log-probs: a forward only for the states
                temperature = self.config.actor_rollout_ref.rollout.temperature
                batch.extra_info.update(calculate_entropy=False, compute_loss=False, temperature=temperature)
                self.actor_rollout_wg.compute_log_prob(batch)
            done = run(batch, metrics)
        finally:
            without(batch)
        return without(done)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        run = super()._compute_advantage  # type: ignore[misc]
        if self.bipace is None:
            return run(batch, metrics)
        with self.bipace.handed_over(rows_of(batch), self.tokenizer, self.global_steps):
            done = run(batch, metrics)
        metrics.update(self.bipace.metrics)
        return without(done)


def without(batch: Any) -> Any:
    """The batch for later forwards, without the request and the states."""
    (batch.extra_info or {}).pop(NAME, None)
    batch.fields = batch.fields and [name for name in batch.fields if name not in (HIDDEN, LABELS, IDS)]
    return batch


def join() -> None:
    """Puts the mixin before verl's own trainers, under their names."""
    registry = trainer_base.TRAINER_REGISTRY
    for name, stock in list(registry.items()):
        if stock in (PPOTrainerSync, PPOTrainerColocateAsync, PPOTrainerSeparateAsync):
            registry[name] = type(stock.__name__, (Trainer, stock), {"__module__": __name__})
