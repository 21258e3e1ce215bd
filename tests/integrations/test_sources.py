"""The code of docs/other_trainers.md in the trainers on PyPI, as released: from their own batches back to them."""

import importlib
import sys
import typing
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import recipes
import torch
import typing_extensions
from recipes import TOKENIZER, check_tokens

import bipace_kernels as bk

PAGE = "docs/other_trainers.md"
#: What they import and these tests do not reach: engines, servers, loggers.
ABSENT = (
    "vllm", "deepspeed", "flash_attn", "tenacity", "flask", "lark", "uvloop", "numba", "einops", "aiofiles", "openai",
    "swanlab", "trackio", "tensorboardX", "tabulate", "pybase64",
)  # fmt: skip


class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Absent, is_package=True) if name.partition(".")[0] in ABSENT else None

    @staticmethod
    def create_module(spec):
        return MagicMock(name=spec.name)

    @staticmethod
    def exec_module(module):
        pass


@pytest.fixture
def source(monkeypatch):
    """Imports a module of a trainer."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Absent])
    monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)  # SkyRL: pydantic wants it below Python 3.12

    def module(name):
        trainer = name.partition(".")[0]
        pytest.importorskip(trainer, reason=f"{trainer} is not installed: `make test-sources` (Python 3.11 or 3.12)")
        return importlib.import_module(name)

    yield module
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ABSENT:
            del sys.modules[name]


def test_openrlhf(source):
    rollouts, strategy = recipes.Rollouts(), MagicMock()
    maker = source("openrlhf.trainer.ppo_utils.experience_maker")
    generator = source("openrlhf.trainer.ppo_utils.samples_generator").SamplesGenerator(strategy, [], [], TOKENIZER, [])
    args = strategy.args
    args.algo.advantage.estimator, args.algo.advantage.gamma, args.rollout.n_samples_per_prompt = "group_norm", 1.0, 3
    args.reward = SimpleNamespace(clip_range=(-10, 10))
    args.train.dynamic_batch_enable, args.rollout.micro_batch_size = False, 4
    samples = []
    for pairs, reward in zip(rollouts.rows, rollouts.outcomes, strict=True):
        ids, ranges = [], []
        for prompt, response in pairs:
            ids += prompt + response
            ranges.append((len(ids) - len(response), len(ids)))
        response = {"observation_tokens": ids, "action_ranges": ranges, "reward": reward, "rollout_log_probs": None}
        samples.append(generator._process_response_into_experience({**response, "prompt": "", "label": ""}))
    Mine = type("Mine", (recipes.run(PAGE, "OpenRLHF")["BiPACEMixin"], maker.RemoteExperienceMaker), {})
    mine = Mine(None, None, None, None, SimpleNamespace(value=0.0), strategy, TOKENIZER)
    batches = mine.split_rollout_samples(samples)[::-1]  # batches by length come in any order
    for batch in batches:
        batch.kl = torch.zeros(batch.action_mask.shape)
    done = mine.compute_advantages_and_returns(batches)
    by_row = {t: [0.0, *row] for e in done for t, row in zip(e.index, e.advantages.tolist(), strict=True)}
    check_tokens(rollouts, [by_row[t] for t in range(6)])


def test_skyrl(source):
    source("skyrl.train.trainer")
    rollouts, config = recipes.Rollouts(silent=6), source("skyrl.train.config").SkyRLTrainConfig()
    trainer = object.__new__(recipes.run(PAGE, "SkyRL")["BiPACETrainer"])
    trainer.cfg, trainer.tokenizer, trainer.all_metrics = config, TOKENIZER, {}
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 5)  # rows of padding
    config.generator.step_wise_trajectories, config.generator.n_samples_per_prompt = True, 3
    config.trainer.train_batch_size = config.trainer.policy_mini_batch_size = 2
    config.trainer.algorithm.advantage_estimator = "grpo"
    found = {"prompt_token_ids": rollouts.prompts, "response_ids": rollouts.responses, "is_last_step": rollouts.last}
    found |= {"rewards": rollouts.reward, "loss_masks": [[1] * len(r) for r in rollouts.responses]}
    found, uids = trainer.postprocess_generator_output(found, [f"g{g}" for g in rollouts.group])
    data = trainer.convert_to_training_input(found, uids)
    data["values"] = None  # its forward has no critic
    data = trainer.compute_advantages_and_returns(data)
    padding = torch.zeros(data.metadata["pad_size"])
    assert len(padding) and trainer.all_metrics["bipace/cluster_count"] > 2
    wanted = bk.to_tokens(torch.cat([rollouts.advantage(), padding]), data["response_mask"])
    torch.testing.assert_close(data["advantages"], wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("texts", [(), ("{}", "{}")])  # with turns of fewer than the 8 tokens of a key
def test_areal(source, texts):
    source("areal.trainer.ppo.actor")
    rollouts, config = recipes.Rollouts(*texts), source("areal.api.cli_args").PPOActorConfig()
    vars(config).update(overlong_reward_penalty=True, overlong_tokens=8, overlong_penalty_factor=8.0, max_new_tokens=8)
    actor = recipes.run(PAGE, "AReaL")["BiPACEActor"](config, None)
    groups = []
    for part in (slice(3), slice(3, 6)):
        ids, mask = recipes.padded(rollouts.rows[part])
        length = torch.tensor([sum(len(p) + len(r) for p, r in pairs) for pairs in rollouts.rows[part]])
        attention = (torch.arange(ids.shape[1]) < length[:, None]).long()
        groups.append({"input_ids": ids, "loss_mask": mask, "attention_mask": attention})
        groups[-1] |= {"rewards": torch.tensor(rollouts.outcomes[part]), "logprobs": torch.zeros(ids.shape)}
    states, seen = [], {}
    for t, prompt, response in zip(rollouts.trajectory, rollouts.prompts, rollouts.responses, strict=True):
        states.append(TOKENIZER.decode(seen.get(t, []) + prompt))
        seen[t] = seen.get(t, []) + prompt + response
        rollouts.reward[rollouts.trajectory.index(t) + len(rollouts.rows[t]) - 1] -= len(response)
    keys = bk.action_keys(rollouts.responses, mode="first_n")[0]
    done = [row for group in actor.compute_advantages(groups) for row in group["advantages"].tolist()]
    check_tokens(rollouts, [[0.0, *row[:-1]] for row in done], rollouts.advantage(states, keys))
