"""verl-agent's batch (a DataProto, one row per environment step) in the estimator's words, and back."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch

from ...action_keys import action_keys
from ...embedders import Ngram
from ...pipeline import advantage
from ...token_bytes import TokenBytes
from ...tokens import to_tokens
from .settings import WHERE, Settings

Tensor = torch.Tensor
IDS = "bipace_ids"  # [N, 3] int64: prompt group, trajectory, step; no two batches of a process share a number
HIDDEN, HIDDEN_IDS = "bipace_hidden", "bipace_hidden_ids"  # [N, D] states, and the ids of the rows they were read from
LAYER = "bipace_layer"  # in meta_info: asks the workers for hidden states
_next_id = itertools.count().__next__


def mark(batch: Any, settings: Settings) -> None:
    """Numbers the rows while they still stand in order of time and none is a copy.

    verl-agent stores no step number, fills the batch up with copies of its rows and then sorts it by length.
    """
    known: tuple[dict[Any, int], ...] = (defaultdict(_next_id), defaultdict(_next_id))
    names = zip(batch.non_tensor_batch["uid"].tolist(), batch.non_tensor_batch["traj_uid"].tolist(), strict=True)
    steps: dict[Any, Any] = defaultdict(itertools.count)
    batch.batch[IDS] = torch.tensor([[known[0][uid], known[1][t], next(steps[t])] for uid, t in names])
    if settings.needs_hidden:
        batch.meta_info[LAYER] = settings.bisim_layer


def write_advantages(data: Any, settings: Settings, table: TokenBytes | None = None) -> dict[str, float]:
    """Writes `advantages` and `returns` [N, T] float32 (both the same, as verl-agent does) and returns the metrics.

    table   bk.token_bytes(tokenizer), for cacb_action_key_mode="action_tag"

    Nothing is written before all of it is computed.  What mark() and the workers added is taken out again.
    """
    mask = data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]
    if "response_mask" in data.batch:
        mask = data.batch["response_mask"]
    total, metrics = _advantages(data, mask, settings, table)
    tokens = to_tokens(total, mask)
    data.batch["response_mask"], data.batch["advantages"], data.batch["returns"] = mask, tokens, tokens
    for name in (IDS, HIDDEN, HIDDEN_IDS):
        data.batch.pop(name, None)
    data.meta_info.pop(LAYER, None)
    return metrics


def _advantages(
    data: Any, mask: Tensor, settings: Settings, table: TokenBytes | None
) -> tuple[Tensor, dict[str, float]]:
    """[N] float32 advantages of a marked batch, and their metrics.

        A_i = A_ep(i) + w · A_S(i),    A_ep of token_level_rewards.sum(-1), A_S of step_rewards; HGPO: its aggregate

    The invalid-action penalty and the KL reward make the score differ between the rows of one trajectory, and verl-agent
    takes mean and σ over rows: so to the episode term each row is a rollout of its own.
    """
    if IDS not in data.batch:
        raise ValueError(
            f"the batch has no {IDS}, which number its steps; run the trainer's fit() after "
            "bipace_kernels.integrations.verl_agent.attach(), or mark() the batch before adjust_batch()."
        )
    ids = data.batch[IDS]
    m, copy = torch.unique(ids, dim=0, return_inverse=True)
    first = torch.full((len(m),), len(ids)).scatter_reduce(0, copy, torch.arange(len(ids)), "amin")
    # Copies may have other log-probabilities, by rounding, and so another KL: the first one's values hold for all.
    counted = settings.bisim_duplicates == "count"
    rows = first[copy] if counted else first
    group, trajectory, step = ids[rows].unbind(1)
    score, returns = data.batch["token_level_rewards"][rows].sum(-1), data.batch["step_rewards"][rows]
    spoilt = torch.isin(trajectory, trajectory[~((score.abs() <= 1e37) & (returns.abs() <= 1e37))])
    score, returns = score.masked_fill(spoilt, torch.nan), returns.masked_fill(spoilt, torch.nan)
    if settings.base_group and len(torch.unique(torch.stack([trajectory, score], 1), dim=0)) > len(trajectory.unique()):
        raise ValueError(
            "algorithm.hgpo.base_group=True needs one score per trajectory, and the invalid-action penalty or the KL reward "
            "gives its rows different ones: set actor_rollout_ref.actor.use_invalid_action_penalty=False and "
            "algorithm.use_kl_in_reward=False, or base_group=False."
        )

    config = settings.config()
    given: dict[str, Any] = {"episode_return": score if settings.base_group else torch.zeros_like(score)}
    anchors = [data.non_tensor_batch["anchor_obs"][i] for i in rows.tolist()]
    if config.partition == "cosine":
        given["fingerprint"] = Ngram().embed(anchors) if settings.bisim_embedder == "ngram" else _hidden(data)[rows]
    else:
        given["observation"] = anchors
    if config.needs_keys:
        given["action_key"], given["action_parsed"] = action_keys(
            data.batch["responses"][rows], mask=mask[rows], mode=settings.cacb_action_key_mode,
            n=settings.cacb_n_action_tokens, token_bytes=table,
        )  # fmt: skip
    result = advantage(group, trajectory, None, step=step, returns=returns, config=config, **given)
    metrics, total = result.metrics(), result.advantage
    if settings.hgpo is None:
        rollout = copy if counted else torch.arange(len(rows))
        own = {"step": torch.zeros_like(step), "returns": score, "episode_return": score}
        episode = advantage(group, rollout, None, **own, config=settings.episode_config())
        total = (episode.advantage.double() + config.step_weight * result.step_advantage.double()).float()
        metrics["bipace/mean_advantage"] = float(total.double().mean())
    return total if counted else total[copy], metrics


def _hidden(data: Any) -> Tensor:
    if HIDDEN not in data.batch:
        raise ValueError(
            f"the batch has no {HIDDEN}: compute_log_prob() of its workers read no hidden states. Start the training by "
            f"python -m bipace_kernels.integrations.verl_agent, or set {WHERE}bisim_embedder=ngram."
        )
    if not torch.equal(data.batch[HIDDEN_IDS], data.batch[IDS]):
        raise ValueError(
            f"{HIDDEN} holds hidden states of other rows than the batch: unite a batch with the log-probabilities of its "
            "own rows, in their order."
        )
    states: Tensor = data.batch[HIDDEN]
    return states
