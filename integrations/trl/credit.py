"""From a batch as GRPOTrainer holds it to step records, and from bipace_kernels.advantage() back to its tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

import bipace_kernels as bk

from ..._ranks import Ranks
from .._states import States, no_hidden_states
from .._turns import Turns, keys_of, start_mask

Tensor = torch.Tensor


@dataclass(frozen=True)
class Credit:
    """What bipace_advantages() gives.

    advantages  [B, T] float32   on the tokens that the model wrote, 0 elsewhere
    metrics     floats by name, over the batch of all processes
    result      of bipace_kernels.advantage(), a row for each turn of this process
    turns       whose they are
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
) -> Credit:
    """Per-token advantages of what _generate_and_score_completions(inputs) gives; changes nothing of it.

    trainer   the GRPOTrainer
    inputs    [B] rows of this process, as they are after that call
    output    its result
    rewards   [B of all processes, F]   what its _calculate_rewards() gave: already gathered
    states    States(Settings(...), "bipace_"), the same one for all batches of a run
    hidden    [n, D] hidden states of the turns, where a forward was tapped; None: an early exit runs where they are needed

    ValueError names what does not fit and the cure.  All processes call this together, and where one fails, all raise.
    """
    settings, several = states.settings, trainer.accelerator.num_processes > 1

    def prepare() -> tuple[Turns, dict[str, Any], list[Any], str]:
        return _records(trainer, inputs, output, rewards, states, hidden)

    turns, records, texts, why = Ranks(None).agree(prepare, lambda _: None)[0] if several else prepare()
    if states.may_be_hidden and not why and hidden is None:
        hidden = _early_exit(trainer, output, turns, settings.layer)
    result, metrics = states.advantage(
        records, lambda: texts, hidden=hidden, why=why, run=bk.distributed.advantage if several else bk.advantage, gather=_of_all
    )  # fmt: skip
    return Credit(turns.spread(result.advantage), metrics, result, turns)


def turns_of(completion_mask: Tensor, tool_mask: Any, starts: Sequence[Any] | None) -> Turns:
    """Turns of a batch: runs of tokens that the model wrote, cut where a rollout_func says that another begins.

    completion_mask  [B, T];  tool_mask  [B, T], or B lists of 0 and 1 no longer than T, or None;  starts  B lists, or None
    """
    mask = completion_mask.cpu().clone()
    for row, written in enumerate(() if tool_mask is None else tool_mask):
        mask[row, : len(written)] *= torch.as_tensor(written, dtype=mask.dtype).cpu()
    return Turns.of(mask, None if starts is None else start_mask(starts, mask.shape, "turn_starts"))


def _records(
    trainer: Any, inputs: Sequence[dict[str, Any]], output: dict[str, Any], rewards: Tensor, states: States,
    hidden: Tensor | None,
) -> tuple[Turns, dict[str, Any], list[Any], str]:  # fmt: skip
    """Turns of this process, their ids, rewards and keys, their observations, and why there is nothing hidden."""
    settings, accelerator, g = states.settings, trainer.accelerator, trainer.num_generations
    ids, tokenizer = output["completion_ids"], trainer.processing_class
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    turns = turns_of(output["completion_mask"], output.get("tool_mask"), _rollout_field(trainer, inputs, "turn_starts"))
    b = turns.shape[0]
    # An environment sees calls: of a last turn that makes none it knows nothing, and behind a last call it has a state more.
    of_function = getattr(trainer, "rollout_func", None) is not None
    spare, mask = int(not of_function), "the env_mask of rollout_func" if of_function else "TRL's tool mask"
    if of_function and output.get("tool_mask") is None and len(turns) == b:
        warnings.warn(
            "every rollout counts as one turn, for rollout_func returned no env_mask: return it, 0 on the tokens that others "
            "wrote, if rollouts have several turns. Without turns there is no step to give credit to.",
            RuntimeWarning,
            stacklevel=2,
        )
    if len(rewards) != b * accelerator.num_processes or len(rewards) % g:
        raise ValueError(
            f"rewards must have one row per completion of all processes, a multiple of num_generations = {g}, got "
            f"{len(rewards)} where this process of {accelerator.num_processes} has {b}; all need the same number of rows."
        )
    if hidden is not None and len(hidden) != len(turns):
        raise ValueError(f"hidden must have one row per turn, {len(turns)}, got {len(hidden)}: of another batch?")
    first = b * accelerator.process_index
    own = rewards[first : first + b].double().cpu()
    total = (own * trainer.reward_weights.cpu()).nansum(1).where(~own.isnan().all(1), torch.nan)  # as TRL has it

    stepwise = _rollout_field(trainer, inputs, "step_rewards")
    step_rewards = turns.on_last(total)
    if stepwise is not None:
        for row in turns.row[turns.stop == turns.start].tolist():  # all its turns are masked: one record has their sum
            stepwise[row] = [sum(settings.gamma**t * float(r) for t, r in enumerate(stepwise[row]))]
        step_rewards = torch.tensor(
            turns.field(stepwise, "step_rewards", 0.0, mask=mask, spare=-spare), dtype=torch.float64
        )
    place = first + turns.row
    records: dict[str, Any] = {
        "group": place // g, "trajectory": place, "step": turns.step, "rewards": step_rewards,
        "episode_return": total[turns.row],
    }  # fmt: skip
    if settings.needs_truncated:
        cut = _rollout_field(trainer, inputs, "truncated")
        records["truncated"] = turns.truncated([False] * b if cut is None else cut)
    if settings.needs_keys:
        actions = _rollout_field(trainer, inputs, "actions")
        if actions is None:
            records |= keys_of(*turns.tokens(ids), tokenizer, settings.action_key_mode, settings.n_action_tokens)
        else:
            keys = bk.action_keys(turns.field(actions, "actions", "", mask=mask, spare=-spare), mode="text")
            records["action_key"], records["action_parsed"] = keys
    records = {name: value.to(ids.device) for name, value in records.items()}
    why = no_hidden_states(trainer.model, states) if states.may_be_hidden and hidden is None else ""
    if "pixel_values" in output and hidden is None:
        why = why or "with images they come only from TRL's own forward (num_iterations=2)"
    if why and settings.embedder == "actor_hidden":
        raise states.no_hidden(why)
    texts: list[Any] = []
    if settings.needs_observation or (settings.needs_fingerprint and (why or not states.may_be_hidden)):
        observations = _rollout_field(trainer, inputs, "observations")
        if observations is None:
            pairs = zip(output["prompt_ids"].cpu(), output["prompt_mask"].cpu().bool(), strict=True)
            texts = turns.observation_texts([row[kept] for row, kept in pairs], ids, tokenizer)
        else:
            texts = turns.field(observations, "observations", "", mask=mask, spare=spare)
    return turns, records, texts, why


def _rollout_field(trainer: Any, inputs: Sequence[dict[str, Any]], name: str) -> list[Any] | None:
    """What rollout_func returned for each row, or what each row's environment has under that name; None where neither has."""
    environments = getattr(trainer, "environments", None) or ()
    if getattr(trainer, "rollout_func", None) is not None:
        found = [row.get(name) for row in inputs]
    else:
        found = [getattr(environment, name, None) for environment in environments[: len(inputs)]]
        # A method or a space of that name says nothing of turns; where turns begin, TRL's own loop knows.
        kinds = (bool,) if name == "truncated" else (list, tuple)
        found = [value if isinstance(value, kinds) and name != "turn_starts" else None for value in found]
    missing = [row for row, value in enumerate(found) if value is None]
    if len(missing) == len(found):
        return None
    if missing:
        raise ValueError(f"{name} must be given for every row or for none, but row {missing[0]} has none.")
    return found


def _early_exit(trainer: Any, output: dict[str, Any], turns: Turns, layer: int | str) -> Tensor:
    """[n, D] hidden states before each turn, by a forward that stops after the layer."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    places = turns.positions(output["prompt_ids"].shape[1])
    with trainer.accelerator.autocast():
        return bk.hidden.extract(trainer.model, ids, mask, layer, positions=places, progress=False)


def _of_all(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of all processes, one after the other."""
    parts = gather_object([{name: column.cpu() for name, column in columns.items()}])
    return {name: torch.cat([part[name] for part in parts]) for name in columns}
