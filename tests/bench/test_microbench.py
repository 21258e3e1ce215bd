"""pytest-benchmark of the calls a trainer makes: `pytest tests/bench/test_microbench.py --benchmark-enable`.

`make test` runs them once each (--benchmark-disable): they show that the calls work. No timing decides a test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bipace_kernels as bk

pytest.importorskip("pytest_benchmark")

GROUPS, ROLLOUTS, STEPS, DIM, STATES = 8, 4, 16, 256, 10
RECORDS = GROUPS * ROLLOUTS * STEPS


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    """512 records in processing order; ten states a group, far apart."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randint(STATES, (RECORDS,), generator=generator)
    centre = torch.nn.functional.normalize(torch.randn(STATES, DIM, generator=generator), dim=1)
    noise = torch.nn.functional.normalize(torch.randn(RECORDS, DIM, generator=generator), dim=1)
    group = torch.arange(GROUPS).repeat_interleave(ROLLOUTS * STEPS)
    trajectory = torch.arange(GROUPS * ROLLOUTS).repeat_interleave(STEPS)
    return {
        "group": group,
        "trajectory": trajectory,
        "step": torch.arange(STEPS).repeat(GROUPS * ROLLOUTS),
        "rewards": torch.rand(RECORDS, generator=generator),
        "action_key": torch.randint(4, (RECORDS,), generator=generator),
        "fingerprint": centre[state] + 0.1 * noise,
        "observation": [f"state {s} of group {g}" for s, g in zip(state.tolist(), group.tolist(), strict=True)],
    }


def _ids(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch["group"], batch["trajectory"], batch["rewards"]


def test_layout(benchmark: Any, batch: dict[str, Any]) -> None:
    found = benchmark(bk.layout, batch["group"], batch["trajectory"], batch["step"])
    assert found.n_rows == RECORDS


def test_discounted_returns(benchmark: Any, batch: dict[str, Any]) -> None:
    found = benchmark(bk.discounted_returns, batch["rewards"], batch["trajectory"], 0.95)
    assert torch.allclose(found[STEPS - 1 :: STEPS], batch["rewards"][STEPS - 1 :: STEPS])


def test_cluster(benchmark: Any, batch: dict[str, Any]) -> None:
    layout = bk.layout(batch["group"], batch["trajectory"])
    found = benchmark(bk.cluster, batch["fingerprint"], None, 0.10, layout=layout)
    assert len(found) == RECORDS


def test_bipace(benchmark: Any, batch: dict[str, Any]) -> None:
    keep = {k: batch[k] for k in ("step", "fingerprint", "action_key")}
    found = benchmark(bk.advantage, *_ids(batch), **keep, config=bk.Config.bipace())
    assert bool(torch.isfinite(found.advantage).all())


def test_gigpo(benchmark: Any, batch: dict[str, Any]) -> None:
    found = benchmark(bk.advantage, *_ids(batch), observation=batch["observation"], config=bk.Config.gigpo())
    assert int(found.cluster.max()) + 1 <= GROUPS * STATES


def test_hgpo(benchmark: Any, batch: dict[str, Any]) -> None:
    found = benchmark(bk.advantage, *_ids(batch), observation=batch["observation"], config=bk.Config.hgpo())
    assert bool(torch.isfinite(found.advantage).all())


def test_metrics(benchmark: Any, batch: dict[str, Any]) -> None:
    found = bk.advantage(*_ids(batch), observation=batch["observation"], config=bk.Config.gigpo())
    assert benchmark(found.metrics)["bipace/cluster_count"] > 0


def test_action_keys_from_text(benchmark: Any) -> None:
    texts = [f"<think>some thoughts</think><action>go to shelf {i % 7}</action>" for i in range(RECORDS)]
    keys, parsed = benchmark(bk.action_keys, texts, mode="action_tag")
    assert bool(parsed.all()) and len(keys.unique()) == 7


def test_ngram_fingerprint(benchmark: Any, batch: dict[str, Any]) -> None:
    found = benchmark(bk.ngram_fingerprint, batch["observation"])
    assert found.shape == (RECORDS, 4096)
