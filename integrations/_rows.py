"""Rows: a batch as trainers hold it, one or several turns in each row, as the records of advantage()."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..action_keys import action_keys
from ..pipeline import advantage
from ..result import AdvantageResult, Records
from ..token_bytes import TokenBytes, token_bytes
from ._states import States
from ._steps import heard, turn_tokens
from ._turns import Turns

Tensor = torch.Tensor


class Tokenizer:
    """A tokenizer, and its table of bytes once somebody has asked for it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def table(self) -> TokenBytes:
        return token_bytes(self.tokenizer)


@dataclass(frozen=True)
class Rows:
    """B rows of a batch, as they were rolled out.

    mask         [B, T]    1 on the tokens that the model wrote, before any of them is rejected
    scores       [B, T]    the reward function's rewards by token, before any penalty; each row of a trajectory holds all of its
    responses    [B, T]    token ids
    prompts      gives the token ids of each prompt; called where observations must be read off them
    group        [B]       id of the prompt
    trajectory   [B]       which rollout of the prompt: ids that sort alike however the rows are shuffled
    place        [B]       number of the row in its trajectory; rows that are copies have equal ones
    valid        [B] bool  False: padding
    extra        {name: [B] values} of what environments may tell: `step_rewards`, `observation`
    hidden       [turns, D] of each row, or None
    labels       [turns] int64 of each row: their clusters c, where others have made them of such states, −1 − c if bad; or None
    """

    mask: Tensor
    scores: Tensor
    responses: Tensor
    prompts: Callable[[], Sequence[Tensor]]
    group: Sequence[str]
    trajectory: Sequence[Any]
    place: Sequence[int]
    valid: Tensor
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    hidden: Sequence[Tensor] | None = None
    labels: Sequence[Tensor] | None = None

    @cached_property
    def turns(self) -> Turns:
        return Turns.of(self.mask)

    def ids(self) -> dict[str, Tensor]:
        """group, trajectory and step [n] of each turn, and whether it is valid.

        Integers in sorted order, so that clusters do not depend on the order of rows.  The turns of a row are counted on
        from those of the rows before it in its trajectory.
        """
        group = np.unique(np.asarray(self.group, dtype=str), return_inverse=True)[1].reshape(-1)
        pairs = list(zip(group.tolist(), self.trajectory, strict=True))
        number = {pair: i for i, pair in enumerate(sorted(set(pairs)))}
        trajectory = [number[pair] for pair in pairs]
        counts, ahead = self.turns.counts.tolist(), [0] * len(pairs)
        before: dict[int, tuple[int, int, int]] = {}  # of each trajectory: last place, its first step, the one after
        for i in sorted(range(len(pairs)), key=lambda i: (trajectory[i], self.place[i])):
            place, first, after = before.get(trajectory[i], (-1, 0, 0))
            if self.place[i] != place:
                first, after = after, after + counts[i]
            before[trajectory[i]], ahead[i] = (self.place[i], first, after), first
        row = self.turns.row
        return {
            "group": torch.from_numpy(group)[row],
            "trajectory": torch.tensor(trajectory, dtype=torch.int64)[row],
            "step": torch.tensor(ahead, dtype=torch.int64)[row] + self.turns.step,
            "valid": self.valid[row],
        }

    def rewards(self, ids: Mapping[str, Tensor], token_rewards: Tensor) -> tuple[Tensor, Tensor | None]:
        """r [n] float64 of each turn, and R(τ) [n], or None where it is the sum of r.

            r_t = step_rewards_t + penalty_t            where there are step_rewards
                = [t is the last] · score + penalty_t   else
            R(τ) = score + Σ penalty_t

        score      of the trajectory: the sum of its last row's `scores`
        penalty_t  token_rewards [B, T] − scores over the turn's tokens and those up to the next turn (KL in the reward)
        """
        turns, trajectory, step = self.turns, ids["trajectory"], ids["step"]
        begins = torch.zeros(turns.shape, dtype=torch.int64)
        later = turns.step > 0
        begins[turns.row[later], turns.start[later]] = 1
        owner = (turns.counts.cumsum(0) - turns.counts)[:, None] + begins.cumsum(1)
        difference = (token_rewards.double() - self.scores.double()).cpu()
        penalty = torch.zeros(len(turns), dtype=torch.float64).index_add_(0, owner.flatten(), difference.flatten())
        n = int(trajectory.max()) + 1 if len(trajectory) else 0
        last = step == torch.full((n,), -1).scatter_reduce_(0, trajectory, step, "amax")[trajectory]
        at_end = turns.on_last(self.scores.double().cpu().sum(1)).where(last, 0.0) + penalty
        if "step_rewards" not in self.extra:
            return at_end, None
        given = torch.tensor(self.per_turn("step_rewards", 0.0), dtype=torch.float64)
        once = torch.from_numpy(np.unique(torch.stack([trajectory, step], 1).numpy(), axis=0, return_index=True)[1])
        total = torch.zeros(n, dtype=torch.float64).index_add_(0, trajectory[once], at_end[once])
        return given + penalty, total[trajectory]

    def per_turn(self, name: str, padding: Any) -> list[Any]:
        """[n] values of `extra`, of which a row holds one for each turn, or with one turn the value itself."""
        found: list[Any] = []
        counts = self.turns.counts.tolist()
        for i, (value, count, valid) in enumerate(zip(self.extra[name], counts, self.valid.tolist(), strict=True)):
            several = isinstance(value, (list, tuple, np.ndarray, Tensor)) and np.ndim(value) > 0
            each = list(value) if several else [value]
            if not valid:
                each = [padding] * count
            elif value is None or len(each) != count:
                raise ValueError(
                    f"{name} must hold one value for each of the {count} turns of row {i} (prompt {self.group[i]}), got "
                    f"{'none' if value is None else len(each)}; a turn is a run of 1 in the response mask, and a row of one turn "
                    "may give the value itself."
                )
            found.extend(each)
        return found

    def observations(self, tokenizer: Tokenizer) -> list[Any]:
        """[n] what each turn answers: `observation`, else the text of the tokens since the turn before it."""
        if "observation" in self.extra:
            return self.per_turn("observation", "")
        return heard(self.turns, self.prompts(), self.responses, tokenizer.tokenizer)

    def of_turns(self, rows: Sequence[Tensor] | None) -> Tensor | None:
        """[n, …] of hidden states or labels by row; ValueError where they are not those of these turns."""
        if rows is None:
            return None
        found, wanted = [len(row) for row in rows], self.turns.counts.tolist()
        if found != wanted:
            differ = [i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b]
            what = f"row {differ[0]} has {found[differ[0]]} for {wanted[differ[0]]} turns" if differ else "no more"
            raise ValueError(
                f"hidden states must be one for each turn of {len(wanted)} rows, but {len(found)} rows came, and {what}: they are "
                "of another batch, or the response mask was changed after the forward that gave them."
            )
        return torch.cat(list(rows)).cpu()

    def advantage(
        self, states: States, tokenizer: Tokenizer, token_rewards: Tensor, why: str = ""
    ) -> tuple[AdvantageResult, dict[str, float]]:
        """The result over the n turns, and metrics; `why` there are no hidden states, where there are none."""
        settings, ids = states.settings, self.ids()
        given: dict[str, Any] = dict(ids)
        given["rewards"], given["episode_return"] = self.rewards(ids, token_rewards)
        epsilon, used, labels = None, "", self.of_turns(self.labels)
        if labels is not None:
            alone = ids["valid"] & (labels < 0)
            used, epsilon, given["observation"] = "actor_hidden", states.epsilon, labels.where(~alone, -1 - labels)
        elif settings.needs_fingerprint:
            used, rows = states.fingerprint(self.of_turns(self.hidden), lambda: self.observations(tokenizer), why)
            given["fingerprint"], epsilon = rows, states.radius(used, rows, **ids)
        if settings.needs_observation:
            given["observation"] = self.observations(tokenizer)
        if settings.needs_keys:
            mode = settings.action_key_mode
            tokens, mask = turn_tokens(self.turns, self.responses.cpu())
            table = None if mode == "first_n" else tokenizer.table
            keys, parsed = action_keys(tokens, mode=mode, n=settings.n_action_tokens, mask=mask, token_bytes=table)
            given["action_key"] = keys
            if mode != "first_n":
                given["action_parsed"] = parsed
        config = settings.config(epsilon)
        if labels is not None:
            config = replace(config, partition="exact")  # of labels: the bits of the clusters that they stand for
        result = advantage(**given, config=config)
        if labels is not None and isinstance(result.records, Records):
            usable = ~alone[result.records.layout.order]
            result = replace(result, records=replace(result.records, usable=usable))
        return result, states.metrics(result, used, epsilon)
