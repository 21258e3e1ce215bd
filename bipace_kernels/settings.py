"""The table of settings: every field of `Config` is declared here, once.

Config checks its fields by it; the settings of trainers, the options of `bipace advantage` and docs/settings.md are
made from it.  It imports nothing of the package, so that the program can show its help without importing torch.
"""
# ruff: noqa: RUF009  (setting() makes dataclass fields)

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# Of GAE's kernel: what suits an embedder better than the defaults of the fields below (docs/gae.md).
KERNELS: dict[str, dict[str, Any]] = {
    "actor_hidden": {"kernel_width": 0.4, "luck_noise": 0.08, "kernel_inside": 1.3, "gae_lambda": 0.3},
    "ngram": {
        "kernel_directions": 128,
        "kernel_width": 0.8,
        "kernel_time": 8.0,
        "kernel_noise": 1.5,
        "action_noise": 0.5,
    },
    "identity": {},
    "sentence": {},
}
PRESETS = ("grpo", "gigpo", "hgpo", "bigpo", "bipace", "gae")
ABSENT = object()  # of trainers, which do not have the setting


@dataclass(frozen=True)
class Range:
    """Values that a setting accepts, numbers or others of this kind; `holds` tests one."""

    text: str
    holds: Callable[[Any], bool]
    kind: Any = float


Accepts = Range | tuple[str, ...] | int | type[bool]


@dataclass(frozen=True)
class Setting:
    """What the table holds on a field, beside its name and default."""

    help: str  # what it does, in one line
    accepts: Accepts  # a range of numbers, words, the least int, bool, or a form
    symbol: str = "NAME"  # stands for its value in help texts
    also: tuple[str, ...] = ()  # words that are accepted beside numbers
    # alternatives {field of Config: words, or above 0}; empty: always read
    read_by: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    off: bool = False  # None turns it off, as 0 does where None means that nothing was given
    trainer: Any = None  # its default in trainers; None: the preset's value; ABSENT: they do not have it

    @property
    def kind(self) -> Any:
        """Type of its values, None aside."""
        if isinstance(self.accepts, Range):
            return self.accepts.kind | str if self.also else self.accepts.kind
        return str if isinstance(self.accepts, tuple) else bool if self.accepts is bool else int

    @property
    def wanted(self) -> str:
        """Its values, for errors and docs/settings.md."""
        if isinstance(self.accepts, Range):
            number = "a number " if self.accepts.kind is float else ""
            return f"{number}{self.accepts.text}{', ' if self.also else ''}{' or '.join(map(repr, self.also))}"
        if isinstance(self.accepts, tuple):
            return f"one of {', '.join(self.accepts)}"
        return "True or False" if self.accepts is bool else f"an int of at least {self.accepts}"

    def holds(self, value: Any) -> bool:
        """Whether it accepts a value, None aside."""
        accepts = self.accepts
        if isinstance(accepts, tuple):
            return isinstance(value, str) and value in accepts
        if isinstance(accepts, Range):
            if isinstance(value, str) and value in self.also:
                return True
            return (accepts.kind is not float or is_number(value)) and accepts.holds(value)
        if accepts is bool or isinstance(value, bool):
            return accepts is bool and isinstance(value, bool)
        return isinstance(value, numbers.Integral) and int(value) >= int(accepts)

    def has_effect(self, config: Any) -> bool:
        """Whether a configuration reads it."""

        def word(name: str) -> str:
            if name == "episode_weight" and config.estimator_row.whole:  # HGPO, whose A_ep base_group turns on
                name = "base_group"
            value = getattr(config, name)
            if callable(value):
                return "function"
            return value if isinstance(value, str) else "above 0" if value > 0 else "0"

        return not self.read_by or any(all(word(name) in words for name, words in one.items()) for one in self.read_by)

    @property
    def cure(self) -> dict[str, str]:
        """Arguments with which it has an effect, such as {"preset": "gae", "value": "kernel"}."""
        chosen = {name: words[0] for name, words in self.read_by[0].items()} if self.read_by else {}
        estimator = chosen.pop("estimator", None)
        preset = {} if estimator is None else {"preset": estimator if estimator in PRESETS else "bipace"}
        return {**preset, **chosen}


def is_number(value: Any) -> bool:
    """Whether it is a number that float64 holds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def setting(default: Any, help: str, accepts: Accepts, symbol: str = "NAME", **more: Any) -> Any:
    """A dataclass field with its row of the table."""
    return field(default=default, metadata={"setting": Setting(help, accepts, symbol, **more)})


def settings_of(cls: Any) -> dict[str, Setting]:
    """The rows of a dataclass, or of an object of one, by name of the field."""
    return {f.name: f.metadata["setting"] for f in fields(cls) if "setting" in f.metadata}


RADII = (1e-4, 1.0)  # smallest and largest radius of a cluster, 0 aside
EPSILON = Range("0 or in [1e-4, 1]", lambda x: x == 0 or RADII[0] <= x <= RADII[1])
GAMMA = Range("in [0, 1]", lambda x: 0 <= x <= 1)
DELTA = Range("in (0, 1e-2]", lambda x: 0 < x <= 1e-2)
NOT_NEGATIVE = Range("finite and at least 0", lambda x: 0 <= x < math.inf)
WIDTH = Range("finite and at least 0.05", lambda x: 0.05 <= x < math.inf)
SAME = Range("in [0, 1000]", lambda x: 0 <= x <= 1000)
NOISE = Range("finite and at least 0.1", lambda x: 0.1 <= x < math.inf)
SIMILARITY = Range("in (0, 1]", lambda x: 0 < x <= 1)

PARTITIONS = ("none", "exact", "history", "similar", "cosine")
ESTIMATORS = ("none", "mean", "diff_peer", "q_style", "hgpo", "gae")
STEP_NORMS = ("none", "std", "batch", "group")
DUPLICATES, ON_INVALID = ("raise", "once", "count"), ("raise", "singleton")
VALUES, SHARES = ("group", "step", "cluster", "kernel"), ("group", "batch", "memory")

_ADDS_TERMS = ({"estimator": ("q_style", "diff_peer", "mean", "gae", "none", "function")},)
_HAS_STEP_TERM = ({"estimator": ("q_style", "diff_peer", "mean", "gae", "function")},)
_HISTORY, _SIMILAR, _COSINE = (({"partition": (name,)},) for name in ("history", "similar", "cosine"))
_HGPO, _GAE = (({"estimator": (name,)},) for name in ("hgpo", "gae"))
_SHRUNK, _KERNEL = (({"estimator": ("gae",), "value": names},) for names in (("step", "cluster"), ("kernel",)))
_OF_STATES = ({"estimator": ("gae",), "value": ("kernel", "function")},)  # also of a function's averages over actions
_SHARED = ({**_OF_STATES[0], "share": ("batch", "memory")},)
_EPISODE = ({"episode_weight": ("above 0",)},)
_DIVIDED = ({"episode_norm": ("std",), **_EPISODE[0]}, {"step_norm": ("std",)}, *_HGPO)


@dataclass(frozen=True)
class Fields:
    """The fields of `Config`, in the order of its arguments."""

    partition: str = setting("cosine", "rule that clusters a group's steps into states", PARTITIONS, trainer=ABSENT)
    estimator: str | Callable[..., Any] = setting(
        "q_style", "step term A_S inside a cluster; also a function of StepRecords", ESTIMATORS, trainer=ABSENT
    )
    gamma: float = setting(0.95, "discount γ of rewards, from step to step", GAMMA, "γ")
    step_weight: float = setting(
        1.0, "w in A = episode_weight · A_ep + w · A_S", NOT_NEGATIVE, "W", read_by=_HAS_STEP_TERM, trainer=1.0
    )
    epsilon: float = setting(
        0.10, "radius ε of cosine clusters: join where 1 − cos ≤ ε; 0: equal rows", EPSILON, "ε", read_by=_COSINE
    )
    history_length: int = setting(
        2, "observations before the record's own that the history partition compares", 0, "K", read_by=_HISTORY
    )
    similarity: float = setting(
        0.95, "least difflib ratio of similar texts", SIMILARITY, "S", read_by=_SIMILAR, trainer=ABSENT
    )
    step_norm: str = setting(
        "none",
        "divisor of A_S: σ + δ (std, of mean and hgpo), or its root mean square (batch, group, of gae)",
        STEP_NORMS,
    )
    episode_norm: str = setting("std", "divisor of A_ep: its σ + δ, or none", ("std", "none"), read_by=_EPISODE)
    episode_scope: str = setting(
        "trajectory", "A_ep's μ and σ are over trajectories, or steps", ("trajectory", "step"), read_by=_EPISODE
    )
    lone_trajectory: str = setting("zero", "A_ep of a lone rollout: 0 or its return", ("zero", "raw"), read_by=_EPISODE)
    delta: float = setting(1e-6, "δ, added to every σ", DELTA, "δ", read_by=_DIVIDED, trainer=ABSENT)
    length_weight_alpha: float = setting(1.0, "exponent α of HGPO's weights by depth", NOT_NEGATIVE, "α", read_by=_HGPO)
    base_group: bool = setting(False, "whether A_ep joins HGPO's aggregate as depth 0", bool, read_by=_HGPO)
    duplicates: str = setting(
        "raise", "rows with equal ids: an error, counted once, or counted each", DUPLICATES, "RULE", trainer="once"
    )
    on_invalid: str = setting(
        "raise", "input that is not finite: an error, or the row is set aside", ON_INVALID, "RULE", trainer="singleton"
    )
    episode_weight: float = setting(1.0, "weight of A_ep; 0 in preset gae", NOT_NEGATIVE, "W", read_by=_ADDS_TERMS)
    value: str | Callable[..., Any] = setting(
        "kernel",
        "V̂ of GAE: mean of group, step or cluster; Gaussian process of fingerprints; also a function of StepRecords",
        VALUES,
        read_by=_GAE,
    )
    share: str = setting(
        "batch",
        "records that GAE's kernel estimates from; memory: also those of earlier batches",
        SHARES,
        read_by=_OF_STATES,
    )
    shrinkage: float = setting(
        3.0, "κ, by which GAE's means by step or cluster shrink", NOT_NEGATIVE, "κ", read_by=_SHRUNK
    )
    kernel_width: float = setting(
        0.6, "width ℓ of GAE's kernel exp((cos − 1)/ℓ) of centred fingerprints", WIDTH, "ℓ", read_by=_OF_STATES
    )
    kernel_time: float | None = setting(
        6.0, "θ of GAE's kernel in steps: exp(−Δt²/(2θ²)); off: no time", WIDTH, "θ", read_by=_OF_STATES, off=True
    )
    kernel_noise: float = setting(
        1.25, "variance ρ of returns about GAE's value, in units of the kernel's", NOISE, "ρ", read_by=_KERNEL
    )
    kernel_same: float = setting(
        0.0, "covariance s of one prompt group's records, shares batch and memory", SAME, "S", read_by=_SHARED
    )
    action_noise: float | None = setting(
        0.4, "η of averages over equal actions in near states; off: none", NOISE, "η", read_by=_OF_STATES, off=True
    )
    gae_lambda: float = setting(0.5, "λ of GAE", GAMMA, "λ", read_by=_GAE)
    longest_text: int = setting(
        32_768, "most characters of a text that similar compares", 1, "N", read_by=_SIMILAR, trainer=ABSENT
    )
    luck_noise: float = setting(
        0.04, "variance β of a step's luck in earlier returns, in units of the kernel's", SAME, "β", read_by=_KERNEL
    )
    kernel_directions: int | None = setting(
        64, "half-whitened coordinates of GAE's kernel, up to 128; off: none", 1, "D", read_by=_OF_STATES, off=True
    )
    kernel_inside: float = setting(
        0.8, "weight of a second kernel inside prompt groups, for shares batch and memory", SAME, "W", read_by=_SHARED
    )
