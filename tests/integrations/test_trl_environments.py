"""BiPACE in TRL with tools and environments: calls are scripted, the rest is TRL's own loop."""

from __future__ import annotations

import random
import re

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-integrations")

import tiny_trl as tt
import torch
from datasets import Dataset
from tool_turns import Silent, Walk, make, tokenizer
from trl import GRPOTrainer

import bipace_kernels as bk

CONFIG = bk.Config.bipace(on_invalid="singleton", duplicates="once")
DATA = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("Go. ", "Walk. ")]})


class Drawing(GRPOTrainer):
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


class Scripted(tt.Keeping, Drawing):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        logged = [vars(environment) for environment in self.environments]
        if "step_rewards" in logged[0]:  # of a last turn without a call: no reward, no action
            rows = [{"step_rewards": [*row["step_rewards"], 0.0], "actions": [*row["actions"], ""],
                     "observations": list(row["observations"])} for row in logged]  # fmt: skip
            rows = [
                {**new, **{k: row[k] for k in ("truncated",) if k in row}}
                for new, row in zip(rows, logged, strict=True)
            ]
            self.batches[-1]["inputs"] = rows
        self.batches[-1]["states of environments"] = [row["place"] for row in logged]
        return output


def trained(folder, environment, **options):
    options = {"max_steps": 1, "max_completion_length": 200, **options}
    trainer = make(folder, environment, cls=Scripted, train_dataset=DATA, **options)
    trainer.train()
    return trainer


@pytest.fixture(autouse=True)
def same_tokenizer(monkeypatch):
    made = tokenizer()
    monkeypatch.setattr(tt, "TOKENIZER", made)
    monkeypatch.setattr(tt, "TABLE", bk.token_bytes(made))
    monkeypatch.setattr(Drawing, "rng", random.Random(0))


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
