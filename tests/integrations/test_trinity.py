"""BiPACE in Trinity-RFT: its own pipeline, from serialized experiences to the batch of its trainer."""

import asyncio
import random
import sys
from types import SimpleNamespace

import doc_blocks
import pyarrow.parquet as pq
import pytest
import torch
from refusals import refused

pytest.importorskip("trinity.algorithm", reason="Trinity-RFT is not installed: see docs/trinity.md for its environment")

from bipace_kernels.integrations.trinity import BiPACEAdvantage
from trained_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast
from trinity.algorithm.advantage_fn.gigpo_advantage import GiGPOAdvantageFn
from trinity.algorithm.advantage_fn.multi_step_grpo_advantage import StepWiseGRPOAdvantageFn
from trinity.buffer.pipelines import experience_pipeline
from trinity.common.config import load_config
from trinity.common.config_validator import AlgorithmConfigValidator
from trinity.common.experience import EID, Experience
from trinity.trainer.verl.utils import to_data_proto

import bipace_kernels as bk

NAME = "bipace_kernels.integrations.trinity.BiPACEAdvantage"
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="<|endoftext|>")
ACTIONS = ["<action>go to fridge 1</action>", "<action>open drawer 2</action>", "I should think"]
OWN = {"episode_scope": "trajectory", "lone_trajectory": "raw"}  # what Trinity's GiGPO does besides
GO, LOOK = TOKENIZER("go")["input_ids"], TOKENIZER("look")["input_ids"]


def experiences(seed=0, **left_out):
    """3 tasks of 4 runs of 1 to 4 steps, in no order; some with two model calls in one step."""
    rng, found = random.Random(seed), []
    for task in range(3):
        for run in range(4):
            steps = rng.randint(1, 4)
            calls = [step for step in range(steps) for _ in range(rng.choice([1, 1, 2]))]
            rewards = [float(rng.randint(0, 2)) for _ in calls]
            for step, reward in zip(calls, rewards, strict=True):
                state = f"room {rng.randint(0, 1)}"
                prompt = TOKENIZER(f"task {task}: {state}")["input_ids"]
                answer = TOKENIZER(rng.choice(ACTIONS))["input_ids"]
                info = {"step_reward": reward, "observation": state, "env_state_hash": f"{task} {state}"}
                eid, kept = EID(batch=1, task=task, run=run, step=step), {k: info[k] for k in info.keys() - left_out}
                of_tokens = {"tokens": prompt + answer, "prompt_length": len(prompt), "logprobs": [0.0] * len(answer)}
                found.append(Experience(eid=eid, **of_tokens, reward=sum(rewards), info=kept))
    # The calls of a step keep their order.
    order = sorted(range(len(found)), key=lambda i: (found[i].eid.step, rng.random()))
    return [found[i] for i in sorted(order, key=lambda i: (found[i].eid.run, found[i].eid.step))]


def by_hand(exps, config, states="ngram"):
    """Advantages, one number for each experience: loops, bk.advantage() and nothing of the adapter."""
    columns = {k: [] for k in ("group", "trajectory", "step", "rewards", "episode_return", "observation", "response")}
    seen = {}
    for exp in exps:
        seen[exp.eid.rid] = seen.get(exp.eid.rid, -1) + 1
        for name, value in {
            "group": exp.eid.tid, "trajectory": exp.eid.task * 10 + exp.eid.run, "step": seen[exp.eid.rid],
            "rewards": exp.info.get("step_reward", 0.0), "episode_return": exp.reward,
            "observation": exp.info.get("observation", exp.info.get("env_state_hash")),
            "response": exp.tokens[exp.prompt_length :].tolist(),
        }.items():  # fmt: skip
            columns[name].append(value)
    if "step_reward" not in exps[0].info:
        last = [seen[exp.eid.rid] == step for exp, step in zip(exps, columns["step"], strict=True)]
        columns["rewards"] = [exp.reward * end for exp, end in zip(exps, last, strict=True)]
    written = columns.pop("response")
    actions = [TOKENIZER.decode(ids) for ids in written]
    keys, parsed = bk.action_keys(written, mode="action_tag", token_bytes=bk.token_bytes(TOKENIZER))
    assert parsed.any() and not parsed.all()
    texts = columns.pop("observation")
    if config.needs_fingerprint and not config.has_epsilon:  # a kernel value reads three observations and two actions
        steps = [(exp.eid.rid, step) for exp, step in zip(exps, columns["step"], strict=True)]
        place = {step: i for i, step in enumerate(steps)}
        before = [[place[rid, t] for t in range(max(0, step - 2), step)] for rid, step in steps]
        heads = ["".join(f"{texts[j]}\n> {actions[j]}\n" for j in js) for js in before]
        texts = [head + own for head, own in zip(heads, texts, strict=True)]
    own = {"fingerprint": bk.ngram_fingerprint(texts)} if states == "ngram" else {"observation": texts}
    return bk.advantage(**columns, **own, action_key=keys, action_parsed=parsed, config=config).advantage


def run(pipeline, exps):
    return asyncio.run(pipeline.process(Experience.serialize_many(exps)))


class Kept:
    """In the place of the buffer behind the pipeline."""

    async def acquire(self):
        return 1

    async def write(self, exps):
        self.exps = exps


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    """Trinity's ExperiencePipeline of a YAML file, and its metrics."""
    monkeypatch.setattr(experience_pipeline, "get_buffer_writer", lambda config: Kept())
    allocator = SimpleNamespace(Allocator=lambda config: None)  # of auxiliary models, which imports vLLM
    monkeypatch.setitem(sys.modules, "trinity.common.models.allocator", allocator)
    TOKENIZER.save_pretrained(tmp_path / "model")

    def make(algorithm=None, **settings):
        lines = "\n".join(f"    {name}: {value}" for name, value in settings.items())
        algorithm = algorithm or (
            f"algorithm:\n  algorithm_type: multi_step_grpo\n  advantage_fn: {NAME}\n  advantage_fn_args:\n"
            f"    tokenizer: ${{model.model_path}}\n{lines}\n"
        )
        (tmp_path / "run.yaml").write_text(
            f"model:\n  model_path: {tmp_path / 'model'}\n{algorithm}"
            "data_processor:\n  experience_pipeline:\n    save_input: false\n"
        )
        config = load_config(str(tmp_path / "run.yaml"))
        AlgorithmConfigValidator().validate(config)
        made = experience_pipeline.ExperiencePipeline(config)
        asyncio.run(made.prepare())
        return made

    return make


@pytest.mark.filterwarnings("ignore:.*embedder=auto uses n-grams:RuntimeWarning")
@pytest.mark.parametrize("left_out", [(), ("step_reward",)])
@pytest.mark.parametrize("method", ["bipace", "bigpo", "gae"])
def test_the_pipeline_gives_the_estimator_s_bits_to_the_trainer(pipeline, method, left_out):
    exps = experiences(**dict.fromkeys(left_out, True))
    own = {"embedder": "ngram"} if method == "gae" else {"epsilon": 0.25}
    config = getattr(bk.Config, method)(**own, gamma=0.9, duplicates="once")
    wanted = by_hand(exps, config)
    made = pipeline(method=method, gamma=0.9, action_key_mode="action_tag")
    metrics = run(made, exps)
    batch = to_data_proto(made.output.exps, TOKENIZER.pad_token_id, None, None).batch
    assert torch.equal(batch["advantages"], batch["response_mask"] * wanted[:, None])
    assert wanted.unique().numel() > 5 and metrics["experience_pipeline/bipace/embedder/ngram"] == 1
    assert metrics["experience_pipeline/experience_count"] == len(exps)


@pytest.mark.filterwarnings("ignore:.*embedder=auto uses n-grams:RuntimeWarning")
def test_the_yaml_of_the_page_runs(pipeline):
    (block,) = doc_blocks.blocks("docs/trinity.md", "yaml")
    ours, page = experiences(), experiences()
    BiPACEAdvantage(TOKENIZER, gamma=0.95)(ours)  # gae, as on the page
    made = pipeline(block.code)
    run(made, page)
    assert all(torch.equal(a.advantages, b.advantages) for a, b in zip(ours, made.output.exps, strict=True))


def test_the_steps_of_a_run_are_recorded(pipeline, tmp_path):
    exps = experiences()
    made = pipeline(method="gigpo", record_dir=tmp_path / "steps", action_key_mode="action_tag")
    run(made, exps)
    found = pq.read_table(tmp_path / "steps/update_00000000.parquet").to_pydict()
    rows = zip(*(found[name] for name in ("reward", "observation", "action", "bipace_advantage")), strict=True)
    wanted = []
    for exp in made.output.exps:
        action = TOKENIZER.decode(exp.tokens[exp.prompt_length :])
        wanted.append((exp.info["step_reward"], exp.info["observation"], action, float(exp.advantages[0])))
    assert sorted(rows) == sorted(wanted) and len(set(found["task_id"])) == 3


def test_rollouts_that_share_an_eid_run_are_warned_of():
    """Trinity's own group advantages do not read it."""
    exps = [exp for exp in experiences() if exp.eid.step == 0]
    for exp in exps:
        exp.eid.run, exp.prompt_length = 0, 2
    with pytest.warns(RuntimeWarning, match="every eid.run is 0, .* count as turns of one rollout.* set eid.run ="):
        BiPACEAdvantage(TOKENIZER, method="grpo")(exps)


def test_grpo_is_trinity_s_step_wise_grpo():
    ours, theirs = experiences(), experiences()
    BiPACEAdvantage(TOKENIZER, method="grpo")(ours)
    StepWiseGRPOAdvantageFn()(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.advantages, b.advantages.float(), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("mode", "fnorm"), [("mean_norm", "none"), ("mean_std_norm", "std")])
@pytest.mark.parametrize("seed", range(4))
def test_gigpo_is_trinity_s_own(mode, fnorm, seed):
    """Its states are hashes that name the task, for it compares them over all tasks; ours are of one prompt group."""
    ours, theirs = experiences(seed, observation=True), experiences(seed, observation=True)
    BiPACEAdvantage(TOKENIZER, method="gigpo", gigpo_mode=mode, gamma=0.9, step_weight=0.7, **OWN)(ours)
    GiGPOAdvantageFn(omega=0.7, gamma=0.9, fnorm=fnorm)(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.advantages, b.advantages.float(), atol=2e-6, rtol=2e-6)


def test_copies_count_once_and_the_order_of_experiences_means_nothing():
    """But of two calls in one step the first one stands first: nothing else says so."""
    ours, more = experiences(), experiences()
    for a, b in zip(ours, more, strict=True):
        b.eid = a.eid
    copies = [Experience.deserialize(exp.serialize()) for exp in more[:9]]
    shuffled = sorted(more, key=lambda exp: random.Random(f"{exp.eid.rid} {exp.eid.step}").random())
    BiPACEAdvantage(TOKENIZER, embedder="ngram")(ours)
    exps, _ = BiPACEAdvantage(TOKENIZER, embedder="ngram")([*copies, *shuffled])
    wanted = {exp.eid.uid: exp.advantages for exp in ours}
    assert [exp.eid.uid for exp in exps[9:]] != list(wanted)
    assert all(torch.equal(exp.advantages, wanted[exp.eid.uid]) for exp in exps)


def conversations(*rewards, **info):
    """Experiences of two turns, each a run of its own."""
    found = []
    for run, reward in enumerate(rewards):
        row = {"tokens": [1, 2, *GO, 3, *LOOK], "action_mask": [1] * len(GO) + [0] + [1] * len(LOOK), "reward": reward}
        eid, own = EID(batch=1, task=0, run=run), {"step_reward": [1.0, float(run)], **info}
        found.append(Experience(eid=eid, prompt_length=2, info=own, **row))
    return found


def test_an_experience_of_several_turns():
    """Its entries are lists, one for each run of ones in action_mask; a run without reward is set aside and counted."""
    exps = conversations(1.0, 3.0, None, observation=["a", "b"])
    _, metrics = BiPACEAdvantage(TOKENIZER, method="gigpo", gigpo_mode="mean_norm", gamma=0.5, **OWN)(exps)
    left, right = [-1 - 0.25, -1 - 0.5], [1 + 0.25, 1 + 0.5]  # R − mean: 1 ∓ 1; R_0 = 1 + run / 2; R_1 = run
    for exp, (a, b) in zip(exps, (left, right, (0.0, 0.0)), strict=True):
        wanted = torch.tensor([a] * len(GO) + [0.0] + [b] * len(LOOK))
        torch.testing.assert_close(exp.advantages, wanted, atol=1e-5, rtol=0)
    assert metrics["bipace/invalid_row_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("key", ["step_reward", "observation"])
def test_a_run_whose_entries_do_not_fit_its_turns_is_set_aside(key):
    """All its experiences are, and the others have the advantages that they have without it."""
    exps, others = (conversations(1.0, 3.0, 2.0, observation=["a", "b"]) for _ in range(2))
    later = conversations(2.0, observation=["a", "b"])[0]
    later.eid = EID(batch=1, task=0, run=2, step=1)
    exps[2].info[key] = exps[2].info[key][:1]
    settings = {"method": "gigpo", "gamma": 0.5}
    words = rf"info\['{key}'\] must have one entry per turn .* row 2 has 1 for 2 turns"
    with pytest.warns(RuntimeWarning, match=words):
        BiPACEAdvantage(TOKENIZER, **settings)([*exps, later])
    BiPACEAdvantage(TOKENIZER, **settings)(others[:2])
    assert others[0].advantages.any()
    assert all(torch.equal(a.advantages, b.advantages) for a, b in zip(exps[:2], others[:2], strict=True))
    assert not exps[2].advantages.any() and not later.advantages.any()
    with pytest.raises(
        ValueError, match="row 0 has 1 for 2 turns; a turn is a run"
    ):  # none fits: that is the workflow's code
        BiPACEAdvantage(TOKENIZER, **settings)(exps[2:])
    del exps[2].info[key]
    with pytest.raises(ValueError, match="row 2 has 0 for 2 turns; a turn is a run"):
        BiPACEAdvantage(TOKENIZER, **settings, on_invalid="raise")(exps)


def test_a_hash_of_an_experience_of_several_turns_is_no_observation(recwarn):
    """It says nothing of the later turns, whose states are then the texts before them."""
    ours, texts = conversations(1.0, 3.0, env_state_hash="x"), conversations(1.0, 3.0)
    BiPACEAdvantage(TOKENIZER, method="gigpo")(ours)
    assert "env_state_hash is one value for an experience of several turns" in str(recwarn.pop(RuntimeWarning).message)
    BiPACEAdvantage(TOKENIZER, method="gigpo")(texts)
    assert texts[0].advantages.any()
    assert all(torch.equal(a.advantages, b.advantages) for a, b in zip(ours, texts, strict=True))


def test_settings_that_do_not_fit():
    for given, match in (
        ({"tokenizer": None}, r"\.tokenizer must be given, got None: set it to \$\{model\.model_path\}"),
        ({"omega": 1.0}, r"advantage_fn_args\.omega is not a setting of BiPACE; the settings are method"),
        ({"method": "ppo"}, r"advantage_fn_args\.method must be one of grpo"),
        ({"embedder": "actor_hidden"}, "embedder=actor_hidden has no hidden states: Trinity-RFT computes advantages"),
    ):
        refused(match, BiPACEAdvantage, **{"tokenizer": TOKENIZER, **given})
