"""What environments log, by the turns of TRL's own tool loop: calls that fail, several in one turn, none."""

import itertools
import json
import math
import random
from collections import deque
from copy import deepcopy
from functools import partial
from threading import Lock

import numpy as np
import pytest
from refusals import refused

pytest.importorskip("trl", reason="TRL is not installed: make test-integrations")

import tiny_trl as tt
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from tool_turns import Scripted, Silent, Walk, Writing, answer, call, make, tokenizer
from trl import GRPOTrainer

import bipace_kernels as bk

NORTH, SOUTH = call("move", direction="north"), call("move", direction="south")
WRONG, UNKNOWN = call("move", way="north"), call("fly")
GO = [{"prompt": [{"role": "user", "content": "Go. "}]}]
TWO = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in ("Go. ", "Walk. ")]})


@pytest.fixture
def records(monkeypatch):
    """What bk.advantage() is given and returns, call by call."""
    seen, run = [], bk.advantage

    def advantage(**given):
        result = run(**given)
        seen.append({**given, "result": result})
        return result

    monkeypatch.setattr(bk, "advantage", advantage)
    return seen


def again(trainer):
    """Another batch of the same environments."""
    return trainer._generate_and_score_completions([deepcopy(GO[0]) for _ in trainer.scripts])


def one_batch(folder, scripts, environment=Walk, trains=True, **options):
    """One batch of four rollouts whose turns are these; no update."""
    data = options.pop("train_dataset", GO)
    trainer = make(folder, environment, per_device_train_batch_size=4, train_dataset=Dataset.from_list(data), **options)
    trainer.scripts = scripts
    trainer.model.train(trains)
    output = trainer._generate_and_score_completions([deepcopy(row) for row in data for _ in range(4 // len(data))])
    return trainer, output


def of_row(records, name, row):
    """Its entries, turn by turn."""
    kept = records["trajectory"] == row
    values = records[name] if isinstance(records[name], list) else records[name].tolist()
    return [value for value, keep in zip(values, kept.tolist(), strict=True) if keep]


def key(text):
    return int(bk.action_keys([text], mode="text")[0])


SCRIPTS = [
    [NORTH, WRONG, NORTH, answer("done")],  # a call that fails in the middle
    [WRONG, answer("done")],  # no call that worked
    [NORTH + SOUTH, NORTH, answer("done")],  # two calls in one turn
    [UNKNOWN, NORTH + WRONG, answer("so")],
]


class Sequences(Walk):
    """Logs that are no lists, and one array as observation, into which it writes."""

    def reset(self, **_):
        self.place, self.grid = 0, np.zeros(1, dtype=int)
        self.step_rewards, self.actions, self.observations = np.zeros(0), deque(), (self.grid,)
        return "at 0"

    def _log(self, direction):
        self.grid[:] = self.place
        self.step_rewards = np.append(self.step_rewards, self.place)
        self.actions.append(direction)
        self.observations += (self.grid,)


@pytest.mark.parametrize("environment", [Walk, Sequences])
def test_entries_go_to_the_turn_that_made_the_call(tmp_path, records, environment):
    trainer, output = one_batch(tmp_path, SCRIPTS, environment, num_iterations=2)
    (given,) = records
    wanted = [[1.0, 0.0, 2.0, 0.0], [0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    assert [of_row(given, "rewards", row) for row in range(4)] == wanted
    keys = [of_row(given, "action_key", row) for row in range(4)]
    wrong, unknown, nothing = (key('["move",{"way":"north"}]'), key('["fly",{}]'), key(""))
    assert keys == [
        [key("north"), wrong, key("north"), nothing],
        [wrong, nothing],
        [key("north\nsouth"), key("north"), nothing],
        [unknown, key("north"), nothing],
    ]
    assert trainer._metrics["train"]["bipace/invalid_row_fraction"] == [0.0]
    assert trainer._metrics["train"]["bipace/action_parse_rate"] == [1.0]
    assert output["advantages"].isfinite().all() and output["advantages"].any()


@pytest.mark.parametrize("environment", [Walk, Sequences])
def test_a_turn_answers_what_was_last_observed(tmp_path, records, environment):
    one_batch(tmp_path, SCRIPTS, environment, bipace_method="gigpo")
    found = [of_row(records[0], "observation", row) for row in range(4)]
    found = [[seen if isinstance(seen, str) else f"at {int(seen[0])}" for seen in row] for row in found]
    assert found == [
        ["at 0", "at 1", "at 1", "at 2"], ["at 0", "at 0"], ["at 0", "at 0", "at 1"], ["at 0", "at 0", "at 1"]
    ]  # fmt: skip


class Locked(Walk):
    """Observes what cannot be copied."""

    def _log(self, direction):
        super()._log(direction)
        self.observations[-1] = {"door": Lock()}


def test_observations_that_the_method_does_not_read_may_be_anything(tmp_path, records):
    one_batch(tmp_path, SCRIPTS, Locked, bipace_method="gae", bipace_value="step")
    assert of_row(records[0], "rewards", 0)[:3] == [1.0, 0.0, 2.0]


@pytest.mark.parametrize("gamma", [0.95, 0.5])
def test_a_masked_row_keeps_the_rewards_of_its_turns(tmp_path, records, gamma):
    """Discounted by γ of the method, also of one's own."""
    (tmp_path / "mine.py").write_text(f"import bipace_kernels as bk\nMINE = bk.Config.bipace(gamma={gamma})\n")
    cut = answer("no end").removesuffix("<|im_end|>")
    scripts = [[NORTH, WRONG, NORTH, cut], *SCRIPTS[1:]]
    options = {"bipace_embedder": "ngram", "bipace_method": f"{tmp_path}/mine.py:MINE"}
    _, output = one_batch(tmp_path, scripts, mask_truncated_completions=True, **options)
    assert not output["completion_mask"][0].any() and not output["advantages"][0].any()
    assert of_row(records[0], "rewards", 0) == pytest.approx([1.0 + gamma**2 * 2.0])
    assert of_row(records[0], "action_key", 0) == [key("north")]


class Rewriting(Walk):
    """Changes what it logged where it goes south."""

    def _log(self, direction):
        super()._log(direction)
        if direction == "south":
            self._change(self.step_rewards)


class Overlong(Rewriting):
    """What it says to the south is too long for TRL: no turn follows the call."""

    def move(self, direction: str) -> str:
        return super().move(direction) * (100 if direction == "south" else 1)

    move.__doc__ = Walk.move.__doc__


@pytest.mark.parametrize("base", [Rewriting, pytest.param(Overlong, marks=pytest.mark.skipif(
    Version(trl.__version__) < Version("1.2"), reason="TRL before 1.2 generates after any result"))])  # fmt: skip
@pytest.mark.parametrize("on_invalid", ["singleton", "raise"])
@pytest.mark.parametrize("change", [lambda self, log: log.clear(), lambda self, log: log.insert(0, log.pop()),
                                    lambda self, log: setattr(self, "step_rewards", log[-1:]),
                                    lambda self, log: setattr(self, "step_rewards", None)])  # fmt: skip
def test_a_log_that_fits_no_turns_sets_its_row_aside(tmp_path, records, change, on_invalid, base):
    done, so = answer("done"), answer("so")
    n = 2 if base is Overlong else 3  # turns of row 0; with two no row has a third, in whose course a change shows
    moves = {2: [NORTH + NORTH, so], 3: [NORTH, NORTH, so]}
    scripts = [[NORTH, SOUTH, done][:n], [NORTH, done], moves[n], [NORTH, so]]
    environment = type("Changing", (base,), {"_change": change})
    options = {"environment": environment, "bipace_embedder": "ngram", "bipace_on_invalid": on_invalid}
    message = f"step_rewards of row 0 does not match its {n} turns: entries were removed or changed"
    if on_invalid == "raise":
        refused(message, one_batch, tmp_path, scripts, **options)
        return
    with pytest.warns(RuntimeWarning, match=message):
        trainer, output = one_batch(tmp_path, scripts, **options)
    assert trainer._metrics["train"]["bipace/invalid_row_fraction"] == [pytest.approx(n / (2 * n + 4))]
    assert not output["advantages"][0].any() and output["advantages"][1].any()
    assert of_row(records[0], "rewards", 2) == {2: [3.0, 0.0], 3: [1.0, 2.0, 0.0]}[n]


@pytest.mark.parametrize("name", ["actions", "observations"])
def test_an_attribute_of_the_environment_that_no_call_adds_to_is_no_log(tmp_path, records, name):
    """Not even by the name of the log that holds an entry after reset()."""
    own = type("Own", (Silent,), {name: ("hot", "cold")})
    method = {"actions": "bipace", "observations": "gigpo"}[name]
    with pytest.warns(RuntimeWarning, match=f"Own.{name} has entries before the first turn"):
        one_batch(tmp_path, [[NORTH, answer("done")]] * 4, own, bipace_embedder="ngram", bipace_method=method)
    if name == "actions":
        assert of_row(records[0], "action_key", 0) == [key('["move",{"direction":"north"}]'), key("done")]
    else:
        assert "cold" not in of_row(records[0], "observation", 0)


class Begins(Walk):
    """Its log of rewards begins with these."""

    def __init__(self, *first):
        self.first = first

    def reset(self, **_):
        seen, self.step_rewards = super().reset(), [*self.first]
        return seen


def test_what_a_trainer_has_seen_of_a_class_is_not_what_the_next_one_sees(tmp_path, records):
    scripts = [[NORTH, NORTH, answer("done")]] * 4
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="Begins.step_rewards has entries before the first turn"):
            one_batch(tmp_path, scripts, partial(Begins, 0.5), bipace_method="gigpo")
        one_batch(tmp_path, scripts, Begins, bipace_method="gigpo")
    assert [of_row(given, "rewards", 0) for given in records] == [[0.0, 0.0, 1.0], [1.0, 2.0, 0.0]] * 2


@pytest.mark.skipif(Version(trl.__version__) < Version("1.9.0"), reason="TRL 1.0.0 takes one environment, no dict")
def test_environments_of_which_only_some_log(tmp_path, records):
    data = [{"prompt": [{"role": "user", "content": "Go. "}], "environment": name} for name in ("walk", "silent")]
    environments = {"walk": Walk, "silent": Silent}
    options = {"train_dataset": data, "num_generations": 2, "bipace_method": "gigpo"}
    one_batch(tmp_path, [[NORTH, answer("done")]] * 4, environment=environments, **options)
    (given,) = records
    assert [of_row(given, "rewards", row) for row in range(4)] == [[1.0, 0.0]] * 2 + [[0.0, 1.0]] * 2
    assert of_row(given, "observation", 0) == ["at 0", "at 1"]
    assert "Go." in of_row(given, "observation", 2)[0] and "at 1" in of_row(given, "observation", 2)[1]


class Kept(Walk):
    """Its lists are made once, and hold what earlier rollouts logged."""

    def __init__(self):
        self.step_rewards, self.observations, self.actions = [], [], []

    def reset(self, **_) -> str:
        self.place = 0
        self.observations.append("at 0")
        return "at 0"


class Late(Kept):
    """Logs no first observation."""

    def reset(self, **_) -> str:
        self.place = 0
        return "at 0"


class Recast(Kept):
    """Hands out another list of new numbers each time."""

    def __init__(self):
        super().__init__()
        self.logged = []

    step_rewards = property(lambda self: [float(str(r)) for r in self.logged], lambda self, given: None)

    def _log(self, direction):
        super()._log(direction)
        self.logged.append(float(self.place))


class Emptied(Kept):
    def reset(self, **_) -> str:
        for log in (self.step_rewards, self.observations, self.actions):
            log.clear()
        return super().reset()


class Greeted(Emptied):
    """Every other one logs two observations at first, of which the last counts."""

    made = itertools.count()

    def __init__(self):
        super().__init__()
        self.greetings = ["Hello."] * (next(self.made) % 2)

    def reset(self, **_) -> str:
        super().reset()
        self.observations[:0] = self.greetings
        return "at 0"


class Sometimes(Walk):
    """Logs no first observation in one rollout of the second batch."""

    resets = itertools.count()

    def reset(self, **_) -> str:
        super().reset()
        self.observations = ["at 0"] * (next(self.resets) % 12 != 4)
        return "at 0"


NO_CALL = [[answer("done")], [answer("so")]] * 2
FINGERPRINTS = ("rewards", "action_key", "action_parsed", "fingerprint", "episode_return")


@pytest.mark.parametrize("between", [SCRIPTS, NO_CALL])
@pytest.mark.parametrize("environment", [Kept, Late, Recast, Emptied, Greeted, Sometimes])
def test_what_earlier_rollouts_logged_is_no_part_of_this_one(tmp_path, records, environment, between):
    """TRL uses its environments again and again."""
    trainer, _ = one_batch(tmp_path, SCRIPTS, environment, bipace_embedder="ngram")
    for scripts in (between, SCRIPTS):
        trainer.scripts = scripts
        again(trainer)
    if environment is not Late:
        one_batch(tmp_path, SCRIPTS, Walk, bipace_embedder="ngram")
    assert all(torch.equal(given[name], records[0][name]) for given in records[2:] for name in FINGERPRINTS)
    assert of_row(records[2], "rewards", 0) == [1.0, 0.0, 2.0, 0.0]
    assert trainer._metrics["train"]["bipace/invalid_row_fraction"] == [0.0] * 3


def test_evaluation_uses_the_environments_too(tmp_path, records, monkeypatch):
    monkeypatch.setattr(Greeted, "made", itertools.repeat(0))
    trainer, _ = one_batch(tmp_path, SCRIPTS, Greeted, bipace_embedder="ngram")
    for environment in trainer.environments:
        environment.greetings = ["Hello."]
    trainer.model.eval()
    trainer.scripts = NO_CALL
    again(trainer)
    trainer.model.train()
    trainer.scripts = SCRIPTS
    again(trainer)
    assert len(records) == 2 and all(torch.equal(*(given[name] for given in records)) for name in FINGERPRINTS)


@pytest.mark.parametrize("environment", [Kept, Late, Emptied, Greeted])
def test_what_evaluations_logged_is_no_part_of_training(tmp_path, records, environment):
    """They come before it and in between, as another use of the environments, perhaps of a few."""
    options = {"bipace_embedder": "ngram", "num_generations_eval": 2}
    trainer, _ = one_batch(tmp_path, SCRIPTS, environment, trains=False, **options)
    few = SCRIPTS[: 2 if hasattr(trainer, "_environment_pool") else 4]  # older TRL takes no fewer than in training
    for trains, scripts in ((True, SCRIPTS), (True, NO_CALL), (False, few), (True, SCRIPTS)):
        trainer.model.train(trains)
        trainer.scripts = scripts
        again(trainer)
    one_batch(tmp_path, SCRIPTS, environment, bipace_embedder="ngram")
    assert all(torch.equal(given[name], records[3][name]) for given in records[::2] for name in FINGERPRINTS)


class Shared(Silent):
    """One list for all environments, by mistake."""

    step_rewards = []  # noqa: RUF012

    def _log(self, direction):
        self.step_rewards.append(1.0)


class Queue(Shared):
    step_rewards = deque()  # noqa: RUF012


class Copying(Shared):
    """Hands out copies of it."""

    inner = []  # noqa: RUF012
    step_rewards = property(lambda self: list(self.inner))

    def _log(self, direction):
        self.inner.append(1.0)


class Refilled(Kept):
    """Keeps what it logged, but for the last entry."""

    def reset(self, **_):
        for log in (self.step_rewards, self.actions):
            del log[:-1]
        return super().reset()


class Sticking(Walk):
    """Once cut off, always cut off."""

    truncated = np.False_

    def _log(self, direction):
        super()._log(direction)
        self.truncated |= direction == "south"


class Cut(Walk):
    """Ends of itself where it is not at home, whatever TRL's budget made of it."""

    def reset(self, **_) -> str:
        self.truncated = False
        return super().reset()

    def _log(self, direction):
        super()._log(direction)
        self.truncated = self.place == 0


@pytest.mark.parametrize("on_invalid", ["singleton", "raise"])
def test_truncated_that_stays_from_an_earlier_rollout_sets_its_row_aside(tmp_path, records, on_invalid):
    options = {"bipace_method": "gae", "bipace_value": "group", "bipace_on_invalid": on_invalid}
    trainer, _ = one_batch(tmp_path, SCRIPTS, Sticking, **options)
    message = "truncated of row 2 was True before its first turn"
    if on_invalid == "raise":
        refused(message, again, trainer)
        return
    with pytest.warns(RuntimeWarning, match=message):
        output = again(trainer)
    assert trainer._metrics["train"]["bipace/invalid_row_fraction"] == [0.0, pytest.approx(3 / 12)]
    assert not output["advantages"][2].any() and output["advantages"][0].any()


@pytest.mark.parametrize("one", [Shared, Queue, Sequences(), Cut()])
def test_what_several_rollouts_share_sets_their_rows_aside(tmp_path, records, one):
    """A list of the class, or an environment that is handed out again and again."""
    name = "truncated" if isinstance(one, Cut) else "step_rewards"
    scripts = [[NORTH, answer("so")], [SOUTH, answer("so")]] * 2
    environment = one if isinstance(one, type) else lambda: one
    with pytest.warns(RuntimeWarning, match=f"{name} of row 0 is that of several rollouts"):
        trainer, _ = one_batch(tmp_path, scripts, environment, bipace_method="gae", bipace_value="group")
    assert trainer._metrics["train"]["bipace/invalid_row_fraction"] == [1.0]


def test_one_list_that_is_handed_out_as_copies(tmp_path, records):
    with pytest.warns(RuntimeWarning, match="row 1 does not .* after its last turn: is the list one of several"):
        one_batch(tmp_path, SCRIPTS, Copying, bipace_embedder="ngram")  # as far as rollouts had ended


def test_a_log_stays_one_where_reset_leaves_entries_of_unknown_rollouts(tmp_path, records):
    """Only its rows are set aside, in every batch; it does not turn into an attribute that is not read."""
    trainer, _ = one_batch(tmp_path, SCRIPTS, Refilled, bipace_embedder="ngram")
    trainer.scripts = [[NORTH, answer("so")], SCRIPTS[1], *SCRIPTS[2:]]
    with pytest.warns(RuntimeWarning, match="row 0 .*: it has 1 before its first turn: empty it in reset"):
        again(trainer)
    assert [math.isnan(of_row(records[1], "rewards", row)[0]) for row in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("given", [1, "no"])
def test_truncated_that_is_no_bool_sets_its_row_aside(tmp_path, records, given):
    own = type("Own", (Walk,), {"truncated": given})
    with pytest.warns(RuntimeWarning, match=f"truncated of row 0 must be one bool, .* got {given!r}"):
        trainer, _ = one_batch(tmp_path, SCRIPTS, own, bipace_method="gae", bipace_value="group")
    assert trainer._metrics["train"]["bipace/invalid_row_fraction"] == [1.0]


@pytest.mark.parametrize("beyond", ["last", "ignore"])
def test_rewards_beyond_those_of_steps_count_at_the_last(tmp_path, records, beyond):
    """Of two reward functions, of which the steps know nothing; a third of the rows has no more than its steps."""
    rewards = [lambda environments, **_: [sum(e.step_rewards) for e in environments],
               lambda completions, **_: [5.0, 0.0, -2.0, 0.5]]  # fmt: skip
    options = {"bipace_method": "gae", "bipace_value": "group", "bipace_reward_beyond_steps": beyond}
    with pytest.warns(RuntimeWarning, match=f"up to 5 beyond .*bipace_reward_beyond_steps={beyond}"):
        one_batch(tmp_path, SCRIPTS, reward_funcs=rewards, **options)
    more = [5.0, 0.0, -2.0, 0.5] if beyond == "last" else [0.0] * 4
    wanted = [[1.0, 0.0, 2.0, more[0]], [0.0, 0.0], [1.0, 1.0, more[2]], [0.0, 1.0, more[3]]]
    assert [of_row(records[0], "rewards", row) for row in range(4)] == wanted


@pytest.mark.parametrize("environment", [Walk, Silent])
def test_a_call_that_cannot_be_read_is_no_action(tmp_path, records, environment):
    """It ends the rollout, as an answer would, and TRL's list of calls knows nothing of it.

    An empty answer is one where actions are logged."""
    cut = answer('<tool_call>\n{"name": "move", "arguments": {"direc')
    nested = answer("<tool_call>\n" + "[" * 20 + "</tool_call>")
    scripts = [[NORTH, cut], [nested], [NORTH, answer("done")], [answer("so" if environment is Silent else "")]]
    trainer, _ = one_batch(tmp_path, scripts, environment, bipace_embedder="ngram")
    found = [of_row(records[0], "action_parsed", row) for row in range(4)]
    assert found == [[True, False], [False], [True, True], [True]]
    assert trainer._metrics["train"]["bipace/action_parse_rate"] == [pytest.approx(4 / 6)]


@pytest.mark.parametrize("environment", [Walk, Silent])
def test_a_reward_function_may_change_messages(tmp_path, records, environment):
    def reward(completions, **_):
        for messages in completions:
            messages[0].pop("tool_calls", None)
            messages.pop()
        return [1.0] * len(completions)

    for options in ({}, {"reward_funcs": [reward]}):
        one_batch(tmp_path, SCRIPTS, environment, bipace_embedder="ngram", **options)
    assert all(torch.equal(*(given[name] for given in records)) for name in ("action_key", "action_parsed"))


def test_keys_of_tool_calls_are_name_and_arguments_in_order(tmp_path, records):
    def go(direction: str, steps: int = 1) -> str:
        """
        Goes.

        Args:
            direction: north or south.
            steps: how many.
        """
        return f"{direction} {steps}"

    def raw(text):
        return f"<tool_call>\n{text}\n</tool_call><|im_end|>"

    scripts = [
        [raw('{"name": "go", "arguments": {"direction": "north", "steps": 2}}'), answer("done")],
        ["<think>\n</think>\n\n" + raw('{"name":"go","arguments":{"steps":2,"direction":"north"}}'), answer("done")],
        [raw('{"name": "go", "arguments": {"direction": "north", "steps": 3}}'), answer("<action>wait</action>")],
        [answer("no idea")],
    ]
    trainer, _ = one_batch(tmp_path, scripts, environment=None, tools=[go], bipace_embedder="ngram",
                           reward_funcs=[lambda completions, **_: [0.0, 1.0, 2.0, 3.0]])  # fmt: skip
    (given,) = records
    found = [of_row(given, "action_key", row) for row in range(4)]
    wanted = key(json.dumps(["go", {"direction": "north", "steps": 2}], separators=(",", ":")))
    assert found[0] == found[1] == [wanted, key("done")]
    tag = int(bk.action_keys(["<action>wait</action>"])[0])
    assert found[2] == [key('["go",{"direction":"north","steps":3}]'), tag] and given["action_parsed"].all()
    metrics = trainer._metrics["train"]
    shares = {name: metrics[f"bipace/action_key/{name}"] for name in ("tool_call", "action_tag", "text")}
    wanted = {"tool_call": 3 / 7, "action_tag": 1 / 7, "text": 3 / 7}
    assert shares == {name: [pytest.approx(share)] for name, share in wanted.items()}


def test_actions_that_cannot_be_told_apart_are_warned_of(tmp_path):
    trainer = tt.make_trainer(tmp_path, max_steps=1)
    with pytest.warns(RuntimeWarning, match="0% of the responses hold an action that was recognized"):
        trainer.train()
    assert trainer.state.log_history[0]["bipace/action_key/first_n"] == 1.0


class Logging(Scripted):
    """Keeps what environments logged, for tiny_trl.by_hand(): of a last turn without a call no reward and no action."""

    def given(self, inputs):
        logged = [vars(environment) for environment in self.environments]
        if "step_rewards" not in logged[0]:
            return inputs
        more = {"step_rewards": [0.0], "actions": [""], "observations": []}
        return [row | {name: [*row[name], *last] for name, last in more.items()} for row in logged]


OWN = {"on_invalid": "singleton", "duplicates": "once"}
GAE = {"bipace_method": "gae", "bipace_value": "cluster"}


@pytest.mark.parametrize(("environment", "options", "config"), [
    (Walk, {"bipace_embedder": "actor_hidden"}, bk.Config.bipace(**OWN)),
    (Walk, GAE, bk.Config.gae("cluster", **OWN)),
    (Cut, GAE, bk.Config.gae("cluster", **OWN)),
    (Silent, {"bipace_action_key_mode": "text"}, bk.Config.bipace(**OWN)),
])  # fmt: skip
def test_advantages_are_those_of_what_environments_log(tmp_path, monkeypatch, environment, options, config):
    """Answers at once, after calls, and rollouts that end with a call; only the environment says what was cut off."""
    monkeypatch.setattr(tt, "TOKENIZER", tokenizer())
    monkeypatch.setattr(tt, "TABLE", bk.token_bytes(tokenizer()))
    trainer = make(tmp_path, environment, cls=Logging, train_dataset=TWO, **options)
    rng = random.Random(0)
    trainer.scripts = [
        [rng.choice([NORTH, SOUTH]) for _ in range(turns - 1)] + [NORTH if turns == 4 else answer("done")]
        for turns in (1, 2, 3, 4, 1, 3, 2, 4)
    ]
    trainer.train()
    assert len(trainer.batches) == 2
    for batch in trainer.batches:
        (wanted,) = tt.by_hand(batch, config=config, mode="text" if environment is Silent else "action_tag")
        assert torch.equal(batch["output"]["advantages"], wanted)
    assert environment is not Cut or {row["truncated"] for row in trainer.batches[0]["inputs"]} == {True, False}


class Hostile(Late):
    """Lists that are never emptied, calls that fail before or after they log, entries that vanish or are no numbers."""

    luck = random.Random(1)

    def _log(self, direction):
        chance = self.luck.random()
        if chance < 0.1:
            raise RuntimeError("no way")
        super()._log(direction)
        self.truncated = chance > 0.97
        if chance < 0.2:
            raise ValueError("too late")
        if chance < 0.23:
            self.step_rewards.pop()
            self.observations.clear()
        elif chance < 0.26:
            self.step_rewards[-1] = "many"
        elif chance < 0.29:
            self.actions += ["again", None]


class Drawn(GRPOTrainer):
    """Turns of every kind, whatever TRL asks for."""

    luck = random.Random(2)
    cut = '<tool_call>\n{"name": "move", "arguments": {"direc'
    kinds = (
        NORTH, SOUTH, NORTH + SOUTH, NORTH + NORTH + WRONG, WRONG, UNKNOWN, NORTH + cut, answer("done"), answer(cut),
        answer(""), answer("<tool_call>\n" + '{"a": [' * 9 + "\n</tool_call>"), call("move", direction={"to": [["x"]]}),
        "no end", call("move", direction="north " * 300),
    )  # fmt: skip

    def _generate_single_turn(self, prompt_ids, *_, **__):
        texts = [self.luck.choice(self.kinds) for _ in prompt_ids]
        texts = [text + "<|im_end|>" if text.endswith("</tool_call>\n") else text for text in texts]
        return [self.processing_class(text)["input_ids"][: self.max_completion_length] for text in texts], None


def test_generation_of_a_subclass_is_watched(tmp_path, records):
    names = ("_generate", "_generate_single_turn")  # those of TRL, which know nothing of the adapter
    own = type("Own", (Scripted,), {name: getattr(Writing, name) for name in names})
    one_batch(tmp_path, SCRIPTS, cls=own, bipace_method="gigpo")
    assert of_row(records[0], "rewards", 0) == [1.0, 0.0, 2.0, 0.0]


@pytest.mark.slow
def test_two_hundred_updates_with_a_hostile_environment(tmp_path, monkeypatch, records):
    """Finite losses, and every rollout is in its batch: with its turns, or set aside and counted."""
    monkeypatch.setattr(tt, "make_model", partial(tt.make_model, num_hidden_layers=2, hidden_size=16))
    rewards = [lambda environments, **_: [None if e.place < -1 else float(e.place) for e in environments]]
    options = {"max_steps": 200, "per_device_train_batch_size": 4, "num_generations": 2, "bipace_layer": -2}
    options |= {"reward_funcs": rewards, "train_dataset": TWO, "bipace_method": "gae", "max_completion_length": 160}
    trainer = make(tmp_path, Hostile, type("Wild", (tt.BiPACEGRPOTrainer, Drawn), {}), **options)
    with pytest.warns(RuntimeWarning, match="such rows are set aside"):
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == len(records) == 200
    assert torch.tensor([[log["loss"], log["grad_norm"]] for log in logs]).isfinite().all()
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    aside = 0
    for log, given in zip(logs, records, strict=True):
        advantage = given["result"].advantage
        assert given["trajectory"].unique().tolist() == list(range(4)) and advantage.isfinite().all()
        bad = given["rewards"].isnan() | given["episode_return"].isnan()
        assert log["bipace/invalid_row_fraction"] == pytest.approx(float(bad.double().mean()))
        assert not advantage[bad].any()
        aside += int(bad.sum())
    assert 0 < aside < sum(len(given["rewards"]) for given in records) / 2
