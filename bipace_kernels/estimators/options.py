"""Fields of Config that not every configuration reads, a row each: what one does, and where.

The command line and the adapters read this table, to refuse an option that would be ignored.  Rows come from the tables of
partitions, estimators and values; those of the total's weights stand here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .partitions import PARTITIONS
from .table import ESTIMATORS, VALUES, estimator_of, value_of

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True)
class Option:
    """A row of the table.

    what         what the field does, in a few words
    has_effect   whether a configuration reads it
    choose       arguments with which it has an effect, such as {"preset": "hgpo"}
    """

    what: str
    has_effect: Callable[[Config], bool]
    choose: dict[str, str]


def _of_partition(name: str) -> Callable[[Config], bool]:
    return lambda config: config.partition == name


def _of_estimator(name: str) -> Callable[[Config], bool]:
    return lambda config: config.estimator == name


def _of_value(name: str) -> Callable[[Config], bool]:
    return lambda config: value_of(config) is VALUES[name]


OPTIONS: dict[str, Option] = {
    **{
        name: Option(what, _of_partition(row.name), {"partition": row.name})
        for row in PARTITIONS.values() for name, what in row.options.items()
    },
    **{
        name: Option(what, _of_estimator(row.name), {"preset": row.name})
        for row in ESTIMATORS.values() for name, what in row.options.items()
    },
    **{
        name: Option(what, _of_value(row.name), {"preset": "gae", "value": row.name})
        for row in VALUES.values() for name, what in row.options.items()
    },
    "kernel_same": Option(
        "applies to values shared over the batch", lambda config: _of_value("kernel")(config) and config.share != "group",
        {"preset": "gae", "share": "batch"},
    ),
    "step_weight": Option(
        "weighs a step term that is added to the episode term",
        lambda config: not estimator_of(config).whole and config.estimator != "none", {"preset": "bipace"},
    ),
    "episode_weight": Option(
        "weighs an episode term that is added to the step term", lambda config: not estimator_of(config).whole,
        {"preset": "bipace"},
    ),
    "delta": Option(
        "is added to σ before a division", lambda config: "std" in (config.step_norm, config.episode_norm),
        {"episode_norm": "std"},
    ),
}  # fmt: skip
