"""A batch of ms-swift's GRPOTrainer as rows of turns."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from .._rollout_rows import RowsOfProcess, at_front

# What a scheduler may write into rollout_infos, one entry per turn; of `truncated` one bool.
INFOS = {"step_rewards": "step_rewards", "observation": "observations", "truncated": "truncated"}


def rows_of(trainer: Any, batches: Sequence[Mapping[str, Any]], extra: Mapping[str, Sequence[Any]]) -> RowsOfProcess:
    """Of the trainer's micro-batches, in their order, and what their samples give."""
    if trainer.dynamic_num_samples:
        raise ValueError(
            "the multi-turn scheduler returned several outputs for one rollout, and which turns follow one another is "
            "then not known: return the whole rollout as one output, or set BiPACE's method to 'grpo'."
        )
    if any(batch["grpo_batch"].teacher_per_token_logps is not None for batch in batches):
        raise ValueError("a teacher's log-probs are part of swift's advantages: leave it out, or set method='grpo'.")
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
    return RowsOfProcess(
        mask=mask,
        scores=at_front(total, mask),
        responses=pad_sequence(ids, batch_first=True),
        prompts=lambda: prompts,
        valid=torch.ones(len(masks), dtype=torch.bool),
        extra=extra,
        mask_name="completion_mask",
        extra_name="rollout_infos",
        keys=INFOS,
        first=first,
        size=trainer.num_generations,
    )
