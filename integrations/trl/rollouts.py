"""Per-turn data of rollouts: fields returned by rollout_func, and lists that environments append to."""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

from ...support.warnings import warn_once
from .._turns import Turns, are_numbers

LOGS = ("step_rewards", "actions", "observations")
Entries = list[Any]
# Of each class of environments and log: the fewest entries after a reset(), and whether any call has added to it.
_SEEN: WeakKeyDictionary[type, dict[str, tuple[int, bool]]] = WeakKeyDictionary()


@dataclass
class ToolLoop:
    """One batch of TRL's own tool loop, as observed by its trainer.

    lengths      [generations] of [B] {name: entries in the environment's list}, before each generation of a turn
    completions  [B] lists of messages, or texts, as in _calculate_rewards()
    before       {id: (environment, {name: entries in its list})} before the rollouts
    stale        [B] {name: entries at the start of the list that are of earlier rollouts}
    cut          [B] whether `truncated` was True before the first turn: of an earlier rollout
    """

    lengths: list[list[dict[str, int]]] = field(default_factory=list)
    completions: Sequence[Any] = ()
    before: dict[int, tuple[Any, dict[str, tuple[Any, ...]]]] = field(default_factory=dict)
    stale: list[dict[str, int]] = field(default_factory=list)
    cut: list[bool] = field(default_factory=list)

    def begin_rollouts(self, trainer: Any) -> None:
        """To be called before TRL resets the trainer's environments, which it uses for one rollout after another."""
        pools = getattr(trainer, "_environment_pool", {}).values()
        for environments in (getattr(trainer, "environments", None) or (), *pools):
            for e in environments:
                self.before[id(e)] = e, {name: tuple(_log(e, name) or ()) for name in LOGS}

    def begin_turn(self, environments: Sequence[Any] | None) -> None:
        """To be called before each _generate_single_turn()."""
        if not self.lengths:
            self.stale = [{name: self._stale(e, name) for name in LOGS} for e in environments or ()]
            self.cut = [getattr(e, "truncated", None) is True for e in environments or ()]
        self.lengths.append([{name: len(_log(e, name) or ()) for name in LOGS} for e in environments or ()])

    def _stale(self, environment: Any, name: str) -> int:
        """Entries that reset() has left in the list."""
        log = _log(environment, name) or ()
        seen = _SEEN.setdefault(type(environment), {})
        least, grew = seen.get(name, (len(log), False))
        least = min(least, len(log))
        seen[name] = least, grew
        before = self.before.get(id(environment), (None, {}))[1].get(name, ())
        if len(log) < len(before) or not all(map(is_, log, before)):
            return 0
        # One observation before and after: a new one, where reset() always logs one.
        return 0 if name == "observations" and len(before) == len(log) == least == 1 else len(before)

    def calls(self, row: int) -> list[list[Any]]:
        """[turns of the model] tool calls of each."""
        messages = self.completions[row]
        if isinstance(messages, str):
            return [[]]
        return [message.get("tool_calls") or [] for message in messages if message["role"] == "assistant"]

    def entries(self, row: int, name: str, log: Sequence[Any]) -> list[Entries]:
        """The entries that each turn's calls appended; for observations, the last one before the turn."""
        begin = [generation[row][name] for generation in self.lengths[: len(self.calls(row))]]
        if any(i > j for i, j in zip(begin, [*begin[1:], len(log)], strict=True)):
            raise ValueError("entries were removed from it while the tool loop ran")
        if name == "observations":
            stale = self.stale[row][name]
            return [list(log[max(stale, i - 1) : i]) for i in begin]
        return [list(log[i:j]) for i, j in zip(begin, [*begin[1:], len(log)], strict=True)]


class Said:
    """The data of a batch's rollouts, by name and turn.

    elsewhere  names that rollouts of other processes give, which those here then lack
    misfits    {row: why its entries do not match its turns}, filled by by_turn()
    must_fit   whether rows of a rollout_func of which none fits are an error; elsewhere some may fit
    """

    def __init__(self, trainer: Any, inputs: Sequence[dict[str, Any]], turns: Turns, loop: ToolLoop | None) -> None:
        self.inputs, self.turns, self.loop = inputs, turns, loop
        self.elsewhere: Container[str] = ()
        self.of_function = getattr(trainer, "rollout_func", None) is not None
        self.environments = list(getattr(trainer, "environments", None) or ())[: len(inputs)]
        self.masked = turns.empty  # rows without a token to train
        self.misfits: dict[int, str] = {}
        self.must_fit = self.of_function

    def names(self) -> list[str]:
        """Those that any rollout gives here."""
        return [name for name in LOGS if any(value is not None for value in self._given(name))]

    def truncated(self) -> list[Any]:
        """[B] whether each rollout was cut off; None if unknown."""
        if self.of_function:
            return [row.get("truncated") for row in self.inputs]
        for row, cut in enumerate(self.loop.cut if self.loop is not None else ()):
            if cut:
                self.misfits[row] = f"truncated of row {row} was True before its first turn: reset() must set it False"
        found = [getattr(e, "truncated", None) for e in self.environments] or [None] * len(self.inputs)
        return [value if isinstance(value, bool) else None for value in found]  # a method of that name is ignored

    def by_turn(self, name: str) -> list[list[Entries] | None] | None:
        """[B] rows, each with a list of entries for each turn; None for a row without entries, and if no row has any.

        A list is empty if nothing was logged, and longer than one if several calls of the turn logged something.
        A row without a token to train also has its turns.
        """
        counts = self.turns.counts.tolist()
        given = self._given(name)
        if all(value is None for value in given):
            if name not in self.elsewhere:
                return None
            self.must_fit = False
        if not self.of_function:
            shared = Counter(id(log) for log in given if log)
            for row, log in enumerate(given):
                if shared[id(log)] > 1:
                    self.misfits[row] = f"{name} of row {row} is one list of several environments: make it in reset()"
            return [self._logged(row, name, log, n) for row, (log, n) in enumerate(zip(given, counts, strict=True))]
        mask, numbers = "the env_mask of rollout_func", name == "step_rewards"
        found, misfits = self.turns.entries(given, name, mask, numbers=numbers)
        for row in self.masked:
            if given[row] is None:
                misfits[row] = f"{name} of row {row} is missing"
        self.misfits = misfits | self.misfits
        return [None if row in misfits else [[one] for one in entries] for row, entries in enumerate(found)]

    def flat(self, rows: list[list[Entries] | None] | None) -> list[Entries | None]:
        """[n] entries of each turn from by_turn(); None in a row without entries."""
        found: list[Entries | None] = []
        for row, n in zip(rows or [None] * self.turns.shape[0], self.turns.counts.tolist(), strict=True):
            found += [None] * n if row is None else [*row, *([[]] * n)][:n]
        return found

    def _given(self, name: str) -> list[Any]:
        return [row.get(name) for row in self.inputs] if self.of_function else self._logs(name)

    def _logged(self, row: int, name: str, log: Sequence[Any] | None, n: int) -> list[Entries] | None:
        """For an environment: only TRL's tool loop shows which turn made an entry."""
        if log is None:
            return None
        if self.loop is None:
            raise ValueError(
                f"loop must be given to bipace_advantages() if environments log {name}, got None: call its begin_turn()"
                " before each _generate_single_turn(), and keep the completions of _calculate_rewards() there."
            )
        written = len(self.loop.calls(row))
        try:
            if row not in self.masked and written != n:
                raise ValueError(f"TRL's tool loop has {written} messages of the model")
            found = self.loop.entries(row, name, log)
            if name == "step_rewards" and not all(map(are_numbers, found)):
                raise ValueError(f"they must be numbers, but are {list(log)!r}")
            return found
        except ValueError as error:
            self.misfits.setdefault(row, f"{name} of row {row} does not match its {n} turns: {error}")
            return None

    def _logs(self, name: str) -> list[Sequence[Any] | None]:
        """[B] lists of that name; None if missing or not a log, i.e. with entries before the first turn."""
        begun = self.loop.lengths[0] if self.loop is not None and self.loop.lengths else ()
        of_kind: dict[str, list[bool]] = {}
        rows = list(zip(self.environments, begun, self.loop.stale if begun and self.loop else (), strict=False))
        added = [len(_log(e, name) or ()) > lengths[name] for e, lengths, _ in rows]
        for (e, _, _), grew in zip(rows, added, strict=True):
            least, before = _SEEN[type(e)][name]
            _SEEN[type(e)][name] = least, before or grew
        for (environment, lengths, stale), grew in zip(rows, added, strict=True):
            first = lengths[name] - stale[name]
            # reset() logs the first observation; several that no call adds to are no log.
            filled = first > 1 and not grew if name == "observations" else first > 0
            is_log = _SEEN[type(environment)][name]
            filled |= stale[name] > 0 and is_log[0] > 0 and not is_log[1]  # there from the first, and never added to
            of_kind.setdefault(type(environment).__name__, []).append(filled)
        decides = all if name == "observations" else any
        own = {kind for kind, filled in of_kind.items() if decides(filled)}
        for kind in own:
            warn_once(
                f"{kind}.{name}",
                f"{kind}.{name} has entries before the first turn, so it is treated as the environment's own "
                "attribute and not read. A log must be empty after reset(), or hold the first observation.",
            )
        found = [None if type(e).__name__ in own else _log(e, name) for e in self.environments]
        return found or [None] * len(self.inputs)


def _log(environment: Any, name: str) -> Sequence[Any] | None:
    """A method, a space or a number of that name is not per-turn data."""
    value = getattr(environment, name, None)
    return value if isinstance(value, (list, tuple)) else None
