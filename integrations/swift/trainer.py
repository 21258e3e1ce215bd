"""BiPACEGRPOTrainer: ms-swift's GRPOTrainer, with advantages per turn in place of one per completion."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from swift.rlhf_trainers import GRPOTrainer
from torch import Tensor

import bipace_kernels as bk

from .. import swift as joined
from .._accelerate import KeepsStates, agreed, of_all, states_of
from .._rollout_rows import extra_of
from .._states import is_noisy, no_hidden_states
from .._turns import Turns
from .._versions import check_version
from .rows import INFOS, rows_of

WHERE = "BiPACE's "


class BiPACEGRPOTrainer(KeepsStates, GRPOTrainer):  # type: ignore[misc]  # ms-swift has no types
    """GRPOTrainer whose training batches carry BiPACE's advantages, [B, T], on the tokens that the model wrote.

    The settings are those that join() was called with.  All else is swift's own, as is evaluation, which keeps its
    advantages; with method="grpo" nothing is changed at all.  docs/swift.md
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version("ms-swift")
        super().__init__(*args, **kwargs)
        settings = joined.settings.scaled(self.args.scale_rewards, WHERE)
        self._bipace = states_of(self, settings, WHERE)
        self._bipace_hidden: list[Tensor] | None = None  # of the micro-batches, while the trainer makes one batch
        if settings.keeps_own_advantages:
            return
        refused = {
            "padding_free=True packs rows": self.template.padding_free,
            "sequence_parallel_size above 1 splits rows": self.template.sequence_parallel_size > 1,
            "use_liger_kernel=True takes one advantage for each row": self.use_liger_loss,
            "loss_type=real takes one advantage for each row": self.loss_type == "real",
            f"advantage_estimator={self.advantage_estimator} is another one": self.advantage_estimator != "grpo",
            "kl_in_reward=True is part of swift's own advantages": self.kl_in_reward and self.beta != 0,
        }
        for what, is_so in refused.items():
            if is_so:
                raise ValueError(f"{what}, but BiPACE's advantages are of turns: turn it off, or set method='grpo'.")
        self._bipace_why = no_hidden_states(self.model, self._bipace) if self._bipace.may_be_hidden else ""
        self._bipace.require_hidden(self._bipace_why)
        if self._bipace.may_be_hidden and not self._bipace_why and is_noisy(self.model, self.args):
            warnings.warn(
                "hidden states are from swift's forward in training mode with the noise of the model's dropout, router "
                "or NEFTune: set lora_dropout, router_jitter_noise, neftune_noise_alpha to 0, or embedder to ngram.",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def _bipace_trains(self) -> bool:
        return bool(self.model.training and not self._bipace.settings.keeps_own_advantages)

    def _prepare_batch_inputs(self, samples: Sequence[Any]) -> Any:
        taps = self._bipace_trains and self._bipace.may_be_hidden and not self._bipace_why
        self._bipace_hidden = [] if taps else None
        return super()._prepare_batch_inputs(samples)

    def _get_per_token_logps_and_entropies(
        self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        run = partial(super()._get_per_token_logps_and_entropies, model, model_inputs, grpo_batch, *args, **kwargs)
        # The policy's own forward is the one that gives old log-probs; those after it are a reference's, or the loss's.
        if self._bipace_hidden is None or grpo_batch.old_per_token_logps is not None:
            return run()
        before = model_inputs["input_ids"].shape[1] - grpo_batch.logits_to_keep
        places = Turns.of(grpo_batch.completion_mask).positions(before)
        with bk.hidden.tap(model, self._bipace.settings.layer, positions=places) as tapped:
            output = run()
        self._bipace_hidden.append(tapped.rows())
        return output

    def _postprocess_batch(self, samples: Sequence[Any], batch_encoded_inputs: Sequence[dict[str, Any]]) -> None:
        """swift's own, and its advantages replaced by those of the turns."""
        super()._postprocess_batch(samples, batch_encoded_inputs)
        tapped, self._bipace_hidden = self._bipace_hidden, None
        if not self._bipace_trains:
            return
        several, tokenizer = self.accelerator.num_processes > 1, self.template.tokenizer

        def made(extra: dict[str, list[Any]], names: set[str]) -> Any:
            rows = rows_of(self, batch_encoded_inputs, extra).fitted(self._bipace, names)
            columns = rows.records(self._bipace, tokenizer, rows.scores, self.state.global_step)
            return rows, {name: c if c is None else c.to(self.accelerator.device) for name, c in columns.items()}

        infos = [sample.rollout_infos or {} for sample in samples]
        rows, records = agreed(several, partial(extra_of, infos, INFOS), list, made)
        hidden, why = torch.cat(tapped) if tapped else None, self._bipace_why
        result, metrics = rows.result(records, self._bipace, tokenizer, hidden=hidden, why=why, **of_all(several))
        on_tokens, first = rows.turns.spread(result.advantage), 0
        for encoded in batch_encoded_inputs:
            batch = encoded["grpo_batch"]
            b, t = batch.completion_mask.shape
            batch.advantages = on_tokens[first : first + b, :t].to(self.accelerator.device)
            first += b
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
