"""Config: which partition, which estimator, which normalisation.  Its presets are the systems of the paper."""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

import torch

from ._handles import Handled

Partition = Literal["none", "exact", "history", "similar", "cosine"]
Estimator = Literal["none", "mean", "diff_peer", "q_style", "hgpo"]

PACE_ESTIMATORS = ("diff_peer", "q_style")


@functools.cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Allowed names of each field that takes one of a few names."""
    return {name: get_args(hint) for name, hint in get_type_hints(Config).items() if get_args(hint)}


@dataclass(frozen=True)
class Config(Handled):
    """What `advantage()` computes.  Every field is checked when the object is made: ValueError names the field.

    partition            how the steps of one prompt group are put into clusters, each a state (docs/estimator.md, 3)
    estimator            the step term inside a cluster (docs/estimator.md, 4)
    gamma                discount γ in [0, 1]
    step_weight          w ≥ 0 of the step term: A = A_ep + w · A_S; not used by "hgpo"
    epsilon              ε of "cosine": join where 1 − cos ≤ ε; 0 (equal rows) or in [1e-4, 2]
    history_length       observations before the record's own that "history" compares, ≥ 0
    similarity           threshold of "similar" in (0, 1]: difflib's ratio
    step_norm            "std" divides the step term by σ_C + δ; "mean" and "hgpo" only
    episode_norm         "std" divides the episode term by σ_p + δ
    episode_scope        μ_p and σ_p over the group's trajectories, or over its step records (as verl-agent does)
    lone_trajectory      A_ep of a population of one: 0, or the raw return
    delta                δ in (0, 1e-2], added to every σ
    length_weight_alpha  α ≥ 0 of HGPO's weights
    base_group           HGPO: the episode advantage joins the aggregate as depth 0
    duplicates           rows with equal (group, trajectory, step): an error, one record, or a record each
    on_invalid           non-finite input: an error, or the row is set aside and counted
    """

    partition: Partition = "cosine"
    estimator: Estimator = "q_style"
    gamma: float = 0.95
    step_weight: float = 1.0
    epsilon: float = 0.10
    history_length: int = 2
    similarity: float = 0.95
    step_norm: Literal["none", "std"] = "none"
    episode_norm: Literal["std", "none"] = "std"
    episode_scope: Literal["trajectory", "step"] = "trajectory"
    lone_trajectory: Literal["zero", "raw"] = "zero"
    delta: float = 1e-6
    length_weight_alpha: float = 1.0
    base_group: bool = False
    duplicates: Literal["raise", "once", "count"] = "raise"
    on_invalid: Literal["raise", "singleton"] = "raise"

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():
            return  # made inside a compiled function: checked when the op makes it again
        self._register()
        for field in fields(self):
            allowed = _choices().get(field.name, ())
            value = getattr(self, field.name)
            if allowed and (not isinstance(value, str) or value not in allowed):
                raise ValueError(f"{field.name} must be one of {', '.join(allowed)}, got {value!r}.")
        if not isinstance(self.base_group, bool):
            raise ValueError(f"base_group must be True or False, got {self.base_group!r}.")
        length: Any = self.history_length
        if isinstance(length, bool) or not isinstance(length, numbers.Integral):
            raise ValueError(f"history_length must be an int of at least 0, got {self.history_length!r}.")
        if self.history_length < 0:
            raise ValueError(f"history_length must be at least 0, got {self.history_length}.")
        object.__setattr__(self, "history_length", int(length))
        self._number("gamma", "in [0, 1]", lambda x: 0 <= x <= 1)
        self._number("step_weight", "finite and at least 0", lambda x: x >= 0)
        self._number("epsilon", "0 or in [1e-4, 2]", lambda x: x == 0 or 1e-4 <= x <= 2)
        self._number("similarity", "in (0, 1]", lambda x: 0 < x <= 1)
        self._number("delta", "in (0, 1e-2]", lambda x: 0 < x <= 1e-2)
        self._number("length_weight_alpha", "finite and at least 0", lambda x: x >= 0)
        self._pairs()

    def _number(self, name: str, wish: str, holds: Any) -> None:
        value = getattr(self, name)
        if (
            isinstance(value, bool)
            or not isinstance(value, numbers.Real)
            or not math.isfinite(value)
            or not holds(value)
        ):
            raise ValueError(f"{name} must be a number {wish}, got {value!r}.")

    def _pairs(self) -> None:
        """Pairs of fields that make no sense together."""
        if self.estimator == "hgpo" and self.partition != "history":
            raise ValueError(f"estimator='hgpo' needs partition='history', got partition={self.partition!r}.")
        if self.estimator == "none" and self.partition != "none":
            raise ValueError(
                f"partition={self.partition!r} has no use under estimator='none'; use partition='none', or keep the "
                "partition as a diagnostic with estimator='mean' and step_weight=0."
            )
        if self.partition == "none" and self.estimator != "none":
            raise ValueError(f"estimator={self.estimator!r} needs a partition, got partition='none'.")
        if self.step_norm == "std" and self.estimator not in ("mean", "hgpo"):
            raise ValueError(
                f"step_norm='std' goes with estimator 'mean' or 'hgpo', got estimator={self.estimator!r}; use step_norm='none'."
            )

    @property
    def needs_keys(self) -> bool:
        """Whether the estimator compares actions."""
        return self.estimator in PACE_ESTIMATORS

    @classmethod
    def grpo(cls, **changes: Any) -> Config:
        """GRPO: A = A_ep alone, every step of a trajectory the same (paper eq. 1)."""
        return cls(**{"partition": "none", "estimator": "none", **changes})

    @classmethod
    def gigpo(cls, mode: str | None = None, **changes: Any) -> Config:
        """GiGPO: clusters of equal observations, A = A_ep + w (R − mean_C).

        mode   None: this package's normalisation (A_ep of paper eq. 1, step term undivided).
               "mean_norm" and "mean_std_norm": verl-agent's two modes, with its population of step records and raw
               returns of lone trajectories; the first divides nothing by σ, the second both terms.
        """
        verl_agent = {"episode_scope": "step", "lone_trajectory": "raw"}
        modes: dict[str | None, dict[str, str]] = {
            None: {},
            "mean_norm": {"episode_norm": "none", "step_norm": "none", **verl_agent},
            "mean_std_norm": {"episode_norm": "std", "step_norm": "std", **verl_agent},
        }
        if mode not in modes:
            raise ValueError(f"mode must be None, 'mean_norm' or 'mean_std_norm', got {mode!r}.")
        return cls(**{"partition": "exact", "estimator": "mean", **modes[mode], **changes})

    @classmethod
    def hgpo(cls, history_length: int = 2, **changes: Any) -> Config:
        """HGPO: clusters of equal observation histories at all depths, their advantages weighted by depth."""
        return cls(**{"partition": "history", "estimator": "hgpo", "history_length": history_length, **changes})

    @classmethod
    def bigpo(cls, epsilon: float = 0.10, **changes: Any) -> Config:
        """BiGPO: greedy cosine clusters of hidden states, A = A_ep + w (R − mean_C) (paper eq. 5)."""
        return cls(**{"partition": "cosine", "estimator": "mean", "epsilon": epsilon, **changes})

    @classmethod
    def bipace(cls, epsilon: float = 0.10, estimator: Estimator = "q_style", **changes: Any) -> Config:
        """BiPACE: BiGPO's clusters with an action-conditioned baseline inside (paper eq. 6 to 10).

        estimator   "q_style": mean of the same action − mean of the cluster; "diff_peer": R − mean of other actions.
        """
        if estimator not in PACE_ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(PACE_ESTIMATORS)} for BiPACE, got {estimator!r}.")
        return cls(**{"partition": "cosine", "estimator": estimator, "epsilon": epsilon, **changes})
