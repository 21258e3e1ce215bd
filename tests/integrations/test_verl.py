"""verl with BiPACE: its plugin, its configuration, and the v0 driver's compute_advantage() on a DataProto."""

import logging
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bipace_kernels.integrations import _turns
from bipace_kernels.integrations.verl import driver_v0, plugin
from bipace_kernels.integrations.verl.estimator import HIDDEN, NAME, Bipace, estimate, settings_of
from marks import slow
from paper_runs import RUNS
from paths import program
from refusals import refused
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import get_trainer_cls
from verl_stand_ins import Words, config, default, of, run_of

import bipace_kernels as bk

SEARCH = "hydra.searchpath=[pkg://bipace_kernels.integrations.verl.config]"
MEGATRON, ONE = ("actor_rollout_ref.actor.strategy", "megatron"), ("actor_rollout_ref.rollout.n", 1)
IDS = {"group": [1, 1, 1, 1, 0, 0, 0], "trajectory": [2, 2, 3, 3, 0, 1, 1], "step": [0, 1, 0, 1, 0, 0, 1]}
TERMINAL = [0, 1.0, 0, 0.0, 0.5, 0, -1.0]


def run(code, env):
    return program(sys.executable, "-W", "ignore", "-c", code, env=env, timeout=120).stdout


def test_verl_loads_the_plugin_by_itself_and_nothing_early(installed):
    out = run(
        "import sys, verl\n"
        "assert 'bipace_kernels.integrations.verl.plugin' in sys.modules\n"
        "ours = [m for m in sys.modules if m.startswith('bipace_kernels.integrations.verl.')]\n"
        "theirs = {'verl.trainer.ppo.core_algos', 'verl.workers.engine', 'verl.trainer.ppo.v1'} & set(sys.modules)\n"
        "from verl.trainer.ppo.core_algos import get_adv_estimator_fn\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "from verl.workers.engine import EngineRegistry\n"
        "print(len(ours), theirs, get_adv_estimator_fn('bipace').__name__)\n"
        "for mode in ('sync', 'colocate_async', 'separate_async'):\n"
        "    print(get_trainer_cls(mode).__mro__[1].__module__, get_trainer_cls(mode).__mro__[3].__name__)\n"
        "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)\n",
        installed,
    ).splitlines()
    assert out == [
        "1 set() estimate",
        *(
            f"bipace_kernels.integrations.verl.trainer_v1 PPOTrainer{m}"
            for m in ("Sync", "ColocateAsync", "SeparateAsync")
        ),
        "FSDPEngineKeepingStates",
    ]


@pytest.mark.parametrize("first", ["trainer_v1", slow("engine"), slow("driver_v0")])
def test_our_files_may_be_imported_before_verl_s(installed, first):
    """As a file with a trainer of one's own imports trainer_v1: that imports verl, whose import joins ours to it."""
    out = run(
        "import warnings\n"
        "warnings.filterwarnings('error', 'bipace_kernels could not patch')\n"
        f"import bipace_kernels.integrations.verl.{first}\n"
        "from verl.trainer.ppo import ray_trainer\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "from verl.workers.engine import EngineRegistry\n"
        "print(get_trainer_cls('sync').__module__, EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)\n"
        "print(ray_trainer.compute_advantage.__wrapped__.__module__, ray_trainer.RayPPOTrainer.__mro__[1].__module__)\n"
        "print(hasattr(ray_trainer.compute_advantage.__wrapped__, '__wrapped__'))\n",
        installed,
    ).splitlines()
    assert out == [
        "bipace_kernels.integrations.verl.trainer_v1 FSDPEngineKeepingStates",
        "verl.trainer.ppo.ray_trainer bipace_kernels.integrations.verl.driver_v0",
        "False",
    ]


def test_a_release_without_a_part_still_trains(monkeypatch):
    def missing(name):
        raise ImportError("cannot import name 'register_adv_est'")

    monkeypatch.setattr(plugin.importlib, "import_module", missing)
    with pytest.warns(RuntimeWarning, match=r"could not patch verl\.trainer\.ppo\.core_algos: .* docs/verl\.md"):
        plugin.load("verl.trainer.ppo.core_algos", "ours")


@pytest.mark.parametrize("name", RUNS)
def test_the_paper_s_runs_are_configurations(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*is not available")  # Hydra's, of a path in SEARCH
        cfg = config(SEARCH, f"+bipace={name}")
    settings, (*_, size, _, layer, epsilon) = settings_of(cfg.algorithm), RUNS[name]
    assert (cfg.actor_rollout_ref.rollout.n, settings.layer, settings.epsilon) == (size, layer, epsilon)
    assert cfg.algorithm.adv_estimator == "bipace"
    assert (settings.method, settings.estimator) == ("bipace", "q_style")
    assert (settings.gamma, settings.step_weight) == (0.95, 1.0)
    assert (settings.embedder, settings.action_key_mode, settings.n_action_tokens) == ("actor_hidden", "action_tag", 8)


@pytest.mark.parametrize("before", [["+algorithm.bipace.method=bigpo"], [SEARCH, "+bipace=alfworld_7b"]])
def test_two_pluses_set_a_key_with_and_without_a_configuration(before):
    algorithm = config(*before, "++algorithm.bipace.epsilon=0.2", "++algorithm.bipace.step_weight=0.5").algorithm
    assert (settings_of(algorithm).epsilon, settings_of(algorithm).step_weight) == (0.2, 0.5)


@pytest.mark.parametrize(("changes", "settings", "message"), [
    ([], {"eps": 0.1}, r"algorithm\.bipace\.eps is not a setting of BiPACE; the settings are method, "),
    ([], {"method": "ppo"}, r"algorithm\.bipace\.method must be one of"),
    ([MEGATRON], {"embedder": "actor_hidden"}, r"megatron gives none.* algorithm\.bipace\.embedder=auto.*=ngram"),
    ([ONE], {"method": "grpo"}, r"actor_rollout_ref\.rollout\.n must be at least 2 .* got 1"),
    ([("trainer.use_v1", True)], {"method": "gae", "cluster_on": "workers"},
     r"algorithm\.bipace\.cluster_on must be driver for method=gae with embedder=auto: workers cluster hidden"),
    ([("trainer.use_v1", True)], {"embedder": "ngram", "cluster_on": "workers"}, "must be driver for method=bipace"),
    ([], {"epsilon": "follow", "cluster_on": "workers"},
     "cluster_on=workers leaves states on the workers, but epsilon=follow"),
])  # fmt: skip
def test_settings_say_what_is_wrong_by_verl_s_names(changes, settings, message):
    refused(message, of, changes, **settings)


def test_gamma_and_lambda_are_bipace_s_own_then_the_trainer_s_then_the_paper_s(tmp_path):
    mine = "import bipace_kernels as bk\nMINE = bk.Config.gae('group', gae_lambda=0.2, gamma=0.5)\n"
    (tmp_path / "mine.py").write_text(mine)
    of_mine = partial(of, method=f"{tmp_path}/mine.py:MINE")
    assert of_mine().settings.config().gae_lambda == 0.2
    # Given ones count, the paper's too.
    found = of_mine(), of_mine([("algorithm.gamma", 0.95)]), of_mine(gamma=0.95)
    assert [one.settings.config().gamma for one in found] == [0.5, 0.95, 0.95]
    own = [("algorithm.gamma", 0.9)]
    assert settings_of(default().algorithm).config().gamma == of().settings.config().gamma == 0.95
    assert of(own).settings.gamma == 0.9 and of(own, gamma=1.0).settings.gamma == 1.0
    own = [("algorithm.lam", 0.9)]
    assert of(method="gae").settings.config().gae_lambda == bk.Config.gae().gae_lambda
    assert of(own, method="gae").settings.config().gae_lambda == 0.9
    assert of_mine(own).settings.config().gae_lambda == 0.9
    assert of(own, method="gae", gae_lambda=0.3).settings.config().gae_lambda == 0.3
    assert of(own).settings.gae_lambda is None
    assert settings_of(config("algorithm.lam=0.9").algorithm).config().gae_lambda == 0.9  # without a method, gae


def test_states_are_asked_for_where_a_forward_gives_them():
    assert of(layer=-12).request == {"layer": -12, "early_exit": False}
    assert of(method="gae", cluster_on=None).request == {"layer": -8, "early_exit": False}  # null: not given
    for none in ({"embedder": "ngram"}, {"method": "gigpo"}, {"method": "grpo"}, {"method": "gae", "value": "group"}):
        assert of(**none).request == {}
    bypass = [("algorithm.rollout_correction.bypass_mode", True)]
    assert of(bypass).request == {}  # auto: n-grams
    assert of(bypass, embedder="actor_hidden").request["early_exit"] is True


class Driver:
    """What compute_advantage() needs of RayPPOTrainer."""

    states_of = driver_v0.Trainer.states_of
    global_steps, bipace_masks = 1, {}

    def __init__(self, bipace, hidden):
        self.bipace, self.bipace_hidden, self.tokenizer = bipace, hidden, Words()


def batch(rows, **extra):
    """A DataProto of rows (uid, prompt, [(response, written by the model)], reward), as RayPPOTrainer has it."""
    p = max(len(prompt) for _, prompt, _, _ in rows)
    t = max(sum(len(text) for text, _ in parts) for _, _, parts, _ in rows)
    b = len(rows)
    widths = {"responses": t, "response_mask": t, "prompts": p, "attention_mask": p + t}
    tensors = {name: torch.zeros(b, width, dtype=torch.int64) for name, width in widths.items()}
    tensors["token_level_scores"] = torch.zeros(b, t)
    for i, (_, prompt, parts, reward) in enumerate(rows):
        tensors["prompts"][i, p - len(prompt) :] = torch.tensor(list(prompt))
        tensors["attention_mask"][i, p - len(prompt) : p] = 1
        at = 0
        for text, written in parts:
            tensors["responses"][i, at : at + len(text)] = torch.tensor(list(text))
            tensors["response_mask"][i, at : at + len(text)] = int(written)
            at += len(text)
        tensors["attention_mask"][i, p : p + at] = 1
        tensors["token_level_scores"][i, at - 1] = reward
    tensors["token_level_rewards"] = tensors["token_level_scores"].clone()
    fields = {"uid": np.array([row[0] for row in rows], dtype=object)}
    for name, values in extra.items():
        fields[name] = np.empty(b, dtype=object)
        fields[name][:] = values
    return DataProto.from_dict(tensors=tensors, non_tensors=fields)


MULTI = [  # two prompts, two rollouts each; tool results between the turns
    ("b", b"go", [(b"<action>left</action>", 1), (b"wall", 0), (b"<action>up</action>", 1)], 1.0),
    ("b", b"go", [(b"<action>left</action>", 1), (b"wall", 0), (b"<action>down</action>", 1), (b"door", 0)], 0.0),
    ("a", b"run", [(b"<action>up</action>", 1)], 0.5),
    ("a", b"run", [(b"hm", 1), (b"what", 0), (b"<action>up</action>", 1)], -1.0),
]
OBSERVATION = ["go", "wall", "go", "wall", "run", "run", "what"]
KEYS = [b"left", b"up", b"left", b"down", b"up", None, b"up"]
BYTES = bk.TokenBytes(torch.arange(257), torch.arange(256, dtype=torch.uint8))  # of Words


@pytest.fixture
def advantages(monkeypatch):
    """verl's compute_advantage(), as the driver calls it: advantages and returns [B, T]."""
    monkeypatch.setattr(_turns, "_byte_table", lambda tokenizer, size: BYTES)

    def call(bipace, data, hidden=None):
        if hidden is not None:
            data.non_tensor_batch[driver_v0.ROW] = np.arange(len(data), dtype=object)
        monkeypatch.setattr(driver_v0, "_trainer", Driver(bipace, dict(enumerate(hidden or ()))))
        out = ray_trainer.compute_advantage(data, "bipace", gamma=1.0, lam=1.0, num_repeat=2, config=None)
        return out.batch["advantages"], out.batch["returns"]

    return call


def records(rewards, config, **given):
    """advantage() on the records of MULTI, typed by hand."""
    return bk.advantage(rewards=rewards, config=config, **IDS, **given)


def recognized():
    keys, parsed = bk.action_keys([f"<action>{k.decode()}</action>" if k else "hm" for k in KEYS])
    return {"action_key": keys, "action_parsed": parsed}


def spread(values, mask):
    """Values of turns, in row order, on their tokens."""
    out, turn = torch.zeros(mask.shape), -1
    for i, row in enumerate(mask.tolist()):
        for t, on in enumerate(row):
            turn += bool(on and (t == 0 or not row[t - 1]))
            out[i, t] = values[turn] if on else 0.0
    return out


def test_multi_turn_rows_with_hidden_states(advantages):
    torch.manual_seed(0)
    hidden = [torch.randn(n, 16) for n in (2, 2, 1, 2)]
    hidden[1][0] = hidden[0][0]  # the first turns of "b" share a state
    bipace, data = of(), batch(MULTI)
    mask = data.batch["response_mask"]
    got, returns = advantages(bipace, data, hidden)
    keys = recognized()["action_key"]
    result = records(TERMINAL, bk.Config.bipace(0.10), fingerprint=torch.cat(hidden), action_key=keys)
    assert torch.equal(got, spread(result.advantage, mask)) and torch.equal(returns, spread(result.returns, mask))
    assert bipace.metrics["bipace/embedder/actor_hidden"] == 1.0 and bipace.metrics["bipace/epsilon"] == 0.10
    assert bipace.metrics["bipace/action_parse_rate"] == pytest.approx(6 / 7)
    assert bipace.metrics["bipace/cluster_count"] == result.metrics()["bipace/cluster_count"] == 6


@pytest.mark.parametrize("method", ["gigpo", "hgpo", "bigpo", "grpo"])
def test_presets_read_their_states_off_the_tokens(advantages, method):
    bipace, data = of(method=method, embedder="identity", epsilon=0.0), batch(MULTI)
    got, _ = advantages(bipace, data)
    config = getattr(bk.Config, method)
    if method == "bigpo":
        result = records(TERMINAL, config(0.0), fingerprint=bk.embedders.Identity().embed(OBSERVATION))
    else:
        result = records(TERMINAL, config(), observation=OBSERVATION)
    assert torch.equal(got, spread(result.advantage, data.batch["response_mask"]))


def test_observations_of_the_agent_loop_come_first(advantages):
    seen = [["x", "y"], ["x", "z"], "x", ["x", "y"]]
    got, _ = advantages(of(method="gigpo"), data := batch(MULTI, observation=seen))
    result = records(TERMINAL, bk.Config.gigpo(), observation=["x", "y", "x", "z", "x", "x", "y"])
    assert torch.equal(got, spread(result.advantage, data.batch["response_mask"]))


def test_auto_without_states_takes_ngrams_with_their_own_radius_and_says_so_once(advantages):
    bipace = of(epsilon=0.01, ngram_epsilon=0.6)
    with pytest.warns(RuntimeWarning, match=r"n-grams of the observations, with ngram_epsilon = 0\.6"):
        got, _ = advantages(bipace, data := batch(MULTI))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        advantages(bipace, batch(MULTI))
    assert bipace.metrics["bipace/embedder/ngram"] == 1.0 and bipace.metrics["bipace/epsilon"] == 0.6
    keys = recognized()["action_key"]
    fingerprint = bk.embedders.Ngram().embed(OBSERVATION)
    result = records(TERMINAL, bk.Config.bipace(0.6), fingerprint=fingerprint, action_key=keys)
    assert torch.equal(got, spread(result.advantage, data.batch["response_mask"]))
    with pytest.raises(ValueError, match=r"embedder=actor_hidden has no hidden states: .*embedder=auto"):
        advantages(of(embedder="actor_hidden"), batch(MULTI))


@pytest.mark.parametrize("name", ["step_rewards", "observation"])
def test_a_row_whose_entries_fit_no_turns_is_set_aside(advantages, name):
    """As without the row, with one warning; an error where no row fits, or on_invalid asks for one."""
    rewards, rooms = [[0.25, 0.5], [0.0, -0.5], 0.5, [0.125, 1.0]], [["a", "b"], ["a", "c"], "a", ["a", "d"]]
    entries = {"step_rewards": rewards, "observation": rooms}
    short = {**entries, name: [*entries[name][:3], entries[name][3][:1]]}
    bipace = of(method="gigpo")
    with pytest.warns(RuntimeWarning, match=rf"\['{name}'\] must have one entry per turn.*row 3 has 1 for 2 turns"):
        got, _ = advantages(bipace, data := batch(MULTI, **short))
    assert bipace.metrics["bipace/invalid_row_fraction"] == pytest.approx(2 / 7)
    gone = data.batch["token_level_scores"].double()
    gone[3] = torch.nan
    whole = batch(MULTI, **entries)
    whole.batch["token_level_scores"] = whole.batch["token_level_rewards"] = gone
    want, _ = advantages(of(method="gigpo"), whole)
    assert torch.equal(got, want) and not got[3].any() and got[:3].any()
    refused("row 3 has 1 for 2", advantages, of(method="gigpo", on_invalid="raise"), batch(MULTI, **short))
    refused("must have one entry per turn", advantages, of(method="gigpo"), batch(MULTI, **{name: [["x"] * 9] * 4}))


@pytest.mark.parametrize("value", ["kernel", "cluster", "group"])
@pytest.mark.parametrize("stepwise", [False, True])
def test_gae_reads_rewards_kl_and_what_was_cut_off(advantages, value, stepwise):
    """r_t with each turn's own KL; what R(τ) has beyond rewards of steps, 0.25, 0.5, 0, −2.125, joins the last step."""
    torch.manual_seed(2)
    hidden = [torch.randn(n, 16) for n in (2, 2, 1, 2)] if value == "kernel" else None
    cut = [True, None, False, True]
    extra = {"step_rewards": [[0.25, 0.5], [0.0, -0.5], 0.5, [0.125, 1.0]]} if stepwise else {}
    data = batch(MULTI, truncated=cut, **extra)
    mask = data.batch["response_mask"]
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - torch.rand(mask.shape) * mask
    bipace = of(method="gae", value=value, gae_lambda=0.7, episode_weight=0.25)
    got, returns = advantages(bipace, data, hidden)
    difference = data.batch["token_level_rewards"].double() - data.batch["token_level_scores"].double()
    turn = spread(torch.arange(1.0, 8), mask)
    each = torch.tensor([float(difference[turn == k].sum()) for k in range(1, 8)], dtype=torch.float64)
    given = [0.25, 0.5 + 0.25, 0.0, -0.5 + 0.5, 0.5, 0.125, 1.0 - 2.125] if stepwise else TERMINAL
    total = torch.stack([1 + each[:2].sum()] * 2 + [each[2:4].sum()] * 2 + [0.5 + each[4]] + [each[5:].sum() - 1] * 2)
    state = {
        "kernel": {"fingerprint": hidden and torch.cat(hidden), **recognized()},
        "cluster": {"observation": OBSERVATION},
        "group": {},
    }
    result = records(
        torch.tensor(given, dtype=torch.float64) + each, bk.Config.gae(value, gae_lambda=0.7, episode_weight=0.25),
        episode_return=total, truncated=[True, True, False, False, False, True, True], **state[value],
    )  # fmt: skip
    torch.testing.assert_close(got, spread(result.advantage, mask), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, spread(result.returns, mask), atol=1e-6, rtol=0)
    assert "bipace/epsilon" not in bipace.metrics and ("bipace/value_r2" in bipace.metrics) == (value == "cluster")
    with pytest.raises(ValueError, match=r"truncated must be one bool per row, .* got 'yes' in row 1"):
        advantages(bipace, batch(MULTI, truncated=[None, "yes", False, True]), hidden)


STEPS = [  # a row per step: every row of a rollout holds the rollout's reward
    ("a", b"s0", [(b"<action>x</action>", 1)], 1.0),
    ("a", b"s1", [(b"<action>y</action>", 1)], 1.0),
    ("a", b"s0", [(b"<action>y</action>", 1)], 0.0),
    ("a", b"s1", [(b"<action>y</action>", 1)], 0.0),
    ("a", b"s2", [(b"<action>x</action>", 1)], 0.0),
]
ROLLOUT, STEP = ["u", "u", "v", "v", "v"], [0, 1, 0, 1, 2]


def by_steps(order):
    """STEPS in an order, and advantages [5] in the order of STEPS."""
    data = batch([STEPS[i] for i in order], traj_uid=[ROLLOUT[i] for i in order], step=[STEP[i] for i in order])
    return data, torch.argsort(torch.tensor(order))


def test_a_row_per_step_shuffled_with_padding_and_copies(advantages):
    settings = {"embedder": "identity", "epsilon": 0.0}
    keys, _ = bk.action_keys([f"<action>{c}</action>" for c in "xyyyx"])
    states = bk.embedders.Identity().embed(["s0", "s1", "s0", "s1", "s2"])
    records = ([0] * 5, [0, 0, 1, 1, 1], [0, 1.0, 0, 0, 0])
    result = bk.advantage(*records, step=STEP, fingerprint=states, action_key=keys, config=bk.Config.bipace(0.0))
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 1, 2]):
        data, back = by_steps(order)
        got, _ = advantages(of(**settings), data)
        assert torch.equal(got[back][:, 0], result.advantage)
    # Copies of rows, as from a trainer that fills up its batch, count once; rows of padding count nowhere.
    gae = bk.advantage(*records, step=STEP, config=bk.Config.gae("group"))
    for given, wanted in (({"method": "gae", "value": "group"}, gae), (settings, result)):
        got, _ = advantages(of(**given), by_steps([3, 0, 4, 1, 2, 3, 0])[0])
        assert torch.equal(got[[1, 3, 4, 0, 2], 0], wanted.advantage) and torch.equal(got[5:], got[:2])
    data, _ = by_steps([0, 1, 2, 3, 4, 0])
    data.batch["response_mask"][5] = 0
    bipace = of(**settings)
    for uid, prompts in (("paddle", 2), (f"pad{7:032x}", 1)):  # an id of one's own that begins so is no padding
        data.non_tensor_batch["uid"][5], data.non_tensor_batch["traj_uid"][5] = uid, "p"
        got, _ = advantages(bipace, data)
        assert bipace.metrics["bipace/prompts"] == prompts
    assert torch.equal(got[:5, 0], result.advantage) and not got[5].any()
    assert bipace.metrics["bipace/singleton_row_fraction"] == result.metrics()["bipace/singleton_row_fraction"]


def test_a_failure_leaves_the_batch_as_it_was(advantages):
    data = batch(MULTI)
    before = {name: value.clone() for name, value in data.batch.items()}
    with pytest.raises(ValueError, match="one for each turn of 4 rows, but 4 rows were given, and row 2 has 2 for 1"):
        advantages(of(), data, [torch.randn(2, 16)] * 4)
    assert set(data.batch.keys()) == set(before)
    assert all(torch.equal(data.batch[name], value) for name, value in before.items())


def test_states_follow_their_rows_and_those_of_another_batch_are_refused(advantages):
    torch.manual_seed(0)
    hidden = [torch.randn(n, 16) for n in (2, 2, 1, 2)]
    wanted, _ = advantages(of(), batch(MULTI), hidden)
    data = batch(MULTI)
    data.non_tensor_batch[driver_v0.ROW] = np.arange(4, dtype=object)
    order = torch.tensor([2, 0, 3, 1])
    data.reorder(order)
    driver_v0._trainer.bipace_hidden = dict(enumerate(hidden))
    got = ray_trainer.compute_advantage(data, "bipace", num_repeat=2, config=None).batch["advantages"]
    assert torch.equal(got, wanted[order])
    for numbers in ([0, 1, 2, 9], None):
        data = batch(MULTI)
        if numbers:
            data.non_tensor_batch[driver_v0.ROW] = np.array(numbers, dtype=object)
        driver_v0._trainer.bipace_hidden = dict(enumerate(hidden))
        with pytest.raises(ValueError, match=rf"{HIDDEN} holds states of 4 rows, but the batch has 4 and their row"):
            ray_trainer.compute_advantage(data, "bipace", config=None)


@pytest.mark.parametrize("name", ["uid", "response_mask"])
def test_fields_that_are_missing(advantages, name):
    data = batch(MULTI)
    (data.batch if name in data.batch else data.non_tensor_batch).pop(name)
    refused(f"{name} is missing in the batch, and algorithm.adv_estimator=bipace needs", advantages, of(), data)


@pytest.mark.parametrize("way", ["tapped", "early exit", "grpo"])
def test_the_v1_trainer_asks_for_states_beside_the_log_probs_and_sends_none_on(monkeypatch, way):
    """Its mixin before a trainer that notes what it is asked; test_verl_runs.py has whole runs."""
    pytest.importorskip("transfer_queue")
    from bipace_kernels.integrations.verl import trainer_v1

    asked, data = [], batch(MULTI)

    class Stock:
        def _compute_old_log_prob(self, batch, metrics):
            asked.append(dict(batch.extra_info))
            metrics["asked"] = 1.0
            return SimpleNamespace(extra_info=dict(batch.extra_info), fields=["old_log_probs", HIDDEN])

        def _compute_advantage(self, batch, metrics):
            if self.bipace is not None:
                self.found = estimate(data.batch["token_level_rewards"], data.batch["response_mask"])
            return batch

    made = object.__new__(type("Own", (trainer_v1.Trainer, Stock), {}))
    early = way == "early exit"
    made.config = run_of(
        [("algorithm.rollout_correction.bypass_mode", early)], **({"embedder": "actor_hidden"} if early else {})
    )
    made.bipace, made.tokenizer = None if way == "grpo" else Bipace(made.config), Words()
    made.actor_rollout_wg = SimpleNamespace(compute_log_prob=lambda batch: asked.append(dict(batch.extra_info)))
    given, metrics = SimpleNamespace(extra_info={}, fields=None), {}
    done = made._compute_old_log_prob(given, metrics)
    request = {} if way == "grpo" else {NAME: {"layer": -8, "early_exit": early}}
    more = {"calculate_entropy": False, "compute_loss": False, "temperature": 1.0} if early else {}
    assert asked == [request | more] * (1 + early)  # verl then takes the rollout's log-probs, without a forward
    assert NAME not in given.extra_info
    assert way == "grpo" or (NAME not in done.extra_info and done.fields == ["old_log_probs"])
    refused("", made._compute_old_log_prob, given, None, error=TypeError)
    assert NAME not in given.extra_info
    rows = driver_v0.rows_of(data, [torch.randn(n, 16) for n in (2, 2, 1, 2)])
    monkeypatch.setattr(trainer_v1, "rows_of", lambda _: rows)
    monkeypatch.setattr(_turns, "_byte_table", lambda tokenizer, size: BYTES)
    assert made._compute_advantage(given, metrics) is given
    assert (metrics.get("bipace/prompts") == 2) == (way != "grpo") == hasattr(made, "found")


def test_workers_cluster_no_states_of_rollouts_that_are_set_aside(monkeypatch):
    pytest.importorskip("transfer_queue")
    from bipace_kernels.integrations.verl import trainer_v1

    rows, sent = driver_v0.rows_of(batch(MULTI), None), []
    rows.scores[2] = float("nan")
    stock = type("Stock", (), {"_compute_old_log_prob": lambda self, batch, metrics: batch})
    made = object.__new__(type("Own", (trainer_v1.Trainer, stock), {}))
    made.bipace = Bipace(run_of([("trainer.use_v1", True)], method="bipace", epsilon=0.2, cluster_on="workers"))
    monkeypatch.setattr(trainer_v1, "rows_of", lambda _: rows)
    monkeypatch.setattr(trainer_v1.tq, "kv_batch_put", lambda **given: sent.append(given["fields"]))
    keys = {"keys": ["a_0_0", "a_1_0", "b_0_0", "b_1_0"], "partition_id": "train", "fields": None, "extra_info": {}}
    made._compute_old_log_prob(type("Meta", (SimpleNamespace,), {"__len__": lambda self: 4})(**keys), {})
    assert sent[0][trainer_v1.IDS][:, 3].tolist() == [1, 1, 0, 1]


def test_a_trainer_that_hands_nothing_over_and_other_estimators_are_verl_s_own(monkeypatch):
    with pytest.raises(RuntimeError, match=r"use one of trainer\.v1\.trainer_mode, .*trainer_v1\.Trainer before your"):
        estimate(torch.zeros(1, 1), torch.ones(1, 1), config=None, index=None)
    stock = ray_trainer.compute_advantage.__wrapped__
    got = ray_trainer.compute_advantage(batch(MULTI), "grpo", num_repeat=2, config=None)
    wanted = stock(batch(MULTI), "grpo", num_repeat=2, config=None)
    assert torch.equal(got.batch["advantages"], wanted.batch["advantages"])


def test_a_chosen_epsilon_goes_with_the_checkpoint(advantages, tmp_path, caplog):
    torch.manual_seed(0)
    hidden = [torch.randn(n, 4) for n in (2, 2, 1, 2)]
    bipace = of(epsilon="auto")
    with caplog.at_level(logging.INFO):
        advantages(bipace, batch(MULTI), hidden)
    assert "algorithm.bipace.epsilon=auto chose" in caplog.text
    chosen = bk.choose_epsilon(torch.cat(hidden), **IDS)
    assert bipace.metrics["bipace/epsilon"] == chosen.epsilon
    bipace.states.save(tmp_path / "seven" / "bipace.json")
    later = of(epsilon="auto")
    later.states.load(tmp_path / "none" / "bipace.json")  # a run from the beginning
    assert later.states.epsilon is None
    later.states.load(tmp_path / "seven" / "bipace.json")
    assert later.states.epsilon == chosen.epsilon
    for other in (of(epsilon=0.3), of(epsilon="auto", layer=-3)):  # given, or of other states
        other.states.load(tmp_path / "seven" / "bipace.json")
        assert other.states.epsilon != chosen.epsilon


@pytest.fixture(params=[(version, mode) for version in ("v0", "v1") for mode in ("auto", "resume_path")], ids="-".join)
def trainer(tmp_path, request):
    """Trainers with these settings whose workers save nothing, past all but the methods of their checkpoints."""
    version, mode = request.param
    changes = [
        ("trainer.default_local_dir", str(tmp_path)), ("trainer.resume_mode", mode),
        ("trainer.resume_from_path", str(tmp_path / "global_step_3") if mode == "resume_path" else None),
    ]  # fmt: skip

    class Nothing:
        def state_dict(self):
            return {}

        def __len__(self):
            return 10

        def __getattr__(self, name):
            return lambda *args, **kwargs: None

    def make(**settings):
        trainer = object.__new__(RayPPOTrainer if version == "v0" else get_trainer_cls("sync"))
        trainer.config = run_of(changes, **settings)
        trainer.bipace, trainer.global_steps, trainer.use_critic = Bipace(trainer.config), 3, False
        trainer.actor_rollout_wg = trainer.train_dataloader = trainer.checkpoint_callback = Nothing()
        trainer.trainer_mode = "sync"
        return trainer

    return make


def test_of_two_trainers_in_a_process_the_one_that_trains_has_its_own_settings(trainer, monkeypatch):
    monkeypatch.setattr(driver_v0, "_trainer", None)
    first, second = trainer(method="gae"), trainer(method="gigpo")
    for each in (first, second, first):
        each._load_checkpoint()
        assert driver_v0._trainer is (each if isinstance(each, driver_v0.Trainer) else None)


def test_verl_s_own_checkpoints_carry_the_batches_before(trainer, advantages, tmp_path):
    """A run that resumes has the bits of the one that went on."""
    torch.manual_seed(0)
    before, after = ([torch.randn(n, 16) for n in (2, 2, 1, 2)] for _ in range(2))
    settings = {"method": "gae", "share": "memory", "memory_rows": 10, "kernel_same": 0.5}
    saved, resumed, fresh = (trainer(**settings) for _ in range(3))
    advantages(saved.bipace, batch(MULTI), before)
    saved._save_checkpoint()
    went_on, _ = advantages(saved.bipace, batch(MULTI), after)
    resumed.global_steps = 0
    resumed._load_checkpoint()
    kept = sorted(path.name for path in (tmp_path / "global_step_3").glob("bipace*"))
    assert resumed.global_steps == 3 and kept == ["bipace.json", "bipace_memory.pt"]
    again, alone = (advantages(each.bipace, batch(MULTI), after)[0] for each in (resumed, fresh))
    assert torch.equal(again, went_on) and not torch.equal(alone, went_on)
    memory, config = bk.ValueMemory(10), bk.Config.gae(share="memory", kernel_same=0.5)
    records(TERMINAL, config, fingerprint=torch.cat(before), memory=memory, **recognized())
    result = records(TERMINAL, config, fingerprint=torch.cat(after), memory=memory, **recognized())
    assert torch.equal(again, spread(result.advantage, batch(MULTI).batch["response_mask"]))
