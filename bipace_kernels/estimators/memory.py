"""ValueMemory: states and returns of earlier batches, for Config.gae(share="memory")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..backends import threads
from ..backends.contract import FINGERPRINT_DTYPES
from ..backends.records import Records, out_of_range, runs
from ..inputs import checks


@dataclass(frozen=True)
class Readings:
    """Records from which values are estimated, in processing order, group by group.

    fingerprint   [K, D]
    returns       [K] float32
    time          [K] int64   step numbers
    usable        [K] bool
    groups        records of each prompt group
    trajectories  records of each trajectory
    """

    fingerprint: Tensor
    returns: Tensor
    time: Tensor
    usable: Tensor
    groups: tuple[int, ...]
    trajectories: tuple[int, ...]

    def __setstate__(self, state: dict[str, Any]) -> None:  # pickles of the first form lack trajectories
        self.__dict__.update({"trajectories": (1,) * sum(state["groups"]), **state})

    def last(self, rows: int) -> Readings:
        """At most the last `rows` records, copied."""
        begin = max(sum(self.groups) - rows, 0)
        if not begin:
            return self
        columns = (self.fingerprint, self.returns, self.time, self.usable)
        x, returns, time, usable = (column[begin:].clone() for column in columns)
        return Readings(x, returns, time, usable, _last(self.groups, rows), _last(self.trajectories, rows))

    def records(self) -> Records:
        """These records as the stages of the critic take them."""
        device, n = self.returns.device, sum(self.groups)
        groups, trajectories = (torch.tensor([0, *sizes]).cumsum(0) for sizes in (self.groups, self.trajectories))
        return Records(
            device=device, n_records=n, n_groups=len(self.groups), n_trajectories=len(self.trajectories),
            longest_group=max(self.groups, default=0), order=torch.arange(n, device=device), step=self.time,
            usable=self.usable, group_offsets=groups.to(device), trajectory_offsets=trajectories.to(device),
            _trajectory_of_record=runs(trajectories).to(device),
        )  # fmt: skip

    def then(self, later: Readings) -> Readings:
        """These records followed by the later ones, on their device; fingerprints in a dtype that holds both."""

        def both(a: Tensor, b: Tensor) -> Tensor:
            dtype = torch.promote_types(a.dtype, b.dtype)
            return torch.cat([a.to(b.device, dtype), b.to(dtype)])

        return Readings(
            both(self.fingerprint, later.fingerprint), both(self.returns, later.returns), both(self.time, later.time),
            both(self.usable, later.usable), self.groups + later.groups, self.trajectories + later.trajectories,
        )  # fmt: skip


def _last(sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Sizes of the parts that the last `rows` records are in."""
    kept, left = [], rows
    for size in reversed(sizes):
        if left > 0:
            kept.append(min(size, left))
        left -= size
    return tuple(reversed(kept))


def _refused(why: str) -> ValueError:
    return ValueError(f"state must come from ValueMemory.state_dict(): {why}.")


def _sizes(name: str, sizes: Any) -> tuple[int, ...]:
    """ValueError if it is not one of the sizes of ValueMemory.state_dict()."""
    if not isinstance(sizes, (list, tuple)) or not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
        raise _refused(f"{name} must be a list of sizes")
    return tuple(sizes)


class ValueMemory:
    """States and returns of earlier batches, from which `advantage(memory=…)` also estimates values.

    max_rows    int ≥ 1   records kept; the oldest are dropped first.  A record takes the D numbers of its fingerprint
                and 17 bytes

    A call of `advantage()` with share="memory" reads the memory, then adds its own records: so pass the batches in the
    order of training, each once.  Each earlier prompt group counts as a separate group.  As the policy changes, old
    records lose their use: one or two batches are enough (docs/gae.md).
    """

    def __init__(self, max_rows: Any) -> None:
        self.max_rows = checks.integer_at_least(max_rows, "max_rows", 1)
        self._held: Readings | None = None

    def __len__(self) -> int:
        return 0 if self._held is None else sum(self._held.groups)

    def __repr__(self) -> str:
        return f"ValueMemory(max_rows={self.max_rows}) with {len(self)} records"

    @threads.using()
    def state_dict(self) -> dict[str, Any]:
        """The state for load_state_dict(): tensors on the CPU and plain numbers."""
        if self._held is None:
            return {}
        held = self._held
        tensors = {name: getattr(held, name).cpu().clone() for name in ("fingerprint", "returns", "time", "usable")}
        return {**tensors, "groups": list(held.groups), "trajectories": list(held.trajectories)}

    @threads.using()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the last max_rows records of another memory; ValueError if `state` is not from state_dict().

        A state of an earlier version, without ends of trajectories, is loaded as trajectories of one record each.
        """
        if not isinstance(state, Mapping):
            raise _refused(f"it must be a dict, got {type(state).__name__}")
        if not state:
            self._held = None
            return
        wanted = {
            "fingerprint": (2, FINGERPRINT_DTYPES), "returns": (1, (torch.float32,)), "time": (1, (torch.int64,)),
            "usable": (1, (torch.bool,)),
        }  # fmt: skip
        groups = _sizes("groups", state.get("groups"))
        for name, (ndim, dtypes) in wanted.items():
            x: Any = state.get(name)
            dense = isinstance(x, Tensor) and x.layout == torch.strided and not (x.is_nested or x.is_meta)
            if not dense or x.ndim != ndim or x.dtype not in dtypes or x.shape[0] != sum(groups):
                got = type(x).__name__
                if isinstance(x, Tensor):
                    got = f"{x.dtype} {list(x.shape)}" if dense else f"{x.layout} on {x.device}"
                raise _refused(f"{name} must be a tensor of {sum(groups)} records, got {got}")
        trajectories = _sizes("trajectories", state.get("trajectories", (1,) * sum(groups)))
        ends = {0, *accumulate(trajectories)}
        if sum(trajectories) != sum(groups) or not ends.issuperset(accumulate(groups)):
            raise _refused(f"trajectories must divide the {sum(groups)} records of groups, each in one of them")
        fingerprint, returns, time, usable = (state[name].detach().clone() for name in wanted)
        rows = fingerprint[usable]
        fits = rows.isfinite().all(1) & (rows != 0).any(1) & ~out_of_range(returns[usable])  # others are not read
        if not bool(fits.all()) or bool(((time < 0) | (time >= 1 << 53)).any()):
            raise _refused("usable records must have finite, non-zero fingerprints and returns, and steps in [0, 2^53)")
        inside = runs(torch.tensor([0, *accumulate(trajectories)])).diff() == 0
        if bool((inside & (time.cpu().diff() < 0)).any()):
            raise _refused("time must not go back inside a trajectory")
        readings = Readings(fingerprint, returns, time, usable, groups, trajectories)
        self._held = readings.last(self.max_rows)

    def before(self, held: Readings | None, now: Readings) -> Readings:
        """The records of a state(), followed by the current ones."""
        if held is None or not sum(held.groups):
            return now
        if held.fingerprint.shape[1] != now.fingerprint.shape[1]:
            raise ValueError(
                f"fingerprint must have D = {held.fingerprint.shape[1]} like the batches in memory, got "
                f"{now.fingerprint.shape[1]}; begin with an empty ValueMemory (trainers load bipace_memory.pt)."
            )
        return held.then(now)

    def keep(self, held: Readings | None, now: Readings, both: Readings) -> None:
        """Adds the current records to the state() that they were read with, or that another thread made meanwhile.

        both   before(held, now)
        """
        kept = both.last(self.max_rows)
        while self._held is not held:
            held = self._held
            kept = self.before(held, now).last(self.max_rows)
        self._held = kept

    def state(self) -> Readings | None:
        """The content, for before(), keep() and restore()."""
        return self._held

    def restore(self, held: Readings | None) -> None:
        """Back to an earlier state()."""
        self._held = held
