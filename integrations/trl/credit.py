"""From a batch of GRPOTrainer to step records, and from bipace_kernels.advantage() back to its tokens."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bipace_kernels as bk

from .._accelerate import agreed, of_all
from .._states import States, no_hidden_states
from .._turns import Turns
from .rollouts import Reported, ToolLoop, fields
from .rows import TrlRows, rows_of, turns_of

DROPOUT = (
    "TRL's forwards give noisy ones, since the model has dropout (such as lora_dropout of PEFT), a router's jitter, or "
    "neftune_noise_alpha: set it to 0, or embedder=actor_hidden runs an additional forward"
)
NO_FORWARD = (
    "no forward of TRL's own gives them in this configuration, or methods of your own see a batch before one does, and "
    "for a value n-grams are nearly as good; embedder=actor_hidden runs an additional forward"
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
    if batch.reads and not batch.why:
        hidden = early_exit(trainer, output, batch.rows.turns, states.settings.layer)
    return batch.credit(states, hidden)


class Prepared(NamedTuple):
    """The records of a batch, as for advantage(), whose hidden states may still be missing; why: if there are none."""

    rows: TrlRows
    records: dict[str, Any]
    tokenizer: Any
    why: str
    several: bool  # processes, which then do all this together
    reads: bool  # states that no forward of TRL's has given or will give, on some process

    def credit(self, states: States, hidden: Tensor | None) -> Credit:
        """With states [n, D] of the turns, or None."""
        options, turns = {"hidden": hidden, "why": self.why, **of_all(self.several)}, self.rows.turns
        result, metrics = self.rows.result(self.records, states, self.tokenizer, **options)
        return Credit(turns.spread(result.advantage), metrics, result, turns)


def prepare(
    trainer: Any, inputs: Sequence[dict[str, Any]], output: dict[str, Any], rewards: Tensor, states: States,
    *, hidden: Tensor | None, loop: ToolLoop | None, later: bool = False,
) -> Prepared:  # fmt: skip
    """The records of this process, as for bipace_advantages().  later: a forward of TRL's own will give the states."""
    several = trainer.accelerator.num_processes > 1
    lacks = ["hidden"] if states.may_be_hidden and hidden is None and not later else []  # one process does: all do
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)  # of a processor
    if not trainer.accelerator.is_main_process:
        states.recorder = None

    def read() -> Reported:
        starts = fields(inputs, "turn_starts", loop) if getattr(trainer, "rollout_func", None) is not None else None
        return Reported(trainer, inputs, turns_of(output["completion_mask"], output.get("tool_mask"), starts), loop)

    def prepared(reported: Reported, names: Set[str]) -> Prepared:
        reported.elsewhere = names
        rows, n = rows_of(trainer, output, rewards, reported, states), len(reported.turns)
        records = rows.records(states, tokenizer, rows.scores, trainer.state.global_step)
        records = {name: column.to(output["completion_ids"].device) for name, column in records.items()}
        reads = "hidden" in names
        why = no_hidden_states(trainer.model, states) if reads else ""
        if reads and "pixel_values" in names:
            why = why or "with images they come only from a forward of TRL's own (num_iterations=2)"
        states.require_hidden(why)
        if states.may_be_hidden and not why and not output["prompt_mask"].any(1).all():
            raise ValueError("every prompt must have a token, but one is empty: fill it, or use bipace_embedder=ngram.")
        if reads and states.settings.embedder == "auto" and states.settings.config().needs_truncated:
            why = why or (DROPOUT if getattr(trainer, "_bipace_dropout", False) else NO_FORWARD)
        if hidden is not None and len(hidden) != n:
            raise ValueError(f"hidden must have one row per turn, {n}, got {len(hidden)}: of another batch?")
        return Prepared(rows, records, tokenizer, why, several, reads)

    return agreed(several, read, lambda mine: [*mine.names(), *lacks, *({"pixel_values"} & output.keys())], prepared)


def early_exit(trainer: Any, output: dict[str, Any], turns: Turns, layer: int | str) -> Tensor:
    """[n, D] hidden states before each turn, by a forward that stops after the layer."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    places = turns.positions(output["prompt_ids"].shape[1])
    with trainer.accelerator.autocast():
        return bk.hidden.extract(trainer.model, ids, mask, layer, positions=places, progress=False)
