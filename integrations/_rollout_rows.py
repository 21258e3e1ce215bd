"""RolloutRows: a trainer's batch, with one or several turns per row, as the records of advantage()."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends.records import out_of_range
from ..result import AdvantageResult
from ..support.lazy import lazy
from ._settings import Settings
from ._states import States
from ._turns import KINDS, Turns, cut_off, keys_of

# What may be said of each turn, and stands where nothing is, and where it does not fit the row's turns.
ENTRIES = {"step_rewards": (0.0, math.nan), "observation": ("", "")}


def require(names: Iterable[str], there: Container[str], cure: str) -> None:
    """Raises ValueError for the first of these fields that the batch lacks."""
    for name in names:
        if name not in there:
            raise ValueError(f"{name} is missing in the batch, and algorithm.adv_estimator=bipace needs it: {cure}.")


def numbered(group: Sequence[str], trajectory: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """[B] int64 numbers of prompt groups and of trajectories, sorted: clusters do not depend on the order of rows."""
    groups = np.unique(np.asarray(group, dtype=str), return_inverse=True)[1].reshape(-1)
    pairs = list(zip(groups.tolist(), trajectory, strict=True))
    number = {pair: i for i, pair in enumerate(sorted(set(pairs)))}
    return torch.from_numpy(groups), torch.tensor([number[pair] for pair in pairs], dtype=torch.int64)


def at_front(reward: Tensor, mask: Tensor) -> Tensor:
    """`scores` [B, T] of RolloutRows for one reward [B] of each row."""
    scores = torch.zeros(mask.shape, dtype=torch.float64)
    scores[:, :1] = reward[:, None]
    return scores


def extra_of(infos: Sequence[Mapping[str, Any]], keys: Mapping[str, str]) -> dict[str, list[Any]]:
    """`extra` of RolloutRows: by name, the values under its key of the rollouts [B], if any of them has one."""
    columns = {name: [info.get(key) for info in infos] for name, key in keys.items()}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


@dataclass(frozen=True)
class RolloutRows:
    """B rows of a batch, as they were rolled out.

    mask         [B, T]    1 on the tokens that the model generated, before any of them is rejected
    scores       [B, T]    rewards by token, before penalties; each row holds those of its trajectory
    responses    [B, T]    token ids
    prompts      returns the token ids of each prompt; called if observations must be derived from them
    group        [B]       id of the prompt
    trajectory   [B]       id of the prompt's rollout, with an order that does not depend on the order of rows
    place        [B]       number of the row in its trajectory; equal for copies
    valid        [B] bool  False: padding
    extra        {name: [B] values} that environments may return: `step_rewards`, `observation`, `truncated`; read by
                 the other methods once they are fitted()
    hidden       [turns, D] of each row, or None
    labels       [turns] int64 of each row: clusters c made on the workers, −1 − c for bad states; or None
    mask_name    the trainer's name of the mask
    extra_name   the trainer's name of what holds `extra`, and `keys` {name: key} there where they differ
    """

    mask: Tensor
    scores: Tensor
    responses: Tensor
    prompts: Callable[[], Sequence[Tensor]]
    valid: Tensor
    group: Sequence[str] = ()
    trajectory: Sequence[Any] = ()
    place: Sequence[int] = ()
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    hidden: Sequence[Tensor] | None = None
    labels: Sequence[Tensor] | None = None
    mask_name: str = "response_mask"
    extra_name: str = "extra_fields"
    keys: Mapping[str, str] = field(default_factory=dict)

    @lazy
    def turns(self) -> Turns:
        return Turns.of(self.mask)

    def fitted(self, states: States, elsewhere: Container[str] = ()) -> RolloutRows:
        """With `step_rewards` and `observation` [n] by turn.  Rows where they do not fit take part in nothing: they
        score NaN.

        elsewhere   names that rollouts of other processes give, which all rows here then need as well
        """
        names = [name for name in ENTRIES if name in self.extra or name in elsewhere]
        if not names:
            return self
        extra: dict[str, Any] = dict(self.extra)
        misfits: dict[int, str] = {}
        for name in names:
            missing, bad = ENTRIES[name]
            entries = extra.get(name, [None] * len(self.valid))
            where = f"{self.extra_name}[{self.keys.get(name, name)!r}]"
            rows, wrong = self.turns.entries(entries, where, self.mask_name, numbers=name == "step_rewards")
            for row in self.turns.empty if name == "step_rewards" else ():  # one record stands for all its turns
                rows[row] = rows[row] if row in wrong else [sum(map(float, rows[row]))]
            by_turn: list[Any] = []
            for row, (n, valid) in enumerate(zip(self.turns.counts.tolist(), self.valid.tolist(), strict=True)):
                by_turn += [missing] * n if not valid else [bad] * n if row in wrong else [*rows[row], missing][:n]
                if valid and row in wrong:
                    misfits.setdefault(row, wrong[row])
            extra[name] = by_turn
        must_fit = all(name in self.extra for name in names)  # else rows elsewhere may fit
        dropped = states.set_aside(misfits, self.valid, must_fit).to(self.scores.device)
        return replace(self, extra=extra, scores=self.scores.double().masked_fill(dropped[:, None], torch.nan))

    def ids(self) -> dict[str, Tensor]:
        """group, trajectory and step [n] of each turn, and whether it is valid.

        The numbering of turns continues over the rows of a trajectory.
        """
        group, number = numbered(self.group, self.trajectory)
        trajectory = number.tolist()
        counts, ahead = self.turns.counts.tolist(), [0] * len(trajectory)
        before: dict[int, tuple[int, int, int]] = {}  # of each trajectory: last place, its first step, the one after
        for i in sorted(range(len(trajectory)), key=lambda i: (trajectory[i], self.place[i])):
            place, first, after = before.get(trajectory[i], (-1, 0, 0))
            if self.place[i] != place:
                first, after = after, after + counts[i]
            before[trajectory[i]], ahead[i] = (self.place[i], first, after), first
        row = self.turns.row
        step = torch.tensor(ahead, dtype=torch.int64)[row] + self.turns.step
        return {"group": group[row], "trajectory": number[row], "step": step, "valid": self.valid[row]}

    def rewards(self, ids: Mapping[str, Tensor], token_rewards: Tensor, states: States) -> tuple[Tensor, Tensor | None]:
        """r [n] float64 of each turn, and R(τ) [n], or None if it is the sum of r.

            r_t = step_rewards_t + penalty_t            if there are step_rewards; the last with what R(τ) has beyond
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
        score = self.scores.double().cpu().sum(1)
        last = _last(ids)
        at_end = turns.on_last(score).where(last, 0.0) + penalty
        if "step_rewards" not in self.extra:
            of_last = torch.zeros(n, dtype=torch.float64).index_put_((trajectory[last],), score[turns.row][last])
            if ((score[turns.row] - of_last[trajectory]).abs() > 1e-5 * (1 + of_last[trajectory].abs())).any():
                states.warn(
                    "rewards of rows",
                    "rows of one rollout have different rewards, and only that of its last row counts: give rewards of "
                    f"steps in {self.extra_name}[{self.keys.get('step_rewards', 'step_rewards')!r}].",
                )
            return at_end, None
        rewards = torch.tensor(self.extra["step_rewards"], dtype=torch.float64) + penalty
        once = torch.from_numpy(np.unique(torch.stack([trajectory, step], 1).numpy(), axis=0, return_index=True)[1])

        def summed(of_turns: Tensor) -> Tensor:  # over the distinct steps of each trajectory
            sums = torch.zeros(n, dtype=torch.float64).index_add_(0, trajectory[once], of_turns[once])
            return sums[trajectory]

        total, valid = summed(at_end), ids["valid"]
        rest = states.beyond(total.where(valid, 0.0), summed(rewards).where(valid, 0.0))
        return torch.where(last & (rest != 0), rewards + rest, rewards), total

    def taking_part(self, states: States) -> Tensor:
        """[B] bool: rows that are not padding, nor of a rollout that advantage() sets aside for its rewards."""
        rows, ids = self.fitted(states), self.ids()
        rewards, total = rows.rewards(ids, rows.scores, states)
        bad = out_of_range(rewards) if total is None else out_of_range(rewards) | out_of_range(total)
        trajectory = ids["trajectory"]
        return self.valid.index_fill(0, self.turns.row[torch.isin(trajectory, trajectory[bad])], False)

    def observations(self, tokenizer: Any, turns: Tensor | None = None) -> list[Any]:
        """[n] observation of each turn: `observation`, else the text of the tokens since the previous turn.

        turns   [k] some turns, all those of their rows
        """
        if "observation" in self.extra:
            seen = self.extra["observation"]
            return list(seen) if turns is None else [seen[i] for i in turns.tolist()]
        return self.turns.some(turns).observation_texts(self.prompts(), self.responses, tokenizer)

    def actions(self, tokenizer: Any, turns: Tensor | None = None) -> list[str]:
        """[n] text of each turn's action; likewise."""
        return self.turns.some(turns).action_texts(self.responses, tokenizer)

    def action_keys(
        self, tokenizer: Any, settings: Settings, last: Tensor, calls: list[str] | None = None
    ) -> dict[str, Tensor]:
        """The columns `action_…` [n] of the turns, of which some end their rollouts; calls as in keys_of()."""
        tokens = self.turns.tokens(self.responses.cpu())
        return keys_of(*tokens, tokenizer, settings.action_key_mode, settings.n_action_tokens, calls, last)

    def of_turns(self, rows: Sequence[Tensor] | None) -> Tensor | None:
        """[n, …] of hidden states or labels by row; ValueError if they do not belong to these turns."""
        if rows is None:
            return None
        counts, wanted = [len(row) for row in rows], self.turns.counts.tolist()
        if counts != wanted:
            differ = [i for i, (a, b) in enumerate(zip(counts, wanted, strict=False)) if a != b]
            what = f"row {differ[0]} has {counts[differ[0]]} for {wanted[differ[0]]} turns" if differ else "no more"
            raise ValueError(
                f"hidden states must be one for each turn of {len(wanted)} rows, but {len(counts)} rows were given, "
                f"and {what}: they belong to another batch, or the response mask was changed after their forward."
            )
        return torch.cat(list(rows)).cpu()

    def records(self, states: States, tokenizer: Any, token_rewards: Tensor, update: int = 0) -> dict[str, Any]:
        """Columns [n] of the turns, as advantage() takes them, without states; the arguments as there."""
        if states.recorder is not None:
            states.recorder.expect(update, lambda of: (self.observations(tokenizer, of), self.actions(tokenizer, of)))
        config, records = states.settings.config(), dict[str, Any](self.ids())
        records["rewards"], records["episode_return"] = self.rewards(records, token_rewards, states)
        if config.needs_truncated:  # also where only rollouts of other processes say whether they were cut off
            cut = cut_off(self.extra.get("truncated", [None] * len(self.valid)))
            records["truncated"] = cut[self.turns.row] & self.turns.last
        if config.reads_keys:
            records |= self.action_keys(tokenizer, states.settings, _last(records))
        return records

    def advantage(
        self, states: States, tokenizer: Any, token_rewards: Tensor, why: str = "", update: int = 0
    ) -> tuple[AdvantageResult, dict[str, float]]:
        """The result over the n turns, and metrics; `why` there are no hidden states, where there are none.

        update   its number in the run, for what is recorded of it
        """
        records = self.records(states, tokenizer, token_rewards, update)
        hidden, labels = self.of_turns(self.hidden), self.of_turns(self.labels)
        return self.result(records, states, tokenizer, hidden=hidden, labels=labels, why=why)

    def result(
        self, records: Mapping[str, Any], states: States, tokenizer: Any, **more: Any
    ) -> tuple[AdvantageResult, dict[str, float]]:
        """States.advantage() of these records, with the texts of the turns where it needs them."""
        if "action_kind" in records:
            own = records["action_kind"]
            every = more.get("gather", dict)({"kind": own})["kind"]
            # A process with a call has no kind first_n of its own: these have none, and others have tools.
            if bool((own == KINDS.index("first_n")).any()) and bool((every == KINDS.index("tool_call")).any()):
                keys = self.action_keys(tokenizer, states.settings, _last(records), [""] * len(self.turns))
                records = {**records, **{name: column.to(records["group"].device) for name, column in keys.items()}}
        texts, actions = partial(self.observations, tokenizer), partial(self.actions, tokenizer)
        return states.advantage(records, texts, actions=actions, **more)


@dataclass(frozen=True)
class RowsOfProcess(RolloutRows):
    """Rows of this process, each a trajectory; a prompt group is `size` of them after one another.

    first   number of the first one among those of all processes
    """

    first: int = 0
    size: int = 1

    def ids(self) -> dict[str, Tensor]:
        place, valid = self.first + self.turns.row, self.valid[self.turns.row]
        return {"group": place // self.size, "trajectory": place, "step": self.turns.step, "valid": valid}


def _last(ids: Mapping[str, Tensor]) -> Tensor:
    """[n] bool: the last turn of its rollout, and copies of it."""
    trajectory, step = ids["trajectory"], ids["step"]
    n = int(trajectory.max()) + 1 if len(trajectory) else 0
    last: Tensor = step == torch.full((n,), -1).scatter_reduce_(0, trajectory, step, "amax")[trajectory]
    return last
