"""BiPACEGRPOConfig: the settings of BiPACE among the arguments of a GRPOTrainer."""
# ruff: noqa: RUF009  (_setting() makes the fields)

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, fields
from typing import Any

from trl import GRPOConfig

from ...config import EpisodeNorm, EpisodeScope, LoneTrajectory, OnInvalid, Preset, Share, StepNorm, Value
from .._settings import ActionKeyMode, GigpoMode, PaceEstimator, Settings


def _setting(name: str, text: str) -> Any:
    return field(default=getattr(Settings, name), metadata={"help": f"BiPACE: {text}"})


@dataclass
class BiPACEGRPOConfig(GRPOConfig):  # type: ignore[misc]  # TRL has no types
    """GRPOConfig with the settings of BiPACE, each named bipace_<name>; ValueError names a wrong setting.

    docs/trl.md has the table, `settings` gives them as `Settings`.
    """

    # Texts are accepted as well as numbers, since a command line's parser has one type per argument.
    bipace_method: Preset = _setting("method", "preset of bipace_kernels.Config; grpo keeps TRL's own advantages.")
    bipace_estimator: PaceEstimator = _setting("estimator", "step term of method bipace.")
    bipace_epsilon: float | str | None = _setting(
        "epsilon",
        "radius of the clusters; auto: chosen on the first training batch; follow: adapted at each; None: the embedder's default.",
    )
    bipace_ngram_epsilon: float = _setting("ngram_epsilon", "radius for n-grams of the observation.")
    bipace_embedder: str = _setting(
        "embedder",
        "auto, actor_hidden, ngram, identity or sentence:MODEL; auto: hidden states if the model gives any.",
    )
    bipace_text_turns: int | None = _setting(
        "text_turns", "observations in a text state, with the actions between; None: 3 for the kernel value, else 1."
    )
    bipace_layer: int | str | None = _setting("layer", "index into hidden_states, or 'block 16'.")
    bipace_action_key_mode: ActionKeyMode = _setting(
        "action_key_mode", "how actions are recognized; auto: a tool call or the text between action tags."
    )
    bipace_n_action_tokens: int = _setting("n_action_tokens", "tokens of an action key in mode first_n.")
    bipace_gamma: float = _setting("gamma", "discount of rewards from turn to turn.")
    bipace_step_weight: float = _setting("step_weight", "w in A_ep + w A_S.")
    bipace_gigpo_mode: GigpoMode | None = _setting("gigpo_mode", "verl-agent's modes.")
    bipace_history_length: int | None = _setting("history_length", "earlier observations in a state, method hgpo.")
    bipace_length_weight_alpha: float | None = _setting("length_weight_alpha", "weight of depths, method hgpo.")
    bipace_base_group: bool | None = _setting("base_group", "whether the episode term counts as a depth, method hgpo.")
    bipace_value: Value | None = _setting("value", "kind of the value V, method gae.")
    bipace_share: Share | None = _setting("share", "records from which V is estimated, method gae.")
    bipace_shrinkage: float | None = _setting("shrinkage", "shrinkage of cluster means, method gae.")
    bipace_kernel_width: float | None = _setting("kernel_width", "width of the kernel in cosine, method gae.")
    bipace_kernel_time: float | None = _setting(
        "kernel_time", "width of the kernel in steps, method gae; 0: no time term."
    )
    bipace_kernel_noise: float | None = _setting("kernel_noise", "variance of returns about V, method gae.")
    bipace_kernel_same: float | None = _setting("kernel_same", "covariance of records of one prompt, method gae.")
    bipace_action_noise: float | None = _setting(
        "action_noise", "of averages over near states with the same action, method gae; 0: no averages."
    )
    bipace_memory_rows: int = _setting("memory_rows", "records kept from earlier batches, share memory.")
    bipace_record_dir: str | None = _setting("record_dir", "folder for step records, which bipace report --html reads.")
    bipace_record_every: int = _setting("record_every", "updates between recorded batches.")
    bipace_gae_lambda: float | None = _setting("gae_lambda", "λ, method gae.")
    bipace_episode_weight: float | None = _setting("episode_weight", "weight of A_ep.")
    bipace_step_norm: StepNorm | None = _setting(
        "step_norm", "whether the step term is divided by σ; in method gae by its root mean square."
    )
    bipace_episode_norm: EpisodeNorm | None = _setting(
        "episode_norm", "whether A_ep is divided by σ; None: from scale_rewards."
    )
    bipace_episode_scope: EpisodeScope | None = _setting("episode_scope", "population of μ and σ.")
    bipace_lone_trajectory: LoneTrajectory | None = _setting("lone_trajectory", "A_ep of a group of one.")
    bipace_on_invalid: OnInvalid = _setting("on_invalid", "what a bad row does.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, number in (("bipace_epsilon", float), ("bipace_layer", int)):
            value = getattr(self, name)
            if value is None:
                setattr(self, name, type(self).__dataclass_fields__[name].default)
            elif isinstance(value, str):
                with contextlib.suppress(ValueError):  # "auto", "block 16", or a text that Settings refuses by name
                    setattr(self, name, number(value))
        self.settings  # noqa: B018  wrong ones are errors before a model is loaded

    @property
    def settings(self) -> Settings:
        """The same settings as in every other adapter."""
        names = [f.name for f in fields(Settings) if hasattr(self, f"bipace_{f.name}")]
        given = {name: getattr(self, f"bipace_{name}") for name in names}
        try:
            settings = Settings.of(given)
        except (ValueError, TypeError) as error:
            raise type(error)(f"bipace_{error}") from error
        return settings.scaled(self.scale_rewards, "bipace_")
