"""BiPACE in ms-swift: `swift rlhf` itself on a CPU, with scripted turns in its own gym scheduler."""

import os
import random
import warnings
from dataclasses import replace

import doc_blocks
import pyarrow.parquet as pq
import pytest
import torch
from refusals import refused

pytest.importorskip("swift.rlhf_trainers", reason="ms-swift is not installed: see docs/swift.md for its environment")

from bipace_kernels.integrations import swift as joined
from bipace_kernels.integrations.swift.trainer import BiPACEGRPOTrainer
from swift import rlhf_main
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutOutput,
    UsageInfo,
)
from swift.rewards import ORM, orms
from swift.rlhf_trainers import GRPOTrainer
from swift.rollout import Env, envs
from swift.trainers import TrainerFactory
from tiny_models import make
from trained_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast

import bipace_kernels as bk

TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="<|endoftext|>", eos_token="<|im_end|>")
ACTIONS = ["<action>go to fridge 1</action>", "<action>open drawer 2</action>", "I should think"]
GYM = {"multi_turn_scheduler": "gym_scheduler", "gym_env": "rooms", "max_turns": 3}
LAYER, GROUP = -8, 4
DICE = random.Random()  # swift seeds the others


class Length(ORM):
    def __call__(self, completions, **kwargs):
        return [float(len(str(c)) % 5) for c in completions]


class Sometimes(Length):
    def __call__(self, completions, **kwargs):
        return [None, *super().__call__(completions[1:])]


class Rooms(Env):
    """One to three turns in rooms that come back."""

    async def reset(self, config):
        self.left = DICE.randint(1, 3)
        return "room A", {}, ""

    async def step(self, action):
        self.left -= 1
        return f"room {DICE.choice('AB')}", float(DICE.randint(0, 2)), self.left == 0, {}

    async def close(self):
        pass


def scripted(self, infer_requests, request_config=None, *, use_tqdm=False):
    """What the engine gives, without a forward."""
    found = []
    for _ in infer_requests:
        text = DICE.choice(ACTIONS)
        ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        choice = ChatCompletionResponseChoice(0, ChatMessage("assistant", text), "stop", token_ids=ids)
        found.append(ChatCompletionResponse("model", [choice], UsageInfo(0, 0, 0)))
    return [RolloutOutput(response=response) for response in found]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs `swift rlhf` with a plugin that joins with these settings; gives (trainer, batches)."""
    monkeypatch.setitem(orms, "length", Length)
    monkeypatch.setitem(orms, "sometimes", Sometimes)
    monkeypatch.setitem(envs, "rooms", Rooms)
    monkeypatch.setitem(TrainerFactory.TRAINER_MAPPING, "grpo", TrainerFactory.TRAINER_MAPPING["grpo"])
    monkeypatch.setattr(joined, "settings", joined.settings)
    monkeypatch.setattr(GRPOTrainer, "_engine_infer", scripted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    batches, trainers = [], []

    score, log = GRPOTrainer._generate_and_score_completions, GRPOTrainer._log_rollout

    def keep_samples(self, samples):
        self.kept = samples
        log(self, samples)

    def keep(self, inputs):
        encoded = score(self, inputs)
        trainers[:] = [self]
        for batch in encoded:
            with torch.no_grad():
                states = self.model(**batch["model_inputs"], output_hidden_states=True).hidden_states
            rewards = (self._rewards_per_func * self.reward_weights).sum(1)  # of one function: None stays NaN
            batches.append((self.kept, batch["model_inputs"], batch["grpo_batch"], rewards, states[LAYER]))
        return encoded

    monkeypatch.setattr(GRPOTrainer, "_log_rollout", keep_samples)
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", keep)
    TOKENIZER.save_pretrained(tmp_path / "model")
    ends = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id, "bos_token_id": None}
    make(**ends, vocab_size=len(TOKENIZER)).save_pretrained(tmp_path / "model")
    rows = "".join(f'{{"messages": [{{"role": "user", "content": "task {i}"}}]}}\n' for i in range(8))
    (tmp_path / "data.jsonl").write_text(rows)

    def run(joins=True, seed=0, options=GYM, plugin_text=None, **settings):
        batches.clear()
        DICE.seed(seed)
        plugin = tmp_path / f"plugin{len(os.listdir(tmp_path))}.py"
        call = f"join(**{settings!r})" if joins else ""
        plugin.write_text(plugin_text or f"from bipace_kernels.integrations.swift import join\n{call}\n")
        given = {
            "rlhf_type": "grpo", "model": tmp_path / "model", "model_type": "qwen2", "template": "chatml",
            "reward_funcs": "length", "dataset": tmp_path / "data.jsonl", "tuner_type": "full",
            "torch_dtype": "float32", "num_generations": GROUP, "per_device_train_batch_size": 8, "max_steps": 1,
            "max_completion_length": 8, "output_dir": tmp_path / "out", "report_to": "none", "logging_steps": 1,
            "save_strategy": "no", "use_cpu": "true", "beta": 0, "check_model": "false",
            "dataloader_num_workers": 0, "dataset_num_proc": 1, "external_plugins": plugin, **options,
        }  # fmt: skip
        rlhf_main([str(part) for name, value in given.items() for part in (f"--{name}", value)])
        return trainers[0], list(batches)

    return run


def by_hand(batches, config, first_n=False):
    """[B, T] of each micro-batch, token by token: loops, bk.advantage() and nothing of the adapter."""
    names = ("group", "trajectory", "step", "rewards", "episode_return", "fingerprint", "observation")
    columns, actions, spans = {name: [] for name in names}, [], []
    row = 0
    for b, (samples, inputs, grpo, rewards, states) in enumerate(batches):
        mask, ids = grpo.completion_mask.tolist(), inputs["input_ids"]
        before = ids.shape[1] - len(mask[0])
        for i, written in enumerate(mask):
            starts = [t for t, m in enumerate(written) if m and (t == 0 or not written[t - 1])]
            infos, last = samples[row].rollout_infos, 0
            for step, t in enumerate(starts):
                end = next((u for u in range(t, len(written)) if not written[u]), len(written))
                there = inputs["attention_mask"][i, : before + t].bool()
                seen = ids[i, : before + t][there] if step == 0 else ids[i, before + last : before + t]
                given = infos.get("step_rewards") or [0.0] * (len(starts) - 1) + [float(rewards[row])]
                beyond = float(rewards[row]) - sum(given) if config.estimator == "gae" and t == starts[-1] else 0.0
                for name, value in {
                    "group": row // GROUP, "trajectory": row, "step": step, "episode_return": float(rewards[row]),
                    "rewards": given[step] + beyond, "fingerprint": states[i, before + t - 1],
                    "observation": TOKENIZER.decode(seen, skip_special_tokens=True),
                }.items():  # fmt: skip
                    columns[name].append(value)
                actions.append(ids[i, before + t : before + end].tolist())
                spans.append((b, i, t, end))
                last = end
            row += 1
    if first_n:
        keys, parsed = bk.action_keys(actions, mode="first_n")[0], None
    else:
        keys, parsed = bk.action_keys(actions, token_bytes=bk.token_bytes(TOKENIZER))
    columns["fingerprint"] = torch.stack(columns["fingerprint"])
    del columns["observation" if config.needs_fingerprint else "fingerprint"]
    result = bk.advantage(**columns, action_key=keys, action_parsed=parsed, config=config)
    found = [torch.zeros(grpo.completion_mask.shape) for _, _, grpo, _, _ in batches]
    for (b, i, t, end), value in zip(spans, result.advantage.tolist(), strict=True):
        found[b][i, t:end] = value
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("settings", "config", "options"), [
    ({"method": "bipace"}, bk.Config.bipace(epsilon=0.1), {}),
    ({"method": "bigpo", "epsilon": 0.02, "gamma": 0.9}, bk.Config.bigpo(epsilon=0.02, gamma=0.9),
     {"scale_rewards": "none", "neftune_noise_alpha": 5.0}),
    ({"method": "gigpo", "gigpo_mode": "mean_norm"}, bk.Config.gigpo("mean_norm"), {}),
    ({"gae_lambda": 0.7}, bk.Config.gae(gae_lambda=0.7), {"beta": 0.04, "tuner_type": "lora"}),
    ({"method": "bipace"}, bk.Config.bipace(epsilon=0.1),
     {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
])  # fmt: skip
def test_advantages_are_the_estimator_s(train, settings, config, options):
    """With its gym's step rewards; LoRA with a reference, whose forward is not tapped; several micro-batches."""
    if "scale_rewards" in options:
        config = replace(config, episode_norm="none")
    config = replace(config, on_invalid="singleton", duplicates="once")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer, batches = train(options={**GYM, **options}, action_key_mode="action_tag", **settings)
    noisy = bool({"tuner_type", "neftune_noise_alpha"} & options.keys())
    assert any("noise of the model's dropout" in str(w.message) for w in said) == noisy
    turns = [sample.rollout_infos["num_turns"] for sample in batches[0][0]]
    assert len(set(turns)) > 1
    for (_, _, grpo, _, _), wanted in zip(batches, by_hand(batches, config), strict=True):
        assert torch.equal(grpo.advantages, wanted) and wanted.unique().numel() > 3
    logged = trainer.state.log_history[0]
    assert ("bipace/embedder/actor_hidden" in logged) == config.needs_fingerprint and "bipace/mean_advantage" in logged


def test_the_plugin_of_the_page_trains(train):
    (plugin,) = [block.code for block in doc_blocks.blocks("docs/swift.md", "python") if not block.fragment]
    trainer, batches = train(plugin_text=plugin)
    settings = trainer._bipace.settings
    assert (settings.method, settings.layer, settings.gamma) == ("gae", -8, 0.95) and batches[0][2].advantages.any()


def test_the_steps_of_a_run_are_recorded(train, tmp_path):
    _, batches = train(method="gigpo", gigpo_mode="mean_norm", record_dir=str(tmp_path / "steps"))
    found = pq.read_table(tmp_path / "steps/update_00000000.parquet").to_pydict()
    (samples, _, grpo, _, _) = batches[0]
    given = [sample.rollout_infos["step_rewards"] for sample in samples]
    assert found["reward"] == [reward for row in given for reward in row]
    turns = [(row, step) for row, rewards in enumerate(given) for step in range(len(rewards))]
    assert list(zip(found["rollout"], found["step"], strict=True)) == turns
    assert found["task_id"] == [row // GROUP for row, _ in turns]
    assert set(found["action"]) <= set(ACTIONS) and all(found["observation"])
    for (row, _), advantage in zip(turns, found["bipace_advantage"], strict=True):
        assert advantage in grpo.advantages[row].tolist()


def test_without_a_scheduler_a_completion_is_one_turn(train):
    """And one whose reward functions all give None takes part in nothing."""
    config = bk.Config.bipace(epsilon=0.1, on_invalid="singleton", duplicates="once")
    trainer, batches = train(options={"reward_funcs": "sometimes"}, method="bipace", action_key_mode="first_n")
    assert batches[0][3].isnan().tolist() == [True] + [False] * 7
    assert torch.equal(batches[0][2].advantages, by_hand(batches, config, first_n=True)[0])
    assert trainer.state.log_history[0]["bipace/invalid_row_fraction"] > 0


@pytest.mark.parametrize("seed", range(2))
def test_grpo_has_the_bits_of_swift_s_own(train, seed):
    stock, own = train(joins=False, seed=seed), train(joins=True, seed=seed, method="grpo")
    assert type(own[0]) is BiPACEGRPOTrainer and type(stock[0]) is GRPOTrainer
    assert torch.equal(own[1][0][2].advantages, stock[1][0][2].advantages) and own[1][0][2].advantages.any()
    same = [[run.state.log_history[0][name] for name in ("loss", "grad_norm")] for run, _ in (own, stock)]
    assert same[0] == same[1]


def test_rows_that_fit_no_turns_are_set_aside(train, monkeypatch):
    def forgets(self, samples, outputs):
        found = inner(self, samples, outputs)
        found[0].rollout_infos["step_rewards"].append(1.0)
        del found[5].rollout_infos["step_rewards"]
        return found

    inner = GRPOTrainer._postprocess_rollout_outputs
    monkeypatch.setattr(GRPOTrainer, "_postprocess_rollout_outputs", forgets)
    with pytest.warns(
        RuntimeWarning, match=r"infos\['step_rewards'\] must have one entry per turn .* row 0 has . for . "
    ):
        trainer, batches = train(method="gigpo", gigpo_mode="mean_norm")
    advantages = batches[0][2].advantages
    assert not advantages[[0, 5]].any() and advantages[[1, 2, 3]].any() and advantages[[4, 6, 7]].any()
    assert trainer.state.log_history[0]["bipace/invalid_row_fraction"] > 0
    refused(r"row 0 has . for . turns; a turn is a run", train, method="gigpo", on_invalid="raise")


@pytest.mark.parametrize(
    ("settings", "options", "match"),
    [
        ({"epsilom": 1}, {}, "epsilom is not a setting of BiPACE; the settings are method"),
        ({"method": "bipace"}, {"scale_rewards": "batch"}, "no counterpart .* set BiPACE's episode_norm"),
        ({}, {"advantage_estimator": "rloo", "scale_rewards": "none"}, "advantage_estimator=rloo is another one"),
        ({}, {"loss_type": "real"}, "loss_type=real takes one advantage for each row"),
        ({"layer": -30}, {}, "BiPACE's layer"),
    ],
)
def test_what_does_not_go_together(train, settings, options, match):
    refused(match, train, options=options, **settings)


def test_an_epsilon_that_was_chosen_is_in_the_checkpoint(train, tmp_path):
    trainer, _ = train(method="bigpo", epsilon="auto", options={**GYM, "save_strategy": "steps", "save_steps": 1})
    (file,) = (tmp_path / "out").glob("*/checkpoint-1/bipace_state.json")
    assert f'"epsilon": {trainer._bipace.epsilon}' in file.read_text()
    resumed = {**GYM, "resume_from_checkpoint": file.parent, "max_steps": 2, "save_strategy": "no"}
    again, _ = train(method="bigpo", epsilon="auto", options=resumed)
    assert again._bipace.epsilon == trainer._bipace.epsilon and again.state.global_step == 2
