"""Settings: the estimator's keys in a trainer's configuration, with the same names in every adapter."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any

from ..config import PRESETS, Config, check_fields
from ..features.embedders import EMBEDDERS, find
from ..settings import ABSENT, EPSILON, Fields, Range, Setting, setting, settings_of
from ..support.errors import InputError, Named, near
from ..support.lazy import lazy
from ..support.optional import named


def is_embedder(value: Any) -> bool:
    """Whether a value names an embedder, or is "auto"."""
    try:
        return value == "auto" or bool(find(value))
    except ValueError:
        return False


def _is_layer(value: Any) -> bool:
    number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return number or (isinstance(value, str) and re.fullmatch(r"block \d+", value) is not None)


EMBEDDER = Range(f"one of auto, {', '.join(row.written for row in EMBEDDERS.values())}", is_embedder, str)
LAYER = Range("an int, an index into hidden_states, or 'block N'", _is_layer, int | str)
OWN = "'module:NAME' or 'file.py:NAME' of a bk.Config of your own"
METHOD = Range(
    f"one of {', '.join(PRESETS)}, or {OWN}",
    lambda value: isinstance(value, str) and (value in PRESETS or ":" in value),
    str,
)
FOLDER = Range("the path of a folder, as a text", lambda value: isinstance(value, str) and value != "", str)
OF_COSINE = ({"partition": ("cosine",)},)


@dataclass(frozen=True)
class OwnFields:
    """What trainers have beside the fields of `Config`, or in another form."""

    method: str = setting("gae", "preset of bk.Config; grpo keeps the trainer's own advantages", METHOD)
    estimator: str = setting("q_style", "step term of method bipace", ("q_style", "diff_peer"))
    epsilon: float | str | None = setting(
        None,
        "radius ε of the clusters; auto: chosen on the first training batch; follow: chosen there and adapted at each; "
        "None: the embedder's default, 0.10 for hidden states and 0.20 for a sentence encoder; a number is not read "
        "with n-grams, which have ngram_epsilon, nor with identity, which has 0",
        EPSILON,
        "ε",
        also=("auto", "follow"),
        read_by=OF_COSINE,
    )
    ngram_epsilon: float = setting(EMBEDDERS["ngram"].epsilon, "radius ε for n-grams", EPSILON, "ε", read_by=OF_COSINE)
    embedder: str = setting(
        "auto", "states; auto: hidden states, or n-grams with one warning where no forward gives any", EMBEDDER
    )
    text_turns: int | None = setting(
        None,
        "observations in a text state, with the actions between them; None: 3 for GAE's kernel, else 1, as for "
        "identity",
        1,
        read_by=({"estimator": ("gae",), "value": ("kernel", "function")}, *OF_COSINE),
    )
    layer: int | str = setting(-8, "layer of hidden states, as in bk.hidden.tap()", LAYER)
    action_key_mode: str = setting(
        "auto",
        "how actions are recognized; auto: tool calls, action tags, or one of the others, depending on the response",
        ("auto", "action_tag", "first_n", "text"),
    )
    n_action_tokens: int = setting(8, "tokens of an action key in mode first_n", 1)
    gigpo_mode: str | None = setting(None, "verl-agent's modes, method gigpo", ("mean_norm", "mean_std_norm"))
    reward_beyond_steps: str = setting(
        "last",
        "what a rollout's reward holds beyond the sum of its step_rewards: added to its last step's, or ignored",
        ("last", "ignore"),
        read_by=({"estimator": ("gae",)},),
    )
    memory_rows: int = setting(
        16_384,
        "records kept from earlier batches, for share memory",
        1,
        read_by=({"estimator": ("gae",), "value": ("kernel",), "share": ("memory",)},),
    )
    record_dir: str | None = setting(None, "folder for step records, which bipace report --html reads", FOLDER, "DIR")
    record_every: int = setting(50, "updates between recorded batches", 1)


def _of_trainers(row: Setting) -> Setting:
    """A row of `Config` in a trainer's configuration, where 0 turns off what None does in `Config`."""
    if not row.off:
        return row
    if not isinstance(row.accepts, Range):
        return replace(row, accepts=0)
    holds = row.accepts.holds
    return replace(row, accepts=Range(f"{row.accepts.text}, or 0", lambda x: x == 0 or holds(x)))


_Fields: Any = make_dataclass(
    "_Fields",
    [
        (name, Any, field(default=row.trainer, metadata={"setting": _of_trainers(row)}))
        for name, row in settings_of(Fields).items()
        if row.trainer is not ABSENT and name not in settings_of(OwnFields)
    ],
    bases=(OwnFields,),
    frozen=True,
)


@dataclass(frozen=True)
class Settings(_Fields):  # type: ignore[misc]  # made from the table
    """One field for each key of a trainer's configuration, listed in docs/settings.md; ValueError names the key.

    They are those of bipace_kernels.Config, where None keeps the preset's value, and those of `OwnFields`.  A setting
    that the method does not read is an error, except for the embedder and action keys.  With a method of your own, a
    setting at its default keeps the value of your Config, except `duplicates` and `on_invalid`.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        for name, argument, method in (("gigpo_mode", "mode", "gigpo"), ("estimator", "estimator", "bipace")):
            if getattr(self, name) != getattr(OwnFields, name) and argument not in self._parameters:
                text = "{} has no effect in method {}; leave it out, or set method to {}."
                raise InputError(text, Named(name), self.method, method)
        self.config(self.ngram_epsilon)
        config = self.config(None if isinstance(self.epsilon, str) else self.epsilon)
        for name, row in settings_of(self).items():
            if getattr(self, name) != getattr(Settings, name) and not row.has_effect(config):
                text = "{} has no effect with these settings of method {}; leave it out, or set {}."
                raise InputError(text, Named(name), self.method, self._cure(row, config))
        if isinstance(self.epsilon, str) and self.embedder in ("ngram", "identity"):
            text = "{}={} has no effect with embedder {}, whose radius is not chosen from data; leave it out."
            raise InputError(text, Named("epsilon"), self.epsilon, self.embedder)
        if self.ngram_epsilon != OwnFields.ngram_epsilon and self.embedder not in ("auto", "ngram"):
            text = "{} has no effect with embedder {}; leave it out, or set embedder to ngram."
            raise InputError(text, Named("ngram_epsilon"), self.embedder)

    def _cure(self, row: Setting, config: Config) -> str:
        """The settings with which one of this row has an effect."""
        if "episode_weight" in row.cure:
            return "base_group to True" if config.estimator_row.whole else "episode_weight above 0"
        method = next((name for name in ("gae", "bipace", *PRESETS) if row.has_effect(PRESETS[name]())), None)
        if method not in (None, self.method):
            return f"method to {method}"
        cure = {"method" if key == "preset" else key: word for key, word in row.cure.items()}
        now = {"method": self.method, "value": config.value, "share": config.share}
        return " and ".join(f"{key} to {word}" for key, word in cure.items() if now.get(key) != word)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "") -> Settings:
        """From a mapping, such as the trainer's own configuration node; `where` goes before a key in errors.

        None counts as not given.
        """
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                text = "{}{} is not a setting of BiPACE; the settings are {}{}"
                raise InputError(text, where, Named(str(key)), ", ".join(known), near(key, known))
        try:
            return cls(**{str(k): v for k, v in values.items() if v is not None})
        except InputError as error:
            raise error.inside(where) from None

    def config(self, epsilon: float | None = None, embedder: str = "") -> Config:
        """The estimator's configuration, at this ε if the method has one.

        embedder   row of EMBEDDERS that made the fingerprints; "": the setting's, hidden states under auto
        """
        changes: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Config) if hasattr(self, f.name)}
        if self.own is not None:
            kept = {f.name: f.default for f in fields(self) if f.name not in ("duplicates", "on_invalid")}
            changes = {name: value for name, value in changes.items() if name not in kept or value != kept[name]}
        embedder = embedder or ("actor_hidden" if self.embedder == "auto" else find(self.embedder)[0].name)
        of_preset = {"epsilon": epsilon, "estimator": self.estimator, "mode": self.gigpo_mode, "embedder": embedder}
        changes |= {name: value if name in self._parameters else None for name, value in of_preset.items()}
        off = {name: None for name, row in settings_of(Config).items() if row.off and changes.get(name) == 0}
        changes = {k: v for k, v in changes.items() if v is not None} | off
        return PRESETS[self.method](**changes) if self.own is None else replace(self.own, **changes)

    @lazy
    def own(self) -> Config | None:
        """The configuration that the method names, where it is no preset."""
        if self.method in PRESETS:
            return None
        try:
            config = named(self.method)
        except ValueError as error:
            raise InputError("{}: {}", Named("method"), error) from error
        if not isinstance(config, Config):
            text = "{} must name a bk.Config, got {}; a function goes into Config(estimator=…) or Config.gae(value=…)."
            raise InputError(text, Named("method"), type(config).__name__)
        return config

    @lazy
    def _parameters(self) -> tuple[str, ...]:
        """Names of the preset's own parameters."""
        own = self.own
        return ("epsilon",) * own.has_epsilon if own else tuple(inspect.signature(PRESETS[self.method]).parameters)

    @property
    def turns_of_text(self) -> int:
        """`text_turns`, or its default."""
        config = self.config()
        compared = config.has_epsilon or (self.embedder != "auto" and find(self.embedder)[0].fixed)
        return self.text_turns or (3 if config.needs_fingerprint and not compared else 1)

    @property
    def keeps_own_advantages(self) -> bool:
        """Whether the trainer keeps its own advantages: those of the preset, but not of a Config of one's own."""
        return self.method == "grpo"

    def scaled(self, scale_rewards: str, where: str = "") -> Settings:
        """With scale_rewards' episode_norm, where A_ep counts and no setting gives it; `where` precedes keys' names."""
        if self.keeps_own_advantages:
            text = "{} has no effect in method grpo, which keeps the trainer's own advantages; leave it out."
            for name in ("episode_weight", "episode_norm", "episode_scope", "lone_trajectory"):
                if getattr(self, name) is not None:
                    raise InputError(text, Named(where + name))
            return self
        counts = settings_of(Config)["episode_norm"].has_effect(self.config())
        if not counts or self.episode_norm is not None or self.gigpo_mode is not None:
            return self
        if scale_rewards not in ("group", "none"):
            raise ValueError(
                f"scale_rewards={scale_rewards!r} has no counterpart in BiPACE, whose A_ep is divided by the σ of its "
                f"prompt group: set {where}episode_norm to 'std' or 'none', or scale_rewards to 'group' or 'none'."
            )
        return replace(self, episode_norm="none") if scale_rewards == "none" else self

    def epsilon_of(self, embedder: str) -> float | None:
        """ε for the fingerprints of this row of EMBEDDERS: the setting, else the default; None: chosen from data."""
        row, own = EMBEDDERS[embedder], self.own if self.epsilon is None else None
        if own is not None and (embedder != "ngram" or self.ngram_epsilon == OwnFields.ngram_epsilon):
            return float(own.epsilon)
        if embedder == "ngram":
            return float(self.ngram_epsilon)
        if row.fixed or self.epsilon is None:
            return row.epsilon
        return None if isinstance(self.epsilon, str) else float(self.epsilon)
