"""BiPACEGRPOTrainer: GRPOTrainer, with advantages per turn in place of one per completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

import bipace_kernels as bk

from .._versions import check_version
from .config import BiPACEGRPOConfig
from .credit import bipace_advantages, embedder_of, turns_of

Tensor = torch.Tensor
STATE_FILE = "bipace_state.json"  # in a checkpoint's folder: the ε that "auto" chose


class _Watched:
    """What passes by while the trainer makes one batch."""

    tool_mask: Any = None  # B lists, or None
    starts: Any = None  # B lists, or None
    rewards: Tensor  # [B of all processes, F]
    states: Tensor | None = None  # [n, D]
    forwards = 0


class BiPACEGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """GRPOTrainer whose training batches carry BiPACE's advantages, [B, T], on the tokens that the model wrote.

    args must be a BiPACEGRPOConfig.  All else is GRPOTrainer's own: rewards, loss, KL, evaluation (which keeps TRL's
    advantages); with bipace_method="grpo" nothing is changed at all.  docs/trl.md
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version("trl")
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, BiPACEGRPOConfig):
            raise TypeError(
                f"args must be a BiPACEGRPOConfig, got {type(self.args).__name__}; it takes all arguments of GRPOConfig."
            )
        self._bipace_epsilon: float | None = None
        self._bipace_watched: _Watched | None = None
        settings = self.args.settings
        if settings.needs_fingerprint:
            embedder_of(self, {}, settings)  # a layer that the model lacks is told now

    def _generate_and_score_completions(self, inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        settings = self.args.settings
        if settings.method == "grpo" or not self.model.training:
            found: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return found
        self._bipace_watched = watched = _Watched()
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self._bipace_watched = None
        # The first forward was the policy's own only if there are old log-probs: else it was a reference's, which PEFT runs
        # through the same model.
        states = watched.states if "old_per_token_logps" in output else None
        credit = bipace_advantages(
            self, inputs, output, watched.rewards, settings, states=states, epsilon=self._bipace_epsilon
        )
        self._bipace_epsilon = credit.epsilon
        output["advantages"] = credit.advantages
        for name, value in credit.metrics.items():
            self._metrics["train"][name].append(value)
        return output

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        watched = self._bipace_watched
        if watched is not None:
            watched.tool_mask = generated[2]
            extras: dict[str, Any] = next(part for part in generated if isinstance(part, dict))
            watched.starts = extras.get("turn_starts")
        return generated

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        def run() -> Any:
            return super(BiPACEGRPOTrainer, self)._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )

        watched, settings = self._bipace_watched, self.args.settings
        if watched is None or watched.forwards or model is not self.model or not settings.needs_fingerprint:
            return run()
        watched.forwards += 1
        if embedder_of(self, {}, settings) != "actor_hidden":
            return run()
        prompt_length = input_ids.shape[1] - logits_to_keep
        turns = turns_of(attention_mask[:, prompt_length:], watched.tool_mask, watched.starts)
        with bk.hidden.tap(model, settings.layer, positions=turns.positions(prompt_length)) as tapped:
            found = run()
        watched.states = tapped.rows()
        return found

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        if self._bipace_watched is not None:
            self._bipace_watched.rewards = rewards
        return rewards

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.settings.epsilon == "auto" and self._bipace_epsilon is not None and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            (folder / STATE_FILE).write_text(json.dumps({"epsilon": self._bipace_epsilon}))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = None if checkpoint is None else Path(checkpoint, STATE_FILE)
        if self.args.settings.epsilon == "auto" and path is not None and path.exists():
            self._bipace_epsilon = float(json.loads(path.read_text())["epsilon"])
