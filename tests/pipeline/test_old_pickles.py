"""Pickles of an earlier version load: they name modules that have moved, and hold no attribute that came later."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bipace_kernels as bk

#: Made by commit b565db3, before the package's modules moved into folders: configurations, a layout, and a memory.
OLD = Path(__file__).with_name("pickles_0.pickle")
#: Defaults of that version, which its pickles keep; and without the terms that the kernel had not yet.
EARLIER = {"kernel_width": 0.5, "kernel_time": 8.0, "kernel_noise": 2.0, "kernel_same": 0.3, "action_noise": 0.3}
FIRST_FORM = {**EARLIER, "gae_lambda": 0.5, "kernel_time": None, "kernel_directions": None}
FIRST_FORM |= {"luck_noise": 0.0, "kernel_inside": 0.0}


def test_configurations_layouts_and_memories_of_an_earlier_version_load():
    old = pickle.loads(OLD.read_bytes())
    first = bk.Config.gae(share="memory", **FIRST_FORM)
    assert old["config"] == first and old["config"].needs_memory
    bipace = replace(bk.Config.bipace(0.2, step_weight=0.5), **EARLIER)
    assert old["bipace"] == bipace and hash(old["bipace"]) == hash(bipace)
    assert old["hgpo"].history_length == 3 and old["hgpo"].estimator_row.whole

    want = bk.layout(["b", "b", "a", "a", "a"], [1, 1, 0, 0, 0], [1, 0, 0, 1, 1])
    for got, new in ((old["layout"], want), (old["once"], want.once())):
        assert torch.equal(got.on("cpu").source, new.source()) and torch.equal(got.group_offsets, new.group_offsets)
    given = {"rewards": [0.0, 1.0, 0.0, 2.0, 2.0], "observation": list("xyxyx")}
    config = bk.Config.gigpo(duplicates="once")
    got, new = (bk.advantage(**given, layout=layout, config=config) for layout in (old["layout"], want))
    assert torch.equal(got.advantage, new.advantage)

    rows = {"group": [0] * 3, "trajectory": [0, 0, 1], "rewards": [0.0, 1.0, 0.5], "fingerprint": torch.eye(3, 4)}
    values = []
    for from_state in (False, True):
        memory = old["memory"]
        if from_state:
            memory = bk.ValueMemory(6)
            memory.load_state_dict(old["state"])
        assert len(memory) == 6
        values.append(bk.advantage(**rows, config=old["config"], memory=memory).value)
    assert torch.equal(*values)


def test_what_a_configuration_means_is_neither_compared_nor_pickled():
    config = bk.Config.bipace()
    assert config.needs_keys and set(config.__getstate__()) == set(bk.Config.__dataclass_fields__)
    again = pickle.loads(pickle.dumps(config))
    assert again == config and hash(again) == hash(config) and again.estimator_row is config.estimator_row
    for change, error in (({"epsilon": float("nan")}, ValueError), ({"of_a_later_version": 1}, TypeError)):
        with pytest.raises(error, match=next(iter(change))):
            bk.Config.__new__(bk.Config).__setstate__(config.__getstate__() | change)
