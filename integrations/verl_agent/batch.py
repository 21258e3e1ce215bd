"""verl-agent's batch (a DataProto, one row per environment step) as step records, and back."""

import functools
import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...backends.records import out_of_range
from ...config import Config
from ...features.embedders import find, named
from ...features.tokens import to_tokens
from ...pipeline import advantage
from .._recorder import Recorder
from .._states import States, batch_metrics, metrics_of
from .._turns import cut_off, keys_of
from .settings import WHERE, Settings

IDS = "bipace_ids"  # [N, 3] int64: prompt group, trajectory, step; unique over the batches of a process
HIDDEN, HIDDEN_IDS = "bipace_hidden", "bipace_hidden_ids"  # [N, D] states, and the ids of the rows they were read from
LAYER = "bipace_layer"  # in meta_info: asks the workers for hidden states
_next_id = itertools.count().__next__
_of_texts = functools.lru_cache(maxsize=1)(named)  # a sentence encoder is loaded once


def mark(batch: Any, settings: Settings) -> None:
    """Numbers the rows while they are in order of time and none is a copy; verl-agent stores no step number."""
    known: tuple[dict[Any, int], ...] = (defaultdict(_next_id), defaultdict(_next_id))
    names = zip(batch.non_tensor_batch["uid"].tolist(), batch.non_tensor_batch["traj_uid"].tolist(), strict=True)
    steps: dict[Any, Any] = defaultdict(itertools.count)
    batch.batch[IDS] = torch.tensor([[known[0][uid], known[1][t], next(steps[t])] for uid, t in names])
    if settings.needs_hidden:
        batch.meta_info[LAYER] = settings.bisim_layer


class AgentRows(NamedTuple):
    """N rows, each a step of the environment; a copy has the values of the first row of its step."""

    mask: torch.Tensor  # [N, T] 1 on the response's tokens
    ids: dict[str, torch.Tensor]  # group, trajectory and step
    copy: torch.Tensor  # [N] number of the step
    first: torch.Tensor  # [N] its first row
    score: torch.Tensor  # [N] of the row; NaN, like the returns, in trajectories where one is not finite
    returns: torch.Tensor  # [N] discounted


def rows_of(data: Any) -> AgentRows:
    """Of a batch that was marked."""
    if IDS not in data.batch:
        raise ValueError(
            f"the batch has no {IDS}, which number its steps; run the trainer's fit() after "
            "bipace_kernels.integrations.verl_agent.attach(), or mark() the batch before adjust_batch()."
        )
    mask = data.batch.get("response_mask", data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :])
    ids = dict(zip(("group", "trajectory", "step"), data.batch[IDS].unbind(1), strict=True))
    copy = torch.unique(data.batch[IDS], dim=0, return_inverse=True)[1]
    everyone = torch.arange(len(copy))
    # Copies may have other log-probabilities, by rounding, and so another KL: all copies get the first one's values.
    first = everyone.scatter_reduce(0, copy, everyone, "amin", include_self=False)[copy]
    score, returns = data.batch["token_level_rewards"].sum(-1)[first], data.batch["step_rewards"][first]
    bad = torch.isin(ids["trajectory"], ids["trajectory"][out_of_range(score) | out_of_range(returns)])
    return AgentRows(mask, ids, copy, first, score.masked_fill(bad, torch.nan), returns.masked_fill(bad, torch.nan))


def records_of(
    rows: AgentRows, data: Any, settings: Settings, tokenizer: Any, states: States | None
) -> tuple[dict[str, Any], Config]:
    """Columns [N], as advantage() takes them, and its configuration."""
    config, first, fields = settings.config(), rows.first, data.non_tensor_batch
    anchors = fields["anchor_obs"][first.cpu().numpy()]  # of images and vectors an array of objects [N, ...]
    records: dict[str, Any] = {**rows.ids, "rewards": None}
    if not config.needs_fingerprint:
        records["observation"] = anchors
    elif settings.bisim_embedder == "actor_hidden":
        records["fingerprint"] = _hidden(data)[first]
    else:
        records["fingerprint"] = _of_texts(settings.bisim_embedder).embed(list(anchors))
    if settings.chooses_epsilon:
        config = settings.config((states or settings.states()).radius.of("actor_hidden", records, dict))
    if config.reads_keys:
        mode, n = settings.cacb_action_key_mode, settings.cacb_n_action_tokens
        records |= keys_of(data.batch["responses"][first], rows.mask[first], tokenizer, mode, n)
    records["episode_return"] = rows.score if config.base_group else torch.zeros_like(rows.score)
    if settings.gae is None:
        records["returns"] = rows.returns
        return records, config
    # r_t: the environment's reward, minus the invalid-action penalty and the row's KL.
    rewards, legal = (torch.from_numpy(fields[k].astype(np.float64)) for k in ("rewards", "is_action_valid"))
    kl = (data.batch["token_level_rewards"].double() - data.batch["token_level_scores"].double()).sum(-1)
    rewards = rewards - settings.penalty * (1 - legal) + kl.cpu()
    records["rewards"] = rewards[first].masked_fill(rows.score.isnan(), torch.nan)
    if "truncated" in fields:
        records["truncated"] = cut_off(fields["truncated"][first.numpy()].tolist())
    return records, config


def write_advantages(
    data: Any, settings: Settings, tokenizer: Any = None, states: States | None = None, recorder: Recorder | None = None
) -> dict[str, float]:
    """Writes `advantages` and `returns` [N, T] float32 (both the same, as verl-agent does) and returns the metrics.

        A_i = A_ep(i) + w · A_S(i),    A_ep of token_level_rewards.sum(-1), A_S of step_rewards; HGPO: its aggregate

    The invalid-action penalty and the KL reward make the score differ between the rows of a trajectory, and verl-agent
    takes mean and σ over rows: so in the episode term each row counts as a rollout.
    Nothing is written before everything is computed.  The fields added by mark() and the workers are removed.
    """
    rows = rows_of(data)
    records, config = records_of(rows, data, settings, tokenizer, states)
    result = advantage(**records, config=config, memory=states and states.memory)
    embedder = find(settings.bisim_embedder)[0].name if settings.bisim_grouping or config.needs_fingerprint else ""
    epsilon = config.epsilon if config.has_epsilon else None
    metrics, total = metrics_of(result, embedder, epsilon, config.has_clusters, settings.gae), result.advantage
    metrics |= batch_metrics(result, records, config) | ({} if states is None else states.radius.moves)
    if not config.estimator_row.whole:
        own = settings.gae is not None and settings.gae.own is not None  # with its own scope
        if "trajectory" not in (settings.bipace_episode_scope, config.episode_scope if own else ""):
            alone = replace(config, partition="none", estimator="none", step_norm="none")
            of_rows = {"step": torch.zeros_like(rows.copy), "returns": rows.score, "episode_return": rows.score}
            episode = advantage(rows.ids["group"], rows.copy, **of_rows, config=alone).advantage.double()
        else:
            episode = config.episode_weight * over_trajectories(data.batch[IDS], rows.score, config)
        total = (episode + config.step_weight * result.step_advantage.double()).float()
        counted = (rows.first == torch.arange(len(total))) | (settings.bisim_duplicates == "count")
        counted &= ~rows.score.isnan()  # not set aside
        metrics["bipace/mean_advantage"] = float(total[counted].double().sum()) / max(1, int(counted.sum()))
    if recorder is not None:
        rewards = torch.from_numpy(data.non_tensor_batch["rewards"].astype(np.float64))[rows.first]
        recorded = {**records, "rewards": rewards, "trained_rewards": records["rewards"]}
        recorder.write(recorded, replace(result, advantage=total), config)
    tokens = to_tokens(total, rows.mask)
    data.batch["response_mask"], data.batch["advantages"], data.batch["returns"] = rows.mask, tokens, tokens
    for name in (IDS, HIDDEN, HIDDEN_IDS):
        data.batch.pop(name, None)
    data.meta_info.pop(LAYER, None)
    return metrics


def over_trajectories(ids: torch.Tensor, score: torch.Tensor, config: Config) -> torch.Tensor:
    """[N] float64 A_ep of each row: its score against one of each trajectory of its group, that of its first step.

    verl-agent's episode_norm_reward() with compute_mean_std_cross_steps=False: (score − mean) / (σ + 1e-6), or
    undivided, and the score itself in a group of one trajectory, or 0 if config says so.  0 where the score is NaN;
    such a trajectory does not count.
    """
    scaled = torch.zeros(len(score), dtype=torch.float64, device=score.device)
    fine, order = ~score.isnan(), np.lexsort(ids.cpu().numpy().T[[2, 1]])
    first = torch.from_numpy(order[np.unique(ids[:, 1].cpu().numpy()[order], return_index=True)[1]]).to(score.device)
    for group in ids[fine, 0].unique():
        rows, own = fine & (ids[:, 0] == group), first[(ids[first, 0] == group) & fine[first]]
        values = score[own].double()
        if len(values) == 1 and config.lone_trajectory == "zero":
            continue
        mean, sigma = (values.mean(), values.std()) if len(values) > 1 else (0.0, 1.0)
        scaled[rows] = (score[rows].double() - mean) / (sigma + config.delta if config.episode_norm == "std" else 1.0)
    return scaled


def texts(data: Any, tokenizer: Any, rows: torch.Tensor) -> tuple[list[Any], list[str]]:
    """Observations and responses of some rows."""
    ids = data.batch["responses"][rows]
    mask = data.batch["attention_mask"][rows, -ids.shape[1] :]
    written = [row[kept != 0].tolist() for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)]
    seen = data.non_tensor_batch["anchor_obs"][rows.numpy()]
    return list(seen), tokenizer.batch_decode(written, skip_special_tokens=True)


def _hidden(data: Any) -> Any:
    if HIDDEN not in data.batch:
        raise ValueError(
            f"the batch has no {HIDDEN}: compute_log_prob() of its workers took no hidden states. Start the training "
            f"by python -m bipace_kernels.integrations.verl_agent, or set {WHERE}bisim_embedder=ngram."
        )
    if not torch.equal(data.batch[HIDDEN_IDS], data.batch[IDS]):
        raise ValueError(f"{HIDDEN} holds states of other rows than the batch: use log-probabilities of its own rows.")
    return data.batch[HIDDEN]
