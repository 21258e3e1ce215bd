"""The code of docs/other_trainers.md on made-up batches, with stand-ins of its trainers' modules."""

import asyncio
import os
import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from paths import ROOT
from trained_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast

import bipace_kernels as bk

PAGE = (ROOT / "docs/other_trainers.md").read_text()
ACTIONS = ("go to the apple", "open drawer 2", "take a red mug")


class TrainingInputBatch(dict):
    """SkyRL's: tensors by name, and metadata."""


class Rollouts:
    """Two prompt groups of three trajectories: which room, which action; the last step has the reward."""

    def __init__(self, tokenizer):
        rng = np.random.default_rng(0)
        self.group, self.trajectory, self.step, self.reward, self.room, self.action = [], [], [], [], [], []
        for t in range(6):
            length = int(rng.integers(2, 4))
            for i in range(length):
                self.group.append(t // 3)
                self.trajectory.append(t)
                self.step.append(i)
                self.reward.append(float(rng.integers(1, 9)) if i + 1 == length else 0.0)
                self.room.append(f"You are in room {'abc'[rng.integers(3)]}.")
                self.action.append(f"<action>{ACTIONS[rng.integers(3)]}</action>")
        self.prompts = [tokenizer.encode(room) for room in self.room]
        self.responses = [tokenizer.encode(action) for action in self.action]
        self.last = [i + 1 == len(self.step) or self.step[i + 1] == 0 for i in range(len(self.step))]

        self.outcomes = [r for r, last in zip(self.reward, self.last, strict=True) if last]  # of the trajectories
        pairs = list(zip(self.trajectory, self.prompts, self.responses, strict=True))
        self.rows = [[(p, r) for t, p, r in pairs if t == wanted] for wanted in range(6)]

    def advantage(self, texts=None, keys=None):
        states = bk.ngram_fingerprint(self.room if texts is None else texts)
        keys = bk.action_keys(self.action)[0] if keys is None else keys
        columns = {"step": self.step, "fingerprint": states, "action_key": keys, "config": bk.Config.bipace(0.25)}
        return bk.advantage(self.group, self.trajectory, self.reward, **columns).advantage

    def padded(self, left, right, pad):
        """[N, P + T] ids and the mask of responses, prompts on the left."""
        p, t = max(map(len, left)), max(map(len, right))
        ids = torch.full((len(left), p + t), pad)
        mask = torch.zeros(len(left), p + t, dtype=torch.int64)
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            ids[i, p - len(a) : p] = torch.tensor(a)
            ids[i, p : p + len(b)] = torch.tensor(b)
            mask[i, p : p + len(b)] = 1
        return ids, mask, p

    def whole(self, part=range(6), room=0):
        """[B, T] ids of these trajectories, one behind the other its prompts and responses, and 1 on the latter."""
        ids = [[i for p, r in self.rows[t] for i in p + r] for t in part]
        masks = [[bit for p, r in self.rows[t] for bit in [0] * len(p) + [1] * len(r)] for t in part]
        width = max(map(len, ids)) + room
        return (torch.tensor([row + [0] * (width - len(row)) for row in each]) for each in (ids, masks))


@pytest.fixture(scope="module")
def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="<|endoftext|>")


@pytest.fixture
def rollouts(tokenizer):
    return Rollouts(tokenizer)


@pytest.fixture
def run(tokenizer, monkeypatch):
    """The names that a section's code defines, with the trainer's modules stood in for."""

    def section(title, **modules):
        for name, contents in modules.items():
            parts = name.replace("__", ".").split(".")
            for i in range(1, len(parts) + 1):
                monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
            vars(sys.modules[".".join(parts)]).update(contents)
        codes = re.findall(r"```python\n(.*?)```", PAGE.split(f"## {title}\n")[1].split("\n## ")[0], re.DOTALL)
        names = {"tokenizer": tokenizer}
        exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], names)
        exec(codes[0], names)
        return names

    return section


@pytest.mark.parametrize("newer", [False, True])
def test_roll(run, rollouts, tokenizer, newer):

    def stock(batch, pipeline_config):
        return (batch, {}) if newer else batch

    pipeline = SimpleNamespace(compute_response_level_rewards=stock)
    run("ROLL", roll__pipeline__agentic={"agentic_pipeline": pipeline})
    ids, mask, _ = rollouts.padded(rollouts.prompts, rollouts.responses, tokenizer.pad_token_id)
    total = dict.fromkeys(rollouts.trajectory, 0.0)
    for t, r in zip(rollouts.trajectory, rollouts.reward, strict=True):
        total[t] += r
    returns = bk.discounted_returns(rollouts.reward, rollouts.trajectory, 0.95, step=rollouts.step)
    copies = list(range(len(ids))) + [3, 1]
    rows = {
        "traj_group_id": [f"g{g}" for g in rollouts.group], "traj_id": [f"t{t}" for t in rollouts.trajectory],
        "step": rollouts.step, "episode_scores": [total[t] for t in rollouts.trajectory],
    }  # fmt: skip
    batch = SimpleNamespace(
        non_tensor_batch={k: np.array(v, dtype=object)[copies] for k, v in rows.items()},
        batch={"input_ids": ids[copies], "response_mask": mask[copies], "step_rewards": returns[copies]},
    )
    pipeline.compute_response_level_rewards(batch=batch, pipeline_config=None)
    torch.testing.assert_close(batch.batch["response_level_rewards"], rollouts.advantage()[copies], atol=1e-6, rtol=0)


def test_skyrl(run, rollouts, tokenizer):
    class RayPPOTrainer:
        def compute_advantages_and_returns(self, data):
            return data

    names = run("SkyRL", skyrl__train__trainer={"RayPPOTrainer": RayPPOTrainer})
    trainer = names["BiPACETrainer"]()
    trainer.tokenizer, trainer.all_metrics = tokenizer, {}
    ids, mask, p = rollouts.padded(rollouts.prompts, rollouts.responses, tokenizer.pad_token_id)
    rewards = torch.zeros(mask[:, p:].shape)
    rewards[:, 0] = torch.tensor(rollouts.reward)
    extra = [*range(len(ids)), 0]  # a row of padding
    data = TrainingInputBatch(sequences=ids[extra], response_mask=mask[extra, p:], rewards=rewards[extra])
    data.metadata = {
        "uids": [f"g{rollouts.group[i]}" for i in extra], "is_last_step": [*rollouts.last, True], "pad_size": 1
    }  # fmt: skip
    data = trainer.compute_advantages_and_returns(data)
    wanted = bk.to_tokens(torch.cat([rollouts.advantage(), torch.zeros(1)]), data["response_mask"])
    torch.testing.assert_close(data["advantages"], wanted, atol=1e-6, rtol=0)
    assert trainer.all_metrics["bipace/cluster_count"] > 1


def test_slime(run, rollouts):
    samples = [
        SimpleNamespace(
            group_index=g, response=action, metadata={"trajectory": t % 3, "step": s, "observation": room},
            get_reward_value=lambda args, r=r: r,
        )
        for g, t, s, r, room, action in zip(
            rollouts.group, rollouts.trajectory, rollouts.step, rollouts.reward, rollouts.room, rollouts.action,
            strict=True,
        )
    ]  # fmt: skip
    raw, advantage = run("slime")["rewards"](None, samples)
    assert raw == rollouts.reward
    assert [sample.rollout_id for sample in samples] == rollouts.trajectory  # else slime drops trailing samples
    torch.testing.assert_close(torch.tensor(advantage), rollouts.advantage(), atol=1e-6, rtol=0)


def trajectories_of(rollouts, step, trajectory):
    """Six of them, and their steps in the order of the rollouts."""
    steps = [step(prompt_ids=p, response_ids=r) for p, r in zip(rollouts.prompts, rollouts.responses, strict=True)]
    own = [[s for s, t in zip(steps, rollouts.trajectory, strict=True) if t == wanted] for wanted in range(6)]
    return steps, [trajectory(steps=s, reward=r) for s, r in zip(own, rollouts.outcomes, strict=True)]


def test_rllm(run, rollouts):
    def own(groups, *configs):
        return groups

    names = run("rLLM", rllm__trainer__algorithms__transform={"_default_traj_grouping_hook": own})
    steps, found = trajectories_of(rollouts, SimpleNamespace, SimpleNamespace)
    groups = [SimpleNamespace(trajectories=found[:3]), SimpleNamespace(trajectories=found[3:])]
    assert names["grouped"](groups, None, None) is groups and names["grouped"]([]) == []
    assert [len(s.advantage) for s in steps] == [len(r) for r in rollouts.responses]
    torch.testing.assert_close(torch.tensor([s.advantage[0] for s in steps]), rollouts.advantage(), atol=1e-6, rtol=0)


@pytest.mark.skipif("BIPACE_RLLM" not in os.environ, reason="BIPACE_RLLM names no checkout of rLLM")
def test_rllm_keeps_them(run, rollouts, monkeypatch):
    """Its own grouping and collection leave each step's advantage as it is, where they were asked to."""
    monkeypatch.syspath_prepend(os.environ["BIPACE_RLLM"])
    from rllm.trainer.algorithms.advantage import collect_reward_and_advantage_from_trajectory_groups as collect
    from rllm.trainer.algorithms.config import AlgorithmConfig, TransformConfig
    from rllm.trainer.algorithms.transform import transform_episodes_to_trajectory_groups
    from rllm.types import Episode, Step, Trajectory

    names = run("rLLM")
    steps, found = trajectories_of(rollouts, Step, lambda **own: Trajectory(name="agent", **own))
    episodes = [Episode(id=f"task{i // 3}:{i % 3}", trajectories=[found[i]]) for i in range(6)]
    hook = {"traj_grouping_hook": names["grouped"]}
    groups, _ = transform_episodes_to_trajectory_groups(episodes, TransformConfig(), **hook)
    metrics = collect(groups, AlgorithmConfig(use_precomputed_advantage=True))
    assert metrics["advantage/agent/std"] > 0
    torch.testing.assert_close(torch.tensor([s.advantage[0] for s in steps]), rollouts.advantage(), atol=1e-6, rtol=0)
    assert [len(s.advantage) for s in steps] == [len(r) for r in rollouts.responses]


def test_areal(run, rollouts, tokenizer):
    class PPOActor:
        def _compute_advantages(self, data, meta=None):
            return {**data, "loss_mask": data["loss_mask"].float().roll(-1, 1)}

    names = run("AReaL", areal__trainer__ppo__actor={"PPOActor": PPOActor})
    ids, mask = rollouts.whole(room=2)
    data = {"input_ids": ids, "loss_mask": mask, "rewards": torch.tensor(rollouts.outcomes)}
    out = names["BiPACEActor"]()._compute_advantages(data, SimpleNamespace(traj_group_sizes=[3, 3]))
    mask = out["loss_mask"].bool()
    assert not out["advantages"][~mask].any()
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    texts, seen = [], {}
    for t, prompt, response in zip(rollouts.trajectory, rollouts.prompts, rollouts.responses, strict=True):
        texts.append(tokenizer.decode(seen.get(t, []) + prompt))
        seen[t] = seen.get(t, []) + prompt + response
    wanted = rollouts.advantage(texts, bk.action_keys(rollouts.responses, mode="first_n")[0])
    torch.testing.assert_close(out["advantages"][begins], wanted, atol=1e-6, rtol=0)


def check_tokens(rollouts, found):
    """found [B][T]: the advantage of each turn on its tokens, 0 elsewhere."""
    values = iter(rollouts.advantage().tolist())
    for row, pairs in zip(found, rollouts.rows, strict=True):
        tokens = []
        for prompt, response in pairs:
            tokens += [0.0] * len(prompt) + [next(values)] * len(response)
        torch.testing.assert_close(torch.tensor(row[: len(tokens)]), torch.tensor(tokens), atol=1e-6, rtol=0)
        assert not any(row[len(tokens) :])


def test_nemo_rl(run, rollouts, tokenizer):
    """compute_advantage(prompt_ids [B, P], rewards [B], mask [B, S], repeated_batch=, …) and messages at 7ea279a."""
    grpo = SimpleNamespace(GRPOAdvantageEstimator=object)
    run("NeMo-RL", nemo_rl__algorithms={"grpo": grpo})

    def message(role, ids, text=""):
        written = torch.full((len(ids),), role == "assistant" and not text)
        content = text or tokenizer.decode(ids)
        return {"role": role, "token_ids": torch.tensor(ids), "content": content, "token_loss_mask": written}

    roles = ("user", "assistant")
    logs = [[message(*part) for pair in pairs for part in zip(roles, pair, strict=True)] for pairs in rollouts.rows]
    for log, ((first, _), *_) in zip(logs, rollouts.rows, strict=True):  # an example's answer ends the prompt
        log[:1] = [message("user", first[:2]), message("assistant", first[2:], tokenizer.decode(first))]
    _, mask = rollouts.whole(room=2)
    given = {"prompt_ids": torch.tensor([[1, 0]] * 3 + [[2, 5]] * 3), "rewards": torch.tensor(rollouts.outcomes)}
    more = {"repeated_batch": {"message_log": logs}, "logprobs_policy": None, "logprobs_reference": None}
    found = grpo.GRPOAdvantageEstimator().compute_advantage(**given, mask=mask, **more)
    check_tokens(rollouts, found.tolist())
    mask[2] = 0  # by sample_mask
    found = grpo.GRPOAdvantageEstimator().compute_advantage(**given, mask=mask, **more)
    assert not found[2].any() and found[1].any()


def test_prime_rl(run, rollouts):
    """score_group(episodes), iter_trainable_traces(), assign_advantages(trace, of sampled tokens), nodes at 559b447."""
    found, traces = {}, []

    def assign(trace, new):
        found[id(trace)] = new

    algo = {"GRPOAlgorithm": object, "ALGORITHM_CLASSES": {}, "assign_advantages": assign}
    base = {"iter_trainable_traces": lambda episodes: ((e, trace) for e in episodes for trace in e.traces)}
    algo = SimpleNamespace(**algo)
    run("prime-rl", prime_rl__orchestrator__algo__base=base, prime_rl__orchestrator={"algo": algo})
    for pairs, reward in zip(rollouts.rows, rollouts.outcomes, strict=True):
        parts = [part for pair in pairs for part in zip((False, True), pair, strict=True)]
        nodes = [SimpleNamespace(mask=[sampled] * len(ids), token_ids=ids) for sampled, ids in parts]
        traces.append(SimpleNamespace(nodes=nodes, reward=reward))
    for group in (traces[:3], traces[3:]):
        episodes = [SimpleNamespace(traces=[trace]) for trace in group]
        asyncio.run(algo.ALGORITHM_CLASSES["grpo"]().score_group(episodes))
    rows = []
    for trace in traces:
        values = iter(found[id(trace)])
        rows.append([next(values) if kept else 0.0 for node in trace.nodes for kept in node.mask])
        assert not list(values)
    check_tokens(rollouts, rows)


def test_openrlhf(run, rollouts):
    """Experiences with index, sequences, action_mask (shifted by one), rewards and advantages of openrlhf 0.11.2."""
    names = run("OpenRLHF")

    class Maker:
        args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=3))

        def compute_advantages_and_returns(self, experiences):
            for e in experiences:
                e.advantages = torch.ones(e.action_mask.shape)
            return experiences

    maker = type("Mine", (names["BiPACEMixin"], Maker), {})
    experiences = []
    for part in ([4, 1, 0], [2, 5, 3]):  # in any order, by dynamic batches
        sequences, mask = rollouts.whole(part)
        found = {"rewards": torch.tensor(rollouts.outcomes)[part], "action_mask": mask[:, 1:].bool()}
        experiences.append(SimpleNamespace(index=part, sequences=sequences, **found))
    done = maker().compute_advantages_and_returns(experiences)
    by_row = {t: [0.0, *row] for e in done for t, row in zip(e.index, e.advantages.tolist(), strict=True)}
    check_tokens(rollouts, [by_row[t] for t in range(6)])
