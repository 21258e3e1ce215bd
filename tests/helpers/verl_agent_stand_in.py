"""verl-agent as its adapter meets it: the functions it replaces, in float64, and a fit() in its order.

Names, arguments and fields are those of the fork xlan156/verl-agent at 8ca3a46; the code is this project's own.
DataProto and the balancing of micro-batches are verl's.
"""

import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, rearrange_micro_batches

CONFIG = {
    "algorithm": {
        "adv_estimator": "gigpo", "gamma": 0.95, "use_kl_in_reward": False,
        "gigpo": {"step_advantage_w": 1.0, "mode": "mean_norm", "enable_similarity": False, "similarity_thresh": 0.95},
        "hgpo": {"mode": "mean_std_norm", "length_weight_alpha": 1.0, "base_group": False},
    },
    "env": {"env_name": "", "max_steps": 50, "history_length": 2, "rollout": {"n": 4}},
    "actor_rollout_ref": {
        "model": {"path": "", "external_lib": None},
        "actor": {"strategy": "fsdp", "use_kl_loss": False, "kl_loss_coef": 0.0, "use_invalid_action_penalty": True,
                  "invalid_action_penalty_coef": 0.1, "optim": {"lr": 1e-6}},
        "rollout": {"tensor_model_parallel_size": 1, "log_prob_micro_batch_size_per_gpu": 4, "temperature": 1.0,
                    "log_prob_use_dynamic_bsz": False, "log_prob_max_token_len_per_gpu": 64},
    },
    "trainer": {"n_gpus_per_node": 1, "balance_batch": True, "total_epochs": 1, "total_training_steps": None,
                "default_local_dir": "checkpoints", "resume_mode": "disable", "resume_from_path": None},
}  # fmt: skip


def compute_step_discounted_returns(batch: Any, gamma: float) -> torch.Tensor:
    """R_t = r_t + γ R_{t+1} inside a trajectory, whose rows are in order of time."""
    rewards, trajectory = batch.non_tensor_batch["rewards"], batch.non_tensor_batch["traj_uid"]
    out, ahead = np.zeros(len(rewards)), defaultdict(float)
    for i in reversed(range(len(rewards))):
        out[i] = ahead[trajectory[i]] = rewards[i] + gamma * ahead[trajectory[i]]
    return torch.tensor(out, dtype=torch.float32)


def standardised(scores: np.ndarray, where: list[list[int]], mode: str, lone: str) -> np.ndarray:
    """(x − mean)/(σ + 1e-6) over each population of rows, or x − mean; of one row: x itself, or 0."""
    out = scores.copy()
    for rows in where:
        x = scores[rows]
        if len(rows) == 1:
            mean, std = (0.0 if lone == "raw" else x[0]), 1.0
        else:
            mean, std = x.mean(), x.std(ddof=1)
        out[rows] = x - mean if mode == "mean_norm" else (x - mean) / (std + 1e-6)
    return out


def populations(*keys: Any) -> list[list[int]]:
    found: dict[Any, list[int]] = defaultdict(list)
    for i, key in enumerate(zip(*keys, strict=True)):
        found[key].append(i)
    return list(found.values())


def gigpo_advantage(
    token_level_rewards, step_rewards, response_mask, anchor_obs, index, traj_index, step_advantage_w, mode
):
    score = token_level_rewards.sum(-1).double().numpy()
    episode = standardised(score, populations(index), mode, "raw")
    step = standardised(step_rewards.double().numpy(), populations(index, anchor_obs), mode, "zero")
    return torch.tensor(episode + step_advantage_w * step)[:, None] * response_mask


def hgpo_advantage(
    token_level_rewards, step_rewards, response_mask, anchor_obs, index, traj_index, history_length, mode,
    length_weight_alpha, base_group,
):  # fmt: skip
    returns = step_rewards.double().numpy()
    seen: dict[Any, list[Any]] = defaultdict(list)
    histories = []
    for trajectory, anchor in zip(traj_index, anchor_obs, strict=True):
        seen[trajectory].append(anchor)
        histories.append(tuple(seen[trajectory]))
    items: list[list[tuple[int, float]]] = [[] for _ in returns]
    if base_group:
        base = standardised(token_level_rewards.sum(-1).double().numpy(), populations(index), mode, "raw")
        for i, a in enumerate(base):
            items[i].append((0, a))
    for k in range(1, history_length + 2):
        tails = [h[-k:] if len(h) >= k else ("alone", i) for i, h in enumerate(histories)]
        for rows in populations(index, tails):
            if len(rows) > 1:
                x = returns[rows]
                a = x - x.mean() if mode == "mean_norm" else (x - x.mean()) / (x.std() + 1e-6)
                for i, value in zip(rows, a, strict=True):
                    items[i].append((k, value))
    total = []
    for own in items:
        kept = [((k + 1) ** length_weight_alpha, a) for k, a in own if abs(a) > 1e-9]
        total.append(sum(w * a for w, a in kept) / (sum(w for w, _ in kept) + 1e-6) if kept else 0.0)
    return torch.tensor(total)[:, None] * response_mask


CORE = {"compute_step_discounted_returns": compute_step_discounted_returns}
core_gigpo, core_hgpo = types.SimpleNamespace(**CORE), types.SimpleNamespace(**CORE)


def compute_advantage(data, adv_estimator, **kwargs):
    fields = {name: data.batch[name] for name in ("token_level_rewards", "step_rewards", "response_mask")}
    rows = data.non_tensor_batch
    fields |= {"anchor_obs": rows["anchor_obs"], "index": rows["uid"], "traj_index": rows["traj_uid"]}
    if adv_estimator == "gigpo":
        own = {"step_advantage_w": kwargs["step_advantage_w"], "mode": kwargs["gigpo_mode"]}
        tokens = gigpo_advantage(**fields, **own)
    else:
        names = ("mode", "length_weight_alpha", "base_group")
        own = {name: kwargs[f"hgpo_{name}"] for name in names} | {"history_length": kwargs["history_length"]}
        tokens = hgpo_advantage(**fields, **own)
    data.batch["advantages"] = data.batch["returns"] = tokens.float()
    return data


def compute_data_metrics(batch, use_critic=True):
    return {"critic/advantages/mean": batch.batch["advantages"].mean().item()}


def adjust_batch(config, data, mode="copy"):
    """Copies of random rows until the worker's micro-batches come out even."""
    missing = -len(data) % (config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu * 2)
    chosen = np.random.choice(len(data), missing, replace=False)  # noqa: NPY002  # as the fork
    return DataProto.concat([data, data.select_idxs(chosen)]) if missing else data


class DataParallelPPOActor:
    """compute_log_prob() over micro-batches, padded or packed; the log-probabilities themselves are left out."""

    def __init__(self, config, actor_module):
        self.actor_module, self.use_remove_padding = actor_module, config.get("use_remove_padding", False)

    def _forward_micro_batch(self, micro_batch, temperature, calculate_entropy=False):
        ids, mask, places = (micro_batch[k] for k in ("input_ids", "attention_mask", "position_ids"))
        if self.use_remove_padding:
            alive = mask.bool()
            self.actor_module(input_ids=ids[alive][None], position_ids=places[alive][None], use_cache=False)
        else:
            self.actor_module(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False)
        nothing = torch.zeros(micro_batch["responses"].shape)
        return nothing, nothing

    def compute_log_prob(self, data, calculate_entropy=False):
        batch, order = data.select(batch_keys=["responses", "input_ids", "attention_mask", "position_ids"]).batch, None
        if data.meta_info["use_dynamic_bsz"]:
            batches, order = rearrange_micro_batches(batch=batch, max_token_len=data.meta_info["max_token_len"])
        else:
            batches = batch.split(data.meta_info["micro_batch_size"])
        with torch.no_grad():
            out = [self._forward_micro_batch(m, temperature=1.0, calculate_entropy=True) for m in batches]
        entropys, log_probs = (torch.cat(x) for x in zip(*out, strict=True))
        if order is not None:  # the fork forgets the entropies
            log_probs = log_probs[torch.tensor([i for part in order for i in part]).argsort()]
        return log_probs, entropys


class ActorRolloutRefWorker:
    def compute_log_prob(self, data):
        rollout = self.config.rollout
        data.meta_info["micro_batch_size"] = rollout.log_prob_micro_batch_size_per_gpu
        data.meta_info["max_token_len"] = rollout.log_prob_max_token_len_per_gpu
        data.meta_info["use_dynamic_bsz"] = rollout.log_prob_use_dynamic_bsz
        data = self.ulysses_sharding_manager.preprocess_data(data)
        output, entropys = self.actor.compute_log_prob(data=data, calculate_entropy=True)
        out = DataProto.from_dict(tensors={"old_log_probs": output, "entropys": entropys})
        return self.ulysses_sharding_manager.postprocess_data(out)


class RayPPOTrainer:
    """fit() for one batch: what the driver does to it, in the fork's order; checkpoints without anything in them."""

    def _save_checkpoint(self):
        folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        folder.mkdir(parents=True, exist_ok=True)

    def _load_checkpoint(self):
        if self.config.trainer.resume_mode == "resume_path":
            self.global_steps = int(self.config.trainer.resume_from_path.split("global_step_")[-1])

    def fit(self):
        config, algorithm = self.config, self.config.algorithm
        self.global_steps = 0
        self._load_checkpoint()
        self.global_steps += 1
        hgpo = algorithm.adv_estimator == "hgpo"
        batch = self.traj_collector.multi_turn_loop(None, self.actor_rollout_wg, None, is_train=True)
        core = core_hgpo if hgpo else core_gigpo
        batch.batch["step_rewards"] = core.compute_step_discounted_returns(batch=batch, gamma=algorithm.gamma)
        if not hgpo:
            batch = self._spread(adjust_batch(config, batch))
        batch.batch["response_mask"] = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :]
        score = torch.zeros(batch.batch["responses"].shape)
        last = batch.batch["response_mask"].sum(1) - 1
        everyone = torch.arange(len(batch))
        score[everyone, last] = torch.tensor(batch.non_tensor_batch["episode_rewards"].astype(np.float32))
        if config.actor_rollout_ref.actor.use_invalid_action_penalty:
            invalid = torch.tensor(1 - batch.non_tensor_batch["is_action_valid"].astype(np.float32))
            penalty = config.actor_rollout_ref.actor.invalid_action_penalty_coef * invalid
            score[everyone, last] -= penalty
            batch.batch["step_rewards"] -= penalty
        if not hgpo:
            batch = batch.union(self.actor_rollout_wg.compute_log_prob(batch))
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"] = score
        batch = compute_advantage(
            batch, adv_estimator=algorithm.adv_estimator, gamma=algorithm.gamma,
            step_advantage_w=algorithm.gigpo.step_advantage_w, gigpo_mode=algorithm.gigpo.mode,
            hgpo_mode=algorithm.hgpo.mode, hgpo_length_weight_alpha=algorithm.hgpo.length_weight_alpha,
            hgpo_base_group=algorithm.hgpo.base_group, history_length=config.env.history_length,
        )  # fmt: skip
        if hgpo:
            batch = self._spread(adjust_batch(config, batch))
        self.actor_rollout_wg.update_actor(batch)
        self.metrics = compute_data_metrics(batch=batch, use_critic=False)

    def _spread(self, batch):
        if self.config.trainer.balance_batch:
            lengths = batch.batch["attention_mask"].sum(-1).tolist()
            parts = get_seqlen_balanced_partitions(lengths, k_partitions=2, equal_size=True)
            batch.reorder(torch.tensor([i for part in parts for i in part]))
        return batch
