"""From a batch as GRPOTrainer holds it to step records, and from bipace_kernels.advantage() back to its tokens."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

import bipace_kernels as bk

from ...hidden.layers import find_decoder, layer_of
from .._settings import Settings
from .._turns import Turns

Tensor = torch.Tensor


@dataclass(frozen=True)
class Credit:
    """What bipace_advantages() gives.

    advantages  [B, T] float32   on the tokens that the model wrote, 0 elsewhere
    metrics     floats by name, over the batch of all processes
    epsilon     of the clusters, None where there are none: what was chosen, if the setting is "auto"
    result      of bipace_kernels.advantage(), one row per turn of this process
    turns       whose they are
    """

    advantages: Tensor
    metrics: dict[str, float]
    epsilon: float | None
    result: bk.AdvantageResult
    turns: Turns


def bipace_advantages(
    trainer: Any,
    inputs: Sequence[dict[str, Any]],
    output: dict[str, Any],
    rewards: Tensor,
    settings: Settings | None = None,
    *,
    states: Tensor | None = None,
    epsilon: float | None = None,
) -> Credit:
    """Per-token advantages of what _generate_and_score_completions(inputs) gives; changes nothing of it.

    trainer    the GRPOTrainer
    inputs     [B] rows of this process, as they are after that call
    output     its result
    rewards    [B of all processes, F]   what its _calculate_rewards() gave: already gathered
    settings   None: the defaults
    states     [n, D] hidden states of the turns, where a forward was tapped; None: an early exit runs where they are needed
    epsilon    what an earlier batch's Credit has, for "auto"; None: chosen on this batch

    ValueError names what does not fit and the cure.  All processes call this together.
    """
    settings = settings or Settings()
    accelerator, g = trainer.accelerator, trainer.num_generations
    turns = turns_of(output["completion_mask"], output.get("tool_mask"), _per_row(trainer, inputs, "turn_starts"))
    b, n = turns.shape[0], len(turns)
    first = b * accelerator.process_index
    if len(rewards) != b * accelerator.num_processes or len(rewards) % g:
        raise ValueError(
            f"rewards must have one row per completion of all processes, a multiple of num_generations = {g}, got "
            f"{len(rewards)} where this process of {accelerator.num_processes} has {b}; all need the same number of rows."
        )
    scored = rewards.double().cpu()
    total = (
        (scored * trainer.reward_weights.cpu()).nansum(1).where(~scored.isnan().all(1), torch.nan)[first : first + b]
    )

    device = output["completion_ids"].device
    place = first + turns.row
    records: dict[str, Any] = {
        "group": place // g, "trajectory": place, "step": turns.step,
        "rewards": _step_rewards(trainer, inputs, turns, total, settings.gamma), "episode_return": total[turns.row],
    }  # fmt: skip
    records = {name: value.to(device) for name, value in records.items()}
    embedder = embedder_of(trainer, output, settings) if settings.needs_fingerprint else None
    observations = None
    if settings.needs_observation or embedder not in (None, "actor_hidden"):
        observations = _observations(trainer, inputs, output, turns)
    if settings.needs_keys:
        records["action_key"], records["action_parsed"] = _keys(trainer, inputs, output, turns, settings)
    if settings.needs_observation:
        records["observation"] = observations
    if embedder == "actor_hidden":
        if states is not None and len(states) != n:
            raise ValueError(f"states must have one row per turn, {n}, got {len(states)}; are they of another batch?")
        records["fingerprint"] = early_exit(trainer, output, turns, settings) if states is None else states
    elif embedder is not None:
        records["fingerprint"] = _embedder(embedder).embed(observations).to(device)
    if embedder == "ngram":
        epsilon = settings.ngram_epsilon
    elif embedder == "identity":
        epsilon = 0.0
    elif embedder is None:
        epsilon = None
    elif settings.epsilon != "auto":
        epsilon = settings.epsilon
    elif epsilon is None:
        epsilon = _choose_epsilon(accelerator, records)

    result = _advantage(accelerator, records, settings.config(epsilon))
    metrics = result.metrics()
    if settings.method != "grpo":
        value = result.value_r2()
        metrics["bipace/value_r2"] = float("nan") if value.r2 is None else value.r2
        metrics["bipace/value_r2_coverage"] = value.coverage
    if embedder is not None and epsilon is not None:
        metrics["bipace/epsilon"] = epsilon
        metrics[f"bipace/embedder_{embedder.partition(':')[0]}"] = 1.0
    return Credit(turns.spread(result.advantage), metrics, epsilon, result, turns)


def turns_of(completion_mask: Tensor, tool_mask: Any = None, starts: list[Any] | None = None) -> Turns:
    """Turns of a batch: runs of tokens that the model wrote, cut where a rollout_func says that another begins.

    completion_mask  [B, T];  tool_mask  [B, T] or B lists of 0 and 1, no longer than T;  starts  B lists of columns
    """
    mask = completion_mask.cpu().clone()
    for row, written in enumerate(() if tool_mask is None else tool_mask):
        mask[row, : len(written)] *= torch.as_tensor(written, dtype=mask.dtype).cpu()
    begins = None
    if starts is not None:
        begins = torch.zeros_like(mask)
        for row, columns in enumerate(starts):
            if any(not 0 <= int(column) < mask.shape[1] for column in columns):
                raise ValueError(
                    f"turn_starts must be columns of the completion, below {mask.shape[1]}, got {list(columns)} in row {row}."
                )
            begins[row, torch.as_tensor(columns, dtype=torch.int64)] = 1
    return Turns.of(mask, begins)


def embedder_of(trainer: Any, output: dict[str, Any], settings: Settings) -> str:
    """The setting, with "auto" decided: hidden states, or n-grams with one warning where the model gives none."""
    if settings.embedder not in ("auto", "actor_hidden"):
        return settings.embedder
    reason = ""
    try:
        decoder = find_decoder(trainer.model)
        if decoder.compiled:
            reason = f"{decoder.compiled} is compiled as a whole, and calls no hooks"
    except (TypeError, ValueError) as error:
        reason = str(error)
    if not reason:
        try:
            layer_of(settings.layer, len(decoder.blocks))
        except ValueError as error:
            raise ValueError(f"bipace_{error}") from error
        return "actor_hidden"
    if settings.embedder == "actor_hidden":
        raise ValueError(f"bipace_embedder='actor_hidden' finds no hidden states: {reason} Use 'auto' or 'ngram'.")
    _warn_once(
        f"BiPACE clusters n-grams of the observations at bipace_ngram_epsilon = {settings.ngram_epsilon}, since the model "
        f"gives no hidden states: {reason}"
    )
    return "ngram"


def early_exit(trainer: Any, output: dict[str, Any], turns: Turns, settings: Settings) -> Tensor:
    """[n, D] hidden states before each turn, by a forward that stops after the layer."""
    if "pixel_values" in output:
        raise ValueError(
            "hidden states of images need a forward to tap: set num_iterations=2 or steps_per_generation above "
            "gradient_accumulation_steps, or bipace_embedder='ngram'."
        )
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    with trainer.accelerator.autocast():
        return bk.hidden.extract(
            trainer.model,
            ids,
            mask,
            settings.layer,
            positions=turns.positions(output["prompt_ids"].shape[1]),
            progress=False,
        )


def _advantage(accelerator: Any, records: dict[str, Any], config: bk.Config) -> bk.AdvantageResult:
    if accelerator.num_processes > 1:
        raise NotImplementedError("several processes")
    return bk.advantage(**records, config=config, check="now")


def _choose_epsilon(accelerator: Any, records: dict[str, Any]) -> float:
    """choose_epsilon() on the turns of all processes, by the main one; the same number everywhere."""
    fingerprint = records["fingerprint"].float()
    good = fingerprint.isfinite().all(1) & (fingerprint != 0).any(1)
    own = [fingerprint, *(records[name] for name in ("group", "trajectory", "step"))]
    gathered = gather_object([[column[good].cpu() for column in own]])
    chosen = [0.0]
    if accelerator.is_main_process:
        rows, group, trajectory, step = (torch.cat(columns) for columns in zip(*gathered, strict=True))
        chosen = [bk.choose_epsilon(rows, group, trajectory=trajectory, step=step).epsilon]
    return float(broadcast_object_list(chosen)[0])


# ---------------------------------------------------------------------------------------- what a rollout says of its turns


def _per_row(trainer: Any, inputs: Sequence[dict[str, Any]], name: str) -> list[Any] | None:
    """What rollout_func gave for each row, or what each row's environment has under that name; None where neither has."""
    environments = getattr(trainer, "environments", None)
    if getattr(trainer, "rollout_func", None) is not None:
        found = [row.get(name) for row in inputs]
    elif environments:
        found = [getattr(environment, name, None) for environment in environments[: len(inputs)]]
    else:
        return None
    missing = [row for row, value in enumerate(found) if value is None]
    if len(missing) == len(found):
        return None
    if missing:
        raise ValueError(f"{name} must be given for all rows or for none, but row {missing[0]} has none.")
    return found


def _per_turn(trainer: Any, inputs: Sequence[dict[str, Any]], turns: Turns, name: str) -> list[list[Any]] | None:
    """One value per turn of each row, in lists; a row without a turn keeps whatever its list holds."""
    found = _per_row(trainer, inputs, name)
    if found is None:
        return None
    from_environment = getattr(trainer, "rollout_func", None) is None
    counts = torch.bincount(turns.row, minlength=turns.shape[0]).tolist()
    written = torch.zeros(turns.shape[0], dtype=torch.bool).index_put_((turns.row,), turns.stop > turns.start)
    for row, (values, n) in enumerate(zip(found, counts, strict=True)):
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise TypeError(
                f"{name} must be a list per row with one entry per turn, got {type(values).__name__} in row {row}."
            )
        # An environment sees calls: of a last turn that makes none it knows nothing, and behind a last call one state more.
        allowed = {n} if not from_environment else {n, n + 1 if name == "observations" else n - 1}
        if written[row] and len(values) not in allowed:
            raise ValueError(
                f"{name} must have one entry per turn of the model, but row {row} has {len(values)} for {n} turns; turns are "
                "the runs of ones in completion_mask * tool_mask: a rollout_func gives env_mask with 0 on what it inserts "
                "itself, and turn_starts where turns stand back to back; an environment logs one entry per turn."
            )
    return [list(values) for values in found]


def _step_rewards(trainer: Any, inputs: Sequence[dict[str, Any]], turns: Turns, total: Tensor, gamma: float) -> Tensor:
    """[n] float64 r_t: what the rollout says, else the row's reward at its last turn."""
    given = _per_turn(trainer, inputs, turns, "step_rewards")
    if given is None:
        return turns.on_last(total)
    rewards = torch.zeros(len(turns), dtype=torch.float64)
    for i, (row, step, empty) in enumerate(
        zip(turns.row.tolist(), turns.step.tolist(), (turns.stop == 0).tolist(), strict=True)
    ):
        if empty:  # all its turns are masked out: the record has their discounted sum
            rewards[i] = sum(gamma**t * float(r) for t, r in enumerate(given[row]))
        elif step < len(given[row]):
            rewards[i] = float(given[row][step])
    return rewards


def _observations(trainer: Any, inputs: Sequence[dict[str, Any]], output: dict[str, Any], turns: Turns) -> list[str]:
    """[n] the observation of each turn: the rollout's own, else the text since the turn before, or the prompt."""
    given = _per_turn(trainer, inputs, turns, "observations")
    if given is not None:
        pairs = zip(turns.row.tolist(), turns.step.tolist(), strict=True)
        return [given[row][step] if step < len(given[row]) else "" for row, step in pairs]
    prompt_ids, prompt_mask = output["prompt_ids"].cpu(), output["prompt_mask"].cpu().bool()
    ids = output["completion_ids"].cpu()
    before = torch.cat([turns.stop.new_zeros(1), turns.stop[:-1]])
    spans = []
    for row, step, begin, end in zip(*(x.tolist() for x in (turns.row, turns.step, before, turns.start)), strict=True):
        spans.append(prompt_ids[row][prompt_mask[row]] if step == 0 else ids[row, begin:end])
    texts: list[str] = _tokenizer(trainer).batch_decode(spans, skip_special_tokens=True)
    return texts


def _keys(
    trainer: Any, inputs: Sequence[dict[str, Any]], output: dict[str, Any], turns: Turns, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Action keys [n], and which parsed: of the actions that the rollout names, else of each turn's tokens."""
    device = output["completion_ids"].device
    actions = _per_turn(trainer, inputs, turns, "actions")
    if actions is not None:
        pairs = zip(turns.row.tolist(), turns.step.tolist(), strict=True)
        texts = [actions[row][step] if step < len(actions[row]) else "" for row, step in pairs]
        keys, parsed = bk.action_keys(texts, mode="text")
        return keys.to(device), parsed.to(device)
    length = (turns.stop - turns.start).to(device)
    column = torch.arange(max(1, int(length.max())), device=device)
    mask = column < length[:, None]
    place = (turns.start.to(device)[:, None] + column).clamp(max=turns.shape[1] - 1)
    ids = output["completion_ids"][turns.row.to(device)[:, None], place]
    options: dict[str, Any] = {"mode": settings.action_key_mode, "n": settings.n_action_tokens, "check": "now"}
    if settings.action_key_mode == "first_n":
        return bk.action_keys(ids, mask=mask, **options)
    table = _token_bytes(_tokenizer(trainer))
    if table is not None:
        return bk.action_keys(ids, mask=mask, token_bytes=table, **options)
    rows = [row[kept] for row, kept in zip(ids.cpu(), mask.cpu(), strict=True)]
    keys, parsed = bk.action_keys(_tokenizer(trainer).batch_decode(rows, skip_special_tokens=True), **options)
    return keys.to(device), parsed.to(device)


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


@functools.lru_cache(maxsize=4)
def _token_bytes(tokenizer: Any) -> bk.TokenBytes | None:
    """None for tokenizers that have no such table, whose text is hashed then."""
    try:
        return bk.token_bytes(tokenizer)
    except (TypeError, ValueError) as error:
        _warn_once(f"BiPACE makes action keys from decoded text, since this tokenizer has no table of bytes: {error}")
        return None


@functools.lru_cache(maxsize=4)
def _embedder(name: str) -> bk.embedders.Embedder:
    return bk.embedders.named(name)


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
