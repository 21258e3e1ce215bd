"""What tests of the verl-agent adapter share: the fork where it is on the path, else the stand-in; workers."""

import functools
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from bipace_kernels.integrations.verl_agent.launch import added
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tiny_models import make
from verl import DataProto

FORK = Path(os.environ["BIPACE_VERL_AGENT"]) if os.environ.get("BIPACE_VERL_AGENT") else None
REAL = FORK is not None and FORK in Path(verl.__file__).parents  # this process imports the fork's own verl
WORDS = ("go east", "look", "take the apple", "open drawer 2")
tiny_model = functools.partial(make, vocab_size=800, num_hidden_layers=4)


def pack(values: torch.Tensor, mask: torch.Tensor) -> tuple[Any, ...]:
    """flash_attn's unpad_input: [B, T, ...] -> the tokens of the mask, and where they stood."""
    where = mask.flatten().nonzero().flatten()
    return values.flatten(0, 1)[where], where, None, None


def unpack(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    out = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    out[indices] = hidden_states
    return out.unflatten(0, (batch, seqlen))


if REAL:
    # The environments are large and not needed here; flash attention's packing only runs on GPUs.
    environments = types.ModuleType("agent_system.environments")
    environments.EnvironmentManagerBase, environments.make_envs = object, None
    sys.modules[environments.__name__] = environments
    from bipace_kernels.integrations.verl_agent.worker import ActorRolloutRefWorker
    from einops import rearrange
    from recipe.hgpo import hgpo_ray_trainer
    from verl.trainer.ppo import ray_trainer
    from verl.utils.debug import performance
    from verl.workers.actor import dp_actor
    from verl.workers.sharding_manager.fsdp_ulysses import FSDPUlyssesShardingManager

    dp_actor.unpad_input, dp_actor.pad_input, dp_actor.rearrange = pack, unpack, rearrange
    performance._get_current_mem_info = lambda *_, **__: ("0",) * 4  # asks the GPU
    dp_actor.index_first_axis = lambda values, where: values[where]
else:
    import verl_agent_stand_in as stand_in
    from bipace_kernels.integrations.verl_agent.capture import log_prob

    ray_trainer = hgpo_ray_trainer = dp_actor = stand_in

    class ActorRolloutRefWorker(stand_in.ActorRolloutRefWorker):
        def compute_log_prob(self, data):
            return log_prob(self, super().compute_log_prob, data)

    class FSDPUlyssesShardingManager:
        def __init__(self, device_mesh):
            self.device_mesh = device_mesh

        def preprocess_data(self, data):
            return data

        def postprocess_data(self, data):
            return data


def module_of(hgpo: bool) -> Any:
    return hgpo_ray_trainer if hgpo else ray_trainer


def config_of(folder: Path, *overrides: str, hgpo: bool = False) -> Any:
    """The trainer's configuration as hydra makes it of the launcher's arguments."""
    name = "hgpo_trainer" if REAL and hgpo else "ppo_trainer"
    if not REAL:
        OmegaConf.save(OmegaConf.create(stand_in.CONFIG), folder / "ppo_trainer.yaml")
    where = str(folder if not REAL else FORK / ("recipe/hgpo/config" if hgpo else "verl/trainer/config"))
    if hgpo:
        overrides = ("algorithm.adv_estimator=hgpo", "algorithm.gigpo.bisim_embedder=identity", *overrides)
    else:
        overrides = ("algorithm.adv_estimator=gigpo", *overrides)
    with initialize_config_dir(where, version_base=None):
        return compose(name, overrides=[*added(), "env.rollout.n=4", *overrides])


def reward_of(rng: Any) -> float:
    """On a grid: where returns differ by little more than rounding, dividing by their σ makes that rounding visible."""
    return float(rng.integers(-20, 21)) / 4


def rollout(seed: int, tokenizer: Any, groups: int = 3, size: int = 4, longest: int = 6) -> Any:
    """A batch as multi_turn_loop() gives it: a row per step, in order of trajectory and time, prompts left-padded."""
    rng = np.random.default_rng(seed)
    width, length = 10, 24
    rows: dict[str, list[Any]] = {}
    ids, masks = [], []
    for g in range(groups):
        for _ in range(size):
            trajectory, reward = f"t{rng.integers(1 << 60)}", reward_of(rng)
            steps = int(rng.integers(1, longest + 1))
            for _ in range(steps):
                room = int(rng.integers(4))  # its prompts only differ in their first token, so its states are similar
                prompt = np.concatenate([rng.integers(10, 200, 1), 10 + 7 * room + np.arange(3 + 2 * room)])
                text = f"<action>{rng.choice(WORDS)}</action>" if rng.random() < 0.8 else str(rng.choice(WORDS))
                response = tokenizer.encode(text)[:length]
                row = np.zeros(width + length, dtype=np.int64)
                row[width - len(prompt) : width] = prompt
                row[width : width + len(response)] = response
                ids.append(row)
                masks.append((row != 0).astype(np.int64))
                for name, value in {
                    "uid": f"g{g}", "traj_uid": trajectory, "anchor_obs": f"room {room}",
                    "rewards": reward_of(rng), "active_masks": True, "is_action_valid": bool(rng.random() < 0.8),
                    "episode_rewards": reward, "episode_lengths": float(steps), "tool_callings": 0.0,
                    "data_source": "text",
                }.items():  # fmt: skip
                    rows.setdefault(name, []).append(value)
    ids, masks = torch.tensor(np.stack(ids)), torch.tensor(np.stack(masks))
    tensors = {
        "input_ids": ids, "attention_mask": masks, "position_ids": (masks.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :width].clone(), "responses": ids[:, width:].clone(),
    }  # fmt: skip
    numbers = ("episode_rewards", "episode_lengths", "tool_callings")
    kinds = {**dict.fromkeys(numbers, np.float32), "is_action_valid": bool}
    fields = {k: np.array(v, dtype=kinds.get(k, object)) for k, v in rows.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=fields)


class Workers:
    """The driver's worker group, with two data-parallel workers of this process."""

    world_size = 2

    def __init__(self, config: Any, model: Any, packed: bool) -> None:
        OmegaConf.set_struct(config, False)
        how = {"use_remove_padding": packed, "use_torch_compile": False, "ulysses_sequence_parallel_size": 1}
        config.actor_rollout_ref.actor.update(how)
        self.worker = object.__new__(ActorRolloutRefWorker)
        self.worker.__dict__.update(
            _is_actor=True, _is_lora=False, _is_offload_param=False, _world_size=1, config=config.actor_rollout_ref,
            actor=dp_actor.DataParallelPPOActor(config.actor_rollout_ref.actor, model),
            ulysses_sharding_manager=FSDPUlyssesShardingManager(None),
        )  # fmt: skip
        self.seen: Any = None

    def compute_log_prob(self, batch: Any) -> Any:
        return DataProto.concat([self.worker.compute_log_prob(part) for part in batch.chunk(self.world_size)])

    def update_actor(self, batch: Any) -> Any:
        self.seen = batch
        return DataProto(meta_info={"metrics": {"actor/lr": [0.0]}})


def trainer_of(config: Any, tokenizer: Any, batch: Any, model: Any = None, packed: bool = False) -> Any:
    """A RayPPOTrainer whose fit() trains for one step on this batch."""
    OmegaConf.set_struct(config, False)
    module = module_of(config.algorithm.adv_estimator == "hgpo")
    cls = type("Trainer", (module.RayPPOTrainer,), {"__module__": module.__name__})
    config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = 4
    trainer = object.__new__(cls)
    trainer.__dict__.update(
        config=config, tokenizer=tokenizer, actor_rollout_wg=Workers(config, model or tiny_model(), packed),
        traj_collector=types.SimpleNamespace(multi_turn_loop=lambda *_, **__: batch), envs=None,
    )  # fmt: skip
    if REAL:
        _ready_for_real_fit(trainer, config, tokenizer)
    return trainer


def _ready_for_real_fit(trainer: Any, config: Any, tokenizer: Any) -> None:
    from agent_system.reward_manager import EpisodeRewardManager

    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 4
    config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu = 4
    config.trainer.update(
        n_gpus_per_node=2, logger=["console"], resume_mode="disable", val_before_train=False, total_epochs=1,
        save_freq=-1, test_freq=-1,
    )  # fmt: skip
    prompt = {"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 2), "position_ids": torch.ones(1, 2)}
    text = np.array(["x"], dtype=object)
    trainer.__dict__.update(
        train_dataloader=[{**prompt, "raw_prompt_ids": text, "data_source": text}], total_training_steps=1,
        val_reward_fn=None, reward_fn=EpisodeRewardManager(tokenizer, num_examine=0), use_rm=False, use_critic=False,
        use_reference_policy=False, ref_in_actor=False,
        resource_pool_manager=types.SimpleNamespace(get_n_gpus=lambda: 2),
    )  # fmt: skip
