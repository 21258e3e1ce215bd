"""BiPACE in TRL: two real updates, and their advantages against bk.advantage() on the records of each batch."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-integrations")

import tiny_trl as tt
import torch

import bipace_kernels as bk

SINGLETON = {"on_invalid": "singleton", "duplicates": "once"}
CONFIGS = {
    "bipace": bk.Config.bipace(**SINGLETON),
    "bigpo": bk.Config.bigpo(**SINGLETON),
    "gigpo": bk.Config.gigpo(**SINGLETON),
    "hgpo": bk.Config.hgpo(**SINGLETON),
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def trained(folder, **options):
    trainer = tt.make_trainer(folder, **options)
    trainer.train()
    return trainer


def check(trainer, config, **how):
    assert len(trainer.batches) == 2
    for batch in trainer.batches:
        assert torch.equal(batch["output"]["advantages"], tt.by_hand(batch, config, **how))


@pytest.mark.parametrize("extras", [(), ("step_rewards",), ("step_rewards", "observations", "actions")])
@pytest.mark.parametrize("method", CONFIGS)
def test_several_turns_from_a_rollout_func(tmp_path, method, extras):
    trainer = trained(tmp_path, bipace_method=method, rollout_func=partial(tt.rollout, extras=extras))
    check(trainer, CONFIGS[method])
    assert any(b["output"]["advantages"].unique().numel() > 5 for b in trainer.batches)  # more than one value per row
