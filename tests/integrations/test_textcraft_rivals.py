"""The TextCraft example's rivals with the real trainer: their states, the value head, resuming, and what a final run measures."""

from __future__ import annotations

import copy
import dataclasses
import json

import campaign
import comparison
import numpy as np
import pytest
import torch
import train_knowledge as knowledge
from environment import TextCraft
from model import load, load_split, make_model, make_split, make_tokenizer, save, save_split
from rivals import CREDITS, StepMeans, ValueHead, states_before_commands
from rollout import play
from safetensors.torch import load_file
from settings import Settings
from trainer import World, evaluate, measure, train

SMALL = Settings(
    width=32, blocks=2, heads=2, train_tasks=12, test_tasks=4, new_goals=60, horizon=3, updates=5, batch=6, group=3,
    micro_batch=2, layer=-1, check_every=0,
)  # fmt: skip


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A warm start that was never warmed."""
    folder = tmp_path_factory.mktemp("start")
    tokenizer = make_tokenizer(SMALL.vocabulary)
    save(folder, make_model(tokenizer, width=32, blocks=2, heads=2, seed=0), tokenizer, {"test": 0.0})
    save_split(
        folder / "tasks.json.gz",
        make_split(tokenizer, train=12, test=4, new_goals=60, most_commands=4, prompt_tokens=60),
    )
    return folder


@pytest.fixture(scope="module")
def world(start):
    split = load_split(start / "tasks.json.gz")
    return World(split.train, split.test, TextCraft)


@pytest.fixture(scope="module")
def episodes(start, world):
    model, tokenizer = load(start)
    envs = [TextCraft(task) for task in world.train[:2] for _ in range(3)]
    return model, tokenizer, play(model, tokenizer, envs, horizon=3, seed=0, command_tokens=8)


def test_states_are_those_before_the_first_token_of_each_command(episodes):
    model, _, played = episodes
    found = states_before_commands(model, played, -1, rows=4)
    assert len(found) == sum(len(episode.commands) for episode in played)
    row = 0
    for episode in played:
        ids = [*episode.prompt_ids, *episode.ids]
        with torch.no_grad():
            plain = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
        begin = len(episode.prompt_ids)
        for i, own in enumerate(episode.own):
            if own and not (i and episode.own[i - 1]):
                np.testing.assert_allclose(found[row], plain[begin + i - 1].numpy(), atol=2e-5)
                row += 1
    assert row == len(found)


@pytest.mark.parametrize("method", sorted(CREDITS))
def test_advantages_stand_for_the_commands_and_draw_nothing_of_the_run(episodes, method):
    model, tokenizer, played = episodes
    before = torch.get_rng_state()
    credit = CREDITS[method](SMALL, seed=3)
    advantages = credit(model, tokenizer, played, 0)
    assert [len(row) for row in advantages] == [len(episode.commands) for episode in played]
    assert np.isfinite(np.concatenate(advantages)).all()
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_prompts_are_one_group(episodes):
    """Means by step are taken over the three rollouts of a prompt: what one of them earns changes the others' credit."""
    model, tokenizer, played = episodes
    before = StepMeans(SMALL, 0)(model, tokenizer, played, 0)
    rewards = played[0].rewards
    played[0].rewards = [*rewards[:-1], 1.0]
    after = StepMeans(SMALL, 0)(model, tokenizer, played, 0)
    played[0].rewards = rewards
    assert before[1] != after[1] and before[3:] == after[3:]


def test_the_value_head_judges_a_batch_before_it_learns_from_it_and_then_learns():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(200, 6)).astype(np.float32)
    returns, none = np.tanh(states[:, 0].astype(np.float64)), np.zeros(200, np.int64)
    head = ValueHead(Settings(value_rate=1e-2), seed=0)
    values = [head.value(states, returns, none, none, update) for update in range(30)]
    assert (values[0] == 0).all()
    errors = [float(((value - returns) ** 2).mean()) for value in values]
    assert errors[-1] < 0.1 * errors[0]
    other = ValueHead(Settings(value_rate=1e-2), seed=0)
    other.load_state_dict(copy.deepcopy(head.state_dict()))
    for update in (30, 31):
        wanted, found = (one.value(states, returns, none, none, update) for one in (head, other))
        assert (wanted == found).all()


@pytest.mark.parametrize("method", ["value-head", "trees"])
def test_a_run_is_the_same_after_a_stop(start, world, method, tmp_path, monkeypatch):
    """Bit for bit, with what the value head had learned."""
    monkeypatch.setattr("trainer.SAVE_EVERY", 2)
    whole = train(method, 1, SMALL, world, start, tmp_path / "whole")
    assert whole["method"] == method and len(whole["updates"]) == 5

    def stop(update, model):
        if update == 3:
            raise Stopped

    with pytest.raises(Stopped):
        train(method, 1, SMALL, world, start, tmp_path / "work", after_update=stop)
    resumed = train(method, 1, SMALL, world, start, tmp_path / "work")
    assert resumed["updates"] == whole["updates"]


def test_success_and_entropy_by_temperature(start, world):
    model, tokenizer = load(start)
    rows = evaluate(model, tokenizer, world, SMALL, {"test": world.test}, (1.0, 0.3, 0.0), 2)
    assert [(row["temperature"], len(row["success"])) for row in rows] == [(1.0, 2), (0.3, 2), (0.0, 1)]
    entropies = [row["entropy"][0] for row in rows]
    assert entropies[0] > entropies[1] > entropies[2] == 0.0
    assert measure(model, tokenizer, world, SMALL, world.test, temperature=0.3, luck=7)["entropy"] == entropies[1]
    assert 0.9 < entropies[0] / np.log(len(tokenizer)) <= 1.0  # random weights: nearly uniform over the vocabulary


def test_a_final_run_keeps_its_weights_and_measures_all_tasks(start, tmp_path, monkeypatch):
    monkeypatch.setattr(knowledge, "VALIDATION", 2)
    of = dataclasses.replace(knowledge.COMPARISON, weights=tmp_path / "weights")
    comparison.run(of, campaign.Run("step-means", 0, SMALL.changed(updates=1), tmp_path), start, final=True)
    found = json.loads((tmp_path / "step-means-g3-seed0.json").read_text())
    assert {(row["tasks"], row["temperature"]) for row in found["measured"]} == {
        (part, t) for part in ("validation", "test", "new_goals") for t in comparison.TEMPERATURES
    }
    kept = load_file(tmp_path / "weights" / "step-means-g3-seed0.safetensors")
    shapes = {name: weight.shape for name, weight in load(start)[0].state_dict().items() if name != "lm_head.weight"}
    assert {name: weight.shape for name, weight in kept.items()} == shapes
    assert all(weight.dtype == torch.float16 for weight in kept.values())


def test_nothing_trains_on_validation_tasks(start, monkeypatch):
    monkeypatch.setattr(knowledge, "VALIDATION", 2)
    world, parts = knowledge.parts_of(load_split(start / "tasks.json.gz"))
    held = set(parts["validation"])
    assert len(held) == 2 and len(world.train) == 10
    assert not held & set(world.train) and not held & set(parts["test"])


def test_a_warm_start_takes_the_highest_temperature_that_is_nearly_best_and_cannot_win_by_sharpening(start):
    model, tokenizer = load(start)
    ids = tokenizer("craft", return_tensors="pt").input_ids
    with torch.no_grad():
        before = model(input_ids=ids).logits
        rows = [{"temperature": t, "success": [s]} for t, s in ((1.0, 0.27), (0.7, 0.36), (0.5, 0.42), (0.3, 0.43))]
        assert comparison.sharpened(model, rows) == 0.5
        np.testing.assert_allclose(model(input_ids=ids).logits.numpy(), before.numpy() / 0.5, rtol=1e-5, atol=1e-6)
    measured = [{"tasks": "validation"} | row for row in rows]
    with pytest.raises(ValueError, match="at most 5 points less at 1"):
        comparison.check_start(measured)
    comparison.check_start([row | {"success": [0.4]} for row in measured])
    with pytest.raises(ValueError, match="25 to 50 %"):
        comparison.check_start([row | {"success": [0.6]} for row in measured])
