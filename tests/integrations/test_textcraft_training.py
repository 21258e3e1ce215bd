"""The TextCraft example with the real trainer: rollouts are the policy's own, and a run comes back from its JSON.

Then its rivals: their states, the value head, and what a final run measures.
"""

import copy
import dataclasses
import json

import campaign
import comparison
import continuations
import model as policies
import numpy as np
import pytest
import torch
import train_knowledge as knowledge
import typer
from bipace_kernels.integrations.trl import BiPACEGRPOConfig
from environment import Explained, TextCraft, published
from model import load, load_split, make_model, make_split, make_tokenizer, save, save_split
from refusals import refused
from rivals import CREDITS, StepMeans, ValueHead, states_before_commands
from rollout import CLOSE, COMMAND_TOKENS, OPEN, _closed, _ends, answer_text, play
from safetensors.torch import load_file
from settings import METHODS, OWN, RIVALS, Settings
from train import again, oracle, run, warm
from trained_tokenizers import learnt
from trainer import PROGRESS, World, by_length, causal_mask, evaluate, measure, on_tokens, train, trimmed
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SMALL = Settings(
    width=32, blocks=2, heads=2, train_tasks=12, test_tasks=4, new_goals=60, horizon=3, updates=2, batch=6, group=3,
    micro_batch=2, layer=-1, check_every=1,
)  # fmt: skip
CHANGE = [f"{name}={value}" for name, value in SMALL.as_json().items()]
FIVE = SMALL.changed(updates=5, check_every=0)


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(SMALL.vocabulary)


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model(tokenizer, width=SMALL.width, blocks=SMALL.blocks, heads=SMALL.heads, seed=0)


@pytest.fixture(scope="module")
def split(tokenizer):
    return make_split(tokenizer, train=12, test=4, new_goals=60, most_commands=4, prompt_tokens=60)


@pytest.fixture(scope="module")
def start(tmp_path_factory, tokenizer, model, split):
    """A warm start that was never warmed."""
    folder = tmp_path_factory.mktemp("start")
    save(folder, model, tokenizer, {"test": 0.0})
    save_split(folder / "tasks.json.gz", split)
    return folder


@pytest.fixture(scope="module")
def world(split):
    return World(split.train, split.test, TextCraft)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_a_rollout_are_those_of_a_plain_forward(tokenizer, temperature):
    """Rows of unequal prompts, some of which end early, out of one cache: within 1e-4 of each row without a cache."""
    envs = [TextCraft(published()[i]) for i in (3, 3, 12, 40, 7)]
    steered = make_model(tokenizer, width=32, blocks=2, heads=2, seed=1)
    with torch.no_grad():  # tokens that end commands become likely, so that rows are at different places
        steered.model.embed_tokens.weight[tokenizer(CLOSE).input_ids[0]] *= 3
    episodes = play(steered, tokenizer, envs, horizon=4, temperature=temperature, seed=0)
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
    episode = play(model, tokenizer, [TextCraft(published()[3])], horizon=4, seed=1)[0]
    env, text, column = TextCraft(published()[3]), "", 0
    assert len(episode.commands) == 4 == len(episode.rewards) == len(episode.observations) - 1
    for command, observation in zip(episode.commands, episode.observations[1:], strict=True):
        assert env.step(command)[0] == observation
        stop = column
        while stop < len(episode.own) and episode.own[stop]:
            stop += 1
        assert 0 < stop - column <= COMMAND_TOKENS
        written = tokenizer.decode(episode.ids[column:stop])
        assert written.removeprefix(OPEN).removesuffix(CLOSE).strip() == command
        text = answer_text(observation)
        column = stop + len(tokenizer(text).input_ids)
        if stop < len(episode.ids):
            assert tokenizer.decode(episode.ids[stop:column]) == text
    assert stop == len(episode.ids)  # nobody reads the last observation


def test_a_row_has_its_own_luck(tokenizer, model):
    """An episode is the same in any company, so that policies are compared under the same random numbers."""
    tasks = [published()[i] for i in (3, 12, 40)]
    alone = play(model, tokenizer, [TextCraft(tasks[0])], horizon=3, seed=5)[0]
    company = play(model, tokenizer, [TextCraft(task) for task in tasks], horizon=3, seed=5)
    assert alone.commands == company[0].commands
    assert len({tuple(e.commands) for e in play(model, tokenizer, [TextCraft(tasks[0])] * 3, horizon=3, seed=5)}) == 3


def test_parts_of_the_split_are_apart(tokenizer, split, tmp_path):
    parts = [split.train, split.test, split.new_goals]
    assert [len(part) for part in parts] == [12, 4, 4]
    keys = [{(task.goal, frozenset(task.commands)) for task in part} for part in parts]
    assert sum(map(len, keys)) == len(set.union(*keys)) == 20
    goals = [{task.goal for task in part} for part in parts]
    assert not goals[2] & (goals[0] | goals[1])
    assert all(policies.commands_needed(task) <= 4 for part in parts for task in part)
    save_split(tmp_path / "tasks.json.gz", split)
    assert load_split(tmp_path / "tasks.json.gz") == split
    tasks, others = policies.lessons(split, 4)
    assert tasks == list(split.train) and not {task.goal for task in others} & (goals[0] | goals[2])


def test_a_batch_without_its_padding():
    """Columns that are padding in every row go, from each tensor that has them; what says nothing of columns stays."""
    prompt_mask, completion_mask = torch.tensor([[0, 0, 1], [0, 1, 1]]), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    batch = {
        "prompt_ids": torch.arange(6).view(2, 3), "prompt_mask": prompt_mask, "advantages": torch.ones(2),
        "completion_ids": torch.arange(8).view(2, 4), "completion_mask": completion_mask,
        "tool_mask": completion_mask, "num_items_in_batch": 3,
    }  # fmt: skip
    found = trimmed(batch)
    assert found["prompt_ids"].tolist() == [[1, 2], [4, 5]] and found["completion_ids"].tolist() == [[0, 1], [4, 5]]
    assert found["tool_mask"].tolist() == [[1, 1], [1, 0]] == found["completion_mask"].tolist()
    assert found["advantages"].shape == (2,) and found["num_items_in_batch"] == 3
    assert batch["prompt_ids"].shape == (2, 3)


def test_a_batch_in_order_of_length():
    """Every row keeps what is its own; what belongs to the batch stays."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0]])
    rows = [{"completion_mask": mask[i : i + 2], "advantages": mask[i : i + 2].sum(1) * 10 + i, "num_items_in_batch": 7}
            for i in (0, 2)]  # fmt: skip
    found = by_length(rows)
    assert torch.cat([part["completion_mask"].sum(1) for part in found]).tolist() == [1, 1, 2, 3]
    assert torch.cat([part["advantages"] for part in found]).tolist() == [10, 12, 22, 30]
    assert [part["num_items_in_batch"] for part in found] == [7, 7] and rows[0]["advantages"].tolist() == [30, 10]


def test_the_causal_mask_alone_gives_every_token_what_it_had(model):
    """Where padding is at the right; at the left it must not be read."""
    ids, mask = torch.randint(4, 300, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 6:] = 0
    for of_batch, masked in ((mask, True), (mask.flip(1), False)):
        before = model(input_ids=ids, attention_mask=of_batch).logits
        handle = model.get_decoder().register_forward_pre_hook(causal_mask, with_kwargs=True)
        after = model(input_ids=ids, attention_mask=of_batch).logits
        handle.remove()
        torch.testing.assert_close(after[of_batch.bool()], before[of_batch.bool()])
        replaced = causal_mask(model, (), {"attention_mask": of_batch})
        assert (replaced is not None) == masked


def test_an_oracle_s_advantages_stand_on_the_tokens_of_their_commands(tokenizer, model):
    envs = [TextCraft(task) for task in published()[:3]]
    episodes = play(model, tokenizer, envs, horizon=2, seed=0)
    given = [[3.0, -4.0], [0.0, 0.0], [1.0, 2.0]]
    longest = max(len(episode.ids) for episode in episodes)
    ids = torch.zeros(3, longest + 2, dtype=torch.int64)
    scale = (sum(a * a for row in given for a in row) / 6) ** 0.5
    found = on_tokens(given, [episode.own for episode in episodes], ids)
    for row, (episode, of_row) in enumerate(zip(episodes, given, strict=True)):
        first = episode.own.index(0) if 0 in episode.own else len(episode.own)  # tokens of the first command
        own = torch.tensor([*episode.own, *[0] * (longest + 2 - len(episode.own))]).bool()
        wanted = torch.where(torch.arange(longest + 2) < first, of_row[0], of_row[1]) / scale * own
        torch.testing.assert_close(found[row], wanted)


def test_an_oracle_run_measures_every_state(start, tmp_path, monkeypatch):
    """The same rollouts as GRPO's until the first update; one call for each update; a finished run is kept."""
    seen = []
    measured = continuations.true_advantages

    def watched(*args, **kwargs):
        seen.append(measured(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(continuations, "true_advantages", watched)
    for _ in range(2):
        oracle(seed=0, copies=2, out=tmp_path, model=start, change=CHANGE)
    assert len(seen) == SMALL.updates and all(len(of_update) == SMALL.batch for of_update in seen)
    found = json.loads((tmp_path / "oracle-g3-seed0.json").read_text())
    assert found["method"] == "oracle" and found["continuations"] == 2 and len(found["updates"]) == SMALL.updates


@pytest.mark.parametrize("method", METHODS)
def test_settings_of_every_method_are_the_adapters(method, tmp_path):
    own = {f"bipace_{OWN[method][0]}": getattr(SMALL, OWN[method][0])} if method in OWN else {}
    given = {f"bipace_{name}": value for name, value in METHODS[method].items()}
    settings = BiPACEGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **own, **given).settings
    assert all(getattr(settings, name) == value for name, value in METHODS[method].items())


@pytest.mark.parametrize("method", ["bipace", "gae", "value-head", "trees"])
def test_a_run_is_the_same_after_a_stop(start, world, method, tmp_path, monkeypatch):
    """Bit for bit: five updates in one go, and where it was killed behind a checkpoint, with what it had learned."""
    monkeypatch.setattr("trainer.SAVE_EVERY", 2)
    five, work = SMALL.changed(updates=5, check_every=3), tmp_path / "work"
    whole = train(method, 1, five, world, start, tmp_path / "whole")
    assert whole["method"] == method and [row["update"] for row in whole["updates"]] == [1, 2, 3, 4, 5]
    assert whole["settings"] == five.as_json() and whole["bipace"] == {**METHODS, **RIVALS}[method]
    assert json.loads(json.dumps(whole)) == whole and not (tmp_path / "whole").exists()

    def stop(update, model):
        if update == 3:
            raise Stopped

    with pytest.raises(Stopped):
        train(method, 1, five, world, start, work, after_update=stop)
    assert (work / "checkpoint-2" / PROGRESS).exists()
    (work / "checkpoint-4").mkdir()  # one that was cut off while it was written
    seen = []
    found = train(method, 1, five, world, start, work, after_update=lambda update, model: seen.append(update))
    assert seen == [3, 4, 5] and found["updates"] == whole["updates"] and found["checks"] == whole["checks"]


def test_a_run_that_was_stopped_while_it_is_measured_trains_no_further(start, world, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.SAVE_EVERY", 2)
    settings, measured = SMALL.changed(updates=2, check_every=0), []

    def finish(model, tokenizer):
        measured.append([weight.detach().clone() for weight in model.parameters()])
        if len(measured) == 1:
            raise Stopped
        return {}

    with pytest.raises(Stopped):
        train("grpo", 1, settings, world, start, tmp_path / "work", finish=finish)
    found = train("grpo", 1, settings, world, start, tmp_path / "work", finish=finish)
    assert [row["update"] for row in found["updates"]] == [1, 2]
    assert all(map(torch.equal, *measured))


def test_a_warm_start_goes_on_after_the_lesson_that_it_finished(tokenizer, split, tmp_path):
    """Own commands first, then all of them; what the first lesson drew is not drawn again."""
    short = SMALL.changed(lesson_updates=2, noisy_updates=1, lesson_check=1, lesson_batch=2)
    drawn = []

    def draw(strays, rng):
        drawn.append(strays)
        if len(drawn) == 33:
            raise Stopped
        return policies.demonstration(split.train[0], tokenizer, 0.3, 3, strays, rng)

    def lessons_of():
        return policies.teach(tmp_path, tokenizer, short, lambda model: 0.5, draw, print, "cpu")

    with pytest.raises(Stopped):
        lessons_of()
    assert drawn == [False] * 32 + [True]
    drawn[:] = [None] * 33
    model, history = lessons_of()
    assert drawn[33:] == [True] * 32
    assert [row["lesson"] for row in history] == ["own commands", "own commands", "all commands"]
    assert [row["update"] for row in history] == [1, 2, 1]
    assert all(p.dtype == torch.float32 and torch.equal(p, p.bfloat16().float()) for p in model.parameters())


def test_a_warm_start_of_other_settings_is_refused(start, tmp_path):
    (tmp_path / "warm_start.json").write_text(json.dumps({"settings": SMALL.of_warm_start()}))
    warm(tmp_path, CHANGE)
    refused(r"other settings \(width=32\)", warm, tmp_path, [*CHANGE, "width=64"], error=typer.BadParameter)


def test_finished_runs_are_left_alone_not_mixed_and_the_same_from_their_json(start, tmp_path):
    run("grpo", 1, tmp_path, start, CHANGE)
    path = tmp_path / "grpo-g3-seed1.json"
    before = path.stat()
    run("grpo", 1, tmp_path, start, CHANGE)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    refused(r"made with other settings \(gamma=0.95\)", run, "grpo", 1, tmp_path, start, [*CHANGE, "gamma=0.5"])
    run("gae", 1, tmp_path, start, CHANGE)
    with pytest.raises(typer.Exit) as ended:
        again(tmp_path / "gae-g3-seed1.json", tmp_path / "again", start)
    assert ended.value.exit_code == 0


@pytest.fixture(scope="module")
def of_bytes():
    """A tokenizer that has a token for each byte, and none for the tag that ends a command."""
    return PreTrainedTokenizerFast(tokenizer_object=learnt([], ["<end>"]), eos_token="<end>")


def test_a_model_of_hugging_face_in_a_local_folder(of_bytes, tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(of_bytes), **shape)).save_pretrained(tmp_path / "llama")
    of_bytes.save_pretrained(tmp_path / "llama")
    change = ["prompt_tokens=300", "updates=1", "batch=2", "group=2", "horizon=2"]
    run("gae", 0, tmp_path / "out", tmp_path / "llama", [*CHANGE, *change])
    found = json.loads((tmp_path / "out" / "gae-g2-seed0.json").read_text())
    assert [check["update"] for check in found["checks"]] == [0, 1]
    assert len(load_split(tmp_path / "out" / "tasks.json.gz").train) == SMALL.train_tasks
    model, tokenizer = load(tmp_path / "llama")
    env = Explained(published()[3])
    episode = play(model, tokenizer, [env], horizon=2, seed=0, command_tokens=24)[0]
    assert tokenizer.decode(episode.prompt_ids) == env.RULES + env.task.text + "\n"
    assert sum(episode.own) <= 48 and len(episode.commands) == 2


def test_a_command_ends_where_its_text_does(of_bytes):
    """However the tokenizer cuts the tag; and at the tokenizer's own end."""
    ids = of_bytes(f"{OPEN}inventory{CLOSE}").input_ids
    ends = [n for n in range(1, len(ids) + 1) if ids[n - 1] in _ends(of_bytes) and _closed(of_bytes, ids[:n])]
    assert len(of_bytes(CLOSE).input_ids) == len(CLOSE) and ends == [len(ids)]
    assert _closed(of_bytes, [of_bytes.eos_token_id])


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
    credit = CREDITS[method](FIVE, seed=3)
    advantages = credit(model, tokenizer, played, 0)
    assert [len(row) for row in advantages] == [len(episode.commands) for episode in played]
    assert np.isfinite(np.concatenate(advantages)).all() and torch.equal(torch.get_rng_state(), before)


def test_equal_prompts_are_one_group(episodes):
    """Means by step are over the three rollouts of a prompt: what one earns changes the others' credit."""
    model, tokenizer, played = episodes
    before = StepMeans(FIVE, 0)(model, tokenizer, played, 0)
    rewards = played[0].rewards
    played[0].rewards = [*rewards[:-1], 1.0]
    after = StepMeans(FIVE, 0)(model, tokenizer, played, 0)
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


def test_success_and_entropy_by_temperature(start, world):
    model, tokenizer = load(start)
    rows = evaluate(model, tokenizer, world, FIVE, {"test": world.test}, (1.0, 0.3, 0.0), 2)
    assert [(row["temperature"], len(row["success"])) for row in rows] == [(1.0, 2), (0.3, 2), (0.0, 1)]
    entropies = [row["entropy"][0] for row in rows]
    assert entropies[0] > entropies[1] > entropies[2] == 0.0
    assert measure(model, tokenizer, world, FIVE, world.test, temperature=0.3, luck=7)["entropy"] == entropies[1]
    assert 0.9 < entropies[0] / np.log(len(tokenizer)) <= 1.0  # random weights: nearly uniform over the vocabulary


def test_a_final_run_keeps_its_weights_measures_all_tasks_and_trains_on_no_validation_task(
    start, tmp_path, monkeypatch
):
    monkeypatch.setattr(knowledge, "VALIDATION", 2)
    of = dataclasses.replace(knowledge.COMPARISON, weights=tmp_path / "weights")
    comparison.run(of, campaign.Run("step-means", 0, FIVE.changed(updates=1), tmp_path), start, final=True)
    found = json.loads((tmp_path / "step-means-g3-seed0.json").read_text())
    each = {(part, t) for part in ("validation", "test", "new_goals") for t in comparison.TEMPERATURES}
    assert {(row["tasks"], row["temperature"]) for row in found["measured"]} == each
    kept = load_file(tmp_path / "weights" / "step-means-g3-seed0.safetensors")
    shapes = {name: weight.shape for name, weight in load(start)[0].state_dict().items() if name != "lm_head.weight"}
    assert {name: weight.shape for name, weight in kept.items()} == shapes
    assert all(weight.dtype == torch.float16 for weight in kept.values())
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
    refused("at most 5 points less at 1", comparison.check_start, measured)
    comparison.check_start([row | {"success": [0.4]} for row in measured])
    refused("25 to 50 %", comparison.check_start, [row | {"success": [0.6]} for row in measured])
