"""layout(): sorts and numbers the ids of a batch once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends import dispatch, threads
from ..backends.records import Records, check_offsets, check_places, runs
from ..support.errors import InputError, Named, Rows
from ..support.handles import Handled
from . import checks, interop, transfer
from .ids import as_sequence, ids_to_int

_SIZES = ("n_rows", "n_records", "n_groups", "n_trajectories", "longest_group", "longest_trajectory")
_TENSORS = ("order", "group_offsets", "trajectory_offsets", "group_trajectories", "step", "first", "valid")


@dataclass(frozen=True, eq=False)
class Layout(Handled):
    """The records of a batch in processing order: by group, then trajectory, then step, then row.

    Made by `layout()`; depends only on the ids, so one layout serves many calls, for tensors on any
    device.  Its own tensors are on the CPU.

    n_rows               N, rows that the caller passes
    n_records            M ≤ N, rows that take part (valid=False rows do not)
    n_groups             G
    n_trajectories       T
    longest_group        most records in one group
    longest_trajectory   most records in one trajectory
    n_duplicates         records that repeat the (group, trajectory, step) of an earlier one
    order                [M] int64   row of each record
    group_offsets        [G+1] int64   records of group g are group_offsets[g] : group_offsets[g+1]
    trajectory_offsets   [T+1] int64   records of trajectory t; a group's trajectories are contiguous
    group_trajectories   [G+1] int64   trajectories of group g
    step                 [M] int64 or None   step number of each record; None: its place in the trajectory counts
    first                [M] int64 or None   the first record with the same ids; None without duplicates
    valid                [N] bool or None   the caller's mask
    """

    n_rows: int
    n_records: int
    n_groups: int
    n_trajectories: int
    longest_group: int
    longest_trajectory: int
    n_duplicates: int
    order: Tensor
    group_offsets: Tensor
    trajectory_offsets: Tensor
    group_trajectories: Tensor
    step: Tensor | None
    first: Tensor | None
    valid: Tensor | None
    _source: Tensor | None = field(default=None, repr=False)  # unless it is the inverse of order
    _kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # results of on() and once(), _writes()

    def __post_init__(self) -> None:
        self._register()
        self._kept["writes"] = self._writes()

    def _writes(self) -> dict[str, int]:
        """How often each tensor was written to through torch, as far as torch counts that."""
        writes = {}
        for name in _TENSORS:
            if (x := getattr(self, name)) is not None and not x.is_inference():
                writes[name] = x._version
        return writes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def __repr__(self) -> str:
        return (
            f"Layout(n_rows={self.n_rows}, n_records={self.n_records}, n_groups={self.n_groups}, "
            f"n_trajectories={self.n_trajectories}, longest_group={self.longest_group})"
        )

    def group_of_record(self) -> Tensor:
        """[M] int64 number of each record's group."""
        return runs(self.group_offsets)

    def trajectory_of_record(self) -> Tensor:
        """[M] int64 number of each record's trajectory."""
        return runs(self.trajectory_offsets)

    @threads.using()
    def time(self) -> Tensor:
        """[M] int64 step number of each record, or its place in the trajectory where no step was given."""
        return self.on("cpu").time

    @threads.using()
    def source(self) -> Tensor:
        """[N] int64 record whose results each row gets: its own, or that of the step it copies; −1 for padding."""
        if self._source is not None:
            return self._source
        source = torch.full((self.n_rows,), -1, dtype=torch.int64)
        source.index_copy_(0, self.order, torch.arange(self.n_records))
        return source

    def on(self, device: torch.device | str) -> Records:
        """Its records on a device.  The first call copies the tensors, without synchronizing; later ones do not."""
        device = torch.device(device)
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        made: tuple[Records, transfer.Copied | None] | None = self._kept.get(device)
        if made is None:
            dispatch.check_device(device)
            sizes = {name: getattr(self, name) for name in _SIZES}
            tensors = {name: getattr(self, name) for name in _TENSORS} | {"source": self.source()}
            started = None
            if device.type != "cpu":
                tensors["_trajectory_of_record"] = self.trajectory_of_record()
                present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
                moved = transfer.to_device_together(list(present.values()), device, "layout")
                tensors |= zip(present, moved, strict=True)
                started = transfer.Copied.to(device)
            made = self._kept[device] = Records(device=device, **sizes, **tensors), started
        records, copied = made
        if copied is not None:
            copied.wait(records.order)
        return records

    @threads.using()
    def once(self) -> Layout:
        """The layout in which copies of a step (rows with equal group, trajectory and step) count once.

        The first in row order is the record; the others get its results.
        """
        if self.first is None:
            return self
        if "once" not in self._kept:
            made = self.restrict(self.first == torch.arange(self.n_records))
            source = made.source()
            of_first = source.index_select(0, self.order.index_select(0, self.first))
            self._kept["once"] = replace(made, _source=source.index_copy(0, self.order, of_first))
        return self._kept["once"]  # type: ignore[no-any-return]

    @threads.using()
    def restrict(self, keep: Tensor) -> Layout:
        """The layout of some of its records (keep [M] bool): for rows set aside and for duplicates counted once."""
        kept = torch.nonzero(keep).flatten()
        source = None
        if self._source is not None and self.n_records:
            place = torch.full((self.n_records,), -1).index_copy_(0, kept, torch.arange(kept.shape[0]))
            source = place.index_select(0, self._source.clamp(min=0)).masked_fill_(self._source < 0, -1)
        columns = (self.order, self.group_of_record(), self.trajectory_of_record(), self.step)
        rows, g, t, s = (None if column is None else column.index_select(0, kept).numpy() for column in columns)
        return _from_sorted(self.n_rows, rows, g, t, s, self.valid, source)


@threads.using()
def layout(group: Any, trajectory: Any, step: Any = None, valid: Any = None) -> Layout:
    """Sorts and numbers the ids of a batch, and computes its sizes.

    group        [N] prompt-group id of each row: integers keep their numeric order, any other hashable ids are numbered
                 by first appearance; tensors on a GPU are copied to the host together, which synchronizes once
    trajectory   [N] trajectory id, likewise; one trajectory belongs to one group
    step         [N] int ≥ 0 or None   step number inside the trajectory; None: the row order is the time order
    valid        [N] bool or None   False rows (padding) are ignored

    Rows with equal (group, trajectory, step) are kept and counted in `n_duplicates`; `Config.duplicates` decides.
    ValueError for a trajectory in two groups (`trajectory_ids(group, rollout)` makes unique ids) and negative steps.
    Definition: docs/estimator.md, section 2.
    """
    device, *columns = interop.tensors(group=group, trajectory=trajectory, step=step, valid=valid)
    dispatch.check_device(device)
    group, trajectory, step, valid = columns if device.type == "cpu" else transfer.to_host(columns)
    n = checks.length(group, "group")
    checks.check_length(trajectory, "trajectory", n)
    step_number = None if step is None else checks.integer_vector(step, "step", n)
    mask = None if valid is None else checks.bool_vector(valid, "valid", n)
    taken = None if mask is None else torch.nonzero(mask).flatten()
    g, t = _ids(group, "group", n, taken).numpy(), _ids(trajectory, "trajectory", n, taken).numpy()
    if taken is not None and step_number is not None:
        step_number = step_number.index_select(0, taken)
    rows, s = (None if column is None else column.numpy() for column in (taken, step_number))
    if s is not None and s.size and int(s.min()) < 0:
        at = int(np.flatnonzero(s < 0)[0])
        row = at if rows is None else int(rows[at])
        raise ValueError(f"step must be at least 0, got step[{row}] = {int(s[at])}; count steps from 0 (or 1).")
    permutation = _processing_order(g, t, s)
    if permutation is not None:
        g, t, s = g[permutation], t[permutation], None if s is None else s[permutation]
        rows = permutation if rows is None else rows[permutation]
    else:
        rows = np.arange(n) if rows is None else rows
        s = None if s is None else s.copy()  # the caller may write to step later
    _check_one_group(g, t, rows)
    made = _from_sorted(n, rows, g, t, s, None if mask is None else mask.clone())
    if device.type != "cpu":
        made.on(device)  # results are needed there
    return made


def _ids(values: Any, name: str, n: int, taken: Tensor | None) -> Tensor:
    """[M] int64 ids of the rows that take part; padding may hold anything."""
    if isinstance(values, Tensor):
        checks.check_dense(values, name)
    if taken is None:
        return checks.check_vector(ids_to_int(values, name)[0], name, n)
    return ids_to_int(checks.take_rows(as_sequence(values, name), taken), name)[0]


def _processing_order(g: Any, t: Any, s: Any) -> Any:
    """The stable sorting permutation by (group, trajectory, step, row); None if the rows are already in order."""
    if g.size < 2:
        return None
    dg, dt = np.diff(g), np.diff(t)
    after = (dg > 0) | ((dg == 0) & (dt > 0))
    same = (dg == 0) & (dt == 0)
    # Differences of far-apart int64 ids overflow; then use a sort, which compares.
    if max(abs(int(g.min())), abs(int(g.max())), abs(int(t.min())), abs(int(t.max()))) < 2**62:
        if s is not None:
            same &= s[1:] >= s[:-1]
        if bool((after | same).all()):
            return None
    keys = (t, g) if s is None else (s, t, g)
    return np.lexsort(keys)


def _check_one_group(g: Any, t: Any, rows: Any) -> None:
    """Raises ValueError if a trajectory id is in two groups.  g, t: [M] sorted by (g, t)."""
    if g.size < 2:
        return
    starts = np.flatnonzero(np.concatenate(([True], (g[1:] != g[:-1]) | (t[1:] != t[:-1]))))
    ids = t[starts]
    by_id = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(ids[by_id][1:] == ids[by_id][:-1])
    if twice.size:
        two = rows[starts[by_id[twice[0] : twice[0] + 2]]].tolist()
        text = (
            "{} must belong to one group, but {} hold one trajectory id in two groups ({} such ids); make ids unique "
            "with bipace_kernels.trajectory_ids(group, rollout)."
        )
        raise InputError(text, Named("trajectory"), Rows(two), twice.size)


def _from_sorted(
    n_rows: int, rows: Any, g: Any, t: Any, s: Any, valid: Tensor | None, source: Tensor | None = None
) -> Layout:
    """A layout from rows and ids [M] in processing order; computes everything else."""
    m = rows.shape[0]
    new_group = g[1:] != g[:-1]
    new_trajectory = new_group | (t[1:] != t[:-1])
    group_offsets = _offsets(new_group, m)
    trajectory_offsets = _offsets(new_trajectory, m)
    group_trajectories = np.searchsorted(trajectory_offsets, group_offsets)
    first: Tensor | None = None
    n_duplicates = 0
    if s is not None and m > 1:
        repeats = np.concatenate(([False], ~new_trajectory & (s[1:] == s[:-1])))
        n_duplicates = int(repeats.sum())
        if n_duplicates:
            first = torch.from_numpy(np.maximum.accumulate(np.where(repeats, 0, np.arange(m))))
    return Layout(
        n_rows=n_rows,
        n_records=m,
        n_groups=group_offsets.size - 1,
        n_trajectories=trajectory_offsets.size - 1,
        longest_group=int(np.diff(group_offsets).max(initial=0)),
        longest_trajectory=int(np.diff(trajectory_offsets).max(initial=0)),
        n_duplicates=n_duplicates,
        order=torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64)),
        group_offsets=torch.from_numpy(group_offsets),
        trajectory_offsets=torch.from_numpy(trajectory_offsets),
        group_trajectories=torch.from_numpy(group_trajectories.astype(np.int64)),
        step=None if s is None else torch.from_numpy(np.ascontiguousarray(s)),
        first=first,
        valid=valid,
        _source=source,
    )


def _offsets(new: Any, m: int) -> Any:
    """[S+1] int64 offsets of runs, from the mask of where a new run starts (entries 1 … m−1)."""
    if m == 0:
        return np.zeros(1, dtype=np.int64)
    return np.concatenate(([0], np.flatnonzero(new) + 1, [m])).astype(np.int64)


def check_layout(layout: Any, **ids: Any) -> Layout:
    """The layout of a call, beside which its ids must be None."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must come from bipace_kernels.layout(), got {type(layout).__name__}.")
    for name, value in ids.items():
        if value is not None:
            raise ValueError(f"{name} must be None where a layout is given; the layout holds the ids.")
    if not torch.compiler.is_compiling():  # its fields can be changed; the op of a compiled graph checks them
        writes = layout._writes()
        for name in (name for name, n in layout._kept.setdefault("writes", writes).items() if n != writes[name]):
            raise ValueError(f"layout.{name} must not be written to: pass other ids to bipace_kernels.layout().")
        sizes = dict.fromkeys(("order", "step", "first"), layout.n_records)
        sizes |= dict.fromkeys(("group_offsets", "group_trajectories"), layout.n_groups + 1)
        for name, size in {**sizes, "trajectory_offsets": layout.n_trajectories + 1}.items():
            tensor = getattr(layout, name)
            if tensor is not None and not (tensor.shape == (size,) and tensor.dtype == torch.int64):
                raise ValueError(f"layout.{name} must be int64 [{size}], got {tensor.dtype} {list(tensor.shape)}.")
        for name in ("group_offsets", "trajectory_offsets"):
            check_offsets(f"layout.{name}", getattr(layout, name), "M", layout.n_records)
        check_offsets("layout.group_trajectories", layout.group_trajectories, "T", layout.n_trajectories)
        check_places("layout.order", layout.order, "N", layout.n_rows, 0)
    return layout


@threads.using()
def trajectory_ids(group: Any, rollout: Any) -> Tensor:
    """[N] int64 trajectory ids, unique in the batch, of (group, rollout) pairs.

    group     [N] prompt-group id
    rollout   [N] id of the rollout, unique inside its group only
    Integer ids are numbered in their numeric order by (group, rollout), any others by first appearance.  Ids on a GPU
    are sorted on the host, which synchronizes once; the result is on the GPU.
    """
    device, *columns = interop.tensors(group=group, rollout=rollout)
    dispatch.check_device(device)
    group, rollout = transfer.to_host(columns)
    n = checks.length(group, "group")
    checks.check_length(rollout, "rollout", n)
    pairs = torch.stack([ids_to_int(group, "group")[0], ids_to_int(rollout, "rollout")[0]], dim=1).numpy()
    _, number = np.unique(pairs, axis=0, return_inverse=True)
    return transfer.to_device(torch.from_numpy(number.reshape(-1).astype(np.int64)), device, "group")
