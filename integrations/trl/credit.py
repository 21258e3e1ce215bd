"""From a batch of GRPOTrainer to step records, and from bipace_kernels.advantage() back to its tokens."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bipace_kernels as bk

from ...distributed.ranks import Ranks
from .._accelerate import of_all
from .._recorder import texts_of
from .._states import States, no_hidden_states
from .._turns import KINDS, Turns, call_text, keys_of, start_mask
from .rollouts import Said, ToolLoop, fields

DROPOUT = (
    "TRL's forwards give noisy ones, since the model has dropout (such as lora_dropout of PEFT, or attention_dropout): "
    "set it to 0, or embedder=actor_hidden runs an additional forward"
)
NO_FORWARD = (
    "no forward of TRL's own gives them in this configuration, and for a value n-grams are nearly as good; "
    "embedder=actor_hidden runs an additional forward"
)


@dataclass(frozen=True)
class Credit:
    """The result of bipace_advantages().

    advantages  [B, T] float32   on the tokens that the model generated, 0 elsewhere
    metrics     floats by name, over the batch of all processes
    result      of bipace_kernels.advantage(), a row for each turn of this process
    turns       the turns of these rows
    """

    advantages: Tensor
    metrics: dict[str, float]
    result: bk.AdvantageResult
    turns: Turns


def bipace_advantages(
    trainer: Any,
    inputs: Sequence[dict[str, Any]],
    output: dict[str, Any],
    rewards: Tensor,
    states: States,
    *,
    hidden: Tensor | None = None,
    loop: ToolLoop | None = None,
) -> Credit:
    """Per-token advantages for the result of _generate_and_score_completions(inputs), which is not modified.

    trainer   the GRPOTrainer
    inputs    [B] rows of this process after that call
    output    its result
    rewards   [B of all processes, F]   result of _calculate_rewards(), already gathered
    states    States(Settings(...), "bipace_"), the same one for all batches of a run
    hidden    [n, D] hidden states of the turns, if a forward was tapped; None: an early exit runs if they are needed
    loop      TRL's tool loop of this batch, if environments log or tools are called

    ValueError names what does not match and what to do.  All processes call this together; if one fails, all raise.
    """
    batch = prepare(trainer, inputs, output, rewards, states, hidden=hidden, loop=loop)
    if hidden is None and states.may_be_hidden and not batch.why:
        hidden = early_exit(trainer, output, batch.turns, states.settings.layer)
    return batch.credit(states, hidden)


@dataclass(frozen=True)
class Prepared:
    """The records of a batch whose hidden states may still be missing.

    turns     of this process
    records   their columns [n], as for advantage()
    texts     [n] observations if they are needed, else none
    actions   [n] texts of the actions if text states hold several turns, else none
    why       reason if there are no hidden states
    several   whether there are several processes, which then do all this together
    """

    turns: Turns
    records: dict[str, Any]
    texts: list[Any]
    actions: list[Any]
    why: str
    several: bool

    def credit(self, states: States, hidden: Tensor | None) -> Credit:
        """With states [n, D] of the turns, or None."""
        together = of_all(self.several)
        result, metrics = states.advantage(
            self.records, lambda: self.texts, actions=lambda: self.actions, hidden=hidden, why=self.why, **together
        )
        return Credit(self.turns.spread(result.advantage), metrics, result, self.turns)


def prepare(
    trainer: Any, inputs: Sequence[dict[str, Any]], output: dict[str, Any], rewards: Tensor, states: States,
    *, hidden: Tensor | None, loop: ToolLoop | None, later: bool = False,
) -> Prepared:  # fmt: skip
    """The records of this process, as for bipace_advantages().  later: a forward of TRL's own will give the states."""
    several = trainer.accelerator.num_processes > 1

    def said() -> Said:
        of_function = getattr(trainer, "rollout_func", None) is not None
        starts = [given or () for given in fields(inputs, "turn_starts", loop)] if of_function else None
        return Said(trainer, inputs, turns_of(output["completion_mask"], output.get("tool_mask"), starts), loop)

    def records(found: Said) -> Prepared:
        tapped = later or hidden is not None
        n, prepared = len(found.turns), _prepared(trainer, output, rewards, states, found, tapped=tapped)
        if hidden is not None and len(hidden) != n:
            raise ValueError(f"hidden must have one row per turn, {n}, got {len(hidden)}: of another batch?")
        return prepared

    if not several:
        return records(said())
    found, names = Ranks(None).agree(said, Said.names)
    found.elsewhere = {name for of_rank in names for name in of_rank}
    return Ranks(None).agree(lambda: records(found), lambda _: None)[0]


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


def _prepared(
    trainer: Any, output: dict[str, Any], rewards: Tensor, states: States, said: Said, *, tapped: bool
) -> Prepared:
    """The records of this process.  tapped: hidden states are there, or will be."""
    settings, accelerator, g = states.settings, trainer.accelerator, trainer.num_generations
    loop = said.loop
    ids, tokenizer = output["completion_ids"], trainer.processing_class
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    turns, b = said.turns, said.turns.shape[0]
    if said.of_function and output.get("tool_mask") is None and len(turns) == b:
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
    stepwise = said.by_turn("step_rewards")
    actions = said.by_turn("actions") if config.reads_keys or settings.turns_of_text > 1 else None
    observations = said.by_turn("observations") if config.needs_observation or config.needs_fingerprint else None
    cut = said.truncated() if config.needs_truncated else None
    aside = states.set_aside(said.misfits, b, said.must_fit)
    total = total.masked_fill(aside, torch.nan)
    step_rewards = _rewards(said, stepwise, total, states).masked_fill(aside[turns.row], torch.nan)
    place = first + turns.row
    records: dict[str, Any] = {"group": place // g, "trajectory": place, "step": turns.step}
    records |= {"rewards": step_rewards, "episode_return": total[turns.row]}
    if cut is not None:
        records["truncated"] = turns.truncated(cut)
    if config.reads_keys:
        calls = _calls(turns, loop) if loop is not None and getattr(trainer, "tools", None) else None
        mode, n = settings.action_key_mode, settings.n_action_tokens
        records |= keys_of(*turns.tokens(ids), tokenizer, mode, n, calls, turns.last)
        if actions is not None:
            records |= _given_keys(said, actions, records)
    records = {name: value.to(ids.device) for name, value in records.items()}
    if states.recorder is not None and accelerator.is_main_process:
        given = said.flat(observations), said.flat(actions)
        states.recorder.expect(trainer.state.global_step, partial(_texts, output, turns, tokenizer, *given))
    why = no_hidden_states(trainer.model, states) if states.may_be_hidden and not tapped else ""
    if "pixel_values" in output and not tapped:
        why = why or "with images they come only from a forward of TRL's own (num_iterations=2)"
    states.require_hidden(why)
    if states.may_be_hidden and not tapped and settings.embedder == "auto" and config.needs_truncated:
        why = why or (DROPOUT if getattr(trainer, "_bipace_dropout", False) else NO_FORWARD)
    texts: list[Any] = []
    done: list[Any] = []
    if config.needs_observation or (config.needs_fingerprint and (why or not states.may_be_hidden)):
        entries = said.flat(observations)
        # Nothing is decoded where each turn has an entry.
        decoded = entries if all(entries) else turns.observation_texts(_prompts(output), ids, tokenizer)
        texts = [of_turn[-1] if of_turn else text for of_turn, text in zip(entries, decoded, strict=True)]
        if settings.turns_of_text > 1 and config.needs_fingerprint:
            written = zip(said.flat(actions), turns.action_texts(ids, tokenizer), strict=True)
            done = [_joined(of_turn) if of_turn else text for of_turn, text in written]
    return Prepared(turns, records, texts, done, why, accelerator.num_processes > 1)


def _prompts(output: dict[str, Any]) -> list[Tensor]:
    """[B] token ids of each prompt, without padding."""
    pairs = zip(output["prompt_ids"].cpu(), output["prompt_mask"].cpu().bool(), strict=True)
    return [row[kept] for row, kept in pairs]


def _joined(entries: Sequence[Any]) -> str:
    return "\n".join(map(str, entries))


def _texts(
    output: dict[str, Any], turns: Turns, tokenizer: Any, observations: list[Any], actions: list[Any], some: Tensor
) -> tuple[list[Any], list[Any]]:
    """Observations and actions of some turns [k], in whole rows: the rollouts' data, else the text of the tokens."""
    seen, done = texts_of(turns, some, _prompts(output), output["completion_ids"].cpu(), tokenizer)
    last = turns.last.tolist()
    for k, i in enumerate(some.tolist()):
        seen[k] = observations[i][-1] if observations[i] else seen[k]
        if actions[i] or (actions[i] is not None and last[i]):  # a last turn without an action has the empty one
            done[k] = _joined(actions[i])
    return seen, done


def _rewards(said: Said, stepwise: Any, total: Tensor, states: States) -> Tensor:
    """[n] float64 r_t: the sum of each turn's entries, at the last turn with what R(τ) has beyond them; else R(τ)."""
    rewards, gamma = said.turns.on_last(total), states.settings.gamma
    given = [row for row, entries in enumerate(stepwise or ()) if entries]
    sums = [sum(float(r) for of_turn in stepwise[row] for r in of_turn) for row in given]
    for row, rest in zip(given, states.beyond(total[given], torch.tensor(sums, dtype=torch.float64)), strict=True):
        if rest:
            stepwise[row] = [*stepwise[row][:-1], [*stepwise[row][-1], float(rest)]]
    for i, (row, entries) in enumerate(zip(said.turns.row.tolist(), said.flat(stepwise), strict=True)):
        if entries is not None and row in said.masked:  # one record represents all its turns
            rewards[i] = sum(gamma**t * float(r) for t, of_turn in enumerate(stepwise[row]) for r in of_turn)
        elif entries is not None:
            rewards[i] = sum(map(float, entries))
    return rewards


def _calls(turns: Turns, loop: ToolLoop) -> list[str]:
    """[n] the tool calls of each turn as one text, empty where it made none."""
    found: list[str] = []
    for row, n in enumerate(turns.counts.tolist()):
        functions = [[call.get("function", call) for call in calls] for calls in loop.calls(row)]
        texts = [call_text([(f.get("name"), f.get("arguments")) for f in calls]) for calls in functions]
        found += [*texts, *([""] * n)][:n]
    return found


def _given_keys(said: Said, actions: Any, records: dict[str, Any]) -> dict[str, Tensor]:
    """The keys of the rollouts' actions.  A turn without an entry keeps its own; a last one has the empty action."""
    entries, last = said.flat(actions), said.turns.last.tolist()
    if "action_kind" in records:  # a call that cannot be read is no answer
        answers = records["action_parsed"] | (records["action_kind"] != KINDS.index("text"))
        last = [end and answer for end, answer in zip(last, answers.tolist(), strict=True)]
    given = torch.tensor([e is not None and (bool(e) or end) for e, end in zip(entries, last, strict=True)])
    keys, _ = bk.action_keys([_joined(e or ()) for e in entries], mode="text")
    device = records["action_key"].device
    given, keys = given.to(device), keys.to(device)
    found = {"action_key": keys.where(given, records["action_key"])}
    found["action_parsed"] = given | records.get("action_parsed", torch.zeros_like(given))
    if "action_kind" in records:
        found["action_kind"] = records["action_kind"].masked_fill(given, KINDS.index("rollout"))
    return found


def early_exit(trainer: Any, output: dict[str, Any], turns: Turns, layer: int | str) -> Tensor:
    """[n, D] hidden states before each turn, by a forward that stops after the layer."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    places = turns.positions(output["prompt_ids"].shape[1])
    with trainer.accelerator.autocast():
        return bk.hidden.extract(trainer.model, ids, mask, layer, positions=places, progress=False)
