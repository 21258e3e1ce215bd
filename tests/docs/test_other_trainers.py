"""The code of docs/other_trainers.md on made-up batches, with stand-ins of the trainers that are not on PyPI."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import recipes
import torch
from recipes import TOKENIZER, check_tokens

import bipace_kernels as bk


@pytest.fixture
def rollouts():
    return recipes.Rollouts()


@pytest.fixture
def run(monkeypatch):
    """The names that a section's code defines, with the trainer's modules stood in for."""

    def section(title, **modules):
        for name, contents in modules.items():
            parts = name.replace("__", ".").split(".")
            for i in range(1, len(parts) + 1):
                monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
            vars(sys.modules[".".join(parts)]).update(contents)
        return recipes.run("docs/other_trainers.md", title)

    return section


@pytest.mark.parametrize("newer", [False, True])
def test_roll(run, rollouts, newer):

    def stock(batch, pipeline_config):
        return (batch, {}) if newer else batch

    pipeline = SimpleNamespace(compute_response_level_rewards=stock)
    run("ROLL", roll__pipeline__agentic={"agentic_pipeline": pipeline})
    ids, mask = recipes.padded([[pair] for pairs in rollouts.rows for pair in pairs], TOKENIZER.pad_token_id)
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


def test_rllm(run, rollouts):
    own = {"_default_traj_grouping_hook": lambda groups, *configs: groups}
    names = run("rLLM", rllm__trainer__algorithms__transform=own)
    found = [
        SimpleNamespace(steps=[SimpleNamespace(prompt_ids=p, response_ids=r) for p, r in pairs], reward=outcome)
        for pairs, outcome in zip(rollouts.rows, rollouts.outcomes, strict=True)
    ]
    groups = [SimpleNamespace(trajectories=found[i : i + 3]) for i in (0, 3)]
    steps = [step for trajectory in found for step in trajectory.steps]
    assert names["grouped"](groups, None, None) is groups and names["grouped"]([]) == []
    assert [len(s.advantage) for s in steps] == [len(r) for r in rollouts.responses]
    found = torch.tensor([s.advantage[0] for s in steps[:-1]])  # the last one has no token for it
    torch.testing.assert_close(found, rollouts.advantage()[:-1], atol=1e-6, rtol=0)


def test_nemo_rl(run, rollouts):
    """compute_advantage(prompt_ids [B, P], rewards [B], mask [B, S], repeated_batch=, …) and messages at 7ea279a."""
    grpo = SimpleNamespace(GRPOAdvantageEstimator=object)
    run("NeMo-RL", nemo_rl__algorithms={"grpo": grpo})

    def message(role, ids, text=""):
        written = torch.full((len(ids),), role == "assistant" and not text)
        content = text or TOKENIZER.decode(ids)
        return {"role": role, "token_ids": torch.tensor(ids), "content": content, "token_loss_mask": written}

    roles = ("user", "assistant")
    logs = [[message(*part) for pair in pairs for part in zip(roles, pair, strict=True)] for pairs in rollouts.rows]
    for log, ((first, _), *_) in zip(logs, rollouts.rows, strict=True):  # an example's answer ends the prompt
        log[:1] = [message("user", first[:2]), message("assistant", first[2:], TOKENIZER.decode(first))]
    _, mask = recipes.padded(rollouts.rows, room=2)
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

    algo = SimpleNamespace(GRPOAlgorithm=object, ALGORITHM_CLASSES={}, assign_advantages=assign)
    base = {"iter_trainable_traces": lambda episodes: ((e, trace) for e in episodes for trace in e.traces)}
    run("prime-rl", prime_rl__orchestrator__algo__base=base, prime_rl__orchestrator={"algo": algo})
    for pairs, reward in zip(rollouts.rows, rollouts.outcomes, strict=True):
        parts = [part for pair in pairs for part in zip((False, True), pair, strict=True)]
        nodes = [SimpleNamespace(mask=[sampled] * len(ids), token_ids=ids) for sampled, ids in parts]
        traces.append(SimpleNamespace(nodes=nodes, reward=reward))
    for group in (traces[:3], traces[3:], []):  # the last: no trace of a group can be trained on
        episodes = [SimpleNamespace(traces=[trace]) for trace in group]
        asyncio.run(algo.ALGORITHM_CLASSES["grpo"]().score_group(episodes))
    rows = []
    for trace in traces:
        values = iter(found[id(trace)])
        rows.append([next(values) if kept else 0.0 for node in trace.nodes for kept in node.mask])
        assert not list(values)
    check_tokens(rollouts, rows)
