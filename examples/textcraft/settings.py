"""Settings of a run.  All methods share them, except their rows of METHODS and their tuned values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

# Settings of bipace_kernels, one row a method.
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"method": "grpo"},
    "bipace": {"method": "bipace", "estimator": "q_style", "action_key_mode": "action_tag"},
    "gae": {"method": "gae"},
    "gigpo": {"method": "gigpo"},
    "bipace-step": {"method": "bipace", "estimator": "q_style", "action_key_mode": "action_tag", "episode_weight": 0.0},
    "gae-group": {"method": "gae", "value": "group"},
    "hgpo": {"method": "hgpo"},
    "bigpo": {"method": "bigpo"},
    "gae-cluster": {"method": "gae", "value": "cluster"},
    "gae-states": {"method": "gae", "action_noise": 0, "embedder": "actor_hidden"},
}
# Plain rivals, whose advantages rivals.py computes from what the trainer has; TRL's own stand aside.
RIVALS: dict[str, dict[str, Any]] = {name: {"method": "grpo"} for name in ("step-means", "trees", "value-head")}
MAIN = ("grpo", "bipace", "gae", "gigpo", "bipace-step", "gae-group", "gae-states")
# The parameter of a method that is tuned after its learning rate, and the values tried, the package's default first;
# the other methods have none.
OWN: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("bipace", "bipace-step", "bigpo"), ("epsilon", ("auto", "0.05", "0.2"))),
    **dict.fromkeys(("gae", "gae-group", "gae-cluster", "gae-states"), ("gae_lambda", (0.5, 0.3, 0.8))),
}


@dataclass(frozen=True)
class Settings:
    """One field for each `--set name=value`."""

    # the model
    vocabulary: int = 1536
    width: int = 128
    blocks: int = 4
    heads: int = 4
    # the tasks: depth 2 and 3, at most so many commands of the planner, prompts of at most so many tokens
    train_tasks: int = 4000
    test_tasks: int = 400  # of the goals that are trained, and as many of goals that are not
    new_goals: int = 60  # of the 366 that are not trained; some of them give no task that fits
    most_commands: int = 10
    prompt_tokens: int = 110
    horizon: int = 12  # commands of an episode
    command_tokens: int = 16  # of one command
    # the warm start
    noise: float = 0.3  # share of stray commands in the planner's episodes
    lesson_batch: int = 16
    lesson_check: int = 100  # updates between looks at the success on 100 train tasks
    lesson_rate: float = 2e-3  # first lesson: the planner's own commands
    lesson_updates: int = 2000
    noisy_rate: float = 1e-3  # second lesson: all commands of the noisy planner, strays too
    noisy_updates: int = 300
    known_goals: float = 1.0  # share of the trained goals that the lessons show
    # training
    updates: int = 40
    batch: int = 64  # rollouts of an update
    group: int = 8  # of them of one task
    micro_batch: int = 8  # rows of one forward and backward
    learning_rate: float = 5e-4
    gamma: float = 0.95
    step_weight: float = 1.0
    layer: int = -2
    upper: int = 0  # blocks that are trained, the last ones; 0: everything
    half: int = 0  # 1: bfloat16 on a CPU too
    epsilon: str = "auto"
    gae_lambda: float = 0.5
    shrinkage: float = 3.0  # of step-means: records of the prompt's mean in a mean by step
    leaf: int = 5  # of trees: least records of a leaf
    value_rate: float = 1e-3  # of value-head: its own learning rate
    # evaluation
    check_every: int = 10  # updates between checks on the test tasks; 0: none

    @classmethod
    def of(cls, changes: list[str], base: Settings | None = None) -> Settings:
        """Those of `base` (None: the defaults) with "name=value" texts; ValueError names what does not fit."""
        kinds = {f.name: type(f.default) for f in fields(cls)}
        given: dict[str, Any] = {}
        for change in changes:
            name, equals, value = change.partition("=")
            if name not in kinds or not equals:
                raise ValueError(f"--set wants NAME=VALUE with NAME one of {', '.join(kinds)}; got {change!r}.")
            try:
                given[name] = kinds[name](value)
            except ValueError:
                raise ValueError(f"{name} must be of type {kinds[name].__name__}, got {value!r}.") from None
        return replace(base or cls(), **given)

    def changed(self, **values: Any) -> Settings:
        return replace(self, **values)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def differ(self, there: dict[str, Any], names: Iterable[str]) -> list[str]:
        """What of these names another run's settings have otherwise; a setting that is younger than the run had its
        default."""
        before, own = {**Settings().as_json(), **there}, self.as_json()
        return [f"{name}={before[name]!r}" for name in names if before[name] != own[name]]

    def of_warm_start(self) -> dict[str, Any]:
        """Those that the warm start depends on: all before `updates`."""
        names = [f.name for f in fields(self)]
        return {name: getattr(self, name) for name in names[: names.index("updates")]}
