"""Settings: the estimator's keys in a trainer's configuration, with the same names in every adapter."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from ..config import (
    OFF_AT_ZERO,
    PRESETS,
    Config,
    Duplicates,
    EpisodeNorm,
    EpisodeScope,
    LoneTrajectory,
    OnInvalid,
    Preset,
    Share,
    StepNorm,
    Value,
)
from ..estimators.options import OPTIONS
from ..features.embedders import EMBEDDERS, find

PaceEstimator = Literal["q_style", "diff_peer"]
GigpoMode = Literal["mean_norm", "mean_std_norm"]
ActionKeyMode = Literal["auto", "action_tag", "first_n", "text"]


def check_fields(settings: Any, where: str = "") -> None:
    """Raises ValueError for a dataclass field whose value does not match its type: one of its words, a bool, a number, an
    int of at least 1, a text, or for a layer an int or "block N"."""
    for name, hint in get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        words = (True, False) if hint is bool else tuple(a for a in get_args(hint) if isinstance(a, str))
        if words and (value not in words or isinstance(value, bool) != (hint is bool)):
            raise ValueError(f"{where}{name} must be one of {', '.join(map(str, words))}, got {value!r}.")
        if hint is int and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{where}{name} must be an int of at least 1, got {value!r}.")
        if hint is float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise ValueError(f"{where}{name} must be a number, got {value!r}.")
        if hint is str and not isinstance(value, str):
            raise ValueError(f"{where}{name} must be a text, got {value!r}.")
        if name.endswith("layer"):
            index = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if not index and not (isinstance(value, str) and re.fullmatch(r"block \d+", value)):
                raise ValueError(
                    f"{where}{name} must be an int, an index into hidden_states, or 'block N', got {value!r}."
                )


@dataclass(frozen=True)
class Settings:
    """One field for each key of a trainer's configuration; ValueError names the key.

    method           a preset of bipace_kernels.Config
    estimator        "q_style" | "diff_peer", for method "bipace"
    epsilon          ε of the clusters; "auto": chosen on the first training step by choose_epsilon(), and kept; "follow": chosen
                     there and adapted at each step by an EpsilonController; None: the embedder's default, 0.10 for hidden
                     states and 0.20 for a sentence encoder
    ngram_epsilon    ε of n-grams, which may replace hidden states for which `epsilon` was set
    embedder         "actor_hidden" | "ngram" | "identity" | "sentence:MODEL"; "auto": hidden states, or n-grams with one
                     warning if no forward gives any
    text_turns       observations that a text state holds for n-grams and sentence encoders, with the actions between them; None: 3
                     for a kernel value, which is then nearly as good as with hidden states, else 1, as with "identity"
    layer            of the actor, as in bipace_kernels.hidden.tap()
    action_key_mode  "action_tag" | "first_n" | "text", with n_action_tokens for "first_n"; "auto": tool calls, action tags,
                     or one of the others, depending on the response (_turns.keys_of)
    kernel_time      0: no time term (None in Config)
    action_noise     0: A_S is not averaged over near states with the same action (None in Config)
    memory_rows      max_rows of the ValueMemory of share "memory"
    record_dir       folder for step records of every `record_every`-th update; None: none are written
    The others are those of bipace_kernels.Config; None keeps the preset's value.  Those of another method are an error.
    """

    method: Preset = "bipace"
    estimator: PaceEstimator = "q_style"
    epsilon: float | Literal["auto", "follow"] | None = None
    ngram_epsilon: float = EMBEDDERS["ngram"].epsilon
    embedder: str = "auto"
    text_turns: int | None = None
    layer: int | str = -8
    action_key_mode: ActionKeyMode = "auto"
    n_action_tokens: int = 8
    gamma: float = 0.95
    step_weight: float = 1.0
    gigpo_mode: GigpoMode | None = None
    history_length: int | None = None
    length_weight_alpha: float | None = None
    base_group: bool | None = None
    value: Value | None = None
    share: Share | None = None
    shrinkage: float | None = None
    kernel_width: float | None = None
    kernel_time: float | None = None
    kernel_noise: float | None = None
    kernel_same: float | None = None
    action_noise: float | None = None
    gae_lambda: float | None = None
    memory_rows: int = 16_384
    episode_weight: float | None = None
    step_norm: StepNorm | None = None
    episode_norm: EpisodeNorm | None = None
    episode_scope: EpisodeScope | None = None
    lone_trajectory: LoneTrajectory | None = None
    on_invalid: OnInvalid = "singleton"
    duplicates: Duplicates = "once"
    record_dir: str | None = None
    record_every: int = 50

    def __post_init__(self) -> None:
        check_fields(self)
        epsilon: Any = self.epsilon
        is_number = isinstance(epsilon, numbers.Real) and not isinstance(epsilon, bool)
        if epsilon not in (None, "auto", "follow") and not is_number:
            raise ValueError(f"epsilon must be a number, 'auto' or 'follow', got {epsilon!r}.")
        turns = self.text_turns
        if turns is not None and (isinstance(turns, bool) or not isinstance(turns, int) or turns < 1):
            raise ValueError(f"text_turns must be an int of at least 1, got {turns!r}.")
        if self.record_dir is not None and not (isinstance(self.record_dir, str) and self.record_dir):
            raise ValueError(f"record_dir must be the path of a folder, got {self.record_dir!r}.")
        if self.gigpo_mode is not None and "mode" not in self._parameters:
            raise ValueError(f"gigpo_mode has no effect in method {self.method}; leave it out, or set method to gigpo.")
        if self.embedder != "auto":
            try:
                find(self.embedder)
            except ValueError as error:
                raise ValueError(
                    str(error).replace("an embedder must be one of", "embedder must be one of auto,")
                ) from None
        self.config(self.ngram_epsilon)
        config = self.config(epsilon if is_number else None)
        for name in (f.name for f in fields(self) if f.default is None and getattr(self, f.name) is not None):
            if name in OPTIONS and name != "epsilon" and not OPTIONS[name].has_effect(config):
                raise ValueError(f"{name} {self._without_effect(name)}")
        if self.memory_rows != type(self).memory_rows and not config.needs_memory:
            raise ValueError(
                f"memory_rows limits the records of share memory with value kernel, but share is {config.share} and value "
                f"{config.value} of method {self.method}; leave it out."
            )

    def _without_effect(self, name: str) -> str:
        option = OPTIONS[name]
        method = next((preset for preset, make in PRESETS.items() if option.has_effect(make())), None)
        choose = option.choose if method is None or method == self.method else {"method": method}
        others = " and ".join(f"{'method' if key == 'preset' else key} to {word}" for key, word in choose.items())
        return f"{option.what}, so it has no effect with these settings of method {self.method}; leave it out, or set {others}."

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str = "") -> Settings:
        """From a mapping, such as the trainer's own configuration node; `where` goes before a key in errors.

        None counts as not given.
        """
        known = [f.name for f in fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(f"{where}{key} is not a setting of BiPACE; the settings are {', '.join(known)}.")
        return cls(**{str(k): v for k, v in given.items() if v is not None})

    def config(self, epsilon: float | None = None) -> Config:
        """The estimator's configuration, at this ε if the method has one."""
        changes: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Config) if hasattr(self, f.name)}
        of_preset = {"epsilon": epsilon, "estimator": self.estimator, "mode": self.gigpo_mode}
        changes |= {name: value if name in self._parameters else None for name, value in of_preset.items()}
        changes = {k: v for k, v in changes.items() if v is not None}
        for name in OFF_AT_ZERO:
            if getattr(self, name) == 0 and getattr(self, name) is not False:
                changes[name] = None
        return PRESETS[self.method](**changes)

    @functools.cached_property
    def _parameters(self) -> tuple[str, ...]:
        """Names of the preset's own parameters."""
        return tuple(inspect.signature(PRESETS[self.method]).parameters)

    @property
    def turns_of_text(self) -> int:
        """`text_turns`, or its default."""
        config = self.config()
        compared = config.has_epsilon or (self.embedder != "auto" and find(self.embedder)[0].fixed)
        return self.text_turns or (3 if config.needs_fingerprint and not compared else 1)

    @property
    def keeps_own_advantages(self) -> bool:
        """Whether the trainer keeps its own advantages: without a step term they are the method's."""
        return self.config().estimator == "none"

    def scaled(self, scale_rewards: str, where: str = "") -> Settings:
        """With the episode_norm that GRPO's scale_rewards asks for, where A_ep has weight and the settings leave it open.

        where   goes before `episode_norm` in the error of what has no counterpart
        """
        has_episode = self.config().episode_weight != 0
        if self.keeps_own_advantages or not has_episode or self.episode_norm is not None or self.gigpo_mode is not None:
            return self
        if scale_rewards not in ("group", "none"):
            raise ValueError(
                f"scale_rewards={scale_rewards!r} has no counterpart in BiPACE, whose A_ep is divided by the σ of its prompt "
                f"group: set {where}episode_norm to 'std' or 'none', or scale_rewards to 'group' or 'none'."
            )
        return replace(self, episode_norm="none") if scale_rewards == "none" else self

    def epsilon_of(self, embedder: str) -> float | None:
        """ε for the fingerprints of this row of EMBEDDERS: the setting, else the default; None: chosen from data."""
        row = EMBEDDERS[embedder]
        if embedder == "ngram":
            return self.ngram_epsilon
        if row.fixed or self.epsilon is None:
            return row.epsilon
        return None if isinstance(self.epsilon, str) else float(self.epsilon)
