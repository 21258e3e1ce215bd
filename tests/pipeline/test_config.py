"""Config: presets, ranges, pairs that make no sense."""

import dataclasses
import math

import pytest
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
    assert bk.Config.hgpo(4).history_length == 4
    assert bk.Config.bigpo(0.25).epsilon == 0.25
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


def test_pairs_that_make_no_sense():
    for fields, words in (
        ({"estimator": "hgpo"}, "estimator='hgpo' needs partition='history'"),
        ({"partition": "none"}, "estimator='q_style' needs a partition"),
        ({"estimator": "none"}, "partition='cosine' has no use under estimator='none'"),
        ({"step_norm": "std"}, "step_norm='std' goes with"),
    ):
        refused(words, bk.Config, **fields)


def test_presets_refuse_unknown_names():
    refused("mode must be None, 'mean_norm' or 'mean_std_norm', got 'std'", bk.Config.gigpo, "std")
    refused(r"gamma must be .*, got an integer of more than 64 bits", bk.Config, gamma=10**5000)
    refused("estimator must be one of diff_peer, q_style", bk.Config.bipace, estimator="mean")
