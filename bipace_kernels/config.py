"""Config: partition, estimator and normalisation.  Its presets are the systems of the paper."""

from __future__ import annotations

import difflib
import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from .backends.contract import ABOVE_ZERO, DELTA, EPSILON, GAMMA, NOISE, NOT_NEGATIVE, SAME, WIDTH, Range
from .estimators.partitions import PARTITIONS
from .estimators.table import ESTIMATORS, VALUES, StepRecords, estimator_of, name_of, needs_of, value_of
from .support.handles import Handled

PACE_ESTIMATORS = tuple(name for name, row in ESTIMATORS.items() if "action_key" in row.needs)
Preset = Literal["grpo", "gigpo", "hgpo", "bigpo", "bipace", "gae"]
StepNorm = Literal["none", "std", "batch", "group"]
EpisodeNorm = Literal["std", "none"]
EpisodeScope = Literal["trajectory", "step"]
LoneTrajectory = Literal["zero", "raw"]
Duplicates = Literal["raise", "once", "count"]
OnInvalid = Literal["raise", "singleton"]
Value = Literal["group", "cluster", "kernel"]
Share = Literal["group", "batch", "memory"]
_NUMBERS = {
    "gamma": GAMMA, "step_weight": NOT_NEGATIVE, "epsilon": EPSILON, "delta": DELTA, "length_weight_alpha": NOT_NEGATIVE,
    "similarity": Range("in (0, 1]", lambda x: 0 < x <= 1), "episode_weight": NOT_NEGATIVE, "shrinkage": NOT_NEGATIVE,
    "kernel_width": WIDTH, "kernel_time": ABOVE_ZERO, "kernel_noise": NOISE,
    "kernel_same": SAME, "action_noise": NOISE, "gae_lambda": GAMMA,
}  # fmt: skip
#: Fields that None turns off; the command line and the adapters write 0 for it.
OFF_AT_ZERO = ("kernel_time", "action_noise")


@functools.cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Allowed names of each field that takes one of a few names."""
    hints = {name: get_args(hint) for name, hint in get_type_hints(Config).items() if get_origin(hint) is Literal}
    return {**hints, "partition": tuple(PARTITIONS), "estimator": tuple(ESTIMATORS), "value": tuple(VALUES)}


@dataclass(frozen=True)
class Config(Handled):
    """What `advantage()` computes.  Every field is checked when the object is made: ValueError names the field.

    partition            how the steps of one prompt group are clustered into states (docs/estimator.md, 3)
    estimator            the step term inside a cluster (docs/estimator.md, 4), or a function of the records that take part:
                         it gets `StepRecords` and returns A_S [M]; it can be pickled if it is at a module's top level
    gamma                discount γ in [0, 1]
    step_weight          w ≥ 0 of the step term: A = episode_weight · A_ep + w · A_S; not used by "hgpo"
    episode_weight       weight ≥ 0 of the episode term; not used by "hgpo"
    epsilon              ε of "cosine": join where 1 − cos ≤ ε; 0 (equal rows) or in [1e-4, 1]
    history_length       observations before the record's own that "history" compares, ≥ 0
    similarity           threshold of "similar" in (0, 1]: difflib's ratio
    longest_text         characters of the longest text that "similar" compares, ≥ 1: a pair of texts takes up to the product of
                         their lengths and more (docs/estimator.md, 3.1); a longer one is a ValueError
    step_norm            "std" divides the step term by σ_C + δ ("mean" and "hgpo"), "batch" and "group" by its root mean
                         square over the batch or the prompt group ("gae")
    episode_norm         "std" divides the episode term by σ_p + δ
    episode_scope        μ_p and σ_p over the group's trajectories, or over its step records (as verl-agent does)
    lone_trajectory      A_ep of a population of one: 0, or the raw return
    delta                δ in (0, 1e-2], added to every σ
    length_weight_alpha  α ≥ 0 of HGPO's weights
    value                "gae": V̂ of a record's state, the prompt group's mean, shrunk cluster means, or a Gaussian process
                         over the fingerprints (docs/gae.md)
    share                value="kernel": records from which a value is estimated: those of the prompt "group", of the "batch",
                         or of the batch and of earlier ones in `memory`
    shrinkage            κ ≥ 0 of value="cluster"
    kernel_width         ℓ ≥ 0.05 of value="kernel": exp((cos − 1)/ℓ) of centred fingerprints
    kernel_time          θ > 0 in steps: exp(−Δt²/(2 θ²)); None: no time term
    kernel_noise         ρ ≥ 0.1, the variance of returns about their value, in units of the kernel's
    kernel_same          s in [0, 1000] of share "batch" and "memory": covariance shared by records of one prompt group
    action_noise         η ≥ 0.1 of value="kernel": A_S is averaged over near states with the same action, K_a (K_a + η I)⁻¹ A_S,
                         where action keys are given; None: it is not
    gae_lambda           λ in [0, 1]
    base_group           HGPO: the episode advantage joins the aggregate as depth 0
    duplicates           rows with equal (group, trajectory, step): an error, counted once, or counted each
    on_invalid           non-finite input: an error, or the row is set aside and counted
    """

    partition: str = "cosine"
    estimator: str | Callable[[StepRecords], torch.Tensor] = "q_style"
    gamma: float = 0.95
    step_weight: float = 1.0
    epsilon: float = 0.10
    history_length: int = 2
    similarity: float = 0.95
    step_norm: StepNorm = "none"
    episode_norm: EpisodeNorm = "std"
    episode_scope: EpisodeScope = "trajectory"
    lone_trajectory: LoneTrajectory = "zero"
    delta: float = 1e-6
    length_weight_alpha: float = 1.0
    base_group: bool = False
    duplicates: Duplicates = "raise"
    on_invalid: OnInvalid = "raise"
    episode_weight: float = 1.0
    value: Value = "kernel"
    share: Share = "batch"
    shrinkage: float = 3.0
    kernel_width: float = 0.5
    kernel_time: float | None = 8.0
    kernel_noise: float = 2.0
    kernel_same: float = 0.3
    action_noise: float | None = 0.3
    gae_lambda: float = 0.5
    longest_text: int = 32_768

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return  # made inside a compiled function: checked when the op recreates it
        self._register()
        for field in fields(self):
            allowed = _choices().get(field.name, ())
            value = getattr(self, field.name)
            if field.name == "estimator" and callable(value):
                continue
            if allowed and (not isinstance(value, str) or value not in allowed):
                raise ValueError(f"{field.name} must be one of {', '.join(allowed)}, got {value!r}.")
        if not isinstance(self.base_group, bool):
            raise ValueError(f"base_group must be True or False, got {self.base_group!r}.")
        for name, least in (("history_length", 0), ("longest_text", 1)):
            length = getattr(self, name)
            if isinstance(length, bool) or not isinstance(length, numbers.Integral) or length < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {length!r}.")
            object.__setattr__(self, name, int(length))
        for name, wish in _NUMBERS.items():
            if name not in OFF_AT_ZERO or getattr(self, name) is not None:
                self._number(name, wish)
        self._pairs()

    def _number(self, name: str, wish: Range) -> None:
        value = getattr(self, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, numbers.Real)
            or not _is_finite(value)
            or not wish.holds(value)
        ):
            raise ValueError(f"{name} must be a number {wish.text}, got {value!r}.")

    def _pairs(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        row, value, name = estimator_of(self), value_of(self), name_of(self.estimator)
        if self.partition not in row.partitions:
            if row.partitions == ("none",):
                raise ValueError(
                    f"partition={self.partition!r} has no use under estimator={name!r}; use partition='none', or keep the "
                    "partition as a diagnostic with estimator='mean' and step_weight=0."
                )
            if len(row.partitions) == 1:
                raise ValueError(
                    f"estimator={name!r} needs partition={row.partitions[0]!r}, got partition={self.partition!r}."
                )
            raise ValueError(f"estimator={name!r} needs a partition, got partition={self.partition!r}.")
        if value is not None and value.has_clusters != self.has_clusters:
            wish = "a partition" if value.has_clusters else "partition='none'"
            raise ValueError(f"value={self.value!r} of estimator={name!r} needs {wish}, got {self.partition!r}.")
        if self.step_norm not in row.step_norms:
            own = " or ".join(map(repr, row.step_norms))
            able = " or ".join(repr(each.name) for each in ESTIMATORS.values() if self.step_norm in each.step_norms)
            raise ValueError(
                f"step_norm={self.step_norm!r} goes with estimator {able}, got estimator={name!r}; use {own}."
            )

    @property
    def needs_keys(self) -> bool:
        """Whether the estimator compares actions."""
        return "action_key" in estimator_of(self).needs

    @property
    def averages_actions(self) -> bool:
        """Whether A_S is averaged over near states with the same action, where action keys are given."""
        return self.action_noise is not None and "fingerprint" in needs_of(self)

    @property
    def reads_keys(self) -> bool:
        """Whether action keys change the result: the estimator needs them, or averages over equal ones if given."""
        return self.needs_keys or self.averages_actions

    @property
    def needs_fingerprint(self) -> bool:
        """Whether the partition or the estimator reads fingerprints."""
        return PARTITIONS[self.partition].argument == "fingerprint" or "fingerprint" in needs_of(self)

    @property
    def needs_observation(self) -> bool:
        """Whether the partition compares observations."""
        return PARTITIONS[self.partition].argument == "observation"

    @property
    def needs_truncated(self) -> bool:
        """Whether the estimator has a value with which to continue a trajectory that was cut off."""
        return value_of(self) is not None

    @property
    def needs_memory(self) -> bool:
        """Whether values are also estimated from the records of earlier batches."""
        return "fingerprint" in needs_of(self) and self.share == "memory"

    @property
    def has_clusters(self) -> bool:
        """Whether the partition compares records."""
        return PARTITIONS[self.partition].has_clusters

    @property
    def has_epsilon(self) -> bool:
        """Whether the partition reads ε."""
        return "epsilon" in PARTITIONS[self.partition].options

    @classmethod
    def _of(cls, given: dict[str, Any]) -> Config:
        """Config(**given); the TypeError for an unknown field suggests a known one."""
        if not torch.compiler.is_compiling():
            known = [field.name for field in fields(cls)]
            for name in (name for name in given if name not in known):
                near = {"eps": ["epsilon"], "lam": ["gae_lambda"]}.get(name, difflib.get_close_matches(name, known, 1))
                raise TypeError(f"Config has no field {name!r}" + (f"; did you mean {near[0]!r}?" if near else "."))
        return cls(**given)

    @classmethod
    def grpo(cls, **changes: Any) -> Config:
        """GRPO: A = A_ep, the same for every step of a trajectory (paper eq. 1)."""
        return cls._of({"partition": "none", "estimator": "none", **changes})

    @classmethod
    def gigpo(cls, mode: str | None = None, **changes: Any) -> Config:
        """GiGPO: clusters of equal observations, A = A_ep + w (R − mean_C).

        mode   None: this package's normalisation (A_ep of paper eq. 1, step term undivided).
               "mean_norm" and "mean_std_norm": verl-agent's two modes, with its population of step records and raw
               returns of lone trajectories; the first does not divide by σ, the second divides both terms.
        """
        verl_agent = {"episode_scope": "step", "lone_trajectory": "raw"}
        modes: dict[str | None, dict[str, str]] = {
            None: {},
            "mean_norm": {"episode_norm": "none", "step_norm": "none", **verl_agent},
            "mean_std_norm": {"episode_norm": "std", "step_norm": "std", **verl_agent},
        }
        if mode not in modes:
            raise ValueError(f"mode must be None, 'mean_norm' or 'mean_std_norm', got {mode!r}.")
        return cls._of({"partition": "exact", "estimator": "mean", **modes[mode], **changes})

    @classmethod
    def hgpo(cls, history_length: int = 2, **changes: Any) -> Config:
        """HGPO: clusters of equal observation histories at all depths, their advantages weighted by depth."""
        return cls._of({"partition": "history", "estimator": "hgpo", "history_length": history_length, **changes})

    @classmethod
    def bigpo(cls, epsilon: float = 0.10, **changes: Any) -> Config:
        """BiGPO: greedy cosine clusters of hidden states, A = A_ep + w (R − mean_C) (paper eq. 5)."""
        return cls._of({"partition": "cosine", "estimator": "mean", "epsilon": epsilon, **changes})

    @classmethod
    def bipace(cls, epsilon: float = 0.10, estimator: str = "q_style", **changes: Any) -> Config:
        """BiPACE: BiGPO's clusters with an action-conditioned baseline inside (paper eq. 6 to 10).

        estimator   "q_style": mean of the same action − mean of the cluster; "diff_peer": R − mean of other actions.
        """
        if estimator not in PACE_ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(PACE_ESTIMATORS)} for BiPACE, got {estimator!r}.")
        return cls._of({"partition": "cosine", "estimator": estimator, "epsilon": epsilon, **changes})

    @classmethod
    def gae(cls, value: str = "kernel", **changes: Any) -> Config:
        """Critic-free GAE(λ), this project's own: A = A_S divided by its root mean square over the batch (docs/gae.md).

        value   "group": μ_p; "cluster": shrunk means of the clusters of equal observations, or of another partition;
                "kernel": a Gaussian process over the fingerprints.
        """
        row = VALUES.get(str(value))
        partition = "exact" if row is not None and row.has_clusters else "none"
        given = {
            "partition": partition,
            "estimator": "gae",
            "value": value,
            "step_norm": "batch",
            "episode_weight": 0.0,
        }
        return cls._of({**given, **changes})


PRESETS: dict[str, Callable[..., Config]] = {name: getattr(Config, name) for name in get_args(Preset)}


def _is_finite(value: Any) -> bool:
    """False for integers beyond float64 too."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
