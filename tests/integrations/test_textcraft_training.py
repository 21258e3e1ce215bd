"""The TextCraft example with the real trainer: its rollouts are the policy's own, and a run leaves what its page draws."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from environment import TextCraft, published
from model import CLOSE, OPEN, answer_text, lessons, make_model, make_tokenizer, prompt_text, save, split_tasks
from report import write_report
from rollout import LONGEST_COMMAND, play
from settings import METHODS, Settings
from train import everything, run, train

SMALL = Settings(
    width=32, blocks=2, heads=2, most_commands=4, prompt_tokens=60, held_out=3, horizon=3, updates=2, tasks=3, rollouts=3,
    layer=-1, check_every=1, check_rollouts=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(SMALL.vocabulary)


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(tokenizer, width=SMALL.width, blocks=SMALL.blocks, heads=SMALL.heads, seed=0)


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory, tokenizer, model):
    out = tmp_path_factory.mktemp("textcraft")
    save(out / "warm_start", model, tokenizer, {"settings": SMALL.as_json()})
    return out


def test_commands_are_few_tokens_and_come_back(tokenizer):
    command = f"{OPEN}craft 4 stick using 2 oak planks{CLOSE}"
    assert tokenizer.convert_ids_to_tokens(tokenizer(command).input_ids)[0] == "<action>craftĠ4Ġ"
    for text in [command, answer_text("Got 2 string"), *(prompt_text(task) for task in published())]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_a_rollout_are_those_of_a_plain_forward(tokenizer, model, temperature):
    """RolloutRows of unequal prompts, of which some end early, out of one cache: within 1e-4 of each row alone, without a cache."""
    tasks = [published()[i] for i in (3, 3, 12, 40, 7)]
    steered = make_model(tokenizer, width=32, blocks=2, heads=2, seed=1)
    with torch.no_grad():  # tokens that end commands become likely, so that rows are at different places
        steered.model.embed_tokens.weight[tokenizer(CLOSE).input_ids[0]] *= 3
    generator = torch.Generator().manual_seed(0)
    episodes = play(steered, tokenizer, tasks, horizon=4, temperature=temperature, generator=generator)
    assert len({len(e.ids) for e in episodes}) > 1 and len({len(e.prompt_ids) for e in episodes}) > 1
    for episode in episodes:
        ids = torch.tensor([episode.prompt_ids + episode.ids])
        with torch.no_grad():
            logits = steered(input_ids=ids).logits[0, len(episode.prompt_ids) - 1 : -1]
        plain = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(episode.ids)[:, None])[:, 0]
        own = torch.tensor(episode.own, dtype=torch.bool)
        assert (plain - torch.tensor(episode.logprobs))[own].abs().max() < 1e-4
        assert torch.tensor(episode.logprobs)[~own].abs().max() == 0


def test_tokens_of_an_episode_are_its_commands_and_observations(tokenizer, model):
    episode = play(model, tokenizer, [published()[3]], horizon=4, generator=torch.Generator().manual_seed(1))[0]
    env, text, column = TextCraft(published()[3]), "", 0
    assert len(episode.commands) == 4 == len(episode.rewards) == len(episode.observations) - 1
    for command, observation in zip(episode.commands, episode.observations[1:], strict=True):
        assert env.step(command)[0] == observation
        stop = column
        while stop < len(episode.own) and episode.own[stop]:
            stop += 1
        assert 0 < stop - column <= LONGEST_COMMAND
        written = tokenizer.decode(episode.ids[column:stop])
        assert written.removeprefix(OPEN).removesuffix(CLOSE).strip() == command
        text = answer_text(observation)
        column = stop + len(tokenizer(text).input_ids)
        if stop < len(episode.ids):
            assert tokenizer.decode(episode.ids[stop:column]) == text
    assert stop == len(episode.ids)  # nobody reads the last observation


def test_the_split_is_fixed_and_its_parts_are_apart(tokenizer):
    settings = Settings()
    split = split_tasks(
        tokenizer, most_commands=settings.most_commands, prompt_tokens=settings.prompt_tokens, held_out=settings.held_out
    )  # fmt: skip
    assert len(split.held_out) == 25
    assert not {task.goal for task in split.train} & {task.goal for task in split.held_out}
    tasks, others = lessons(split, settings.most_commands)
    assert len(tasks) == len(split.train) + 25
    assert not {task.goal for task in tasks} & {task.goal for task in others}


@pytest.mark.parametrize("method", ["grpo", "hgpo", "bipace_q"])
def test_a_run_of_two_updates(warm_start, method):
    found = train(method, 0, SMALL, warm_start, "cpu", 1)
    assert [row["update"] for row in found["updates"]] == [1, 2]
    assert [check["update"] for check in found["checks"]] == [0, 1, 2]
    assert found["settings"] == dataclasses.asdict(SMALL) and found["bipace"] == METHODS[method]
    for row in found["updates"]:
        assert ("singleton_cluster_fraction" in row) == (method != "grpo")
        if method == "bipace_q":
            assert row["epsilon"] > 0 and row["action_parse_rate"] <= 1
    assert json.loads(json.dumps(found)) == found


def test_finished_runs_are_left_alone_and_drawn(warm_start):
    change = [f"{name}={value}" for name, value in SMALL.as_json().items()]
    for method in ("grpo", "gigpo"):
        run(method, 1, warm_start, change, "cpu", 1)
    before = (warm_start / "grpo-seed1.json").stat()
    run("grpo", 1, warm_start, change, "cpu", 1)
    assert (warm_start / "grpo-seed1.json").stat().st_mtime_ns == before.st_mtime_ns
    written = write_report(warm_start)
    assert [path.name for path in written] == ["results.md", "results.json", "success.png", "partitions.png"]
    assert "GiGPO" in written[0].read_text() and all(path.stat().st_size > 0 for path in written)


def test_runs_of_other_settings_are_not_mixed(warm_start):
    with pytest.raises(Exception, match="made with other settings"):
        run("grpo", 3, warm_start, ["width=32"], "cpu", 1)
    (warm_start / "hgpo-seed2.json").write_text(json.dumps({"settings": {**SMALL.as_json(), "gamma": 0.5}}))
    with pytest.raises(Exception, match=r"hgpo-seed2.json was made with other settings \(gamma=0.5\)"):
        everything(warm_start, [f"{name}={value}" for name, value in SMALL.as_json().items()], "cpu", 1)
