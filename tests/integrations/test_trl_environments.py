"""BiPACE in TRL with tools and environments: calls are scripted, the rest is TRL's own loop."""

from __future__ import annotations

import functools
import random
import re

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-integrations")

import tiny_trl as tt
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl import chat_template_utils

import bipace_kernels as bk

CONFIG = bk.Config.bipace(on_invalid="singleton", duplicates="once")
DATA = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("Go. ", "Walk. ")]})


class Walk:
    """Walks along a line; says where it is, and logs what it knows of each step."""

    logs = True

    def reset(self, **_) -> str:
        self.place = 0
        if self.logs:
            self.step_rewards, self.observations, self.actions = [], ["at 0"], []
        return "at 0"

    def move(self, direction: str) -> str:
        """
        Takes one step.

        Args:
            direction: north or south.

        Returns:
            Where that led.
        """
        self.place += 1 if direction == "north" else -1
        if self.logs:
            self.step_rewards.append(float(self.place))
            self.actions.append(direction)
            self.observations.append(f"at {self.place}")
        return f"at {self.place}"


class Silent(Walk):
    logs = False


@functools.cache
def tokenizer():
    """Qwen's template, and pieces learnt from it: its description of tools alone would be a thousand bytes."""
    template = chat_template_utils.qwen3_chat_template
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [template],
        trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    made.chat_template = template
    return made


class Scripted(tt.Keeping):
    """Turns are drawn, not generated: a call, or an answer that ends the rollout."""

    rng = random.Random(0)

    def _generate_single_turn(self, prompt_ids, *_, **__):
        def turn():
            if self.rng.random() < 0.3:
                return "done<|im_end|>"
            direction = self.rng.choice(["north", "south"])
            return (
                f'<tool_call>\n{{"name": "move", "arguments": {{"direction": "{direction}"}}}}\n</tool_call><|im_end|>'
            )

        return [self.processing_class(turn())["input_ids"] for _ in prompt_ids], None

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        told = [vars(environment) for environment in self.environments]
        if "step_rewards" in told[0]:  # of a last turn without a call: no reward, no action
            rows = [{"step_rewards": [*row["step_rewards"], 0.0], "actions": [*row["actions"], ""],
                     "observations": list(row["observations"])} for row in told]  # fmt: skip
            rows = [
                {**new, **{k: row[k] for k in ("truncated",) if k in row}} for new, row in zip(rows, told, strict=True)
            ]
            self.batches[-1]["inputs"] = rows
        self.batches[-1]["states of environments"] = [row["place"] for row in told]
        return output


def trained(folder, environment, **options):
    made = tokenizer()
    trainer = tt.make_trainer(
        folder, cls=Scripted, environment_factory=environment, train_dataset=DATA, processing_class=made,
        model=tt.make_model(vocab_size=len(made), max_position_embeddings=1024, eos_token_id=made.eos_token_id),
        reward_funcs=[lambda environments, **_: [float(e.place > 0) for e in environments]],
        max_completion_length=200, max_tool_calling_iterations=3, **{"max_steps": 1, **options},
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.fixture(autouse=True)
def same_tokenizer(monkeypatch):
    made = tokenizer()
    monkeypatch.setattr(tt, "TOKENIZER", made)
    monkeypatch.setattr(tt, "TABLE", bk.token_bytes(made))
    monkeypatch.setattr(Scripted, "rng", random.Random(0))


def messages_of(batch):
    written = batch["output"]["completion_mask"] * batch["output"]["tool_mask"]
    return [len(re.findall("1+", "".join(map(str, row)))) for row in written.tolist()]


def test_what_an_environment_logs(tmp_path):
    trainer = trained(tmp_path, Walk, bipace_embedder="actor_hidden", max_steps=2)
    for batch in trainer.batches:
        (wanted,) = tt.by_hand(batch, config=CONFIG)
        assert torch.equal(batch["output"]["advantages"], wanted)
    turns = [n for batch in trainer.batches for n in messages_of(batch)]
    assert set(turns) >= {1, 2, 3, 4}  # answers at once, after calls, and rollouts that end for their length


def test_the_observations_of_an_environment_are_the_states_of_gigpo(tmp_path):
    trainer = trained(tmp_path, Walk, bipace_method="gigpo")
    for batch in trainer.batches:
        (wanted,) = tt.by_hand(batch, config=bk.Config.gigpo(on_invalid="singleton", duplicates="once"))
        assert torch.equal(batch["output"]["advantages"], wanted)


class Told(Walk):
    """Ends of itself where it is not at home, whatever TRL's budget made of it."""

    def reset(self, **_) -> str:
        self.truncated = False
        return super().reset()

    def move(self, direction: str) -> str:
        """
        Takes one step.

        Args:
            direction: north or south.
        """
        seen = super().move(direction)
        self.truncated = self.place == 0
        return seen


@pytest.mark.parametrize("environment", [Walk, Told])
def test_gae_takes_what_was_cut_off_from_the_environment_alone(tmp_path, environment):
    trainer = trained(tmp_path, environment, bipace_method="gae", bipace_value="cluster", max_steps=2)
    config = bk.Config.gae("cluster", on_invalid="singleton", duplicates="once")
    for batch in trainer.batches:
        (wanted,) = tt.by_hand(batch, config=config)
        assert torch.equal(batch["output"]["advantages"], wanted)
    rows = [row for batch in trainer.batches for row in batch["inputs"]]
    assert environment is Walk or {row["truncated"] for row in rows} == {True, False}


def test_an_environment_that_logs_nothing(tmp_path):
    trainer = trained(tmp_path, Silent, bipace_action_key_mode="text", num_iterations=2)
    (batch,) = trainer.batches
    (wanted,) = tt.by_hand(batch, config=CONFIG, mode="text")
    assert torch.equal(batch["output"]["advantages"], wanted)


def test_an_environment_whose_log_does_not_fit(tmp_path):
    class Twice(Walk):
        def move(self, direction: str) -> str:
            """
            Takes one step.

            Args:
                direction: north or south.
            """
            self.step_rewards.append(0.0)
            return super().move(direction)

    with pytest.raises(ValueError, match="step_rewards must have one entry per turn of the model"):
        trained(tmp_path, Twice)
