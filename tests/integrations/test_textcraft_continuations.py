"""Truth sets whose policy is a model: forwards and gradients are its own, and an interrupted set goes on."""

import importlib.util
import json
import random

import babyai_chat
import language_model
import numpy as np
import pytest
import textcraft_chat
import torch
import train_language_model
import trainer
from continuations import Continuation, Rows, continue_from, returns_from, states_of, true_advantages
from environment import TextCraft
from model import load
from rollout import play
from settings import Settings
from trained_tokenizers import learnt
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench import truth_batches, truth_measures, truth_rows, truth_sets
from bench.make_truth import language_model as maker
from bench.make_truth.model import DIRECTIONS, SKETCH, _coordinates, _gradients, split
from bench.make_truth.textcraft import POLICY

GAMMA = 0.95


@pytest.fixture(scope="module")
def policy():
    return load(POLICY)


@pytest.fixture(scope="module")
def tasks(policy):
    return split(policy[1])[0][:10]


needs_minigrid = pytest.mark.skipif(
    importlib.util.find_spec("minigrid") is None, reason="minigrid is not installed: pip install minigrid==3.2.0"
)
TEMPLATE = (
    "{% for m in messages %}{% if loop.first %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """The folder of a random Llama, whose query heads share keys, and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("smollm2") / "base"
    special = ["<|im_start|>", "<|im_end|>"]
    texts = [textcraft_chat.RULES, babyai_chat.RULES, textcraft_chat.task("lessons", 0).text]
    letters = learnt(texts, special, vocab_size=400)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=special[0], chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=24, intermediate_size=48, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def small(monkeypatch):
    """Sets and lessons of a few seconds."""
    for name, value in {"PROMPTS": 2, "ROLLOUTS": 4, "SAMPLED": 1, "DEEP": 2, "WIDTH": 101}.items():
        monkeypatch.setattr(maker, name, value)
    for world in (textcraft_chat, babyai_chat):
        monkeypatch.setattr(world, "HORIZON", 3)
    short = {"TAUGHT": 3, "BATCH": 2, "RATE": 0.01, "UPDATES": 10, "EVERY": 10, "CHECK": 2, "COMMAND_TOKENS": 4}
    for name, value in short.items():
        monkeypatch.setattr(language_model, name, value)


@pytest.mark.parametrize("world", [textcraft_chat, pytest.param(babyai_chat, marks=needs_minigrid)])
def test_a_lesson_is_the_templates_conversation_and_solves_its_task(language, world):
    _, tokenizer = language_model.load(language)
    chat = language_model.Chat(tokenizer)
    for number in range(3):
        task = world.task("lessons", number)
        ids, places = language_model.lesson(world, chat, task)
        env = world.make(task)
        turns = [{"role": "user", "content": world.RULES + env.opening}]
        for command in world.expert(task):
            turns.append({"role": "assistant", "content": command})
            turns.append({"role": "user", "content": env.step(command)[0]})
        assert env.done and len(turns) // 2 <= world.HORIZON
        assert tokenizer.decode(ids) + "\n" == tokenizer.apply_chat_template(turns[:-1], tokenize=False)
        spoken = [[]]
        for at in places:
            spoken[-1].append(ids[at])
            if ids[at] == chat.end:
                spoken.append([])
        assert [chat.spell(tuple(part)) for part in spoken[:-1]] == world.expert(task) and not spoken[-1]
        assert world.task("truth", number) != task != world.task("check", number)


def test_interrupted_lessons_end_with_the_same_weights(language, small, tmp_path, monkeypatch):
    """Five updates, then five more from the checkpoint, are ten; only the upper blocks change."""
    found = []
    for pauses in ([10], [5, 10]):
        folder = tmp_path / str(len(pauses))
        folder.mkdir()
        for updates in pauses:
            monkeypatch.setattr(language_model, "UPDATES", updates)
            model, tokenizer = language_model.load(language)
            before = {name: weight.clone() for name, weight in model.named_parameters()}
            state = language_model.teach(textcraft_chat, model, language_model.Chat(tokenizer), folder)
        assert state["updates"] == 10 and state["solved"].keys() >= {"10"} and state["losses"][-1] < state["losses"][0]
        found.append(dict(model.named_parameters()))
    for name, weight in found[0].items():
        assert torch.equal(weight, found[1][name]), name
        assert torch.equal(weight, before[name]) == (not any(f"layers.{k}." in name for k in (3, 4, 5))), name


def test_training_in_turns_changes_only_the_upper_blocks(language, small, tmp_path, monkeypatch):
    """A run by the TRL adapter, whose rollouts are the conversations that the lessons teach."""
    for name, value in {"TRAIN": 4, "TEST": 2, "EVERY": 1}.items():
        monkeypatch.setattr(train_language_model, name, value)
    model, tokenizer = language_model.load(language)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "start")
    world, before = train_language_model.world(), {name: weight.clone() for name, weight in model.named_parameters()}

    def step(self, command):
        return self.env.step(command)[0], float(len(command) % 2), False

    monkeypatch.setattr(train_language_model.Spoken, "step", step)  # so that a random policy has something to learn
    once, twice = (
        world.play(
            model, tokenizer, [world.env(world.train[i]) for i in (0, 1, 0)], horizon=3, seed=1, command_tokens=4
        )
        for _ in range(2)
    )
    for episode, again in zip(once, twice, strict=True):
        starts = [at for at, own in enumerate(episode.own) if own and not (at and episode.own[at - 1])]
        assert len(starts) == len(episode.commands) == len(episode.rewards) and episode.entropy > 0
        assert episode.commands == again.commands
        assert tokenizer.decode(episode.prompt_ids).count(episode.env.opening.splitlines()[0]) == 1
    changes = ["updates=1", "batch=4", "group=2", "micro_batch=2", "upper=2", "horizon=3", "command_tokens=4"]
    settings = Settings.of([*changes, "learning_rate=0.01"], train_language_model.DEFAULTS)
    after = {}

    def finish(policy, _):
        after.update({name: weight.clone() for name, weight in policy.named_parameters()})
        return {}

    found = trainer.train("gae", 0, settings, world, tmp_path / "start", tmp_path / "work", finish=finish)
    assert np.isfinite(found["updates"][0]["grad_norm"])
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == (not any(f"layers.{k}." in name for k in (4, 5))), name
    train_language_model.run("step-means", 0, tmp_path / "runs", tmp_path / "start", changes)
    (path,) = (tmp_path / "runs").glob("*.json")
    assert [row["temperature"] for row in json.loads(path.read_text())["curve"]["1"]] == [1.0, 0.3, 0.0]


@pytest.mark.parametrize("world", ["textcraft", pytest.param("babyai", marks=needs_minigrid)])
def test_a_set_goes_on_where_it_was_interrupted(language, small, tmp_path, monkeypatch, world):
    """The second run keeps lessons and prompts of the first; the set is what its page promises, and can be measured."""
    out, measure, numbers = tmp_path / "out", maker.measure, []
    out.mkdir()
    (out / "base").symlink_to(language)

    def interrupted(*arguments):
        numbers.append(arguments[3])
        if numbers == [0, 1]:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(maker, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        maker.make(world, out, 4)
    first = (out / world / "lessons.pt").stat().st_mtime_ns
    path = maker.make(world, out, 4)
    assert numbers == [0, 1, 1] and (out / world / "lessons.pt").stat().st_mtime_ns == first
    found = truth_sets.read(path)
    (batch,) = truth_batches.batches(found)
    rank = found.trajectory % 4
    assert sorted(set(found.group)) == [0, 1] and len(set(found.trajectory)) == 8
    assert (np.isfinite(found.value_a) == (rank < 1)).all() and (batch.measured == (rank < 1)).all()
    assert sorted(found.hidden) == [2, 4, 5] and np.isfinite(found.hidden[5]).all()
    assert (np.isfinite(found.hidden[2]).all(axis=1) == (rank < 2)).all() and found.gradient.any(axis=1).all()
    rows = [row for row in truth_rows.table() if row.name in truth_rows.BASELINES]
    result = truth_measures.measure(path, rows, [2])
    cosines = [of["cosine"].cosine() for of in result.measures.values() if "cosine" in of]
    assert len(cosines) == len(truth_rows.BASELINES) and np.isfinite(cosines).all()


def test_sketches_of_enough_numbers_keep_inner_products_exactly(language):
    model, tokenizer = language_model.load(language)
    chat, world = language_model.Chat(tokenizer), textcraft_chat
    weights = language_model.upper(model, 2)
    signs = torch.randint(0, 2, (1, sum(weight.numel() for weight in weights) + 3), dtype=torch.int8) * 2 - 1
    prompt, row = chat.prompt("Goal"), Continuation(world.make(world.task("truth", 0)), 3)
    continue_from(model, chat, [prompt], [row], generator=torch.Generator().manual_seed(0), command_tokens=4)
    states, found = language_model.states_and_sketches(model, weights, signs, prompt, row)
    assert states.shape == (3, 3, 24) and len(row.commands) == 3
    ids = [*prompt, *row.ids]
    wanted = []
    for begin, end in row.spans:
        logp = model(torch.tensor([ids[: len(prompt) + end]])).logits[0].log_softmax(-1)
        total = sum(logp[len(prompt) + at - 1, row.ids[at]] for at in range(begin, end))
        wanted.append(torch.cat([part.flatten() for part in torch.autograd.grad(total, weights)]))
    wanted = torch.stack(wanted)
    products = (wanted @ wanted.T).numpy()
    np.testing.assert_allclose(found @ found.T, products, rtol=0, atol=1e-4 * products.max())


@pytest.mark.parametrize("heads", ["one each", "shared"])
def test_logits_are_those_of_plain_forwards(policy, language, heads):
    """Pasts of unequal lengths, one of whose rows end early, beyond one growth of the own keys; within 1e-9."""
    model, rng = (policy if heads == "one each" else language_model.load(language))[0].double(), random.Random(0)
    vocabulary = model.config.vocab_size
    pasts = [[rng.randrange(vocabulary) for _ in range(n)] for n in (7, 30, 19)]
    with torch.inference_mode():
        rows = Rows(model, pasts, 3)
        written = [list(pasts[number // 3]) for number in range(9)]
        for step in range(45):
            if step in (10, 20):  # first some rows of each past, then all of the second past
                kept = [0, 2, 4, 7, 8] if step == 10 else [0, 1, 3, 4]
                rows.keep(torch.tensor(kept))
                written = [written[i] for i in kept]
            token = [rng.randrange(vocabulary) for _ in written]
            for ids, new in zip(written, token, strict=True):
                ids.append(new)
            wanted = torch.tensor([0, len(written) - 1])
            logits = rows.feed(torch.tensor(token), wanted)
            if step in (0, 9, 10, 20, 31, 32, 44):
                for row, found in zip(wanted.tolist(), logits, strict=True):
                    plain = model(input_ids=torch.tensor([written[row]])).logits[0, -1]
                    assert (plain - found).abs().max() < 1e-9, (step, row)
    model.float()


def test_a_policy_that_never_doubts_goes_on_as_its_episode_went_on(policy, tasks):
    """Logits a thousand times as large leave no choice: V(s_t) = γ^(n-1-t) where a rollout is solved, else 0."""
    model, tokenizer = policy
    with torch.no_grad():
        model.model.norm.weight *= 1000
    try:
        episodes = play(model, tokenizer, [TextCraft(task) for task in tasks], horizon=12, seed=0)
        states = [state for episode in episodes for state in states_of(episode, 12)]
        places = [(e, t) for e in episodes for t in range(len(e.commands))]
        wanted = [e.solved * GAMMA ** (len(e.commands) - 1 - t) for e, t in places]
        assert [state.left for state in states] == [12 - t for _, t in places]
        generator = torch.Generator().manual_seed(0)
        found = returns_from(model, tokenizer, states, copies=2, gamma=GAMMA, generator=generator)
        surprises = true_advantages(model, tokenizer, episodes, horizon=12, copies=2, gamma=GAMMA, seed=0)
    finally:
        with torch.no_grad():
            model.model.norm.weight /= 1000
    assert 0 < sum(episode.solved for episode in episodes) < len(episodes)
    np.testing.assert_allclose(found, np.repeat(np.array(wanted)[:, None], 2, axis=1), rtol=1e-12)
    for episode, of_episode in zip(episodes, surprises, strict=True):  # A* = 0: every outcome was certain
        assert len(of_episode) == len(episode.commands)
        np.testing.assert_allclose(of_episode, 0.0, atol=1e-12)


def test_a_gradient_is_that_of_its_commands_tokens(policy, tasks):
    """Against a forward over the state's tokens and the command's, one command at a time."""
    model, tokenizer = policy
    (episode,) = play(model, tokenizer, [TextCraft(tasks[0])], horizon=12, seed=0)
    found = _gradients(model, episode)
    assert len(found) == len(episode.commands) > 1
    ids = [*episode.prompt_ids, *episode.ids]
    own = [0] * len(episode.prompt_ids) + episode.own
    for gradient, state in zip(found, states_of(episode, 12), strict=True):
        begin = len(state.ids)
        end = next((at for at in range(begin, len(ids)) if not own[at]), len(ids))
        logits = model(input_ids=torch.tensor([ids[:end]])).logits[0, begin - 1 : -1].log_softmax(-1)
        total = logits.gather(1, torch.tensor(ids[begin:end])[:, None]).sum()
        wanted = torch.cat([part.flatten() for part in torch.autograd.grad(total, list(model.parameters()))])
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("n", [DIRECTIONS, DIRECTIONS + 100])
def test_coordinates_keep_the_inner_products_of_gradients(n):
    """Exactly up to as many gradients as directions; else within six standard errors, |x| |y| √(2 / SKETCH) each."""
    gradients = torch.randn(n, 5000, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -2, 5000)
    found, share = _coordinates(gradients)
    products = (gradients.double() @ gradients.double().T).numpy()
    products /= np.diagonal(products).mean()
    leading, rest = found[:, :DIRECTIONS], found[:, DIRECTIONS:]
    # Lengths of what is not in the leading ones.
    length = np.sqrt(np.maximum(np.diagonal(products) - (leading**2).sum(axis=1), 0.0))
    assert rest.shape == (n, SKETCH) and share == pytest.approx(1 - (length**2).mean(), abs=1e-5)
    assert (share > 1 - 1e-9) == (n == DIRECTIONS)
    error = np.abs(leading @ leading.T + rest @ rest.T - products)
    assert (error <= 1e-5 + 6 * np.sqrt(2 / SKETCH) * np.outer(length, length)).all()
