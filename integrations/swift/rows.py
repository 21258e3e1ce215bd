"""A batch of ms-swift's GRPOTrainer as rows of turns."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from .._rollout_rows import RolloutRows, entries_of
from .._states import States
from .._turns import Turns

Tensor = torch.Tensor
# What a scheduler may write into rollout_infos, one entry per turn; of `truncated` one bool.
INFOS = {"step_rewards": ("step_rewards", float("nan")), "observation": ("observations", "")}


@dataclass(frozen=True)
class SwiftRows(RolloutRows):
    """Rows of this process, each a trajectory; a prompt group is `size` of them after one another.

    first   number of the first one among those of all processes
    size    of a prompt group
    """

    first: int = 0
    size: int = 1

    def ids(self) -> dict[str, Tensor]:
        place = self.first + self.turns.row
        return {
            "group": place // self.size,
            "trajectory": place,
            "step": self.turns.step,
            "valid": self.valid[self.turns.row],
        }

    def rewards(self, ids: Mapping[str, Tensor], token_rewards: Tensor) -> tuple[Tensor, Tensor]:
        """r [n]: step_rewards, else the row's at its last turn; R(τ) [n]: the row's.  A row set aside has NaN."""
        total = token_rewards.sum(1)
        if "step_rewards" not in self.extra:
            return self.turns.on_last(total), total[self.turns.row]
        return torch.tensor(self.field("step_rewards", 0.0), dtype=torch.float64), total[self.turns.row]


def keys_given(samples: Sequence[Any]) -> list[str]:
    """The keys of INFOS that any of the samples gives."""
    return [key for key, _ in INFOS.values() if any((s.rollout_infos or {}).get(key) is not None for s in samples)]


def rows_of(
    trainer: Any, samples: Sequence[Any], batches: Sequence[Mapping[str, Any]], states: States, given: Container[str]
) -> SwiftRows:
    """Of the trainer's micro-batches of these samples, in their order; given: keys of all processes."""
    if trainer.dynamic_num_samples:
        raise ValueError(
            "the multi-turn scheduler returned several outputs for one rollout, and which turns follow one another is "
            "then not known: return the whole rollout as one output, or set BiPACE's method to 'grpo'."
        )
    if any(batch["grpo_batch"].teacher_per_token_logps is not None for batch in batches):
        raise ValueError(
            "a teacher's log-probs are part of swift's advantages: leave the teacher out, or set method='grpo'."
        )
    masks, ids, prompts = [], [], []
    for batch in batches:
        written, tokens = batch["grpo_batch"].completion_mask.cpu(), batch["model_inputs"]["input_ids"].cpu()
        there, t = batch["model_inputs"]["attention_mask"].cpu().bool(), written.shape[1]
        for i, mask in enumerate(written.long()):
            begin = tokens.shape[1] - t + int(mask.argmax())
            masks.append(mask)
            ids.append(tokens[i, -t:])
            prompts.append(tokens[i, :begin][there[i, :begin]])
    mask = pad_sequence(masks, batch_first=True)
    first = len(masks) * trainer.accelerator.process_index
    rewards = trainer._rewards_per_func[first : first + len(masks)].double().cpu()
    total = (rewards * trainer.reward_weights.cpu()).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)
    infos = [sample.rollout_infos or {} for sample in samples]
    extra, aside = entries_of(
        infos, INFOS, Turns.of(mask), states, where="rollout_infos", mask="completion_mask", elsewhere=given
    )
    extra["truncated"] = [info.get("truncated") for info in infos]
    total[aside] = torch.nan
    scores = torch.zeros(mask.shape, dtype=torch.float64)
    scores[:, 0] = total
    none = [0] * len(masks)
    return SwiftRows(
        mask, scores, pad_sequence(ids, batch_first=True), lambda: prompts, [], none, none,
        valid=torch.ones(len(masks), dtype=torch.bool), extra=extra, mask_name="completion_mask", first=first,
        size=trainer.num_generations,
    )  # fmt: skip
