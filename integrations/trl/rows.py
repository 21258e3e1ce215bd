"""A batch of TRL's GRPOTrainer as rows of turns."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import bipace_kernels as bk

from ...support.lazy import lazy
from .._rollout_rows import RowsOfProcess, at_front
from .._settings import Settings
from .._states import States
from .._turns import KINDS, Turns, keys_of, start_mask
from .rollouts import Entries, Reported


@dataclass(frozen=True, kw_only=True)
class TrlRows(RowsOfProcess):
    """Rows whose `extra` holds, as Reported.by_turn() gives them, a list of entries of each turn.

    reported  the rollouts' data
    dropped   [B] bool   rows whose entries do not fit their turns
    """

    reported: Reported
    dropped: Tensor

    @lazy
    def turns(self) -> Turns:
        return self.reported.turns

    def rewards(self, ids: Mapping[str, Tensor], token_rewards: Tensor, states: States) -> tuple[Tensor, Tensor]:
        """R(τ) [n], and r [n] float64: the sum of each turn's entries, at the last turn with what R(τ) has beyond them;
        in rows without entries R(τ) at the last turn."""
        total, turns, gamma = token_rewards.sum(1), self.turns, states.settings.config().gamma
        rewards, stepwise = turns.on_last(total), self.extra["step_rewards"] or ()
        stepped = [row for row, entries in enumerate(stepwise) if entries]
        sums = [sum(float(r) for of_turn in stepwise[row] for r in of_turn) for row in stepped]
        rests = states.beyond(total[stepped], torch.tensor(sums, dtype=torch.float64)).tolist()
        for row, rest in zip(stepped, rests, strict=True):
            stepwise[row][-1] = [*stepwise[row][-1], rest]
        for i, (row, entries) in enumerate(zip(turns.row.tolist(), self.entries("step_rewards"), strict=True)):
            if entries is not None and row in self.reported.masked:  # one record represents all its turns
                rewards[i] = sum(gamma**t * float(r) for t, of_turn in enumerate(stepwise[row]) for r in of_turn)
            elif entries is not None:
                rewards[i] = sum(map(float, entries))
        return rewards.masked_fill(self.dropped[turns.row], torch.nan), total[turns.row]

    def action_keys(
        self, tokenizer: Any, settings: Settings, last: Tensor, calls: list[str] | None = None
    ) -> dict[str, Tensor]:
        """Of the rollouts' actions where they give some.  A turn without an entry has the key of its tokens, a last one
        the empty action."""
        tokens, calls = self.turns.tokens(self.responses), self.reported.calls() if calls is None else calls
        keys = keys_of(*tokens, tokenizer, settings.action_key_mode, settings.n_action_tokens, calls, last)
        if self.extra["actions"] is None:
            return keys
        entries, ends = self.entries("actions"), last.cpu() & (self.turns.stop > self.turns.start)
        own = bk.action_keys([_joined(e or ()) for e in entries], mode="text")[0].to(tokens[0].device)
        if "action_kind" in keys:  # a call that cannot be read is no answer; an empty text is, with the key of none
            answers = keys["action_parsed"] | (keys["action_key"] == own) | (keys["action_kind"] != KINDS.index("text"))
            ends &= answers.cpu()
        of_turns = [e is not None and (bool(e) or end) for e, end in zip(entries, ends.tolist(), strict=True)]
        acted = torch.tensor(of_turns, device=own.device)
        keys["action_key"] = own.where(acted, keys["action_key"])
        keys["action_parsed"] = acted | keys.get("action_parsed", torch.zeros_like(acted))
        if "action_kind" in keys:
            keys["action_kind"] = keys["action_kind"].masked_fill(acted, KINDS.index("rollout"))
        return keys

    def observations(self, tokenizer: Any, turns: Tensor | None = None) -> list[Any]:
        entries = self.entries("observations", turns)
        # Nothing is decoded where each turn has an entry.
        decoded: list[Any] = entries if all(entries) else super().observations(tokenizer, turns)
        return [of_turn[-1] if of_turn else text for of_turn, text in zip(entries, decoded, strict=True)]

    def actions(self, tokenizer: Any, turns: Tensor | None = None) -> list[str]:
        written = zip(self.entries("actions", turns), self.turns.some(turns).last.tolist(), strict=True)
        texts = zip(written, super().actions(tokenizer, turns), strict=True)
        # A last turn may have the empty action.
        return [_joined(own) if own or (own is not None and last) else text for (own, last), text in texts]

    def entries(self, name: str, turns: Tensor | None = None) -> list[Entries | None]:
        """[n] of each turn, or [k] of some; None in a row without entries."""
        entries: list[Entries | None] = []
        for row, n in zip(self.extra[name] or [None] * len(self.valid), self.turns.counts.tolist(), strict=True):
            entries += [None] * n if row is None else [*row, *([[]] * n)][:n]
        return entries if turns is None else [entries[i] for i in turns.tolist()]


def _joined(entries: Sequence[Any]) -> str:
    return "\n".join(map(str, entries))


def turns_of(completion_mask: Tensor, tool_mask: Any, starts: Sequence[Any] | None) -> Turns:
    """Turns of a batch: runs of tokens that the model generated, cut where a rollout_func says that a turn begins.

    completion_mask   [B, T]
    tool_mask         [B, T], or B lists of 0 and 1 no longer than T, or None
    starts            B lists, or None
    """
    mask = completion_mask.cpu().clone()
    for row, written in enumerate(() if tool_mask is None else tool_mask):
        mask[row, : len(written)] *= torch.as_tensor(written, dtype=mask.dtype).cpu()
    return Turns.of(mask, None if starts is None else start_mask(starts, mask.shape, "turn_starts"))


def rows_of(trainer: Any, output: Mapping[str, Any], rewards: Tensor, reported: Reported, states: States) -> TrlRows:
    """The rows of this process; arguments as of bipace_advantages(), and what its rollouts say."""
    settings, accelerator, g = states.settings, trainer.accelerator, trainer.num_generations
    b = reported.turns.shape[0]
    if reported.of_function and output.get("tool_mask") is None and len(reported.turns) == b:
        text = (
            "every rollout counts as one turn, since rollout_func returned no env_mask: return it, 0 on tokens that "
            "the model did not generate, if rollouts have several turns."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    if len(rewards) != b * accelerator.num_processes or len(rewards) % g:
        raise ValueError(
            f"rewards must have one row per completion of all processes, a multiple of num_generations = {g}, got "
            f"{len(rewards)} where this process of {accelerator.num_processes} has {b}, as all must have."
        )
    first = b * accelerator.process_index
    own = rewards[first : first + b].double().cpu()
    total = (own * trainer.reward_weights.cpu()).nansum(1).where(~own.isnan().all(1), torch.nan)  # as in TRL

    config = settings.config()
    reads = {
        "step_rewards": True,
        "actions": config.reads_keys or settings.turns_of_text > 1,
        "observations": config.needs_observation or config.needs_fingerprint,
    }
    extra: dict[str, Any] = {name: reported.by_turn(name) if read else None for name, read in reads.items()}
    if config.needs_truncated:
        extra["truncated"] = reported.truncated()
    valid, mask = torch.ones(b, dtype=torch.bool), output["completion_mask"].cpu()
    dropped = states.set_aside(reported.misfits, valid, reported.must_fit)
    if states.recorder is not None:  # it shows these too; where they do not fit, no row is set aside
        extra |= {name: reported.by_turn(name) for name, read in reads.items() if not read}
    prompts, kept = output["prompt_ids"].cpu(), output["prompt_mask"].cpu().bool()
    return TrlRows(
        mask=mask,
        scores=at_front(total.masked_fill(dropped, torch.nan), mask),
        responses=output["completion_ids"],
        prompts=lambda: [row[there] for row, there in zip(prompts, kept, strict=True)],
        valid=valid,
        extra=extra,
        first=first,
        size=g,
        reported=reported,
        dropped=dropped,
    )
