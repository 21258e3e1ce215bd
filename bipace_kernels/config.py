"""Config: partition, estimator and normalisation.  Its presets are the systems of the paper."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from .estimators.rows import ESTIMATORS, FUNCTION, PARTITIONS, VALUE_FUNCTION, VALUES, Estimator, Partition, StateValue
from .inputs import checks
from .settings import KERNELS, PRESETS as PRESET_NAMES, Fields, settings_of
from .support.errors import InputError, Named, near, refuse_unknown
from .support.handles import Handled
from .support.warnings import warn_once

PACE_ESTIMATORS = tuple(name for name, row in ESTIMATORS.items() if "action_key" in row.needs)


def check_fields(settings: Any, where: str = "") -> None:
    """Raises InputError for a field of this dataclass whose value its row of the table of settings does not accept.

    where   goes before the field's name
    """
    for name, row in settings_of(settings).items():
        value = getattr(settings, name)
        optional = value is None and (row.off or settings.__dataclass_fields__[name].default is None)
        if not (optional or row.holds(value) or (name in ("estimator", "value") and callable(value))):
            words = re.findall(r"\w+", row.wanted)
            end = "." if isinstance(value, str) and value in words else near(value, words)
            raise InputError("{} must be {}, got {}{}", Named(where + name), row.wanted, checks.shown(value), end)


class Derived:
    """What the fields of a configuration mean: found once, when it is made, and neither compared nor pickled."""

    partition_row: Partition
    estimator_row: Estimator
    estimator_name: str  # also of a function
    value_name: str  # likewise
    value_row: StateValue | None  # None: the estimator has no value
    needs: tuple[str, ...]  # arguments of advantage() that the estimator reads in addition to its partition's
    needs_keys: bool  # the estimator compares actions
    averages_actions: bool  # A_S is averaged over near states with the same action, where action keys are given
    reads_keys: bool  # action keys may change the result: needed, averaged over if given, or read by a function
    needs_fingerprint: bool  # the partition or the estimator reads fingerprints
    needs_observation: bool  # the partition compares observations
    needs_truncated: bool  # the estimator has a value with which to continue a trajectory that was cut off
    needs_memory: bool  # values are also estimated from the records of earlier batches
    has_clusters: bool  # the partition compares records
    has_epsilon: bool  # the partition reads ε


@dataclass(frozen=True)
class Config(Handled, Fields, Derived):
    """What `advantage()` computes.  Every field is checked when the object is made: ValueError names the field.

    docs/estimator.md and docs/gae.md define the formulas, docs/settings.md lists the values that each field accepts.
    estimator may be a function: it gets `StepRecords`, the records that take part, and returns A_S [M].  So may value,
    which then returns V̂ [M].  A function can be pickled if it is at a module's top level.
    """

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return self._derive()  # made inside a compiled function: checked when the op recreates it
        self._register()
        check_fields(self)
        for name in ("history_length", "longest_text"):
            object.__setattr__(self, name, int(getattr(self, name)))
        self._derive()
        self._pairs()

    def _pairs(self) -> None:
        """Raises InputError for fields that contradict each other."""
        if self.value_row is VALUE_FUNCTION and self.share == "memory":
            memory, batch, group = (Named("share", (name,)) for name in ("memory", "batch", "group"))
            raise InputError("{} goes with {}; use {} or {}.", memory, Named("value", ("kernel",)), batch, group)
        row, value, name = self.estimator_row, self.value_row, self.estimator_name
        own, partition = Named("estimator", (name,)), Named("partition", (self.partition,))
        none = Named("partition", ("none",))
        if self.partition not in row.partitions:
            if row.partitions == ("none",):
                text = "{} has no use under {}; use {}, or keep the partition as a diagnostic with {} and {}."
                raise InputError(text, partition, own, none, Named("estimator", ("mean",)), Named("step_weight", (0,)))
            one = Named("partition", row.partitions) if len(row.partitions) == 1 else "a partition"
            raise InputError("{} needs {}, got {}.", own, one, partition)
        if value is not None and value.has_clusters != self.has_clusters:
            wanted = "a partition" if value.has_clusters else none
            named = Named("value", (self.value_name,))
            raise InputError("{} of {} needs {}, got {!r}.", named, own, wanted, self.partition)
        if self.step_norm not in row.step_norms:
            norm, norms = Named("step_norm", (self.step_norm,)), " or ".join(map(repr, row.step_norms))
            able = " or ".join(repr(each.name) for each in ESTIMATORS.values() if self.step_norm in each.step_norms)
            raise InputError("{} goes with estimator {}, got {}; use {}.", norm, able, own, norms)

    def _derive(self) -> None:
        partition, own = PARTITIONS[self.partition], self.estimator
        estimator = ESTIMATORS[own] if isinstance(own, str) else FUNCTION
        value = (VALUES[self.value] if isinstance(self.value, str) else VALUE_FUNCTION) if estimator.has_value else None
        needs = estimator.needs + (value.needs if value else ())
        needs_keys, of_fingerprints = "action_key" in estimator.needs, "fingerprint" in needs
        averages_actions = self.action_noise is not None and of_fingerprints
        derived = {
            "partition_row": partition,
            "estimator_row": estimator,
            "estimator_name": str(getattr(own, "__qualname__", own)),
            "value_name": str(getattr(self.value, "__qualname__", self.value)),
            "value_row": value,
            "needs": needs,
            "needs_keys": needs_keys,
            "averages_actions": averages_actions,
            "reads_keys": needs_keys or averages_actions or estimator is FUNCTION,
            "needs_fingerprint": of_fingerprints or partition.argument == "fingerprint",
            "needs_observation": partition.argument == "observation",
            "needs_truncated": value is not None,
            "needs_memory": value is not None and value.name == "kernel" and self.share == "memory",
            "has_clusters": partition.has_clusters,
            "has_epsilon": partition.argument == "fingerprint",
        }
        for name, meaning in derived.items():
            object.__setattr__(self, name, meaning)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["estimator"] == "gae":  # pickled before these fields: it keeps its numbers
            state = {"action_noise": None, "luck_noise": 0.0, "kernel_directions": None, "kernel_inside": 0.0, **state}
        values = {name: value for name, value in state.items() if name != "_handle"}  # which earlier ones hold
        Config.__init__(self, **values)  # checks them: a state can have been edited, or be of a later version

    @classmethod
    def _of(cls, defaults: dict[str, Any], changes: dict[str, Any]) -> Config:
        """A preset with changes; TypeError for an unknown field, one warning for each that nothing reads."""
        if torch.compiler.is_compiling():
            return cls(**{**defaults, **changes})
        refuse_unknown("Config", changes, [field.name for field in fields(cls)], "field")
        made = cls(**{**defaults, **changes})
        for name, row in settings_of(cls).items():
            if changes.get(name, row.trainer) != row.trainer and not row.has_effect(made):  # trainers give theirs
                text = f"{name} has no effect with estimator={made.estimator_name!r}: leave it out."
                warn_once(f"unused {name}", text, stacklevel=3)
        return made

    @classmethod
    def grpo(cls, **changes: Any) -> Config:
        """GRPO: A = A_ep, the same for every step of a trajectory (paper eq. 1)."""
        return cls._of({"partition": "none", "estimator": "none"}, changes)

    @classmethod
    def gigpo(cls, mode: str | None = None, **changes: Any) -> Config:
        """GiGPO: clusters of equal observations, A = A_ep + w (R − mean_C).

        mode   None: this package's normalisation (A_ep of paper eq. 1, step term undivided).
               "mean_norm" and "mean_std_norm": verl-agent's two modes, with its population of step records and raw
               returns of lone trajectories; the first does not divide by σ, the second divides both terms.
        """
        if mode not in (None, "mean_norm", "mean_std_norm"):
            raise ValueError(f"mode must be None, 'mean_norm' or 'mean_std_norm', got {mode!r}.")
        norm = "none" if mode == "mean_norm" else "std"
        verl_agent = {"episode_norm": norm, "step_norm": norm, "episode_scope": "step", "lone_trajectory": "raw"}
        return cls._of({"partition": "exact", "estimator": "mean", **(verl_agent if mode else {})}, changes)

    @classmethod
    def hgpo(cls, history_length: int = 2, **changes: Any) -> Config:
        """HGPO: clusters of equal observation histories at all depths, their advantages weighted by depth."""
        return cls._of({"partition": "history", "estimator": "hgpo", "history_length": history_length}, changes)

    @classmethod
    def bigpo(cls, epsilon: float = 0.10, **changes: Any) -> Config:
        """BiGPO: greedy cosine clusters of hidden states, A = A_ep + w (R − mean_C) (paper eq. 5)."""
        return cls._of({"partition": "cosine", "estimator": "mean", "epsilon": epsilon}, changes)

    @classmethod
    def bipace(cls, epsilon: float = 0.10, estimator: str = "q_style", **changes: Any) -> Config:
        """BiPACE: BiGPO's clusters with an action-conditioned baseline inside (paper eq. 6 to 10).

        estimator   "q_style": mean of the same action − mean of the cluster; "diff_peer": R − mean of other actions.
        """
        if estimator not in PACE_ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(PACE_ESTIMATORS)} for BiPACE, got {estimator!r}.")
        return cls._of({"partition": "cosine", "estimator": estimator, "epsilon": epsilon}, changes)

    @classmethod
    def gae(cls, value: str | Callable[..., Any] = "kernel", embedder: str = "actor_hidden", **changes: Any) -> Config:
        """Critic-free GAE(λ), this project's own: A = A_S divided by its root mean square over the batch (docs/gae.md).

        value      "group": μ_p; "step": shrunk means of the prompt group's records at the same step; "cluster": those
                   of the clusters of equal observations, or of another partition;
                   "kernel": a Gaussian process over the fingerprints; a function: from `StepRecords` to V̂ [M].
        embedder   what made the kernel's fingerprints, on which its defaults and that of λ depend (docs/gae.md):
                   "actor_hidden", "ngram", "identity" or "sentence"; "sentence" also for those of your own.
        """
        if embedder not in KERNELS:
            raise ValueError(f"embedder must be one of {', '.join(KERNELS)}, got {embedder!r}.")
        defaults = {"partition": "exact" if value == "cluster" else "none", "estimator": "gae", "step_norm": "batch"}
        defaults |= KERNELS[embedder] if value == "kernel" else {}
        return cls._of({**defaults, "value": value, "episode_weight": 0.0}, changes)


_help = "".join(f"\n    {name:<19}  {row.help}" for name, row in settings_of(Config).items())
Config.__doc__ = f"{(Config.__doc__ or '').rstrip()}\n{_help}"
PRESETS: dict[str, Callable[..., Config]] = {name: getattr(Config, name) for name in PRESET_NAMES}
