"""What the adapters share: keys of turns, entries per turn, functions that give way."""

import dataclasses
import importlib.metadata
import json
import math
import re
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bipace_kernels.integrations import _accelerate, _versions
from bipace_kernels.integrations._replace import replace, replaced
from bipace_kernels.integrations._rollout_rows import RolloutRows, RowsOfProcess
from bipace_kernels.integrations._settings import Settings
from bipace_kernels.integrations._states import States
from bipace_kernels.integrations._turns import KINDS, Turns, call_text, keys_of, windows
from bipace_kernels.integrations._versions import check_version
from hypothesis import given, strategies as st
from refusals import refused
from tiny_encoder import Encoder
from trained_tokenizers import byte_level

import bipace_kernels as bk

TEXTS = ["<action>Go east</action>", "hm <action> go EAST </action>", "look", "<action>look</action>", ""]
TURNS = [[1, 0, 1], [0, 1, 1], [0, 0, 0], [1, 0, 1]], [True, True, True, False]  # two, one, none, and padding of two
MEMORY = {"method": "gae", "share": "memory", "memory_rows": 4}


class Slow:
    """A tokenizer that shows no table of bytes: it gives text alone."""

    def __init__(self):
        self.fast = byte_level()

    def batch_decode(self, ids, skip_special_tokens):
        return self.fast.decode_batch(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="module")
def ids():
    rows = [byte_level().encode(text).ids for text in TEXTS]
    ids = torch.full((len(rows), max(map(len, rows))), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])


@pytest.fixture
def tokenizer():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="<|endoftext|>")


@pytest.mark.parametrize("one_token", [False, True])
def test_keys_of_tool_calls_in_text(tokenizer, one_token):
    """Name and arguments in canonical order, whatever stands around; where there are tools, the rest by its text."""
    if one_token:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])

    def keys(*texts, mode="auto", **more):
        given = tokenizer(list(texts), padding=True, return_tensors="pt")
        return keys_of(given["input_ids"], given["attention_mask"], tokenizer, mode, 8, **more)

    one = '<tool_call>\n{"name": "go", "arguments": {"to": "A", "by": [1, 2]}}\n</tool_call>'
    same = 'Well. <tool_call>{"arguments":{"by":[1,2],"to":"A"},"name":"go"}</tool_call>'
    text = '<tool_call>{"name": "go", "arguments": "{\\"by\\": [1, 2], \\"to\\": \\"A\\"}"}</tool_call>'
    bad, tag = "<tool_call>{no}</tool_call>", "<action>go</action>"
    found = keys(one, same, text, one + same, bad, tag)
    key = found["action_key"].tolist()
    assert key[0] == key[1] == key[2] and len(set(key)) == 4
    assert key[4] == int(bk.action_keys([bad], mode="text")[0]) and key[5] == int(bk.action_keys([tag])[0])
    assert [KINDS[k] for k in found["action_kind"].tolist()] == ["tool_call"] * 4 + ["text", "action_tag"]
    assert found["action_parsed"].tolist() == [True, True, True, True, False, True]  # `bad` begins a call
    deep = '<tool_call>{"name": "go", "arguments": %s}</tool_call>'
    for nested in ("[" * 3000, '{"a": ' * 1200 + "1" + "}" * 1200, '["go"]'):
        odd = (deep % nested).replace('{"name": "go", "arguments": ["go"]}', '["go"]')  # JSON, but no call
        assert KINDS[int(keys(one, odd)["action_kind"][1])] == "text"
    other = one.replace("arguments", "parameters")  # JSON of another form: what it says is the action
    assert len(keys(other, other.replace("A", "B"), other, one)["action_key"].unique()) == 3
    answers = keys(one, "Call go.", "Done.", last=torch.tensor([False, False, True]))
    assert answers["action_parsed"].tolist() == [True, False, True]
    begun = keys(one, bad, "Done.", calls=["go", "", ""])["action_parsed"].tolist()
    assert begun == [True, False, True]  # TRL lists no call that it cannot read
    none = keys("no tool", tag)  # and where there are none, as action_tag has it
    wanted = keys("no tool", tag, mode="action_tag")
    assert torch.equal(none["action_key"], wanted["action_key"]) and none["action_parsed"].tolist() == [False, True]


@pytest.mark.parametrize("row_per_step", [False, True])
def test_an_answer_ends_its_rollout(tokenizer, row_per_step):
    texts = ['<tool_call>{"name": "go", "arguments": {}}</tool_call>', "Call go.", "Done."]
    given = tokenizer(texts, padding="max_length", max_length=60, return_tensors="pt")
    rows, mask = given["input_ids"], given["attention_mask"]
    if not row_per_step:
        rows, mask = rows.reshape(1, -1), mask.reshape(1, -1)
    b, none = len(rows), torch.zeros(rows.shape)
    given = RolloutRows(
        mask=mask, scores=none, responses=rows, prompts=lambda: [torch.tensor([1])] * b, group=["p"] * b,
        trajectory=[0] * b, place=list(range(b)), valid=torch.ones(b, dtype=torch.bool),
    )  # fmt: skip
    records = given.records(States(Settings.of({"method": "gae"})), tokenizer, none)
    assert records["step"].tolist() == [0, 1, 2] and records["action_parsed"].tolist() == [True, False, True]


@pytest.mark.parametrize("here", ["first_n", "tool_call"])
def test_a_call_on_one_process_tells_the_others_of_tools(tokenizer, here):
    """Equal actions would have other keys there than here; the process with the call keeps its own."""
    call = '<tool_call>{"name": "go", "arguments": {"b": 1, "a": 2}}</tool_call>'
    texts, seen = [call if here == "tool_call" else "Call go.", "Done."], []
    given = tokenizer(texts, padding=True, return_tensors="pt")
    mask, none = given["attention_mask"], torch.zeros(given["input_ids"].shape)
    valid = torch.ones(2, dtype=torch.bool)
    rows = RowsOfProcess(mask=mask, scores=none, responses=given["input_ids"], prompts=list, valid=valid, size=2)

    def gather(columns):  # what the other process has comes after these
        more = torch.tensor([KINDS.index("tool_call" if here == "first_n" else "first_n")], dtype=torch.int8)
        return {name: torch.cat([c, more.to(c.dtype)]) if "kind" in columns else c for name, c in columns.items()}

    def run(**columns):
        seen.append(columns["action_key"])
        return bk.advantage(**columns)

    states = States(Settings.of({"method": "gae", "embedder": "ngram", "text_turns": 1}))
    rows = dataclasses.replace(rows, extra={"observation": texts})
    records = rows.records(states, tokenizer, none)
    for of_all in ({}, {"gather": gather}):
        rows.result(records, states, tokenizer, run=run, **of_all)
    if here == "tool_call":
        texts[0] = call_text([("go", {"a": 2, "b": 1})])
    assert seen[1].tolist() == bk.action_keys(texts, mode="text")[0].tolist()
    assert torch.equal(*seen) == (here == "tool_call")


@pytest.mark.parametrize("mode", ["action_tag", "text"])
def test_keys_of_decoded_text_tell_actions_apart_as_those_of_bytes_do(ids, mode):
    """A tokenizer without a table of bytes costs one warning, and no run."""
    table = bk.token_bytes(byte_level())
    keys, parsed = bk.action_keys(ids[0], mask=ids[1], mode=mode, token_bytes=table)
    fast = keys_of(*ids, byte_level(), mode, 8)
    assert torch.equal(fast["action_key"], keys) and torch.equal(fast["action_parsed"], parsed)
    first, _ = bk.action_keys(ids[0], mask=ids[1], mode="first_n", n=2)
    found = keys_of(*ids, None, "first_n", 2)  # needs no tokenizer, and parses nothing
    assert list(found) == ["action_key"] and torch.equal(found["action_key"], first)
    slow = Slow()
    with pytest.warns(RuntimeWarning, match="action keys are made from decoded text, .* has no table of bytes: "):
        found = keys_of(*ids, slow, mode, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = keys_of(*ids, slow, mode, 8)
    assert torch.equal(again["action_key"], found["action_key"]) and torch.equal(found["action_parsed"], parsed)
    assert torch.equal(found["action_key"], keys)  # without a tag the first tokens', of which there are n
    assert len(keys.unique()) == {"action_tag": 4, "text": 5}[mode]


def test_tokens_may_be_added_after_a_tokenizer_s_first_use(tokenizer):
    for added in ("<one>", "<two>"):
        tokenizer.add_tokens([added])
        ids = torch.tensor([tokenizer(f"<action>go</action>{added}")["input_ids"]])
        keys = keys_of(ids, torch.ones_like(ids), tokenizer, "action_tag", 8)
        assert keys["action_key"].tolist() == bk.action_keys(["<action>go</action>"])[0].tolist()


def rows_with(mask, valid=None, **extra):
    """Rows of this mask, and what their rollouts say of the turns."""
    mask, valid = torch.tensor(mask), torch.ones(len(mask), dtype=torch.bool) if valid is None else torch.tensor(valid)
    given = {"scores": torch.zeros(mask.shape), "responses": mask, "prompts": list, "valid": valid}
    names = {"mask_name": "the mask", "extra_name": "infos", "keys": {"step_rewards": "rewards"}}
    return RolloutRows(mask=mask, extra=extra, **given, **names)


def test_entries_per_turn_and_those_of_other_turns():
    for rows, wanted in (
        ([["a", "b"], ["c"], [], None], ["a", "b", "c", "", "", ""]),
        ([("a", "b"), "word", ["d", "e"], ["x"]], ["a", "b", "word", "d", "", ""]),
        ([np.array([1, 2]), 3.0, np.array(4), None], [1, 2, 3.0, 4, "", ""]),
        ([[["x"], ["y", "z"]], "c", [], None], [["x"], ["y", "z"], "c", "", "", ""]),
    ):
        rows = rows_with(*TURNS, observation=rows).fitted(States(Settings()))
        assert rows.extra["observation"] == wanted and not rows.scores.isnan().any()
    for rows, message in (
        ([["a"], "c", [], None], "row 0 has 1 for 2 turns"),
        (["word", "c", [], None], "row 0 has 1 for 2 turns"),
        ([["a", "b"], ["c", "d"], [], None], "row 1 has 2 for 1 turns"),
        ([["a", "b"], None, [], None], "row 1 has 0 for 1 turns"),
    ):
        said = rf"infos\['observation'\] must have one entry per turn of the model, but {message}; a turn is a run "
        said += "of ones in the mask, which must be 0 on the tokens in between"
        refused(said, rows_with(*TURNS, observation=rows).fitted, States(Settings(on_invalid="raise")))


def test_functions_give_way_and_come_back():
    class Owner:
        def own(self):
            return [self.name]

        name = "owner"

    def own(inner, *args):
        return [*inner(*args), "ours"]

    before, instance = Owner.own, Owner()
    undo = replace(Owner, own)
    assert instance.own() == ["owner", "ours"] and Owner.own.__wrapped__ is before
    with replaced(instance, own):
        assert instance.own() == ["owner", "ours", "ours"] and Owner().own() == ["owner", "ours"]
    assert "own" not in vars(instance)
    undo()
    assert Owner.own is before
    module = SimpleNamespace(own=print)
    with pytest.raises(RuntimeError), replaced(module, own):
        raise RuntimeError
    assert module.own is print

    refused("SimpleNamespace has no rows_with", replace, module, own, rows_with, error=AttributeError)
    assert module.own is print


@pytest.mark.parametrize(("given", "said"), [
    ({"gigpo_mode": "mean_norm"}, "gigpo_mode has no effect in method gae; leave it out, or set method to gigpo"),
    ({"ngram_epsilon": 0.3}, "ngram_epsilon has no effect with these settings of method gae; leave it out, or set"),
    ({"episode_norm": "none"}, "of method gae; leave it out, or set episode_weight above 0."),
    ({"method": "hgpo", "episode_norm": "none"}, "of method hgpo; leave it out, or set base_group to True."),
    ({"method": "gigpo", "base_group": True}, "base_group has no effect"),
    ({"epsilon": "wide"}, "epsilon must be a number 0 or in [1e-4, 1], 'auto' or 'follow', got 'wide'"),
    ({"embedder": 1}, "embedder must be one of auto, actor_hidden, ngram, identity, sentence:MODEL, got 1"),
    ({"layer": 1.5}, "layer must be an int, an index into hidden_states, or 'block N', got 1.5"),
    ({"step_weight": True}, "step_weight must be a number finite and at least 0, got True"),
    ({"method": "bipace", "value": "kernel"}, "or set method to gae."),
    ({"method": "bigpo", "shrinkage": 1.0}, "or set method to gae and value to step"),
    ({"method": "gae", "value": "critic"}, "value must be one of group, step, cluster, kernel, got 'critic'"),
    ({"method": "gae", "share": "memory", "memory_rows": 0}, "memory_rows must be an int of at least 1, got 0"),
    ({"method": "gae", "share": "group", "kernel_same": 0.1}, "leave it out, or set share to batch."),
    ({"method": "gae", "step_norm": "std"}, "step_norm='std' goes with estimator"),
    ({"method": "bipace", "step_norm": "batch"}, "step_norm='batch' goes with estimator 'gae', got estimator="),
    ({"method": "hgpo", "episode_weight": 0.5}, "episode_weight has no effect"),
    ({"method": "gae", "epsilon": "auto"}, "epsilon has no effect with these settings of method gae"),
    ({"method": "bigpo", "embedder": "actor_hidden", "ngram_epsilon": 0.3}, "ngram_epsilon has no effect with"),
    ({"method": "bigpo", "embedder": "ngram", "epsilon": "auto"}, "epsilon=auto has no effect with embedder ngram"),
    ({"method": "absent_module:KNN"}, "for a file of the current folder write absent_module.py:KNN"),
    ({"method": "absent.py:KNN"}, "method: absent.py:KNN cannot be loaded, FileNotFoundError"),
    ({"method": "math:pi"}, "method must name a bk.Config, got float; a function goes into"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_warned_by_name(given, said):
    refused(re.escape(said), Settings.of, given)


RECORDS = {
    "group": torch.zeros(3, dtype=torch.int64), "trajectory": torch.arange(3), "valid": torch.ones(3, dtype=torch.bool),
    "step": torch.zeros(3, dtype=torch.int64), "rewards": torch.tensor([0.0, 1.0, 2.0]),
}  # fmt: skip


def test_an_embedder_has_its_own_epsilon_where_none_is_set(monkeypatch):
    loaded = []
    monkeypatch.setattr(bk.embedders, "_load", lambda model, device: loaded.append(model) or Encoder())
    for settings, epsilon in (
        ({"embedder": "actor_hidden"}, 0.10),
        ({"embedder": "ngram"}, 0.25),
        ({"embedder": "identity"}, 0.0),
        ({"embedder": "sentence:MODEL"}, 0.20),
        ({"embedder": "actor_hidden", "epsilon": 0.07}, 0.07),
        ({"embedder": "ngram", "ngram_epsilon": 0.3}, 0.3),
        ({"embedder": "ngram", "epsilon": 0.07}, 0.25),  # a recipe's ε is one of hidden states
        ({"embedder": "sentence:MODEL", "epsilon": 0.07}, 0.07),
    ):
        states = States(Settings(method="bigpo", **settings))
        hidden = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]) if states.may_be_hidden else None
        for _ in range(2):
            result, metrics = states.advantage(RECORDS, lambda: ["a", "a", "b"], hidden=hidden)
        assert metrics["bipace/epsilon"] == epsilon and result.advantage.shape == (3,)
        assert metrics[f"bipace/embedder/{settings['embedder'].split(':')[0]}"] == 1.0
    assert loaded == ["MODEL"] * 2  # once a run


def test_settings_of_gae_are_those_of_its_configuration():
    """What each value needs; and no ε, neither in the configuration nor chosen nor logged."""
    own = {"on_invalid": "singleton", "duplicates": "once"}
    for value in (None, "kernel", "cluster", "group"):
        settings = Settings.of({"method": "gae", "value": value})
        assert settings.config().needs_fingerprint is (value in (None, "kernel"))
        assert settings.config().needs_observation is (value == "cluster")
        assert not settings.config().needs_keys and settings.config(0.3) == bk.Config.gae(value or "kernel", **own)
    changed = {
        "gae_lambda": 0.9, "kernel_width": 0.2, "kernel_noise": 1.0, "kernel_same": 0.7, "episode_weight": 0.5,
        "step_norm": "group", "share": "batch",
    }  # fmt: skip
    found = Settings.of({"method": "gae", "kernel_time": 0, "action_noise": 0, **changed}).config()
    assert found == bk.Config.gae(kernel_time=None, action_noise=None, **changed, **own)
    assert Settings.of({"method": "gae", "action_noise": 0.5}).config().action_noise == 0.5
    assert Settings.of(dict.fromkeys(Settings.__dataclass_fields__)) == Settings() == Settings(method="gae")
    assert Settings(method="bipace").config().estimator != "gae"
    assert Settings.of({"method": "bipace", "episode_weight": 0}).config() == bk.Config.bipace(episode_weight=0, **own)
    states = States(Settings.of({"method": "gae"}))
    states.load_state_dict({"epsilon": 0.1, "embedder": "auto", "layer": -8})
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    result, metrics = states.advantage(RECORDS, list, hidden=hidden)
    assert states.epsilon is None and "bipace/epsilon" not in metrics and metrics["bipace/embedder/actor_hidden"] == 1.0
    wanted = bk.advantage(**RECORDS, fingerprint=hidden, config=bk.Config.gae(**own))
    assert torch.equal(result.advantage, wanted.advantage)
    with pytest.warns(RuntimeWarning, match="n-grams"):
        result, _ = states.advantage(RECORDS, lambda: ["a", "a", "b"], why="no forward")
    grams, of_grams = bk.ngram_fingerprint(["a", "a", "b"]), bk.Config.gae(embedder="ngram", **own)
    assert torch.equal(result.advantage, bk.advantage(**RECORDS, fingerprint=grams, config=of_grams).advantage)
    assert Settings.of({"method": "gae", "embedder": "ngram"}).config() == of_grams


MINE = """
import bipace_kernels as bk

def half(records):
    return records.returns * 0.5

KNN = bk.Config.gae(half, gamma=0.5, gae_lambda=0.25, action_noise=None)
TERM = bk.Config(partition="none", estimator=half, step_weight=3.0, on_invalid="raise")
CLUSTERS = bk.Config.bigpo(0.3)
"""


def test_a_method_of_one_s_own_trains_by_its_name(tmp_path, monkeypatch):
    """Its own values hold where a setting is at its default; a log and a checkpoint name it."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    set_by_trainers = {"on_invalid": "singleton", "duplicates": "once"}
    found, term = (Settings.of({"method": f"mine.py:{name}"}).config() for name in ("KNN", "TERM"))
    assert found == bk.Config.gae(found.value, gamma=0.5, gae_lambda=0.25, action_noise=None, **set_by_trainers)
    assert found.value_name == "half" and (term.step_weight, term.on_invalid) == (3.0, "singleton")
    changed = Settings.of({"method": "mine.py:KNN", "gae_lambda": 0.75, "action_noise": 0.5}).config()
    assert (changed.gamma, changed.gae_lambda, changed.action_noise) == (0.5, 0.75, 0.5)
    clusters = Settings.of({"method": "mine.py:CLUSTERS"})
    changed = Settings.of({"method": "mine.py:CLUSTERS", "epsilon": 0.2})
    assert (clusters.epsilon_of("ngram"), changed.epsilon_of("actor_hidden")) == (0.3, 0.2)
    grams = Settings.of({"method": "mine.py:CLUSTERS", "ngram_epsilon": 0.4})
    assert (grams.epsilon_of("ngram"), grams.epsilon_of("actor_hidden")) == (0.4, 0.3)
    for settings, epsilon in ((clusters, 0.3), (grams, 0.4)):
        with pytest.warns(RuntimeWarning, match=f"with ngram_epsilon = {epsilon}"):
            _, metrics = States(settings, "here.").advantage(RECORDS, lambda: ["a", "a", "b"], why="no forward")
        assert metrics["bipace/epsilon"] == epsilon
    states = States(Settings.of({"method": str(tmp_path / "mine.py:KNN")}), "here.")
    hidden = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    result, metrics = states.advantage(RECORDS, list, hidden=hidden)
    assert torch.equal(result.value, result.returns * 0.5) and metrics["bipace/method/mine.py:KNN"] == 1.0
    assert states.state_dict()["method"] == str(tmp_path / "mine.py:KNN")
    states.save(tmp_path / "bipace.json")
    states.load(tmp_path / "bipace.json")
    monkeypatch.syspath_prepend(tmp_path)
    assert Settings.of({"method": "mine:KNN"}).config().gae_lambda == 0.25
    term = dataclasses.replace(sys.modules["mine"].TERM, step_weight=30.0)  # in a notebook, between two runs
    monkeypatch.setattr("mine.TERM", term)
    (tmp_path / "mine.py").write_text(MINE.replace("step_weight=3.0", "step_weight=30.0"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.py").write_text(MINE.replace("step_weight=3.0", "step_weight=3.5"))
    of_run = [Settings.of({"method": name}).own for name in ("mine:TERM", "mine.py:TERM", "mine.py:TERM")]
    monkeypatch.chdir(tmp_path / "other")
    of_run.append(Settings.of({"method": "mine.py:TERM"}).own)
    assert [own.step_weight for own in of_run] == [30.0, 30.0, 30.0, 3.5] and of_run[1] is of_run[2]


def states_of(**settings):
    return States(Settings.of({**MEMORY, **settings}), "here.")


def test_a_memory_of_other_states(tmp_path):
    """Those of another layer, of texts of other lengths or with returns of another γ are left where they are, with a
    warning; those of another model have another width."""
    one, file = states_of(), tmp_path / "bipace.json"
    one.save(file)
    assert not (tmp_path / "bipace_memory.pt").exists()  # of an empty one, such as that of a rank behind the first
    one.advantage(RECORDS, list, hidden=torch.randn(3, 4))
    one.save(file)
    differ = {"layer": (-8, -3), "gamma": (0.95, 0.5), "text_turns": (None, 1)}
    differ["reward_beyond_steps"] = "last", "ignore"
    for other, match in [(states_of(**{k: b}), f"'{k}': {a!r}.*: {b!r}") for k, (a, b) in differ.items()]:
        with pytest.warns(RuntimeWarning, match=rf"here\.share=memory begins with an empty memory: .*{match}"):
            other.load(file)
        assert len(other.memory) == 0
    States(Settings.of({"method": "gae"})).load(file)  # without a memory
    later = states_of()
    later.load(file)
    with pytest.raises(ValueError, match=r"D = 4 like the batches in memory, got 6; begin .*_memory\.pt"):
        later.advantage(RECORDS, list, hidden=torch.randn(3, 6))
    (tmp_path / "bipace_memory.pt").unlink()
    for states, missing in ((one, r"an empty memory: .*bipace_memory\.pt"), (later, r".*bipace\.json")):
        with pytest.warns(RuntimeWarning, match=rf"{missing} does not exist"):
            states.load(file)
        assert len(states.memory) == 0  # which held records of a training in this process
        file.unlink(missing_ok=True)


def test_settings_of_numpy_are_in_a_checkpoint(tmp_path):
    """The memory could not be loaded again, and a layer not be saved."""
    one = states_of(layer=np.int64(-3), gamma=np.float64(0.9), text_turns=np.int64(1))
    one.advantage(RECORDS, list, hidden=torch.randn(3, 4))
    one.save(tmp_path / "bipace.json")
    later = states_of(layer=-3, gamma=0.9, text_turns=1)
    later.load(tmp_path / "bipace.json")
    assert len(later.memory) == len(one.memory) > 0


def test_a_damaged_checkpoint_is_refused_by_its_name(tmp_path):
    """A changed number in the memory too, which torch.load() reads as if nothing had happened."""
    one, file = states_of(), tmp_path / "bipace.json"
    one.advantage(RECORDS, list, hidden=torch.full((3, 4), 0.123))
    one.save(file)
    own, changed = (np.float32(x).tobytes() for x in (0.123, 0.124))
    for name, damage, words in (
        ("bipace_memory.pt", lambda data: data.replace(own, changed, 1), "data/0 in it is damaged"),
        ("bipace_memory.pt", lambda data: data[: len(data) // 2], "not a zip file"),
        ("bipace.json", lambda data: data[:-3], "line 1 column"),
    ):
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        refused(rf"{name} cannot be loaded: .*{words}.*; resume from another checkpoint", states_of().load, file)
        path.write_bytes(whole)
    states_of().load(file)


class Second(_accelerate.Ranks):
    """Of two processes, of which the first fails."""

    rank, size = 1, 2
    first = "failed", ["ValueError", "what the first one has is damaged"]

    def __init__(self, process_group):
        pass

    def texts(self, mine):
        return [json.dumps(dict([self.first])), mine]


def test_texts_that_the_first_process_cannot_read_are_an_error_of_all(monkeypatch):
    """The others would wait for its records."""
    monkeypatch.setattr(_accelerate, "Ranks", Second)
    run = partial(states_of(embedder="ngram").advantage, RECORDS, lambda: ["a", "b", "ab"], **_accelerate.of_all(True))
    refused("rank 0: what the first one has is damaged", run)
    monkeypatch.setattr(Second, "first", ("head", ["actor_hidden", 4096, "torch.float32"]))  # only here images
    refused(r"states must be of one kind on all processes, got .*hidden.*'ngram'", run)
    monkeypatch.setattr(Second, "first", ("failed", ["ValueError", "no text"]))
    run = States(Settings.of({"method": "gigpo"})).advantage
    refused("rank 0: no text", run, RECORDS, list, **_accelerate.of_all(True))


def test_a_checkpoint_that_the_first_process_cannot_load_is_an_error_of_all(monkeypatch):
    """The others would wait for its answer."""

    class Stock:
        def _load_optimizer_and_scheduler(self, checkpoint):
            pass

    trainer = type("Trainer", (_accelerate.KeepsStates, Stock), {})()
    trainer._bipace, trainer.accelerator = states_of(), SimpleNamespace(is_main_process=False, num_processes=2)
    monkeypatch.setattr(_accelerate, "Ranks", Second)
    refused("rank 0: what the first one has is damaged", trainer._load_optimizer_and_scheduler, "checkpoint-1")


def test_a_memory_of_hidden_states_takes_no_n_grams(tmp_path):
    """embedder=auto may find other states than the run that saved it, and n-grams can have the width of a model's."""
    one, resumed, file = states_of(embedder="auto"), states_of(embedder="auto"), tmp_path / "bipace.json"
    one.advantage(RECORDS, list, hidden=torch.randn(3, 4096))
    one.save(file)
    resumed.load(file)
    with pytest.warns(RuntimeWarning, match=r"share=memory begins anew: .* of actor_hidden, and now of ngram"):
        resumed.advantage(RECORDS, lambda: ["a", "b", "ab"], why="none")
    assert len(resumed.memory) == 3  # and not its 4 rows


def test_a_state_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    one, file = states_of(), tmp_path / "bipace.json"
    one.advantage(RECORDS, list, hidden=torch.randn(3, 4))
    one.save(file)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def half(found, path):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", half)
    one.advantage(RECORDS, list, hidden=torch.randn(3, 4))
    refused("no space left", one.save, file, error=OSError)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_rewards_that_are_no_numbers_set_their_row_aside():
    rows = rows_with([[1, 1]] * 4, step_rewards=[0.5, None, "1", torch.tensor(1.0)])
    with pytest.warns(RuntimeWarning, match=r"infos\['rewards'\] must have one entry per turn .* row 1 has 0 for 1"):
        found = rows.fitted(States(Settings()))
    assert found.scores.isnan().all(1).tolist() == [False, True, True, False]
    assert np.isnan(found.extra["step_rewards"]).tolist() == [False, True, True, False]
    empty = rows_with(*TURNS, step_rewards=[[1.0, 2.0], 3.0, [0.5, 0.25, 1.0], None]).fitted(States(Settings()))
    assert empty.extra["step_rewards"] == [1.0, 2.0, 3.0, 1.75, 0.0, 0.0]  # a row without tokens is one record
    with pytest.raises(ValueError, match=r"infos\['rewards'\] must be numbers, but row 0 has \[None\]"):
        rows_with([[1, 1]] * 4, step_rewards=[[None]] * 4).fitted(States(Settings()))
    with pytest.raises(ValueError, match="must have one entry per turn"):  # padding fits nothing
        rows_with([[1, 1]] * 2, [True, False], step_rewards=[[1.0, 2.0], [1.0]]).fitted(States(Settings()))


def test_a_checkpoint_of_something_else_changes_nothing():
    states = States(Settings(method="bigpo", epsilon="follow"))
    own = {"embedder": "auto", "layer": -8}
    states.load_state_dict({**own, "epsilon": 0.07})
    for wrong, message in (
        ({"epsilon": 0.1}, "lacks embedder, layer"),
        ({**own, "epsilon": 7}, r"state\['epsilon'\] must be None or a number 0 or in"),
        ({**own, "epsilon": True}, "must be None or a number"),
        ({**own, "epsilon": 0.2, "controller": {"epsilon": 0.2}}, "must come from state_dict"),
    ):
        refused(message, states.load_state_dict, wrong)
        assert states.epsilon == 0.07 and states.radius.controller is None


def test_a_text_state_of_several_turns():
    records = {
        "group": torch.tensor([0, 0, 0, 0, 1, 0]), "trajectory": torch.tensor([0, 0, 0, 1, 2, 0]),
        "step": torch.tensor([2, 0, 1, 5, 1, 4]), "valid": torch.tensor([True, True, True, True, True, True]),
    }  # fmt: skip
    observations, actions = list("cabxye"), ["3", "1", "2", "?", "?", "?"]
    wanted = ["a\n> 1\nb\n> 2\nc", "a", "a\n> 1\nb", "x", "y", "c\n> 3\ne"]
    assert windows(records, observations, actions, 3) == wanted
    assert windows(records, observations, actions, 1) == observations
    records["valid"][1] = False
    assert windows(records, observations, actions, 3)[:3] == ["b\n> 2\nc", "a", "b"]

    # Three where a kernel value reads it.
    for gae, turns in (({}, 3), ({"embedder": "ngram"}, 3), ({"embedder": "identity"}, 1), ({"value": "cluster"}, 1)):
        assert Settings(method="gae", **gae).turns_of_text == turns
    for turns in (None, 2):
        assert Settings(method="bipace", embedder="ngram", text_turns=turns).turns_of_text == (turns or 1)
    for wrong in (0, True, 1.5):
        refused("text_turns must be an int of at least 1", Settings, text_turns=wrong)
    for unread in ({"method": "gigpo"}, {"value": "cluster"}, {"value": "group"}):  # observations count singly, or not
        refused("text_turns has no effect with these settings", Settings, text_turns=3, **unread)


OF_TRL = {"1.16.0+cu1": False, "1.0.0.post1": False, "1.17.0.dev0": True, "0.9": True, "main": True, None: True}
OF_VERL = {"0.8.9": True, "0.9.0": False, "0.9.1": False, "0.10.0": True}


@pytest.mark.parametrize(
    ("package", "version", "warned"),
    [*(("trl", *release) for release in OF_TRL.items()), *(("verl", *release) for release in OF_VERL.items())],
)
def test_a_release_that_was_not_run_is_one_warning_and_never_an_error(package, version, warned, monkeypatch):
    def of(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(_versions.importlib.metadata, "version", of)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_version(package)
        check_version(package)
    assert len(found) == warned
    ours = {"trl": "1.0.0 to ", "verl": f"0.9.0 to 0.9.1, but this is {version}"}[package]
    assert all(f"bipace_kernels.integrations was run with {package} {ours}" in str(w.message) for w in found)


def test_rows_of_one_rollout_with_rewards_of_their_own_are_warned_of():
    """As Trinity's StepWiseRewardWorkflow has them, whose last one alone counts."""
    rows = dataclasses.replace(rows_with([[1], [1]]), group=list("aa"), trajectory=[0, 0], place=[0, 1])
    rows = dataclasses.replace(rows, scores=torch.tensor([[3.0], [1.0]]))
    for _ in range(2):  # runs of one process
        with pytest.warns(RuntimeWarning, match=r"only that of its last row counts: .* in infos\['rewards'\]"):
            records = rows.records(States(Settings(method="gae", value="group")), Slow(), rows.scores)
        assert records["rewards"].tolist() == [0.0, 1.0]


def test_entries_that_only_rollouts_of_other_processes_give_are_missing_here():
    """Else a row's reward would be its own at its last turn on one process, and of its steps on another."""
    rows = rows_with([[1, 0, 1], [1, 0, 0]])
    assert rows.fitted(States(Settings())) is rows
    with pytest.warns(RuntimeWarning, match=r"infos\['rewards'\] must have one entry per turn of the model, but row 0"):
        found = rows.fitted(States(Settings()), ["step_rewards"])
    assert found.scores.isnan().all() and np.isnan(found.extra["step_rewards"]).all()
    refused("row 0 has 0 for 2 turns", rows.fitted, States(Settings(on_invalid="raise")), ["step_rewards"])
    rows = dataclasses.replace(rows, group=["a"] * 2, trajectory=[0, 1], place=[0] * 2)
    records = rows.records(States(Settings(value="group")), Slow(), rows.scores)
    assert records["truncated"].tolist() == [False] * 3  # the column that they have where one was cut off


@pytest.mark.parametrize("beyond", ["last", "ignore"])
def test_a_reward_beyond_those_of_steps_is_added_once_at_the_last_step_of_its_rollout(beyond):
    rows = rows_with([[1, 0, 1]] * 5, valid=[True] * 4 + [False],
                     step_rewards=[[0.25, 0.5], [0.0, 0.5], [0.0, 0.5], [1.0, 1.0], [7.0, 7.0]])  # fmt: skip
    scores = torch.zeros(5, 3)
    scores[:, 2] = torch.tensor([5.25, 5.25, 5.25, 2.0, 9.0])
    ids = {"group": list("aaaap"), "trajectory": [0, 0, 0, 1, 2], "place": [0, 1, 1, 0, 0]}
    rows = dataclasses.replace(rows, scores=scores, **ids)
    settings = Settings(method="gae", value="group", reward_beyond_steps=beyond)
    states = States(settings)
    with pytest.warns(RuntimeWarning, match="rewards hold up to 4 beyond their step_rewards"):
        records = rows.fitted(states).records(states, Slow(), scores)
    more = 4.0 if beyond == "last" else 0.0
    assert records["rewards"].tolist()[:8] == [0.25, 0.5, 0.0, 0.5 + more, 0.0, 0.5 + more, 1.0, 1.0]
    published = States(Settings(method="bipace"))  # its A_ep has R(τ)
    assert not published.beyond(torch.tensor([3.0]), torch.tensor([1.0])).any()
    assert not states.beyond(torch.ones(1), torch.tensor([1e300], dtype=torch.float64)).any()  # which is no reward


@pytest.mark.parametrize("share", ["batch", "memory", "group", None])  # None: a value of its own prompt alone
def test_what_a_batch_is_is_logged_and_few_prompts_are_a_warning(share):
    alone, value = share in ("group", None), None if share else "group"
    states = States(Settings(method="gae", value=value, share=share, step_norm="none" if alone else None), "bipace_")
    columns = {
        "group": torch.tensor([0, 0, 0, 1, 1, 7, 1]), "trajectory": torch.tensor([0, 0, 1, 2, 2, 9, 3]),
        "step": torch.tensor([0, 1, 0, 0, 1, 0, 0]), "rewards": torch.tensor([0.0, 1.0, 0.0, 0.0, 3.0, 0.0, math.nan]),
        "truncated": torch.tensor([True, True, False, True, False, True, True]), "valid": torch.arange(7) != 5,
        "action_key": torch.arange(7), "action_parsed": torch.arange(7) >= 0,
        "action_kind": 1 - (torch.arange(7) >= 5).int(),
    }  # fmt: skip
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            result, metrics = states.advantage(columns, list, hidden=torch.randn(7, 4))
    few = [str(w.message) for w in seen if "2 prompts (3 rollouts, 5 turns)" in str(w.message)]
    assert len(few) == (not alone) and ("or set bipace_share=memory" in "".join(few)) == (share == "batch")
    assert metrics["bipace/prompts"] == 2 and metrics["bipace/turns_per_rollout"] == pytest.approx(5 / 3)
    assert metrics["bipace/truncated_fraction"] == pytest.approx(1 / 3)
    # Also those that no turn has, as trainers take the mean of what they find in several batches.
    assert {kind: metrics[f"bipace/action_key/{kind}"] for kind in KINDS} == {**dict.fromkeys(KINDS, 0), KINDS[1]: 1}
    size = math.sqrt(float((result.advantage[:5].double() ** 2).mean()))
    assert metrics["bipace/advantage_rms"] == pytest.approx(size) if alone else size == pytest.approx(1.0)


def test_tokens_rewards_at_the_end_and_positions():
    turns = Turns.of(torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]))
    tokens, mask = turns.tokens(torch.arange(12).reshape(3, 4))
    assert [row[on].tolist() for row, on in zip(tokens, mask, strict=True)] == [[0, 1], [3], [], [8]]
    assert turns.on_last(torch.tensor([3.0, 5.0, 7.0])).tolist() == [0, 3, 5, 7]
    places = turns.positions(10)
    assert (places.column.tolist(), places.offsets.tolist()) == ([9, 12, 9, 9], [0, 2, 3, 4])
    assert turns.positions(torch.tensor([2, 5, 7])).column.tolist() == [1, 4, 4, 6]
    assert turns.counts.tolist() == [2, 1, 1]


bit = st.integers(0, 1)
masks = st.integers(0, 9).flatmap(lambda t: st.lists(st.lists(bit, min_size=t, max_size=t), min_size=1, max_size=4))


def by_loop(mask, starts=None):
    """Turns that a mask says, by a loop over its tokens."""
    turns = []
    for b, row in enumerate(mask):
        found, begin = [], None
        for t, written in enumerate([*row, 0]):
            edge = begin is not None and (not written or (starts is not None and starts[b][t]))
            if edge:
                found.append((begin, t))
                begin = None
            if written and begin is None:
                begin = t
        turns += [(b, i, *span) for i, span in enumerate(found or [(0, 0)])]
    return turns


@given(masks, st.randoms(use_true_random=False), st.booleans())
def test_turns_are_the_runs_of_the_mask_and_cut_where_starts_say_so(mask, random, cut):
    starts = [[random.randint(0, 1) for _ in row] for row in mask] if cut else None
    both = (rows and torch.tensor(rows, dtype=torch.int64).reshape(len(mask), -1) for rows in (mask, starts))
    turns = Turns.of(*both)
    columns = (turns.row, turns.step, turns.start, turns.stop)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == by_loop(mask, starts)
    assert turns.last.tolist() == [i + 1 == len(turns) or turns.row[i + 1] != turns.row[i] for i in range(len(turns))]


@given(masks)
def test_a_step_s_advantage_stands_on_its_tokens_alone(mask):
    mask = torch.tensor(mask, dtype=torch.int64).reshape(len(mask), -1)
    turns = Turns.of(mask)
    advantage = torch.arange(1.0, len(turns) + 1)
    wanted = torch.zeros(mask.shape)
    for value, b, start, stop in zip(advantage, turns.row, turns.start, turns.stop, strict=True):
        wanted[b, start:stop] = value
    assert torch.equal(turns.spread(advantage), wanted) and torch.equal(turns.spread(advantage) != 0, mask != 0)
