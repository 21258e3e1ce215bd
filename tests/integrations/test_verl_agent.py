"""BiPACE in verl-agent: with the fork where BIPACE_VERL_AGENT names a checkout of it, else with the stand-in alone."""

import contextlib
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bipace_kernels.integrations import _states
from bipace_kernels.integrations.verl_agent import Settings, attach, launch as launcher
from bipace_kernels.integrations.verl_agent.batch import HIDDEN, HIDDEN_IDS, IDS, mark, write_advantages
from bipace_kernels.integrations.verl_agent.capture import log_prob
from omegaconf import OmegaConf
from paper_runs import RUNS
from paths import program
from refusals import refused
from trained_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl_agent_harness import FORK, REAL, Workers, config_of, module_of, ray_trainer, rollout, tiny_model, trainer_of

import bipace_kernels as bk

PACKAGE = "bipace_kernels.integrations.verl_agent"
SEEDS = range(5)
ON = Settings(bisim_grouping=True, bisim_embedder="identity", bisim_eps=0.0)
KEYS = {"bisim_grouping": True, "bisim_embedder": "identity"}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>", pad_token="<|endoftext|>")


@pytest.fixture
def ready(tokenizer):
    """Batches as compute_advantage() gets them, with a penalty that differs between the rows of a trajectory."""

    def make(seed, settings, hgpo=False, penalty=0.1, copies=0):
        rng = np.random.default_rng(seed)
        batch = rollout(seed, tokenizer)
        core = module_of(hgpo).core_hgpo if hgpo else ray_trainer.core_gigpo
        batch.batch["step_rewards"] = core.compute_step_discounted_returns(batch=batch, gamma=0.95)
        mark(batch, settings)
        if copies:
            batch = DataProto.concat([batch, batch.select_idxs(rng.choice(len(batch), copies, replace=False))])
        batch.batch["response_mask"] = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :]
        invalid = penalty * torch.tensor(1 - batch.non_tensor_batch["is_action_valid"].astype(np.float32))
        score = torch.zeros(batch.batch["responses"].shape)
        score[:, 0] = torch.tensor(batch.non_tensor_batch["episode_rewards"].astype(np.float32)) - invalid
        batch.batch["token_level_rewards"], batch.batch["token_level_scores"] = score, score.clone()
        batch.batch["step_rewards"] = batch.batch["step_rewards"] - invalid
        if not hgpo:
            batch.reorder(torch.tensor(rng.permutation(len(batch))))
        return batch

    return make


def clone(batch):
    return batch.select_idxs(np.arange(len(batch)))


def own_advantages(batch, config):
    """verl-agent's function on the rows of the batch that are no copies; [N, T] with each copy given its row's."""
    hgpo = config.algorithm.adv_estimator == "hgpo"
    names = ("mode", "length_weight_alpha", "base_group") if hgpo else ()
    hgpo_own = {f"hgpo_{name}": config.algorithm.hgpo[name] for name in names}
    out = module_of(hgpo).compute_advantage(
        clone(batch), adv_estimator=config.algorithm.adv_estimator, gamma=config.algorithm.gamma,
        step_advantage_w=config.algorithm.gigpo.step_advantage_w, gigpo_mode=config.algorithm.gigpo.mode,
        history_length=config.env.history_length, **hgpo_own,
    )  # fmt: skip
    return out.batch["advantages"]


def settings_of(config):
    settings = Settings.of(config)
    assert settings is not None
    return settings


def originals(batch):
    """The rows that are no copies of earlier ones."""
    ids = batch.batch[IDS].tolist()
    return [i for i, row in enumerate(ids) if row not in ids[:i]]


def to_rows(batch, first, values):
    """[N, T] of the batch: each copy has the value of its row among the first."""
    ids = batch.batch[IDS].tolist()
    wanted = dict(zip([tuple(ids[i]) for i in first], values.tolist(), strict=True))
    return torch.tensor([wanted[tuple(row)] for row in ids])[:, None] * batch.batch["response_mask"]


def episode_term(group, score):
    """verl-agent's: every row counts, and no σ."""
    config = bk.Config.grpo(episode_norm="none", episode_scope="step", lone_trajectory="raw")
    each = torch.arange(len(group))
    return bk.advantage(group, each, None, returns=score, episode_return=score, config=config).advantage


@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
@pytest.mark.parametrize("seed", SEEDS)
def test_identity_at_epsilon_0_is_verl_agent_s_gigpo(ready, tmp_path, mode, seed):
    config = config_of(
        tmp_path, f"algorithm.gigpo.mode={mode}", "algorithm.gigpo.step_advantage_w=0.7",
        "algorithm.gigpo.bisim_grouping=True", "algorithm.gigpo.bisim_embedder=identity",
        "algorithm.gigpo.bisim_eps=0", "algorithm.gigpo.bisim_duplicates=count",
    )  # fmt: skip
    batch = ready(seed, settings_of(config), copies=seed)
    wanted, fields = own_advantages(batch, config), batch.non_tensor_batch
    if seed % 2:  # images, of which verl-agent makes an array of objects [N, 2, 3]
        rooms = [np.full((2, 3), int(room[-1]), np.uint8) for room in fields["anchor_obs"]]
        fields["anchor_obs"] = np.array(rooms, dtype=object)
    write_advantages(batch, settings_of(config))
    torch.testing.assert_close(batch.batch["advantages"], wanted, atol=2e-6, rtol=0)
    assert torch.equal(batch.batch["returns"], batch.batch["advantages"])


@pytest.mark.parametrize(("mode", "base"), list(itertools.product(["mean_norm", "mean_std_norm"], ["False", "True"])))
@pytest.mark.parametrize("seed", SEEDS)
def test_identity_is_verl_agent_s_hgpo(ready, tmp_path, mode, base, seed):
    config = config_of(
        tmp_path, f"algorithm.hgpo.mode={mode}", f"algorithm.hgpo.base_group={base}",
        "algorithm.hgpo.length_weight_alpha=0.5",
        "algorithm.gigpo.bisim_grouping=True", f"actor_rollout_ref.actor.use_invalid_action_penalty={base == 'False'}",
        hgpo=True,
    )  # fmt: skip
    batch = ready(seed, settings_of(config), hgpo=True, penalty=0.0 if base == "True" else 0.1, copies=seed)
    first = originals(batch)
    wanted = to_rows(batch, first, own_advantages(batch.select_idxs(first), config)[:, 0])
    write_advantages(batch, settings_of(config))
    torch.testing.assert_close(batch.batch["advantages"], wanted, atol=2e-6, rtol=0)


def test_off_means_that_nothing_is_touched(tmp_path, tokenizer):
    """The same function objects, and the same fit(); null counts as not given."""
    nulls = [f"algorithm.gigpo.{key}=null" for key in ("bipace_episode_scope", "bisim_duplicates", "cacb_enabled")]
    config = config_of(tmp_path, *nulls)
    assert Settings.of(config) is None
    trainer = trainer_of(config, tokenizer, rollout(0, tokenizer))

    def functions():
        return ray_trainer.compute_advantage, ray_trainer.core_gigpo.compute_step_discounted_returns

    seen, fit = [], ray_trainer.RayPPOTrainer.fit

    def update(batch):
        seen.append((*functions(), list(batch.batch.keys())))
        return DataProto(meta_info={"metrics": {}})

    trainer.actor_rollout_wg.update_actor = update
    before = functions()
    attach(type(trainer), Settings.of(config))
    assert type(trainer).fit is fit
    trainer.fit()
    assert seen[0][:2] == before and not [key for key in seen[0][2] if "bipace" in key]


@pytest.mark.parametrize("estimator", ["q_style", "counterfactual"])
@pytest.mark.parametrize("key_mode", ["action_tag", "first_n"])
def test_pace_over_n_grams_is_the_estimator_s_on_the_same_records(ready, tokenizer, estimator, key_mode):
    settings = Settings(
        bisim_grouping=True, bisim_embedder="ngram", cacb_enabled=True, cacb_estimator=estimator,
        cacb_action_key_mode=key_mode, cacb_n_action_tokens=3,
    )  # fmt: skip
    batch = ready(1, settings, penalty=0.0)
    group, trajectory, step = batch.batch[IDS].unbind(1)
    how = {"mask": batch.batch["response_mask"], "mode": key_mode, "n": 3, "token_bytes": bk.token_bytes(tokenizer)}
    keys, parsed = bk.action_keys(batch.batch["responses"], **how)
    wanted = bk.advantage(
        group, trajectory, None, step=step, returns=batch.batch["step_rewards"],
        episode_return=batch.batch["token_level_rewards"].sum(-1), action_key=keys,
        action_parsed=parsed if key_mode == "action_tag" else None,
        fingerprint=bk.ngram_fingerprint(list(batch.non_tensor_batch["anchor_obs"])),
        config=bk.Config.bipace(
            0.25, {"q_style": "q_style", "counterfactual": "diff_peer"}[estimator], episode_norm="none",
            episode_scope="step", lone_trajectory="raw",
        ),
    )  # fmt: skip
    metrics = write_advantages(batch, settings, tokenizer)
    got = batch.batch["advantages"]
    torch.testing.assert_close(got, bk.to_tokens(wanted.advantage, batch.batch["response_mask"]), atol=2e-6, rtol=0)
    value = wanted.value_r2()
    assert metrics == pytest.approx(
        {**wanted.metrics(), "bipace/embedder/ngram": 1.0, "bipace/epsilon": 0.25, "bipace/value_r2": value.r2,
         "bipace/value_r2_coverage": value.coverage, "bipace/prompts": len(group.unique()),
         "bipace/turns_per_rollout": len(group) / len(trajectory.unique())}, abs=2e-6)  # fmt: skip
    assert metrics.get("bipace/action_parse_rate", 0.0) > 0.5 or key_mode == "first_n"
    assert not [key for key in set(batch.batch.keys()) if "bipace" in key]


@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_mean_and_sigma_over_trajectories(ready, tmp_path, mode):
    """A long one weighs no more; against loops, with copies, each row's own penalty, and a trajectory set aside."""
    keys = {"mode": mode, "bipace_episode_scope": "trajectory", "step_advantage_w": 0.0, **KEYS}
    settings = settings_of(config_of(tmp_path, *(f"algorithm.gigpo.{k}={v}" for k, v in keys.items())))
    batch = ready(3, settings, copies=5)
    ids, score = batch.batch[IDS].tolist(), batch.batch["token_level_rewards"].sum(-1).tolist()
    bad = ids[0][1]
    batch.batch["token_level_rewards"][[i for i, row in enumerate(ids) if row[1] == bad]] = torch.nan
    begins = {row[1]: score[i] for i, row in enumerate(ids) if row[2] == min(r[2] for r in ids if r[1] == row[1])}
    wanted = []
    for (g, t, _), own in zip(ids, score, strict=True):
        others = [begins[u] for u in {row[1] for row in ids if row[0] == g and row[1] != bad}]
        sigma = np.std(others, ddof=1) + 1e-6 if mode == "mean_std_norm" else 1.0
        wanted.append((own - np.mean(others)) / sigma if t != bad else 0.0)
    for scope, same in (("trajectory", True), ("step", False)):
        data = clone(batch)
        write_advantages(data, replace(settings, bipace_episode_scope=scope))
        full = torch.tensor(wanted, dtype=torch.float32)[:, None] * data.batch["response_mask"]
        assert torch.allclose(data.batch["advantages"], full, atol=4e-6, rtol=0) is same


GAE = {
    "kernel": ({"bipace_kernel_time": 0, "bipace_kernel_noise": 1.0}, {"kernel_time": None, "kernel_noise": 1.0}),
    "cluster": ({"bipace_shrinkage": 1.0, "bipace_episode_weight": 0.5}, {"shrinkage": 1.0, "episode_weight": 0.5}),
    "group": ({"bipace_step_norm": "group", "bipace_gae_lambda": 0.9}, {"step_norm": "group", "gae_lambda": 0.9}),
}


@pytest.mark.parametrize("given", ["False", [False], 0])
def test_truncated_that_is_no_bool(ready, tokenizer, tmp_path, given):
    keys = {"bipace_method": "gae", "bipace_value": "group"}
    settings = settings_of(config_of(tmp_path, *[f"algorithm.gigpo.{k}={v}" for k, v in keys.items()]))
    batch = ready(7, settings)
    batch.non_tensor_batch["truncated"] = np.array([None] * len(batch), dtype=object)
    batch.non_tensor_batch["truncated"][2] = given
    refused("truncated must be one bool per row, True if cut off, got", write_advantages, batch, settings, tokenizer)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("value", GAE)
def test_gae_is_the_estimator_s_on_the_same_records(ready, tokenizer, tmp_path, value, cut):
    """r_t by hand: the environment's reward, the penalty, the KL in the reward; copies of rows have theirs."""
    keys, changes = GAE[value]
    keys = {"bipace_method": "gae", "bipace_value": value, "bisim_embedder": "ngram", "step_advantage_w": 0.7, **keys}
    overrides = [f"algorithm.gigpo.{k}={v}" for k, v in keys.items()]
    settings = settings_of(config_of(tmp_path, "algorithm.gamma=0.95", *overrides))
    batch = ready(7, settings, copies=5)
    first = originals(batch)
    batch.batch["token_level_rewards"] -= 0.01 * torch.rand(len(batch), 1) * batch.batch["response_mask"]
    fields = batch.non_tensor_batch
    if cut:
        fields["truncated"] = (batch.batch[IDS][:, 1] % 2 == 0).numpy().astype(object)
    group, trajectory, step = batch.batch[IDS][first].unbind(1)
    with_kl, without = (batch.batch[f"token_level_{name}"].double().sum(1) for name in ("rewards", "scores"))
    penalty = 0.1 * ~fields["is_action_valid"].astype(bool)
    rewards = (torch.from_numpy(fields["rewards"].astype(float) - penalty) + with_kl - without)[first]
    anchors = [fields["anchor_obs"][i] for i in first]
    written = batch.batch["responses"][first], batch.batch["response_mask"][first]
    keys, parsed = bk.action_keys(written[0], mask=written[1], token_bytes=bk.token_bytes(tokenizer))
    states = {
        "kernel": {"fingerprint": bk.ngram_fingerprint(anchors), "action_key": keys, "action_parsed": parsed},
        "cluster": {"observation": anchors},
        "group": {},
    }
    term = bk.advantage(
        group, trajectory, rewards, step=step, truncated=[cut and t % 2 == 0 for t in trajectory.tolist()],
        **states[value], config=bk.Config.gae(value, embedder="ngram", **changes),
    )  # fmt: skip
    episode = episode_term(group, batch.batch["token_level_rewards"].sum(-1)[first])
    total = changes.get("episode_weight", 0.0) * episode + 0.7 * term.step_advantage
    wanted = to_rows(batch, first, total)
    metrics = write_advantages(batch, settings, tokenizer)
    torch.testing.assert_close(batch.batch["advantages"], wanted, atol=2e-6, rtol=0)
    share = "bipace/value_explained_share"
    assert metrics[share] == pytest.approx(term.metrics()[share], abs=1e-6)
    every = trajectory.unique()
    assert metrics["bipace/truncated_fraction"] == (pytest.approx(float((every % 2 == 0).float().mean())) if cut else 0)
    assert "bipace/epsilon" not in metrics and ("bipace/embedder/ngram" in metrics) == (value == "kernel")
    assert not [key for key in set(batch.batch.keys()) if "bipace" in key]


@pytest.mark.parametrize(
    "made", ["gigpo(step_weight=3.0)", "hgpo(base_group=True)", "gae('cluster', episode_weight=0.5)"]
)
def test_a_method_of_one_s_own_gives_its_advantages_where_rows_have_their_trajectory_s_score(ready, tmp_path, made):
    """Its episode term is over trajectories, and HGPO's result is the whole."""
    (tmp_path / "mine.py").write_text(f"import bipace_kernels as bk\nMINE = bk.Config.{made}\n")
    method = f"algorithm.gigpo.bipace_method='{tmp_path}/mine.py:MINE'"
    settings = settings_of(config_of(tmp_path, method, "actor_rollout_ref.actor.use_invalid_action_penalty=False"))
    assert settings.config().step_weight == (3.0 if "step_weight" in made else 1.0)
    batch = ready(11, settings, penalty=0.0, copies=5)
    first, fields = originals(batch), batch.non_tensor_batch
    group, trajectory, step = batch.batch[IDS][first].unbind(1)
    wanted = bk.advantage(
        group, trajectory, fields["rewards"].astype(float)[first], step=step,
        episode_return=batch.batch["token_level_rewards"].sum(-1)[first],
        observation=[fields["anchor_obs"][i] for i in first], config=replace(settings.config(), on_invalid="raise"),
    )  # fmt: skip
    want, states = to_rows(batch, first, wanted.advantage), settings.states()
    assert write_advantages(batch, settings, states=states)["bipace/method/mine.py:MINE"] == 1.0
    assert states.state_dict()["method"] == f"{tmp_path}/mine.py:MINE"  # of checkpoints
    torch.testing.assert_close(batch.batch["advantages"], want, atol=2e-6, rtol=2e-6)


def test_given_keys_count_beside_a_method_of_one_s_own(tmp_path):
    made = "import bipace_kernels as bk\nMINE = bk.Config.bigpo(0.3, gamma=0.5)\nWHOLE = bk.Config.hgpo()\n"
    (tmp_path / "mine.py").write_text(made)
    keys = f"algorithm.gigpo.bipace_method='{tmp_path}/mine.py:MINE'", "algorithm.gamma=0.95"
    more = [], ["algorithm.gigpo.bisim_eps=0.2"]
    found = [settings_of(config_of(tmp_path, *keys, *own)).config() for own in more]
    assert [(one.epsilon, one.gamma) for one in found] == [(0.3, 0.95), (0.2, 0.95)]
    given = keys[0].replace("MINE", "WHOLE"), "algorithm.gigpo.bipace_episode_scope=trajectory"
    refused("bipace_episode_scope has no effect on HGPO's", settings_of, config_of(tmp_path, *given))


KEPT = {
    "bipace_memory.pt": ("bipace_method=gae", "bipace_share=memory", "bipace_memory_rows=20", "bisim_layer=-2"),
    "bipace.json": ("bisim_grouping=True", "bisim_eps=follow", "bisim_layer=-2"),
}  # fmt: skip


@pytest.mark.parametrize("file", KEPT)
def test_what_a_run_keeps_goes_with_verl_agent_s_checkpoints(tmp_path, tokenizer, monkeypatch, file):
    """fit() resumes from what the trainer's own functions saved, and has the bits of the run that went on."""
    monkeypatch.setattr(_states, "choose_epsilon", lambda *_, **__: SimpleNamespace(epsilon=0.02, reason="far off"))
    overrides = [*(f"algorithm.gigpo.{key}" for key in KEPT[file]), f"trainer.default_local_dir={tmp_path}"]

    class Nothing:  # of the fork: what it saves besides, in workers and of its data
        state_dict = dict

        def __init__(self, rows=()):
            self.rows = rows

        def __iter__(self):
            return iter(self.rows)

        def load_state_dict(self, state):
            pass

    def make(seed, **where):
        config = config_of(tmp_path, *overrides)
        trainer = trainer_of(config, tokenizer, rollout(seed, tokenizer))
        config.trainer.update(where)
        trainer.train_dataloader, trainer.use_critic = Nothing(getattr(trainer, "train_dataloader", ())), False
        for name in ("save_checkpoint", "load_checkpoint"):
            setattr(trainer.actor_rollout_wg, name, lambda *_, **__: None)
        attach(type(trainer), settings_of(config))
        return trainer

    def fitted(trainer):
        np.random.seed(0)  # noqa: NPY002  # what the fork chooses copies with
        trainer.fit()
        trainer.global_steps = 9
        trainer._save_checkpoint()
        kept = (tmp_path / "global_step_9" / "bipace.json").read_text()
        return trainer.actor_rollout_wg.seen.batch["advantages"], kept

    first = make(10)
    fitted(first)
    first.global_steps = 3
    first._save_checkpoint()
    assert (tmp_path / "global_step_3" / file).exists()
    first.traj_collector.multi_turn_loop = lambda *_, **__: rollout(11, tokenizer)
    (went_on, kept), (fresh, anew) = fitted(first), fitted(make(11))
    resumed, again = fitted(make(11, resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_3")))
    assert torch.equal(resumed, went_on) and again == kept
    assert anew != kept if file == "bipace.json" else not torch.equal(fresh, went_on)


def test_without_a_memory_checkpoints_are_verl_agent_s_own(tmp_path, tokenizer):
    config = config_of(tmp_path, "algorithm.gigpo.bipace_method=gae")
    trainer = trainer_of(config, tokenizer, rollout(10, tokenizer))
    before = type(trainer)._save_checkpoint, type(trainer)._load_checkpoint
    attach(type(trainer), settings_of(config))
    assert (type(trainer)._save_checkpoint, type(trainer)._load_checkpoint) == before


def test_pace_alone_keeps_verl_agent_s_own_groups(ready):
    """cacb_enabled without bisim_grouping: equal observations, or similar ones."""
    for similar, partition in ((False, "exact"), (True, "similar")):
        settings = Settings(cacb_enabled=True, cacb_action_key_mode="first_n", enable_similarity=similar)
        assert settings.config().partition == partition
        batch = ready(2, settings)
        assert write_advantages(batch, settings)["bipace/cluster_count"] > 1


def test_rows_that_are_not_finite_are_set_aside_or_stop_the_run(ready, tokenizer):
    batch = ready(5, ON)
    batch.batch["token_level_rewards"][3, 0] = torch.nan
    spoilt = batch.batch[IDS][:, 1] == batch.batch[IDS][3, 1]
    before = {k: v.clone() for k, v in batch.batch.items()}
    refused("finite", write_advantages, batch, replace(ON, bisim_on_invalid="raise"))
    assert set(batch.batch.keys()) == set(before), "a failure leaves nothing behind"
    metrics = write_advantages(batch, replace(ON, cacb_enabled=True), tokenizer)
    assert torch.equal(batch.batch["advantages"].any(1), ~spoilt & batch.batch["advantages"].any(1))
    assert metrics["bipace/invalid_row_fraction"] == pytest.approx(spoilt.double().mean().item())
    each = batch.batch["advantages"].sum(1) / batch.batch["response_mask"].sum(1)
    assert metrics["bipace/mean_advantage"] == pytest.approx(each[~spoilt].mean().item(), abs=1e-6)


def test_hidden_states_that_are_missing_or_of_another_batch(ready):
    settings = Settings(bisim_grouping=True)
    batch = ready(6, settings)
    with pytest.raises(ValueError, match=r"python -m bipace_kernels\.integrations\.verl_agent.*bisim_embedder=ngram"):
        write_advantages(batch, settings)
    batch.batch[HIDDEN], batch.batch[HIDDEN_IDS] = torch.randn(len(batch), 8), ready(6, settings).batch[IDS]
    refused("of other rows than the batch", write_advantages, batch, settings)
    assert "advantages" not in batch.batch
    batch.batch.pop(IDS)
    refused(r"mark\(\) the batch before adjust_batch", write_advantages, batch, settings)


@pytest.mark.parametrize("cause", ["actor_rollout_ref.actor.use_invalid_action_penalty", "algorithm.use_kl_in_reward"])
def test_base_group_needs_one_score_per_trajectory(tmp_path, cause):
    causes = {"actor_rollout_ref.actor.use_invalid_action_penalty": False, "algorithm.use_kl_in_reward": False}
    overrides = ["algorithm.gigpo.bisim_grouping=True", "algorithm.hgpo.base_group=True"]
    overrides += [f"{k}={v}" for k, v in {**causes, cause: True}.items()]
    with pytest.raises(ValueError, match=r"base_group=True needs one score .*use_invalid_action_penalty=False"):
        Settings.of(config_of(tmp_path, *overrides, hgpo=True))


GAE_KEYS = ["bipace_method=gae"]


@pytest.mark.parametrize(("keys", "others", "message"), [
    (["bisim_epsilon=0.1"], [], r"gigpo\.bisim_epsilon is not a BiPACE setting; they are .*bisim_eps"),
    (["cacb_estimator=diff"], [], "cacb_estimator must be one of q_style, counterfactual"),
    (["cacb_enabled=1"], [], "cacb_enabled must be True or False, got 1"),
    (["enable_similarity=True"], [], "set one to False"),
    (["bisim_grouping=False", *GAE_KEYS, "bisim_eps=auto"], [], "bisim_eps=auto needs bisim_grouping=True and"),
    ([], ["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator must be gigpo"),
    ([], ["env.rollout.n=1"], "env.rollout.n must be at least 2, got 1"),
    ([], ["actor_rollout_ref.actor.strategy=megatron"], "use bisim_embedder=ngram, or strategy=fsdp"),
    ([], ["algorithm.adv_estimator=hgpo"], "set algorithm.gigpo.bisim_embedder=identity"),
    (GAE_KEYS, [], "bipace_method=gae has no clusters and does not use PACE: set .* to False"),
    (["bisim_grouping=False", *GAE_KEYS, "bipace_episode_scope=trajectory"], [],
     "bipace_episode_scope has no effect where bipace_episode_weight is 0"),
    (["bipace_method=bigpo"], [], "bipace_method must be gae, or .* if there are keys bipace_…, got 'bigpo'"),
    (["bipace_value=group"], [], "bipace_method must be gae.* got None: set it, or leave out bipace_value"),
    ([*GAE_KEYS, "bipace_memory_rows=9"], [], r"gigpo\.bipace_memory_rows has no effect"),
    (GAE_KEYS, ["algorithm.gamma=2"], r"algorithm\.gigpo\.bipace_gamma must be a number"),
])  # fmt: skip
def test_settings_that_make_no_sense_name_the_key_and_the_cure(tmp_path, keys, others, message):
    ours = [f"{'+' * key.startswith('bisim_epsilon')}algorithm.gigpo.{key}" for key in keys]
    config = config_of(tmp_path, "algorithm.gigpo.bisim_grouping=True", *ours, *others)
    refused(message, Settings.of, config)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_workers_give_the_hidden_state_of_the_last_prompt_token(tmp_path, tokenizer, packed, dynamic):
    config = config_of(tmp_path, "algorithm.gigpo.bisim_grouping=True", "algorithm.gigpo.bisim_layer=-2")
    model = tiny_model()
    workers = Workers(config, model, packed)
    rollout_config = workers.worker.config.rollout
    rollout_config.log_prob_micro_batch_size_per_gpu = 4
    rollout_config.log_prob_use_dynamic_bsz, rollout_config.log_prob_max_token_len_per_gpu = dynamic, 80
    batch = rollout(8, tokenizer)
    batch = batch.select_idxs(np.arange(len(batch) // 2 * 2))
    plain = workers.compute_log_prob(batch).batch["old_log_probs"]
    mark(batch, settings_of(config))
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=REAL)  # as the fork's actor runs its forward
    with torch.no_grad(), autocast:
        states = model(
            batch.batch["input_ids"], attention_mask=batch.batch["attention_mask"],
            position_ids=batch.batch["position_ids"], output_hidden_states=True,
        ).hidden_states[-2]  # fmt: skip
    out = workers.compute_log_prob(batch)
    wanted = states[:, batch.batch["prompts"].shape[1] - 1].float()
    got = out.batch[HIDDEN].float()
    assert (got - wanted).abs().max() <= (2e-2 if REAL else 1e-5) * wanted.abs().max()
    assert torch.equal(out.batch[HIDDEN_IDS], batch.batch[IDS])
    assert torch.equal(out.batch["old_log_probs"], plain) and out.batch["old_log_probs"].dtype == plain.dtype
    assert out.batch[HIDDEN].dtype == states.dtype and "_forward_micro_batch" not in vars(workers.worker.actor)
    batch.meta_info["is_lora"] = True
    model.disable_adapter = contextlib.nullcontext
    assert HIDDEN not in workers.worker.compute_log_prob(batch).batch, "the reference's forward is not the policy's"


def test_under_ulysses_each_rank_gives_the_rows_of_its_slice(tokenizer, monkeypatch):
    """Two ranks' shares add up to the states of slices of the packed tokens; log-probabilities stay."""
    model = tiny_model()
    batch = rollout(9, tokenizer).select_idxs(np.arange(7))
    mark(batch, Settings(bisim_grouping=True, bisim_layer=-2))
    names = ("input_ids", "attention_mask", "responses")
    micro_batches = [{k: batch.batch[k][a:b] for k in names} for a, b in ((0, 4), (4, 7))]
    own = torch.rand(batch.batch["responses"].shape, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)

    def slices(micro_batch):
        tokens = micro_batch["input_ids"][micro_batch["attention_mask"].bool()]
        tokens = torch.nn.functional.pad(tokens, (0, len(tokens) % 2))
        return tokens.chunk(2)

    class Actor:
        use_remove_padding, actor_module = True, model

        def _forward_micro_batch(self, micro_batch):
            with torch.no_grad():
                model(input_ids=slices(micro_batch)[rank][None], use_cache=False)
            return None, own[:4] if len(micro_batch["responses"]) == 4 else own[4:]

    def compute_log_prob(data):
        parts = [worker.actor._forward_micro_batch(micro_batch)[1] for micro_batch in micro_batches]
        return DataProto.from_dict(tensors={"old_log_probs": torch.cat(parts)})

    mesh = {"sp": SimpleNamespace(get_group=lambda: "the group of both")}
    worker = SimpleNamespace(actor=Actor(), ulysses_sharding_manager=SimpleNamespace(device_mesh=mesh))
    total = 0
    for rank in range(2):  # noqa: B007  # Actor looks at it
        out = log_prob(worker, compute_log_prob, batch)
        assert torch.equal(out.batch["old_log_probs"], own)
        total = total + out.batch[HIDDEN]
    wanted = []
    for micro_batch in micro_batches:
        with torch.no_grad():
            found = [model(input_ids=s[None], output_hidden_states=True) for s in slices(micro_batch)]
            parts = [each.hidden_states[-2][0] for each in found]
        lengths = micro_batch["attention_mask"].sum(1)
        prompts = micro_batch["attention_mask"][:, : -own.shape[1]].sum(1)
        wanted.append(torch.cat(parts)[lengths.cumsum(0) - lengths + prompts - 1])
    torch.testing.assert_close(total, torch.cat(wanted), atol=1e-6, rtol=1e-6)
    micro_batches[0]["multi_modal_inputs"] = []
    refused("images under Ulysses", log_prob, worker, compute_log_prob, batch)
    assert "_forward_micro_batch" not in vars(worker.actor)


@pytest.mark.parametrize("packed", [False, True])
def test_fit_trains_on_bipace_s_advantages(tmp_path, tokenizer, packed, monkeypatch):
    """Copies, balanced rows, the penalty and the tap together; and everything is put back afterwards."""
    config = config_of(
        tmp_path, "algorithm.gigpo.bisim_grouping=True", "algorithm.gigpo.bisim_layer=-2",
        "algorithm.gigpo.bisim_eps=0.3", "algorithm.gigpo.cacb_enabled=True",
    )  # fmt: skip
    settings = settings_of(config)
    trainer = trainer_of(config, tokenizer, rollout(10, tokenizer), packed=packed)
    attach(type(trainer), settings)
    module = ray_trainer
    before = module.compute_advantage, module.compute_data_metrics, module.core_gigpo.compute_step_discounted_returns
    given, logged = [], []
    inner = write_advantages

    def watched(data, *args):
        given.append(clone(data))
        return inner(data, *args)

    monkeypatch.setattr("bipace_kernels.integrations.verl_agent.launch.write_advantages", watched)
    if REAL:
        monkeypatch.setattr("verl.utils.tracking.Tracking.log", lambda self, data, step: logged.append(data))
    trainer.fit()
    assert before == (
        module.compute_advantage, module.compute_data_metrics, module.core_gigpo.compute_step_discounted_returns
    )  # fmt: skip
    data, seen = given[0].batch, trainer.actor_rollout_wg.seen
    first = originals(given[0])
    assert len(first) < len(data), "the batch was filled up with copies"
    group, trajectory, step = data[IDS][first].unbind(1)
    assert step.tolist() != sorted(step.tolist())
    written = {"mask": data["response_mask"][first], "token_bytes": bk.token_bytes(tokenizer)}
    keys, _ = bk.action_keys(data["responses"][first], **written)
    term = bk.advantage(
        group, trajectory, None, step=step, returns=data["step_rewards"][first], episode_return=torch.zeros(len(first)),
        fingerprint=data[HIDDEN][first], action_key=keys, config=bk.Config.bipace(0.3),
    )  # fmt: skip
    episode = episode_term(group, data["token_level_rewards"].sum(-1)[first])
    wanted = to_rows(given[0], first, episode + term.step_advantage)
    torch.testing.assert_close(seen.batch["advantages"], wanted, atol=2e-6, rtol=0)
    assert 1 < len(term.cluster.unique()) < len(first)
    metrics = logged[0] if REAL else trainer.metrics
    assert metrics["bipace/cluster_count"] == len(term.cluster.unique()) and "critic/advantages/mean" in metrics


def test_fit_of_hgpo(tmp_path, tokenizer):
    config = config_of(tmp_path, "algorithm.gigpo.bisim_grouping=True", "algorithm.hgpo.mode=mean_norm", hgpo=True)
    outcomes = []
    for settings in (None, settings_of(config)):
        np.random.seed(0)  # noqa: NPY002  # what the fork chooses copies with
        trainer = trainer_of(config, tokenizer, rollout(11, tokenizer))
        attach(type(trainer), settings)
        trainer.fit()
        outcomes.append(trainer.actor_rollout_wg.seen.batch["advantages"])
    torch.testing.assert_close(outcomes[1], outcomes[0], atol=2e-6, rtol=0)
    assert not torch.equal(*outcomes), "two ways to the same numbers"


def test_of_runs_one_after_another_each_has_its_own_settings(tmp_path, tokenizer):
    """Also where BiPACE is off again."""
    cls = type("Trainer", (ray_trainer.RayPPOTrainer,), {"__module__": ray_trainer.__name__})
    own, seen = dict(vars(cls)), []
    for keys in (["bipace_method=gae", "bipace_share=memory"], ["bisim_grouping=True", "cacb_enabled=True"], []):
        keys = [f"algorithm.gigpo.{key}" for key in ["bisim_embedder=ngram", *keys]]
        config = config_of(tmp_path, *keys)
        for again in (True, False):
            np.random.seed(0)  # noqa: NPY002  # what the fork chooses copies with
            trainer = trainer_of(config, tokenizer, rollout(10, tokenizer))
            trainer.__class__ = cls if again else type(trainer)
            attach(type(trainer), Settings.of(config))
            trainer.fit()
            seen.append(trainer.actor_rollout_wg.seen.batch["advantages"])
    assert all(torch.equal(one, alone) for one, alone in zip(seen[::2], seen[1::2], strict=True))
    assert not torch.equal(seen[0], seen[2]) and not torch.equal(seen[2], seen[4]) and dict(vars(cls)) == own


def test_a_layer_that_the_model_lacks_is_an_error_before_any_update(tmp_path, tokenizer):
    config = config_of(tmp_path, "algorithm.gigpo.bisim_grouping=True")
    trainer = trainer_of(config, tokenizer, rollout(12, tokenizer))
    attach(type(trainer), settings_of(config))
    refused(r"algorithm\.gigpo\.bisim_layer=-8: layer must be an index into hidden_sta", trainer.fit)
    assert trainer.actor_rollout_wg.seen is None


@pytest.mark.parametrize("name", ["compute_data_metrics", "core_gigpo"])
def test_a_verl_agent_without_a_part_is_refused_by_name(monkeypatch, name):
    monkeypatch.delattr(ray_trainer, name)
    with pytest.raises(AttributeError, match=rf"has no {name}, so this version of verl-agent was not tested .* docs/"):
        attach(ray_trainer.RayPPOTrainer, ON)


SHARED = {
    "algorithm.adv_estimator": "gigpo", "algorithm.gamma": 0.95, "algorithm.gigpo.bisim_grouping": True,
    "algorithm.gigpo.bisim_embedder": "actor_hidden", "algorithm.gigpo.cacb_enabled": True,
    "algorithm.gigpo.cacb_n_action_tokens": 8, "algorithm.gigpo.cacb_action_key_mode": "action_tag",
    "algorithm.gigpo.cacb_estimator": "q_style", "algorithm.gigpo.step_advantage_w": 1.0,
    "actor_rollout_ref.actor.kl_loss_coef": 0.01, "actor_rollout_ref.actor.optim.lr": 5e-7,
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_recipes_are_the_paper_s_table(tmp_path, name):
    model, gpus, tp, steps, size, horizon, layer, epsilon = RUNS[name]
    config = config_of(tmp_path, f"+recipe={name}", "env.env_name=Any", f"env.rollout.n={size}")
    wanted = {
        **SHARED, "trainer.n_gpus_per_node": gpus, "actor_rollout_ref.rollout.tensor_model_parallel_size": tp,
        "trainer.total_training_steps": steps, "trainer.total_epochs": steps, "env.max_steps": horizon,
        "algorithm.gigpo.bisim_layer": layer, "algorithm.gigpo.bisim_eps": epsilon,
        "actor_rollout_ref.model.path": f"Qwen/{model}-Instruct",
    }  # fmt: skip
    assert {key: OmegaConf.select(config, key) for key in wanted} == wanted
    recipe = OmegaConf.load(launcher.CONFIG / f"recipe/{name}.yaml")
    assert recipe.env.rollout.n == size
    estimator = settings_of(config).config()
    assert (estimator.partition, estimator.estimator, estimator.epsilon) == ("cosine", "q_style", epsilon)


def test_keys_stand_for_these_configurations():
    norm = {"episode_scope": "step", "lone_trajectory": "raw", "on_invalid": "singleton", "duplicates": "once"}
    raw = {**norm, "episode_norm": "none"}
    on = {"bisim_grouping": True}
    assert Settings(**on).config() == bk.Config.bigpo(0.10, **raw)
    assert Settings(**on, bisim_embedder="ngram").config() == bk.Config.bigpo(0.25, **raw)
    gigpo = bk.Config.gigpo("mean_norm", on_invalid="singleton", duplicates="once")
    assert Settings(**on, bisim_embedder="identity").config() == gigpo
    on["cacb_enabled"] = True
    assert Settings(**on).config() == bk.Config.bipace(0.10, **raw)
    both = Settings(**on, cacb_estimator="counterfactual", mode="mean_std_norm", step_advantage_w=0.5)
    assert both.config() == bk.Config.bipace(0.10, "diff_peer", **norm, step_weight=0.5)
    with_sigma = Settings(bisim_grouping=True, mode="mean_std_norm")
    assert with_sigma.config() == bk.Config.bigpo(0.10, **norm, step_norm="std")


PARTS = """
import hydra, os, types
core_gigpo = types.SimpleNamespace(compute_step_discounted_returns=None)
compute_advantage = compute_data_metrics = None
@hydra.main(config_path="config", config_name="ppo_trainer", version_base=None)
def main(config):
    run_ppo(config)
"""
MAIN = f"""{PARTS}
ran = []
class RayPPOTrainer:
    def fit(self):
        ran.append("fit")
class TaskRunner:
    def run(self, config):
        trainer = RayPPOTrainer()
        trainer.tokenizer = None
        ran.append((config, type(trainer).fit))
def run_ppo(config):
    TaskRunner().run(config)
"""


@pytest.mark.parametrize("on", [False, True])
def test_the_launcher_runs_verl_agent_s_main(tmp_path, monkeypatch, on):
    if REAL:
        (tmp_path / "config").symlink_to(FORK / "verl/trainer/config")
    else:
        (tmp_path / "config").mkdir()
        config_of(tmp_path / "config")  # writes the stand-in's configuration
    (tmp_path / "entry_of_test.py").write_text(MAIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import entry_of_test as entry

    monkeypatch.setitem(sys.modules, "verl.trainer.main_ppo", entry)
    monkeypatch.setattr(sys, "argv", ["program"])
    installed = []
    worker = SimpleNamespace(install=lambda: installed.append(1))
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.worker", worker)
    monkeypatch.setattr(sys.modules[PACKAGE], "worker", worker, raising=False)
    fit = entry.RayPPOTrainer.fit
    mine = tmp_path / "my folder" / "mine"
    mine.mkdir(parents=True)
    (mine / "long.yaml").write_text("# @package _global_\nenv: {max_steps: 77}\n")
    arguments = ["+recipe=alfworld_7b", "algorithm.gigpo.bisim_eps=0.2"] if on else []
    arguments += [f"hydra.searchpath=['file://{mine.parent}']", "+mine=long"]
    launcher.main(["--config-name", "ppo_trainer", "algorithm.adv_estimator=gigpo", "env.rollout.n=8", *arguments])
    config, used = entry.ran[0]
    assert config.algorithm.gigpo.bisim_grouping is on
    assert config.algorithm.gigpo.bisim_eps == (0.2 if on else None) and (used is fit) is not on
    assert bool(installed) is on
    assert config.env.max_steps == 77  # of the user's own folder
    del sys.modules["entry_of_test"]


def test_paths_of_the_user_stand_before_those_of_the_launcher():
    (plain, _) = launcher.added()
    assert launcher.added("hydra.searchpath=[]")[0] == plain
    (both, _) = launcher.added("hydra.searchpath=[pkg://a, 'file:///b c']", "hydra.searchpath=[pkg://d]")
    assert both == plain.replace("=[", "=[pkg://a, 'file:///b c',pkg://d,")
    with pytest.raises(ValueError, match=r"must be a list such as .*, got hydra\.searchpath=pkg://a; add brackets"):
        launcher.added("hydra.searchpath=pkg://a")


RAY_MAIN = f"""{PARTS}
import ray
class RayPPOTrainer:
    tokenizer = None
    def fit(self):
        return compute_advantage is not None
@ray.remote(num_cpus=1)
class TaskRunner:
    def run(self, config):
        return os.getpid(), RayPPOTrainer().fit(), config.algorithm.gigpo.bisim_eps
def run_ppo(config):
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    pid, *found = ray.get(TaskRunner.remote().run.remote(config), timeout=90)
    print("found", pid != os.getpid(), *found)
    ray.shutdown()
"""
START = f"""
import sys, ray_entry
sys.modules["verl.trainer.main_ppo"] = ray_entry
from {PACKAGE}.launch import main
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.skipif(REAL, reason="the fork's own runner loads a model")
@pytest.mark.parametrize("on", [False, True])
def test_a_runner_in_a_process_of_ray_is_prepared_there(tmp_path, on):
    """Settings reach the process in which fit() runs; off, verl-agent's own runner runs there."""
    (tmp_path / "config").mkdir()
    config_of(tmp_path / "config")
    (tmp_path / "ray_entry.py").write_text(RAY_MAIN)
    asked = ["algorithm.gigpo.bisim_grouping=True", "algorithm.gigpo.bisim_embedder=ngram"] if on else []
    paths = os.pathsep.join([str(tmp_path), str(Path(bk.__file__).parent.parent)])
    # Ray's processes have low priority, and a busy machine hardly lets them start.
    how = {"cwd": tmp_path, "env": {"PYTHONPATH": paths, "RAY_worker_niceness": "0"}, "timeout": 150, "status": None}
    done = program(sys.executable, "-c", START, "algorithm.gigpo.bisim_eps=0.2", "hydra.run.dir=out", *asked, **how)
    assert f"found True {on} 0.2" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.skipif(REAL, reason="this is the fork")
def test_all_of_this_with_the_fork():
    if FORK is None:
        pytest.skip("BIPACE_VERL_AGENT names no checkout of xlan156/verl-agent")
    path = os.pathsep.join([str(FORK), os.environ.get("PYTHONPATH", ""), str(Path(bk.__file__).parent.parent)])
    argv = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    program(*argv, env={"PYTHONPATH": path}, timeout=400)
