"""What a run is made of.  All methods share all of it but their own rows of METHODS."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

# BiPACE's settings of each method; the three of BiPACE are the paper's: keys of first tokens or of action tags, and Q-style.
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"method": "grpo"},
    "gigpo": {"method": "gigpo"},
    "hgpo": {"method": "hgpo"},
    "bigpo": {"method": "bigpo"},
    "bipace_first": {
        "method": "bipace", "estimator": "diff_peer", "action_key_mode": "first_n", "n_action_tokens": 1,
    },
    "bipace_tag": {"method": "bipace", "estimator": "diff_peer", "action_key_mode": "action_tag"},
    "bipace_q": {"method": "bipace", "estimator": "q_style", "action_key_mode": "action_tag"},
}  # fmt: skip
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Settings:
    """One field for each `--set name=value`."""

    # the model
    vocabulary: int = 1536
    width: int = 128
    blocks: int = 4
    heads: int = 4
    # the tasks: depth 2 and 3, of which the planner needs at most so many commands, with prompts of at most so many tokens
    most_commands: int = 10
    prompt_tokens: int = 110
    held_out: int = 25
    horizon: int = 12  # commands of an episode
    # the warm start
    noise: float = 0.3  # share of stray commands in the planner's episodes
    lesson_batch: int = 16
    lesson_check: int = 100  # updates between looks at the success
    lesson_rate: float = 2e-3  # first lesson: the planner's own commands, until this success on the train tasks
    lesson_updates: int = 3000
    enough: float = 0.35
    noisy_rate: float = 1e-3  # second lesson: all commands of the noisy planner, strays too
    noisy_updates: int = 300
    # training
    updates: int = 60
    tasks: int = 8
    rollouts: int = 8
    micro_batch: int = 64  # rows of one forward and backward
    learning_rate: float = 5e-4
    gamma: float = 0.95
    step_weight: float = 1.0
    layer: int = -2
    epsilon: str = "auto"
    # evaluation
    check_every: int = 10
    check_rollouts: int = 4

    @classmethod
    def of(cls, changes: list[str]) -> Settings:
        """From "name=value" texts; ValueError names what does not fit."""
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
        return cls(**given)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def of_warm_start(self) -> dict[str, Any]:
        """Those that the warm start depends on: all before `updates`."""
        names = [f.name for f in fields(self)]
        return {name: getattr(self, name) for name in names[: names.index("updates")]}
