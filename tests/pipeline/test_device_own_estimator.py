"""Config(estimator=function) where the tensors are: the records come on their device, without those set aside."""

from __future__ import annotations

import re

import numpy as np
import torch
from batches import make_batch
from paths import ROOT
from ragged import BACKEND

import bipace_kernels as bk

BATCH = make_batch(5, groups=3, trajectories=3, longest=5)


def discounted(records: bk.StepRecords) -> torch.Tensor:
    """R − mean of the prompt group."""
    sizes = records.group_offsets.diff()
    group = torch.repeat_interleave(torch.arange(sizes.numel(), device=sizes.device), sizes)
    total = torch.zeros(sizes.numel(), dtype=torch.float64, device=sizes.device)
    total.index_add_(0, group, records.returns.double())
    return (records.returns.double() - (total / sizes)[group]).float()


def test_a_function_gets_tensors_of_the_device(device):
    rewards = BATCH.rewards.copy()
    rewards[4] = np.nan
    config = bk.Config(estimator=discounted, on_invalid="singleton", partition="exact")
    given = {**BATCH.arguments(rewards=rewards), "observation": np.arange(BATCH.n) % 4, "fingerprint": None}
    want = bk.advantage(config=config, backend="cpu", **given)
    there = {name: torch.as_tensor(value).to(device) for name, value in given.items() if value is not None}
    got = bk.advantage(config=config, backend=BACKEND, **there)
    assert got.advantage.device == device or got.advantage.device.type == device.type
    assert torch.allclose(got.step_advantage.cpu(), want.step_advantage, atol=2e-6)
    assert torch.equal(got.cluster.cpu(), want.cluster) and torch.equal(got.branch.cpu(), want.branch)


def test_the_example_of_the_docs(device):
    """docs/estimator.md, 4.1: the same function on tensors of the device."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/estimator.md").read_text(), re.DOTALL)
    page = {"__name__": "page"}
    exec(compile(code, "docs/estimator.md", "exec"), page)
    ids = [torch.tensor(values, device=device) for values in ([0, 0, 0, 0], [0, 0, 1, 1])]
    rewards, observation = torch.tensor([0.0, 1.0, 0.0, 0.0], device=device), torch.tensor([7, 8, 7, 8], device=device)
    result = bk.advantage(*ids, rewards, observation=observation, config=page["config"], backend=BACKEND)
    assert result.step_advantage.tolist() == [0.5, 1.0, 0.0, 0.0]
