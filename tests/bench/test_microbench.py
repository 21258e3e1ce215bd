"""pytest-benchmark of the calls a trainer makes: `pytest tests/bench/test_microbench.py --benchmark-enable`.

`make test` runs them once each (--benchmark-disable): they show that the calls work. No timing decides a test.
"""

import pytest
import torch

import bipace_kernels as bk

pytest.importorskip("pytest_benchmark")

GROUPS, ROLLOUTS, STEPS, DIM, STATES = 8, 4, 16, 256, 10
RECORDS = GROUPS * ROLLOUTS * STEPS


@pytest.fixture(scope="module")
def calls():
    """Functions and their arguments: 512 records in processing order; ten states a group, far apart."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randint(STATES, (RECORDS,), generator=generator)
    centre = torch.nn.functional.normalize(torch.randn(STATES, DIM, generator=generator), dim=1)
    noise = torch.nn.functional.normalize(torch.randn(RECORDS, DIM, generator=generator), dim=1)
    group = torch.arange(GROUPS).repeat_interleave(ROLLOUTS * STEPS)
    trajectory = torch.arange(GROUPS * ROLLOUTS).repeat_interleave(STEPS)
    texts = [f"<think>some thoughts</think><action>go to shelf {i % 7}</action>" for i in range(RECORDS)]
    ids = {"group": group, "trajectory": trajectory}
    rows = {**ids, "rewards": torch.rand(RECORDS, generator=generator)}
    seen = [f"state {s} of group {g}" for s, g in zip(state.tolist(), group.tolist(), strict=True)]
    states = {"fingerprint": centre[state] + 0.1 * noise}
    steps = {"step": torch.arange(STEPS).repeat(GROUPS * ROLLOUTS)}
    keys = {"action_key": torch.randint(4, (RECORDS,), generator=generator)}
    of_gigpo = {**rows, "observation": seen, "config": bk.Config.gigpo()}
    returns = {"rewards": rows["rewards"], "trajectory": trajectory, "gamma": 0.95}
    return {
        "layout": (bk.layout, {**ids, **steps}),
        "discounted_returns": (bk.discounted_returns, returns),
        "cluster": (bk.cluster, {**states, "epsilon": 0.10, "layout": bk.layout(**ids)}),
        "bipace": (bk.advantage, {**rows, **steps, **states, **keys, "config": bk.Config.bipace()}),
        "gigpo": (bk.advantage, of_gigpo),
        "hgpo": (bk.advantage, {**of_gigpo, "config": bk.Config.hgpo()}),
        "metrics": (bk.advantage(**of_gigpo).metrics, {}),
        "action_keys": (bk.action_keys, {"responses": texts, "mode": "action_tag"}),
        "ngram_fingerprint": (bk.ngram_fingerprint, {"texts": seen}),
    }


PRESETS = ["bipace", "gigpo", "hgpo"]
CALLS = ["layout", "discounted_returns", "cluster", *PRESETS, "metrics", "action_keys", "ngram_fingerprint"]


@pytest.mark.parametrize("name", CALLS)
def test_a_call(benchmark, calls, name):
    function, arguments = calls[name]
    assert benchmark(function, **arguments) is not None
