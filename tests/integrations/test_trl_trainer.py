"""BiPACE in TRL: real updates, and the advantages of each batch against bk.advantage() on its records, bit for bit."""

import json
import logging
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_trl as tt
import torch
import trl
from bipace_kernels.integrations import _states
from bipace_kernels.integrations._settings import Settings
from bipace_kernels.integrations._states import States
from bipace_kernels.integrations.trl import (
    BiPACEGRPOConfig,
    ToolLoop,
    bipace_advantages,
    rows,
    trainer as trainer_module,
)
from datasets import Dataset
from packaging.version import Version
from refusals import refused
from transformers import HfArgumentParser, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import bipace_kernels as bk

SINGLETON = {"on_invalid": "singleton", "duplicates": "once"}
CONFIGS = {name: getattr(bk.Config, name)(**SINGLETON) for name in ("bipace", "bigpo", "gigpo", "hgpo")}
ALL = ("step_rewards", "observations", "actions")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture
def no_early_exit(monkeypatch):
    def refuse(*_):
        raise AssertionError("a forward of its own, where TRL's was there to tap")

    monkeypatch.setattr(trainer_module, "early_exit", refuse)


def trained(folder, **options):
    trainer = tt.make_trainer(folder, **options)
    trainer.train()
    return trainer


def check(trainer, config=CONFIGS["bipace"], **how):
    """Every batch; and that the values are more than one per row, or the test says little."""
    for batch in trainer.batches:
        (wanted,) = tt.by_hand(batch, config=config, **how)
        assert torch.equal(batch["output"]["advantages"], wanted)


@pytest.mark.parametrize("extras", [(), pytest.param(("step_rewards",), marks=pytest.mark.slow), ALL])
@pytest.mark.parametrize("method", CONFIGS)
def test_several_turns_from_a_rollout_func(tmp_path, method, extras):
    trainer = trained(tmp_path, bipace_method=method, rollout_func=partial(tt.rollout, extras=extras))
    assert len(trainer.batches) == 2
    check(trainer, CONFIGS[method])
    assert max(len(row.unique()) for b in trainer.batches for row in b["output"]["advantages"]) > 2


def test_a_method_of_one_s_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import bipace_kernels as bk\n\ndef half(records):\n    return records.returns * 0.5\n\n"
        "MINE = bk.Config(partition='exact', estimator=half, gamma=0.5)\nTERM = bk.Config.grpo(episode_norm='none')\n"
    )
    check(trained(tmp_path, bipace_method=f"{tmp_path}/mine.py:TERM"), bk.Config.grpo(episode_norm="none", **SINGLETON))
    name = f"{tmp_path}/mine.py:MINE"
    trainer = trained(tmp_path, bipace_method=name, rollout_func=partial(tt.rollout, extras=ALL))
    check(trainer, replace(trainer.args.settings.config(), **SINGLETON))
    line = ["--use_cpu", "true", "--bf16", "false", "--bipace_method", name]
    (parsed,) = HfArgumentParser(BiPACEGRPOConfig).parse_args_into_dataclasses(line)
    assert (parsed.settings.config().estimator_name, parsed.settings.config().gamma) == ("half", 0.5)


GAE = {
    "kernel": {"gae_lambda": 0.8, "kernel_width": 0.2, "kernel_time": None, "kernel_noise": 1.0, "step_norm": "group"},
    "cluster": {"shrinkage": 1.0, "episode_weight": 0.5, "step_norm": "none"},
    "group": {},
}


@pytest.mark.parametrize("value", GAE)
def test_gae_by_every_value_and_with_rollouts_that_were_cut_off(tmp_path, value):
    wanted = bk.Config.gae(value, **GAE[value], **SINGLETON)
    options = {f"bipace_{name}": 0.0 if number is None else number for name, number in GAE[value].items()}
    options |= {"num_iterations": 2, "max_steps": 3}  # TRL's forward: one of our own, narrower, rounds states otherwise
    rollout = partial(tt.rollout, extras=(*ALL, "truncated"), failed=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer = trained(tmp_path, bipace_method="gae", bipace_value=value, rollout_func=rollout, **options)
    assert not any("truncated is True at" in str(w.message) for w in seen)  # of no turn but the last
    check(trainer, wanted)
    assert {row["truncated"] for b in trainer.batches for row in b["inputs"]} == {True, False}
    log = trainer.state.log_history[0]
    assert ("bipace/embedder/actor_hidden" in log, "bipace/value_r2" in log) == (value == "kernel", value == "cluster")
    assert "bipace/value_explained_share" in log and "bipace/epsilon" not in log


@pytest.mark.parametrize("masked", [False, True])
def test_a_completion_that_runs_out_of_tokens_has_ended(tmp_path, masked):
    """Few tokens, so that about a quarter of those that are drawn is the end: V̂ stands for nothing that was cut off."""
    few = {"suppress_tokens": [i for i in range(len(tt.TOKENIZER)) if i not in (65, 66, 67, tt.TOKENIZER.eos_token_id)]}
    trainer = trained(
        tmp_path, bipace_method="gae", bipace_value="group", max_completion_length=4, generation_kwargs=few,
        mask_truncated_completions=masked,
    )  # fmt: skip
    check(trainer, bk.Config.gae("group", **SINGLETON))
    assert all(0 < log["completions/clipped_ratio"] < 1 for log in trainer.state.log_history if "loss" in log)


def test_plain_generation_is_one_turn_per_row(tmp_path):
    trainer = trained(tmp_path, bipace_action_key_mode="first_n", bipace_n_action_tokens=1)
    check(trainer, mode="first_n")
    log = trainer.state.log_history[0]
    assert {"bipace/singleton_cluster_fraction", "bipace/value_r2", "bipace/value_r2_coverage"} < set(log)
    assert log["bipace/epsilon"] == 0.1 and log["bipace/embedder/actor_hidden"] == 1.0


def turns_of(batch):
    """The turns, and the columns at which their states stand."""
    out = batch["output"]
    turns = rows.turns_of(out["completion_mask"], out["tool_mask"], None)
    return turns, turns.start + out["prompt_ids"].shape[1] - 1


def observed(batch):
    """What each turn answers, by its tokens."""
    out = batch["output"]
    prompts = [ids[kept.bool()] for ids, kept in zip(out["prompt_ids"], out["prompt_mask"], strict=True)]
    return turns_of(batch)[0].observation_texts(prompts, out["completion_ids"], tt.TOKENIZER)


def put_states(batch, rows):
    turns, columns = turns_of(batch)
    batch["states"] = torch.zeros(*batch["states"].shape[:2], rows.shape[1])
    batch["states"][turns.row, columns] = rows


@pytest.mark.parametrize(("embedder", "epsilon"), [("ngram", 0.25), ("identity", 0.0)])
def test_text_embedders(tmp_path, embedder, epsilon):
    trainer = trained(tmp_path, bipace_embedder=embedder, bipace_epsilon=0.3, rollout_func=tt.rollout)
    for batch in trainer.batches:  # the states are not those of the model
        put_states(batch, bk.embedders.named(embedder).embed(observed(batch)))
    check(trainer, bk.Config.bipace(epsilon, **SINGLETON))


def test_auto_without_hidden_states_takes_ngrams_with_one_warning(tmp_path, monkeypatch):
    def none(model):
        raise ValueError("no blocks.")

    monkeypatch.setattr(_states, "find_decoder", none)
    with pytest.warns(RuntimeWarning, match="bipace_embedder=auto uses n-grams") as caught:
        trainer = trained(tmp_path, rollout_func=tt.rollout, num_iterations=2, max_steps=3)
    assert sum("n-grams" in str(w.message) for w in caught) == 1
    log = trainer.state.log_history[0]
    assert log["bipace/epsilon"] == 0.25 and log["bipace/embedder/ngram"] == 1.0


TWICE = {"num_iterations": 2, "max_steps": 3}  # a forward for old log-probs
EARLY = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}  # no forward but one of our own
HALVES = {"steps_per_generation": 2, "per_device_train_batch_size": 4}
FORWARDS = {"of the loss": {}, "of old log-probs": TWICE, "that ends early": EARLY}


@pytest.mark.parametrize("options", [TWICE, {**TWICE, "beta": 0.1}, HALVES])
def test_the_old_log_prob_forward_is_tapped(tmp_path, no_early_exit, options):
    tt.make_model().save_pretrained(tmp_path / "model")  # a reference is loaded from where the model came from
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "model")
    trainer = trained(tmp_path, rollout_func=tt.rollout, model=model, **options)
    assert "old_per_token_logps" in trainer.batches[-1]["output"]
    check(trainer)


def test_where_a_batch_is_learned_from_once_the_loss_s_forward_is_tapped(tmp_path, no_early_exit):
    """TRL's defaults: no forward besides."""
    trainer = trained(tmp_path, rollout_func=tt.rollout)
    assert "old_per_token_logps" not in trainer.batches[0]["output"]
    check(trainer)
    rows = [dict(row) for row in trainer.train_dataset.select([0])] * 4
    trainer.model.train()
    assert trainer._generate_and_score_completions(rows)["advantages"].isnan().all()  # until the loss has its forward
    model, forwards = tt.make_model(), []
    model.model.layers[0].register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    trained(tmp_path, cls=tt.BiPACEGRPOTrainer, model=model, rollout_func=tt.rollout)
    assert forwards == [True, True]


@pytest.mark.parametrize("where", ["subclass", "behind", "object"])
@pytest.mark.parametrize("name", trainer_module.SEE_BATCHES)
def test_a_subclass_that_sees_batches_sees_their_advantages(tmp_path, name, where):
    """They do not wait for the loss's forward then; nor where a class behind the adapter's, or the object, does."""
    seen = []

    def own(self, *args, **kwargs):
        found = getattr(super(cls, self), name)(*args, **kwargs)
        batches = [batch for batch in (*args, found) if isinstance(batch, dict)]
        seen.extend(batch["advantages"] for batch in batches if self.model.training and where != "behind")
        return found

    cls = tt.Keeping
    if where != "object":
        cls = type("Own", (GRPOTrainer if where == "behind" else cls,), {name: own})
    both = type("Both", (tt.Keeping, cls), {}) if where == "behind" else cls
    trainer = tt.make_trainer(tmp_path, cls=both, rollout_func=tt.rollout)
    if where == "object":
        setattr(trainer, name, partial(own, trainer))
    trainer.train()
    check(trainer)
    assert where == "behind" or name == "training_step" or seen  # which makes its batch itself
    assert all(a.isfinite().all() and a.any() for a in seen)


def test_a_subclass_that_runs_trl_s_forward_in_parts(tmp_path):
    class Own(tt.Keeping):
        def _get_per_token_logps_and_entropies(self, model, ids, mask, *args, **kwargs):
            run = super()._get_per_token_logps_and_entropies
            parts = [run(model, ids[rows], mask[rows], *args, **kwargs) for rows in (slice(6, 8), slice(0, 6))]
            return tuple(None if a is None else torch.cat([b, a]) for a, b in zip(*parts, strict=True))

    for options in ({}, TWICE):
        check(trained(tmp_path, cls=Own, rollout_func=tt.rollout, **options))


@pytest.mark.parametrize("options", [{}, EARLY, {"num_iterations": 2}])
def test_forwards_of_the_user_s_own_are_not_tapped(tmp_path, options):
    """As of a rollout_func that returns log-probs, a reward function that reads them, or a subclass, which here also
    changes rewards."""

    def forward():
        ids = torch.ones(2, 3, dtype=torch.int64)
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2)

    class Own(tt.Keeping):
        def _generate(self, prompts):
            generated = super()._generate(prompts)
            return forward() or generated

        def _calculate_rewards(self, *args, **kwargs):
            self.seen = super()._calculate_rewards(*args, **kwargs).square()
            return self.seen

    def rewards(completions, **_):
        return forward() or tt.reward(completions)

    own = {"rollout_func": lambda *given: forward() or tt.rollout(*given), "reward_funcs": [rewards]}
    trainer = tt.make_trainer(tmp_path, cls=Own, **own, **options)
    trainer.train()
    check(trainer)


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}])
def test_dropout_would_be_noise_in_the_states_of_trl_s_forwards(tmp_path, monkeypatch, options):
    ran, run = [], trainer_module.early_exit
    monkeypatch.setattr(trainer_module, "early_exit", lambda *given: ran.append(1) or run(*given))
    by = {"cls": tt.BiPACEGRPOTrainer, "rollout_func": tt.rollout, "max_steps": 1, **options}
    for name in ("attention_dropout", "router_jitter_noise"):
        model = tt.make_model()
        for block in model.model.layers:  # as of a text model inside another, whose configuration does not name it
            setattr(block.self_attn, name, 0.5)
        trained(tmp_path, model=model, **by)
    trained(tmp_path, neftune_noise_alpha=5.0, **by)
    assert ran == [1, 1, 1]
    for regions in ("true", "false"):
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", regions)
        trained(tmp_path, torch_compile_backend="eager", **by)  # as a whole the loss's model calls no hooks
        assert len(ran) == 3 + (regions == "false" and not options)
    model = tt.make_model(attention_dropout=0.5)  # an adapter's, by its lora_dropout, or the model's
    with pytest.warns(RuntimeWarning, match="n-grams of .* since the model has dropout .such as lora_dropout"):
        trained(tmp_path, model=model, rollout_func=tt.rollout, bipace_method="gae", max_steps=1, **options)


def test_a_loss_that_runs_no_forward_is_an_error(tmp_path, monkeypatch):
    """It would train on NaN."""
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: inputs["advantages"].mean())
    trainer = tt.make_trainer(tmp_path, cls=tt.BiPACEGRPOTrainer, rollout_func=tt.rollout)
    refused("loss ran no forward", trainer.train, error=RuntimeError)


@pytest.mark.parametrize("given", [False, True])
def test_a_kernel_value_reads_texts_where_no_forward_is_there(tmp_path, no_early_exit, given):
    """embedder="auto": n-grams of the last three observations and the actions between them; with one warning."""
    rollout = partial(tt.rollout, extras=ALL if given else ())
    with pytest.warns(RuntimeWarning, match="n-grams of the last 3 observations, instead of hidden states: no forward"):
        trainer = trained(tmp_path, rollout_func=rollout, bipace_method="gae", **EARLY)
    windows = []
    for batch in trainer.batches:
        turns, _ = turns_of(batch)
        own, written = turns.tokens(batch["output"]["completion_ids"])
        seen = observed(batch)
        acted = [tt.TOKENIZER.decode(ids[kept].tolist()) for ids, kept in zip(own, written, strict=True)]
        if given:
            seen, acted = ([x for row in batch["inputs"] for x in row[name]] for name in ("observations", "actions"))
        texts = []
        for i, step in enumerate(turns.step.tolist()):
            before = range(i - min(2, step), i)
            texts.append("".join(f"{seen[j]}\n> {acted[j]}\n" for j in before) + seen[i])
        put_states(batch, bk.ngram_fingerprint(texts))
        windows += [text.count("\n> ") for text in texts]
    assert {0, 1, 2} == set(windows)
    check(trainer, bk.Config.gae(embedder="ngram", **SINGLETON))


def test_a_kernel_value_has_hidden_states_by_a_forward_if_they_are_asked_for(tmp_path):
    """Up to the rounding of a narrower forward; without directions, whose landmarks are distinct rows bit by bit."""
    options = {**EARLY, "bipace_method": "gae", "bipace_embedder": "actor_hidden", "bipace_kernel_directions": 0}
    trainer = trained(tmp_path, rollout_func=tt.rollout, **options)
    for batch in trainer.batches:
        (wanted,) = tt.by_hand(batch, config=bk.Config.gae(kernel_directions=None, **SINGLETON))
        torch.testing.assert_close(batch["output"]["advantages"], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{"beta": 0.1}, {"beta": 0.1, **TWICE}])
def test_peft_states_are_the_adapter_s_not_the_reference_s(tmp_path, options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    trainer = trained(tmp_path, rollout_func=tt.rollout, peft_config=config, **options)
    assert "ref_per_token_logps" in trainer.batches[0]["output"]
    check(trainer)


@pytest.mark.parametrize(
    "options",
    [pytest.param({"loss_type": name}, marks=pytest.mark.slow) for name in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo")]
    + [{"loss_type": name} for name in ("dapo", "vespo", *["luspo"] * (Version(trl.__version__) >= Version("1.10")))]
    + [{"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.5, "top_entropy_quantile": 0.5}],
)
def test_every_loss_takes_them(tmp_path, options):
    trainer = trained(tmp_path, rollout_func=tt.rollout, max_steps=1, **options)
    log = trainer.state.log_history[0]
    assert abs(log["loss"]) > 0 and 0 < log["grad_norm"] < float("inf")


@pytest.mark.parametrize("forward", FORWARDS)
def test_truncated_rows_that_are_masked_out_still_count(tmp_path, forward):
    trainer = trained(tmp_path, mask_truncated_completions=True, bipace_method="bigpo", **FORWARDS[forward])
    empty = [~b["output"]["completion_mask"].bool().any(1) for b in trainer.batches]
    assert any(rows.any() for rows in empty)
    check(trainer, CONFIGS["bigpo"])


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("weights", ["bfloat16", "float32 under autocast"])
def test_bf16(tmp_path, weights, forward):
    model = tt.make_model()
    if weights == "bfloat16":
        model = model.to(torch.bfloat16)
    trainer = trained(tmp_path, model=model, rollout_func=tt.rollout, bf16=True, **FORWARDS[forward])
    check(trainer)
    states = trainer.batches[0]["states"]
    exact = tt.make_model().model(trainer.batches[0]["ids"], output_hidden_states=True).hidden_states[tt.LAYER]
    assert states.dtype == torch.bfloat16 or 1e-4 < float((states - exact).abs().max()) < 0.1


def test_rewards_that_are_none(tmp_path):
    def some(completions, **_):
        return [None if i % 3 == 0 else float(i) for i in range(len(completions))]

    with pytest.warns(RuntimeWarning, match="of a batch's turns are invalid: a reward of None"):
        trainer = trained(tmp_path, rollout_func=partial(tt.rollout, extras=()), reward_funcs=[some])
    check(trainer)
    advantages = trainer.batches[0]["output"]["advantages"]
    assert not advantages[0::3].any() and advantages[1].any()


def test_a_column_of_the_data_set_is_not_what_a_rollout_func_returned(tmp_path):
    own = {"actions": ["gold"] * 4, "truncated": [True] * 4, "turn_starts": [[1]] * 4}
    options = {"bipace_method": "gae", "bipace_embedder": "ngram", "rollout_func": partial(tt.rollout, extras=())}
    data = [Dataset.from_dict({"prompt": tt.PROMPTS, **more}) for more in ({}, own)]
    plain, named = (trained(tmp_path, train_dataset=rows, **options) for rows in data)
    for a, b in zip(plain.batches, named.batches, strict=True):
        assert torch.equal(a["output"]["advantages"], b["output"]["advantages"])


def test_turns_back_to_back_are_separated_by_turn_starts(tmp_path):
    def given(prompts, trainer):
        rows = [tt.TOKENIZER(text)["input_ids"] for text in ("aabb", "aacc", "ddbb", "aacc") * (len(prompts) // 4)]
        return {"prompt_ids": [tt.TOKENIZER(p)["input_ids"] for p in prompts], "completion_ids": rows,
                "logprobs": [[0.0] * 4] * len(rows), "turn_starts": [None, *[[0, 2]] * (len(rows) - 1)],
                "step_rewards": [[0.0], *[[0.0, float(i)] for i in range(1, len(rows))]]}  # fmt: skip

    trainer = trained(tmp_path, rollout_func=given, num_iterations=2)
    batch = trainer.batches[0]
    halves = batch["output"]["advantages"].reshape(8, 2, 2)
    assert torch.equal(halves[..., 0], halves[..., 1]) and (halves[:, 0, 0] != halves[:, 1, 0]).any()


def test_grpo_trains_as_trl_does(tmp_path):
    models = [tt.make_model(), tt.make_model()]
    for model, cls in zip(models, (GRPOTrainer, tt.BiPACEGRPOTrainer), strict=True):
        trained(tmp_path, cls=cls, model=model, bipace_method="grpo", rollout_func=tt.rollout)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_evaluation_is_trl_s_own_and_leaves_training_alone(tmp_path, monkeypatch):
    """Between the steps of a training: the batches of either are those of a run without the other."""
    scored, score = {}, GRPOTrainer._generate_and_score_completions

    def kept(self, inputs):
        output = score(self, inputs)
        if not self.model.training:
            scored.setdefault(type(self), []).append(output["advantages"])
        return output

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", kept)
    data = {"eval_dataset": Dataset.from_dict({"prompt": tt.PROMPTS}), "eval_strategy": "steps", "eval_steps": 1}
    more = {**data, "num_generations_eval": 2, "per_device_eval_batch_size": 4, "learning_rate": 0.0}
    trained(tmp_path, cls=GRPOTrainer, rollout_func=tt.rollout, **more)
    trainer = trained(tmp_path, rollout_func=tt.rollout, **more)
    stock, ours = scored[GRPOTrainer], scored[tt.Keeping]
    assert len(stock) == len(ours) > 2
    assert all(map(torch.equal, stock, ours)) and any(a.any() for a in ours)
    check(trainer)
    assert any("eval_reward" in log for log in trainer.state.log_history)
    assert not any("bipace" in name for log in trainer.state.log_history for name in log if name.startswith("eval"))
    alone = trained(tmp_path, rollout_func=tt.rollout, learning_rate=0.0)
    for a, b in zip(trainer.batches, alone.batches, strict=True):
        assert torch.equal(a["output"]["advantages"], b["output"]["advantages"])


def test_epsilon_auto_is_chosen_once_and_goes_with_the_checkpoint(tmp_path, caplog):
    options = {"rollout_func": tt.rollout, "bipace_epsilon": "auto", "save_strategy": "steps", "save_steps": 1}
    with caplog.at_level(logging.INFO):
        first = trained(tmp_path, **options)
    assert caplog.text.count("bipace_epsilon=auto chose") == 1
    chosen = first._bipace.epsilon
    assert chosen == bk.choose_epsilon(**states_of(first.batches[0])).epsilon
    assert [log["bipace/epsilon"] for log in first.state.log_history if "loss" in log] == [chosen] * 2
    check(first, bk.Config.bipace(chosen, **SINGLETON))
    file = tmp_path / "checkpoint-1" / "bipace_state.json"
    assert json.loads(file.read_text())["epsilon"] == chosen

    file.write_text(json.dumps({**json.loads(file.read_text()), "epsilon": 0.123}))
    second = tt.make_trainer(tmp_path, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert second._bipace.epsilon == 0.123 and second.state.log_history[-2]["bipace/epsilon"] == 0.123


def states_of(batch):
    """Of each turn: its hidden state, group, row and number."""
    turns, columns = turns_of(batch)
    states = batch["states"][turns.row, columns]
    return {"fingerprint": states, "group": turns.row // 4, "trajectory": turns.row, "step": turns.step}


KEPT = {
    "bipace_memory.pt": {"bipace_method": "gae", "bipace_share": "memory", "bipace_memory_rows": 12},
    "bipace_state.json": {"bipace_epsilon": "follow"},
}


@pytest.mark.parametrize("file", KEPT)
def test_a_run_that_resumes_has_the_bits_of_the_one_that_went_on(tmp_path, monkeypatch, file):
    """Values of batches before, or an ε that follows; without the file the run begins anew."""
    monkeypatch.setattr(_states, "choose_epsilon", lambda *_, **__: SimpleNamespace(epsilon=0.02, reason="far off"))
    options = {
        "rollout_func": tt.rollout, "num_iterations": 2, "max_steps": 7, "shuffle_dataset": False,
        "save_strategy": "steps", "save_steps": 4, **KEPT[file],
    }  # fmt: skip
    save, saved = GRPOTrainer._save, []
    of = lambda self, to, **what: saved.append(Path(to, file).exists()) or save(self, to, **what)  # noqa: E731
    monkeypatch.setattr(GRPOTrainer, "_save", of)
    first, epsilons = trained(tmp_path, **options), []
    assert set(saved) == {True}  # before the model: a run may end before its checkpoint is whole
    memory, controller = bk.ValueMemory(12), bk.EpsilonController(0.02)
    for batch in first.batches:
        config, how = bk.Config.gae(share="memory", **SINGLETON), {"memory": memory}
        if file == "bipace_state.json":
            epsilons.append(controller.update(**states_of(batch)))
            config, how = bk.Config.bipace(epsilons[-1], **SINGLETON), {}
        (wanted,) = tt.by_hand(batch, config=config, **how)
        assert torch.equal(batch["output"]["advantages"], wanted)
    if epsilons:
        (*_, log) = [log for log in first.state.log_history if "loss" in log]
        assert len(set(epsilons)) > 1 and log["bipace/epsilon"] == epsilons[-1]
        assert log["bipace/epsilon_moves"] == controller.metrics()["bipace/epsilon_moves"]
    at = tmp_path / "checkpoint-4"
    assert len(first.batches) == 4 and not list(at.glob("*.begun"))
    for kept in (True, False):
        if not kept:
            (at / file).unlink()
        second = tt.make_trainer(tmp_path, **options)
        second.train(resume_from_checkpoint=str(at))
        pairs = zip(first.batches[2:], second.batches, strict=True)
        assert all(torch.equal(a["output"]["advantages"], b["output"]["advantages"]) for a, b in pairs) is kept
        assert (second._bipace.state_dict() == first._bipace.state_dict()) is (kept or not epsilons)


def test_a_command_line_and_a_yaml_file(tmp_path):
    parser = HfArgumentParser(BiPACEGRPOConfig)
    line = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    words = "--bipace_method bigpo --bipace_epsilon auto --bipace_layer -12 --bipace_step_norm std"
    (args,) = parser.parse_args_into_dataclasses([*line, *words.split()])
    assert args.settings == Settings(method="bigpo", epsilon="auto", layer=-12, step_norm="std")
    words = "--bipace_method bigpo --bipace_epsilon 0.2 --bipace_layer"
    (args,) = parser.parse_args_into_dataclasses([*line, *words.split(), "block 3"])
    assert args.settings == Settings(method="bigpo", epsilon=0.2, layer="block 3")
    (args,) = parser.parse_args_into_dataclasses([*line, "--bipace_kernel_time", "0"])
    assert args.settings == Settings(method="gae", kernel_time=0.0)
    file = tmp_path / "run.yaml"
    ours = {"bipace_method": "bipace", "bipace_epsilon": 0.15, "bipace_layer": -1, "scale_rewards": "none"}
    file.write_text(json.dumps({"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **ours}))
    (args,) = parser.parse_yaml_file(str(file))
    assert args.settings == Settings(method="bipace", epsilon=0.15, layer=-1, episode_norm="none")
    assert args.to_dict()["bipace_epsilon"] == 0.15


def config(**options):
    return BiPACEGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **options)


def test_settings_that_are_wrong_a_layer_that_the_model_lacks_and_a_plain_config(tmp_path, monkeypatch):
    for options, message in (
        ({"bipace_metod": "gae"}, "has no argument 'bipace_metod'; did you mean 'bipace_method'"),
        ({"scale_rewards": "batch", "bipace_method": "bipace"}, "scale_rewards='batch' has no counterpart"),
        ({"scale_rewards": "batch", "bipace_method": "gae", "bipace_episode_weight": 1.0}, "='batch' has no"),
        ({"bipace_epsilon": 0.2}, "bipace_epsilon has no effect .* method gae; leave it out, or set method to bipace"),
        ({"num_generations": 1}, "GRPO requires at least 2 generations"),
    ):
        refused(message, config, error=(ValueError, TypeError), **options)
    with pytest.raises(ValueError, match=r"bipace_layer must be an index into hidden_states, −9 to −1 .* got -20"):
        tt.make_trainer(tmp_path, bipace_layer=-20)
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    data = Dataset.from_dict({"prompt": tt.PROMPTS})
    with pytest.raises(TypeError, match="args must be a BiPACEGRPOConfig, got GRPOConfig"):
        tt.BiPACEGRPOTrainer(tt.make_model(), [tt.reward], args, train_dataset=data, processing_class=tt.TOKENIZER)
    # As TRL before 1.15 sets it, but not until it has looked for Liger, which is not installed.
    set_late = property(lambda trainer: hasattr(trainer, "_bipace"), lambda *_: None)
    fused = type("Fused", (tt.Keeping,), {"use_liger_kernel": set_late})
    refused("use_liger_kernel takes one advantage per completion", tt.make_trainer, tmp_path, cls=fused)
    monkeypatch.setattr(trainer_module, "release", "1.9.0")
    refused("luspo before TRL 1.10 takes one advantage", tt.make_trainer, tmp_path, loss_type="luspo")


def test_scale_rewards_decides_the_episode_norm():
    published = partial(config, bipace_method="bipace")
    assert published().settings.episode_norm is None
    assert published(scale_rewards="none").settings.episode_norm == "none"
    assert published(scale_rewards="none", bipace_episode_norm="std").settings.episode_norm == "std"
    gigpo = config(scale_rewards="none", bipace_method="gigpo", bipace_gigpo_mode="mean_std_norm")
    assert gigpo.settings.episode_norm is None
    assert config(scale_rewards="batch", bipace_method="grpo").settings.method == "grpo"
    refused("bipace_episode_norm has no effect in method grpo", config, bipace_method="grpo", bipace_episode_norm="std")
    for other in (config, partial(published, bipace_episode_weight=0.0)):  # no episode term
        assert other(scale_rewards="batch").settings.config().episode_weight == 0


def test_what_a_rollout_func_gives_wrongly(tmp_path):
    for change, message in (
        ({"observations": lambda rows: [["x"] * 9] * len(rows)}, "observations must have one entry per turn"),
        ({"actions": lambda rows: ["north"] * len(rows)}, "actions must have one entry per turn of the model, but row"),
        ({"step_rewards": lambda rows: rows[:3] + [None] * (len(rows) - 3)}, "step_rewards .* but row 3 has 0 for"),
        ({"turn_starts": lambda rows: [[99]] * len(rows)}, "turn_starts must be columns below"),
        ({"turn_starts": lambda rows: [[1, 0, 0]] * len(rows)}, "each once, got .1, 0, 0. in row 0; it is not a mask"),
        ({"env_mask": lambda rows: [[1] * len(row) for row in rows]}, "the env_mask of rollout_func, which must be 0"),
        ({"truncated": lambda rows: [[True]] * len(rows)}, r"truncated must be one bool per row, .* got \[True\] in"),
    ):

        def wrong(prompts, trainer, change=change):
            out = tt.rollout(prompts, trainer, extras=ALL)
            return {**out, **{name: make(out.get(name, out["completion_ids"])) for name, make in change.items()}}

        options = {"bipace_method": "gae", "bipace_embedder": "ngram", "bipace_on_invalid": "raise"}
        trainer = tt.make_trainer(tmp_path, rollout_func=wrong, **options)
        refused(message, trainer.train, error=(ValueError, TypeError))
        assert trainer._buffered_inputs is None  # a failure leaves the batch alone


def test_rows_and_states_of_another_batch_and_logs_without_the_tool_loop(tmp_path):
    trainer = trained(tmp_path, rollout_func=tt.rollout, max_steps=1)
    batch = trainer.batches[0]
    given = (trainer, batch["inputs"], batch["output"])
    with pytest.raises(ValueError, match="rewards must have one row per completion of all processes"):
        bipace_advantages(*given, batch["rewards"][:4], trainer._bipace)
    with pytest.raises(ValueError, match="hidden must have one row per turn"):
        bipace_advantages(*given, batch["rewards"], trainer._bipace, hidden=torch.ones(3, 32))
    trainer = trained(tmp_path, max_steps=1)
    batch = trainer.batches[0]
    trainer.environments = [SimpleNamespace(step_rewards=[1.0]) for _ in batch["inputs"]]
    given = (trainer, batch["inputs"], batch["output"], batch["rewards"], trainer._bipace)
    refused("loop must be given to bipace_advantages", bipace_advantages, *given)
    with pytest.warns(RuntimeWarning, match=r"generated without begin_turn\(\), so what environments log"):
        bipace_advantages(*given, loop=ToolLoop())


def test_the_function_for_trainers_of_one_s_own(tmp_path):
    class Own(GRPOTrainer):
        states = States(Settings(method="bipace"), "bipace_")

        def _calculate_rewards(self, *args, **kwargs):
            self.seen = super()._calculate_rewards(*args, **kwargs)
            return self.seen

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            before = dict(output)
            found = bipace_advantages(self, inputs, output, self.seen, self.states)
            assert all(output[name] is value for name, value in before.items())
            output["advantages"] = found.advantages
            return output

    one, two = tt.make_model(), tt.make_model()
    trained(tmp_path, cls=Own, model=one, rollout_func=tt.rollout)
    trained(tmp_path, cls=tt.BiPACEGRPOTrainer, model=two, rollout_func=tt.rollout)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
