"""Per-turn data of rollouts: fields returned by rollout_func, and lists that environments append to."""

import copy
import warnings
from collections import Counter
from collections.abc import Container, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Number
from types import NoneType
from typing import Any

import numpy as np
import torch

from ...support.warnings import warn_once
from .._turns import Turns, are_numbers, call_text

LOGS = ("step_rewards", "actions", "observations")
MESSAGE = ("role", "tool_calls")  # what is read of one
Entries = list[Any]


@dataclass
class _Seen:
    """What a trainer's batches have shown of an attribute of a class of environments.

    least   fewest entries after a reset()
    is_log  whether it is read, once a batch with entries has decided it; observations are also when a call adds to them
    """

    least: int
    is_log: bool | None = None


@dataclass
class ToolLoop:
    """One batch of TRL's own tool loop, as observed by its trainer.

    logged       [generations + 1] of [B] {name: entries in its list}, before each turn is generated, and after the last
    completions  [B] lists of messages, of which roles and tool calls are kept, or texts, as in _calculate_rewards()
    before       {id: (environment, {name: (its list, the entries in it)})} before the rollouts
    stale        [B] {name: entries at the start of the list that are of earlier rollouts}, which `logged` leaves out
    cut          [B] whether `truncated` was True before the first turn: of an earlier rollout
    fields       names that a rollout_func returned: other columns of that name are the data set's; None: unknown
    seen         of each class, by the attribute's name; the trainer keeps it: another may configure a class otherwise
    resets       {id: (environment, its observations after the last reset(), how many of them are stale)}; likewise
    """

    logged: list[list[dict[str, Entries]]] = field(default_factory=list)
    completions: Sequence[Any] = ()
    before: dict[int, tuple[Any, dict[str, tuple[Any, Entries]]]] = field(default_factory=dict)
    stale: list[dict[str, int]] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)
    fields: Container[str] | None = None
    seen: dict[type, dict[str, _Seen]] = field(default_factory=dict)
    resets: dict[int, tuple[Any, int, int]] = field(default_factory=dict)

    def begin_rollouts(self, trainer: Any) -> None:
        """To be called before TRL resets the trainer's environments, which it uses for one rollout after another."""
        self.seen, self.resets = vars(trainer).setdefault("_bipace_seen", (self.seen, self.resets))
        pools = getattr(trainer, "_environment_pool", {}).values()
        for environments in (getattr(trainer, "environments", None) or (), *pools):
            for e in environments:
                self.before[id(e)] = e, {name: (log := _log(e, name), list(log or ())) for name in LOGS}
        for gone in self.resets.keys() - self.before.keys():
            del self.resets[gone]

    def begin_turn(self, environments: Sequence[Any] | None) -> None:
        """To be called before each _generate_single_turn(), and after the last, when the last calls have been made."""
        environments = environments or ()
        if not self.logged:
            self.stale = [{name: self._stale(e, name) for name in LOGS} for e in environments]
            for e, stale in zip(environments, self.stale, strict=True):
                self.resets[id(e)] = e, len(_log(e, "observations") or ()), stale["observations"]
            self.cut = [_truncated(e) is True for e in environments]
        self.logged.append([])
        for environment, stale in zip(environments, self.stale, strict=True):
            logs = {name: (_log(environment, name) or [])[stale[name] :] for name in LOGS}
            seen = logs["observations"]
            if seen and isinstance(seen[-1], (np.ndarray, torch.Tensor)):
                seen[-1] = copy.deepcopy(seen[-1])  # the environment may go on to write into it
            self.logged[-1].append(logs)

    def end_rollouts(self, completions: Sequence[Any]) -> None:
        """To be called before reward functions run, which may change the messages that they are given."""
        said = [c if isinstance(c, str) else [{k: m.get(k) for k in MESSAGE} for m in c] for c in completions]
        self.completions = copy.deepcopy(said)

    def _stale(self, environment: Any, name: str) -> int:
        """Entries that reset() has left in the list."""
        log = _log(environment, name) or []
        seen = self.seen.setdefault(type(environment), {}).setdefault(name, _Seen(len(log)))
        seen.least = min(seen.least, len(log))
        old, before = self._before(environment, name)
        if not _begins_with(log, before):
            return 0
        if name == "observations" and len(log) == len(before):  # of this reset(), or all left
            _, last, stale = self.resets.get(id(environment), (None, seen.least, 0))
            if old is not log is _log(environment, name):  # another list; a property may make one at each look
                return 0
            if last == len(log):  # none since the last reset(): this one has done as that one, or always logs so many
                return stale
        return len(before)

    def _before(self, environment: Any, name: str) -> tuple[Any, Entries]:
        return self.before.get(id(environment), (None, {}))[1].get(name, (None, []))

    def calls(self, row: int) -> list[list[Any]]:
        """[turns of the model] tool calls of each."""
        messages = self.completions[row]
        if isinstance(messages, str):
            return [[]]
        return [message.get("tool_calls") or [] for message in messages if message["role"] == "assistant"]

    def entries(self, row: int, name: str, environment: Any) -> list[Entries]:
        """The entries that each turn's calls appended; for observations, the last one before the turn."""
        own = [generation[row][name] for generation in self.logged]
        turns, stale, log = len(self.calls(row)), self.stale[row][name], _log(environment, name) or []
        now, kept = log[stale:], _begins_with(log, self._before(environment, name)[1][:stale])
        fits = [len(a) <= len(b) if name == "observations" else _begins_with(b, a) for a, b in pairwise(own)]
        if not all(fits) or not kept or len(now) < len(own[-1]):
            raise ValueError("entries were removed or changed while the tool loop ran, which may only append")
        if any(len(later) > len(own[turns]) for later in own[turns + 1 :]):
            raise ValueError("entries were added after its last turn: is the list one of several environments?")
        if name == "observations":
            return [a[-1:] for a in own[:turns]]
        begin = [len(a) for a in own[:turns]]
        return [now[i:j] for i, j in pairwise([*begin, len(now)])]


class Reported:
    """The data of a batch's rollouts, by name and turn.

    elsewhere  names that rollouts of other processes give, which those here then lack
    misfits    {row: why its entries do not match its turns}, filled by by_turn()
    must_fit   whether rows of a rollout_func of which none fits are an error; elsewhere some may fit
    """

    def __init__(self, trainer: Any, inputs: Sequence[dict[str, Any]], turns: Turns, loop: ToolLoop | None) -> None:
        self.inputs, self.turns, self.loop, self.caller = inputs, turns, loop, type(trainer).__name__
        self.elsewhere: Container[str] = ()
        self.of_function = getattr(trainer, "rollout_func", None) is not None
        self.has_tools = bool(getattr(trainer, "tools", None))
        self.environments = list(getattr(trainer, "environments", None) or ())[: len(inputs)]
        self.used = Counter(map(id, self.environments))
        self.masked = turns.empty  # rows without a token to train
        self.misfits: dict[int, str] = {}
        self.must_fit = self.of_function

    def names(self) -> list[str]:
        """Those that any rollout gives here."""
        return [name for name in LOGS if any(value is not None for value in self._given(name))]

    def truncated(self) -> list[Any]:
        """[B] whether each rollout was cut off; None if unknown."""
        if self.of_function:
            return self._given("truncated")
        values, cut = [_truncated(e) for e in self.environments], self.loop.cut if self.loop is not None else ()
        for row, value in enumerate(values):
            if not isinstance(value, (bool, NoneType)):
                self.misfits[row] = f"truncated of row {row} must be one bool, True if it was cut off, got {value!r}"
            elif row < len(cut) and cut[row]:
                self.misfits[row] = f"truncated of row {row} was True before its first turn: reset() must set it False"
            elif value and self.used[id(self.environments[row])] > 1:
                self.misfits[row] = f"truncated of row {row} is that of several rollouts, which have one environment"
        return [None if row in self.misfits else value for row, value in enumerate(values)] or [None] * len(self.inputs)

    def by_turn(self, name: str) -> list[list[Entries] | None] | None:
        """[B] rows, each with a list of entries for each turn; None for a row without entries, and if no row has any.

        A list is empty if nothing was logged, and longer than one if several calls of the turn logged something.
        A row without a token to train also has its turns.
        """
        counts, logs = self.turns.counts.tolist(), self._given(name)
        if all(value is None for value in logs):
            if name not in self.elsewhere:
                return None
            self.must_fit = False
        if not self.of_function:
            own = [getattr(e, name, None) for e in self.environments]  # deques are no lists in `logs`
            shared = self.used + Counter(id(one) for one in own if isinstance(one, MutableSequence) and one)
            why = "is that of several rollouts: make it in reset(), and an environment in each environment_factory()"
            for row, log in enumerate(logs):
                if log and max(shared[id(own[row])], shared[id(self.environments[row])]) > 1:
                    self.misfits[row] = f"{name} of row {row} {why}"
            return [self._logged(row, name, log, n) for row, (log, n) in enumerate(zip(logs, counts, strict=True))]
        mask, numbers = "the env_mask of rollout_func", name == "step_rewards"
        rows, misfits = self.turns.entries(logs, name, mask, numbers=numbers)
        for row in self.masked:
            if logs[row] is None:
                misfits[row] = f"{name} of row {row} is missing"
        self.misfits = misfits | self.misfits
        return [None if row in misfits else [[one] for one in entries] or [[]] for row, entries in enumerate(rows)]

    def calls(self) -> list[str] | None:
        """[n] the tool calls of each turn as one text, empty where it made none; None where there are no tools."""
        if self.loop is None or not self.has_tools:
            return None
        every: list[str] = []
        for row, n in enumerate(self.turns.counts.tolist()):
            functions = [[call.get("function", call) for call in calls] for calls in self.loop.calls(row)]
            texts = [call_text([(f.get("name"), f.get("arguments")) for f in calls]) for calls in functions]
            every += [*texts, *([""] * n)][:n]
        return every

    def _given(self, name: str) -> list[Any]:
        return fields(self.inputs, name, self.loop) if self.of_function else self._logs(name)

    def _logged(self, row: int, name: str, log: Entries | None, n: int) -> list[Entries] | None:
        """For an environment: only TRL's tool loop shows which turn made an entry."""
        if log is None:
            return None
        if self.loop is None:
            raise ValueError(
                f"loop must be given to bipace_advantages() if environments log {name}, got None: call its begin_turn()"
                " before each _generate_single_turn() and after the last, and end_rollouts() in _calculate_rewards()."
            )
        written = len(self.loop.calls(row))
        try:
            if row not in self.masked and written != n:
                raise ValueError(f"TRL's tool loop has {written} messages of the model")
            if name != "observations" and (first := len(self.loop.logged[0][row][name])):
                raise ValueError(f"it has {first} before its first turn: empty it in reset()")
            entries = self.loop.entries(row, name, self.environments[row])
            if name == "step_rewards" and not all(map(are_numbers, entries)):
                raise ValueError(f"they must be numbers, but are {log!r}")
            return entries
        except ValueError as error:
            self.misfits.setdefault(row, f"{name} of row {row} does not match its {n} turns: {error}")
            return None

    def _logs(self, name: str) -> list[Entries | None]:
        """[B] lists of that name; None if missing or not a log, i.e. with entries before the first turn."""
        logs, loop = [_log(e, name) for e in self.environments], self.loop
        if loop is None or not loop.logged:
            if loop is not None and any(logs):
                why = f"{self.caller} generated without begin_turn(), so what environments log is not used"
                warn_once(why, f"{why}: call it in _generate_single_turn(), or this in a _generate() of your own.")
            return logs if loop is None and logs else [None] * len(self.inputs)
        # A log that the environment has taken away by now has lost its entries.
        logs = [[] if log is None and any(turn[i][name] for turn in loop.logged) else log for i, log in enumerate(logs)]
        types = [type(e) for e in self.environments]
        for cls in dict.fromkeys(types):
            rows = [row for row, own in enumerate(types) if own is cls]
            seen, stale = loop.seen[cls][name], [loop.stale[row][name] for row in rows]
            first = [len(loop.logged[0][row][name]) for row in rows]
            grew = any(len(logs[row] or ()) > n + old for row, n, old in zip(rows, first, stale, strict=True))
            fixed = any(stale) and seen.least > 0 and not grew  # there from the first, and never added to
            undecided = seen.is_log is None
            if name == "observations" and not seen.is_log:  # reset() logs the first one
                seen.is_log = True if grew else False if fixed or min(first) > 1 else None
            elif seen.is_log is None and (any(first) or fixed or grew):
                seen.is_log = not any(first) and not fixed
            if seen.is_log is False:
                text = f"{cls.__name__}.{name} has entries before the first turn, so it is treated as the environment's"
                text += " own attribute and not read. A log must be empty after reset(), or hold the first observation."
                if undecided:  # also where an earlier trainer had the same warning
                    warnings.warn(text, RuntimeWarning, stacklevel=2)
                logs = [None if row in rows else log for row, log in enumerate(logs)]
        return logs or [None] * len(self.inputs)


def fields(inputs: Sequence[dict[str, Any]], name: str, loop: ToolLoop | None) -> list[Any]:
    """[B] what a rollout_func returned under that name, None where nothing, and where a data set has such a column."""
    known = loop is None or loop.fields is None or name in loop.fields
    return [row.get(name) if known else None for row in inputs]


def _log(environment: Any, name: str) -> Entries | None:
    """Its entries.  A method, a text, a space, a matrix or a number of that name is not per-turn data."""
    value = getattr(environment, name, None)
    if isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim == 1:
        return value.tolist()
    if isinstance(value, list):
        return value
    return list(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None


def _begins_with(log: Entries, entries: Entries) -> bool:
    """Whether these entries are the log's first ones: the same objects, or equal numbers or texts."""
    if len(log) < len(entries):
        return False
    pairs = zip(log, entries, strict=False)
    return all(a is b or (isinstance(a, (str, Number)) and (a == b or (a != a and b != b))) for a, b in pairs)


def _truncated(environment: Any) -> Any:
    """Its attribute of that name, as a bool where it is one; None for a method."""
    value = getattr(environment, "truncated", None)
    own = bool(value) if isinstance(value, np.bool_) else value
    return None if callable(value) else own
