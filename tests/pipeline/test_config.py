"""Config: presets, ranges, pairs that make no sense; and pickles of an earlier version, which name modules that have
moved and hold no attribute that came later."""

import dataclasses
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refused

import bipace_kernels as bk


def test_presets_are_the_systems_of_the_paper():
    default = bk.Config()
    assert default == bk.Config.bipace()
    rows = {
        "grpo": (bk.Config.grpo(), "none", "none"),
        "gigpo": (bk.Config.gigpo(), "exact", "mean"),
        "hgpo": (bk.Config.hgpo(), "history", "hgpo"),
        "bigpo": (bk.Config.bigpo(), "cosine", "mean"),
        "bipace": (bk.Config.bipace(), "cosine", "q_style"),
        "diff": (bk.Config.bipace(estimator="diff_peer"), "cosine", "diff_peer"),
    }
    for name, (config, partition, estimator) in rows.items():
        assert (config.partition, config.estimator) == (partition, estimator), name
        # A preset changes nothing else.
        assert dataclasses.replace(config, partition="cosine", estimator="q_style") == default, name
    bk.Config(gamma=0, step_weight=0, epsilon=1e-4, history_length=0, similarity=1, delta=1e-2, length_weight_alpha=0)
    bk.Config(gamma=1, epsilon=1)  # the edges of the ranges are taken
    with pytest.raises(dataclasses.FrozenInstanceError):
        default.gamma = 0.5
    assert bk.Config.hgpo(4).history_length == 4 and bk.Config.bigpo(0.25).epsilon == 0.25
    assert bk.Config.gigpo(partition="similar", similarity=0.9).partition == "similar"


@pytest.mark.parametrize(("field", "value"), [
    ("gamma", -0.1), ("gamma", 1.01), ("gamma", math.nan), ("gamma", "0.9"), ("gamma", None), ("gamma", True),
    ("step_weight", -1), ("step_weight", math.inf), ("epsilon", -0.1), ("epsilon", 2.1), ("epsilon", 9e-5),
    ("epsilon", math.nan), ("history_length", -1), ("history_length", 1.5), ("history_length", True),
    ("similarity", 0), ("similarity", 1.1), ("delta", 0), ("delta", 0.02), ("length_weight_alpha", -0.5),
    ("length_weight_alpha", math.inf), ("base_group", 1), ("partition", "cos"), ("partition", None),
    ("estimator", "q"), ("step_norm", "mean"), ("episode_norm", True), ("episode_scope", "group"),
    ("lone_trajectory", "mean"), ("duplicates", "drop"), ("on_invalid", "skip"),
])  # fmt: skip
def test_out_of_range_names_the_field_and_what_came(field, value):
    refused(f"{field} must be .*{value!r}".replace("[", r"\["), bk.Config, **{field: value})


def test_pairs_that_make_no_sense_and_unknown_names():
    for fields, words in (
        ({"estimator": "hgpo"}, "estimator='hgpo' needs partition='history'"),
        ({"partition": "none"}, "estimator='q_style' needs a partition"),
        ({"estimator": "none"}, "partition='cosine' has no use under estimator='none'"),
        ({"step_norm": "std"}, "step_norm='std' goes with"),
    ):
        refused(words, bk.Config, **fields)
    refused("mode must be None, 'mean_norm' or 'mean_std_norm', got 'std'", bk.Config.gigpo, "std")
    refused(r"gamma must be .*, got an integer of more than 64 bits", bk.Config, gamma=10**5000)
    refused("estimator must be one of diff_peer, q_style", bk.Config.bipace, estimator="mean")


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
    fields = {name: value for name, value in old["config"].__getstate__().items() if name != "action_noise"}
    first.__setstate__(fields)  # before averages over actions
    assert first.action_noise is None

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
