"""ValueMemory: states and returns of earlier batches, for Config.gae(share="memory")."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.contract import FINGERPRINT_DTYPES

Tensor = torch.Tensor


@dataclass(frozen=True)
class Readings:
    """Records from which values are estimated, in processing order, group by group.

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
        """At most the last `rows` records, copied."""
        begin = max(sum(self.groups) - rows, 0)
        if not begin:
            return self
        kept, left = [], sum(self.groups) - begin
        for size in reversed(self.groups):
            if left > 0:
                kept.append(min(size, left))
            left -= size
        return Readings(
            self.fingerprint[begin:].clone(), self.returns[begin:].clone(), self.time[begin:].clone(),
            self.usable[begin:].clone(), tuple(reversed(kept)),
        )  # fmt: skip

    def then(self, later: Readings) -> Readings:
        """These records followed by the later ones, on the device of the later ones; fingerprints in a dtype that holds both."""
        device = later.returns.device

        def both(a: Tensor, b: Tensor) -> Tensor:
            dtype = torch.promote_types(a.dtype, b.dtype)
            return torch.cat([a.to(device, dtype), b.to(dtype)])

        return Readings(
            both(self.fingerprint, later.fingerprint), both(self.returns, later.returns), both(self.time, later.time),
            both(self.usable, later.usable), self.groups + later.groups,
        )  # fmt: skip


class ValueMemory:
    """States and returns of earlier batches, from which `advantage(memory=…)` also estimates values.

    max_rows    int ≥ 1   records kept; the oldest are dropped first.  A record takes the D numbers of its fingerprint
                and 17 bytes

    A call of `advantage()` with share="memory" reads the memory, then adds its own records: so pass the batches in the
    order of training, each once.  Each earlier prompt group counts as a separate group.  As the policy changes, old
    records lose their use: one or two batches are enough (docs/gae.md).
    """

    def __init__(self, max_rows: Any) -> None:
        if isinstance(max_rows, bool) or not isinstance(max_rows, numbers.Integral) or max_rows < 1:
            raise ValueError(f"max_rows must be an int of at least 1, got {max_rows!r}.")
        self.max_rows: int = int(max_rows)
        self._held: Readings | None = None

    def __len__(self) -> int:
        return 0 if self._held is None else sum(self._held.groups)

    def __repr__(self) -> str:
        return f"ValueMemory(max_rows={self.max_rows}) with {len(self)} records"

    def state_dict(self) -> dict[str, Any]:
        """The state for load_state_dict(): tensors on the CPU and plain numbers."""
        if self._held is None:
            return {}
        held = self._held
        tensors = {name: getattr(held, name).cpu().clone() for name in ("fingerprint", "returns", "time", "usable")}
        return {**tensors, "groups": list(held.groups)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the last max_rows records of another memory; ValueError if `state` is not from state_dict()."""
        if not state:
            self._held = None
            return
        wanted = {
            "fingerprint": (2, FINGERPRINT_DTYPES), "returns": (1, (torch.float32,)), "time": (1, (torch.int64,)),
            "usable": (1, (torch.bool,)),
        }  # fmt: skip
        groups = state.get("groups")
        if not isinstance(groups, (list, tuple)) or not all(type(n) is int and n >= 0 for n in groups):
            raise ValueError(f"state must come from ValueMemory.state_dict(): groups must be sizes, got {groups!r}.")
        for name, (ndim, dtypes) in wanted.items():
            x = state.get(name)
            if not isinstance(x, Tensor) or x.ndim != ndim or x.dtype not in dtypes or x.shape[0] != sum(groups):
                got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(
                    f"state must come from ValueMemory.state_dict(): {name} must be a tensor of {sum(groups)} records, got {got}."
                )
        fingerprint, returns, time, usable = (state[name].clone() for name in wanted)
        found = Readings(fingerprint, returns, time, usable, tuple(groups))
        self._held = found.last(self.max_rows)

    def before(self, now: Readings) -> Readings:
        """The records held, followed by the current ones."""
        held = self._held
        if held is None or not len(self):
            return now
        if held.fingerprint.shape[1] != now.fingerprint.shape[1]:
            raise ValueError(
                f"fingerprint must have D = {held.fingerprint.shape[1]} like the batches in memory, got "
                f"{now.fingerprint.shape[1]}: of another model, layer or embedder; begin with an empty ValueMemory (a trainer "
                "that resumes from a checkpoint loads a full one from bipace_memory.pt)."
            )
        return held.then(now)

    def keep(self, both: Readings) -> None:
        """Replaces the content by the last max_rows of these records."""
        self._held = both.last(self.max_rows)

    def state(self) -> Readings | None:
        """The content, for restore()."""
        return self._held

    def restore(self, held: Readings | None) -> None:
        """Back to an earlier state()."""
        self._held = held
