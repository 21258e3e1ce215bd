"""ValueMemory: states and returns of the batches before, for Config.gae(share="memory")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Readings:
    """What a value is read from: records in processing order, group by group.

    fingerprint   [K, D]
    returns       [K] float32
    time          [K] int64   step numbers
    usable        [K] bool
    groups        records of each prompt group
    """

    fingerprint: Tensor
    returns: Tensor
    time: Tensor
    usable: Tensor
    groups: tuple[int, ...]

    def last(self, rows: int) -> Readings:
        """The last `rows` records at most."""
        begin = max(sum(self.groups) - rows, 0)
        kept, left = [], sum(self.groups) - begin
        for size in reversed(self.groups):
            if left > 0:
                kept.append(min(size, left))
            left -= size
        return Readings(
            self.fingerprint[begin:],
            self.returns[begin:],
            self.time[begin:],
            self.usable[begin:],
            tuple(reversed(kept)),
        )

    def then(self, later: Readings) -> Readings:
        """These records, on the device of the later ones, and those behind them."""

        def both(a: Tensor, b: Tensor) -> Tensor:
            return torch.cat([a.to(b), b])

        return Readings(
            both(self.fingerprint, later.fingerprint), both(self.returns, later.returns), both(self.time, later.time),
            both(self.usable, later.usable), self.groups + later.groups,
        )  # fmt: skip


class ValueMemory:
    """States and returns of the batches before, from which `advantage(memory=…)` reads values too.

    max_rows    int ≥ 1   records kept; the oldest go first.  A record takes D numbers of its fingerprint and 17 bytes

    A call of `advantage()` with share="memory" reads what is there, then adds its own records: so pass the batches in the
    order of training, each once.  Each earlier prompt group counts as a group of its own.  The policy moves on meanwhile:
    one or two batches are enough (docs/gae.md).
    """

    def __init__(self, max_rows: int) -> None:
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ValueError(f"max_rows must be an int of at least 1, got {max_rows!r}.")
        self.max_rows = max_rows
        self._held: Readings | None = None

    def __len__(self) -> int:
        return 0 if self._held is None else sum(self._held.groups)

    def __repr__(self) -> str:
        return f"ValueMemory(max_rows={self.max_rows}) with {len(self)} records"

    def state_dict(self) -> dict[str, Any]:
        """What load_state_dict() takes: tensors on the CPU and plain numbers."""
        if self._held is None:
            return {}
        held = self._held
        tensors = {name: getattr(held, name).cpu().clone() for name in ("fingerprint", "returns", "time", "usable")}
        return {**tensors, "groups": list(held.groups)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the records of another memory, the last max_rows of them; ValueError where `state` is none."""
        if not state:
            self._held = None
            return
        try:
            groups = tuple(int(n) for n in state["groups"])
            found = Readings(state["fingerprint"], state["returns"], state["time"], state["usable"], groups)
            fits = all(x.shape[0] == sum(groups) for x in (found.fingerprint, found.returns, found.time, found.usable))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"state must come from ValueMemory.state_dict(): {error}.") from error
        if not fits:
            raise ValueError("state must come from ValueMemory.state_dict(), got tensors of different lengths.")
        self._held = found.last(self.max_rows)

    def join(self, now: Readings) -> Readings:
        """The records held, and behind them those of now, which are held from now on."""
        if self._held is not None and self._held.fingerprint.shape[1] != now.fingerprint.shape[1]:
            raise ValueError(
                f"fingerprint must have D = {self._held.fingerprint.shape[1]} as the batches in memory, got "
                f"{now.fingerprint.shape[1]}: of another model, layer or embedder; begin with an empty ValueMemory (a checkpoint "
                "that a trainer resumes from may hold a full one, in bipace_memory.pt)."
            )
        both = now if self._held is None else self._held.then(now)
        self._held = both.last(self.max_rows)
        return both
