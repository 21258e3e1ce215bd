"""advantage() and cluster() over the ranks of torch.distributed; docs/distributed.md shows what goes where, and why."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..backends import dispatch, threads
from ..backends.contract import FINGERPRINT_DTYPES
from ..config import Config
from ..diagnostics.records import Records, Unread
from ..estimators.memory import ValueMemory
from ..estimators.table import StepRecords
from ..inputs import checks, interop
from ..inputs.canonical import canonical
from ..inputs.columns import check_columns, check_config, check_memory
from ..inputs.ids import as_sequence, elements, ids_to_int, is_integer, number_objects
from ..inputs.observations import check_text
from ..inputs.transfer import to_device, to_host
from ..inputs.values import check_fingerprint
from ..pipeline import run
from ..result import AdvantageResult
from ..support.errors import InputError
from .ranks import Ranks

Ints = npt.NDArray[np.int64]
Values = dict[str, Any]

_REAL = ("rewards", "returns", "episode_return")
_BOOL = ("action_parsed", "valid", "truncated")
# Of the mean load: moving a record costs about as much as clustering it, so finer balance is not worth it.
_SLACK = 1.25
_DTYPES = {str(dtype): dtype for dtype in FINGERPRINT_DTYPES}
_FAILED = 255  # instead of a record's state, where its owner could not cluster
_UTF8 = "utf-8", "surrogatepass"  # for any str
_ARGUMENTS = ("group", "trajectory", "step", "observation", "action_key", "fingerprint", *_REAL, *_BOOL)


@threads.using()
def advantage(
    group: Any = None,
    trajectory: Any = None,
    rewards: Any = None,
    *,
    process_group: Any = None,
    step: Any = None,
    returns: Any = None,
    episode_return: Any = None,
    fingerprint: Any = None,
    observation: Any = None,
    action_key: Any = None,
    action_parsed: Any = None,
    valid: Any = None,
    truncated: Any = None,
    memory: ValueMemory | None = None,
    config: Config | str | None = None,
    backend: str = "auto",
    check: str = "auto",
    num_threads: int | None = None,
) -> AdvantageResult:
    """`bipace_kernels.advantage()` on the rows of all ranks in rank order; each rank gets the results of its own rows.

    group            [N] prompt-group id of each of this rank's rows; groups may span ranks.  Integers on all ranks keep
                     their numeric order, any other ids are numbered by first appearance over the ranks
    trajectory       [N] trajectory id, unique in the batch of all ranks; likewise
    process_group    of torch.distributed; None: the default group.  All of its ranks make this call, with the same
                     configuration and the same arguments; a rank may have no rows (N = 0)
    check            "auto" | "now": no difference here, values are always checked at the call
    memory           on every rank a `ValueMemory` of share="memory"; rank 0's holds the records, the others stay empty
    The other arguments are those of `bipace_kernels.advantage()`.

    Bit-equal to one process on the concatenated rows, for every split, on ranks with one kind of device and instruction
    set.  Clusters are numbered over the batch; metrics() and value_r2() are the batch's, equal on all ranks.
    Rank 0 owns all groups where values are shared between them (share "batch" and "memory").  Nothing that another rank
    sent is unpickled: so ids and observations must be of types that compare as text; TypeError names any other.
    ValueError and TypeError are raised on all ranks: for an argument, naming the rank; for values, with rows counted
    over the ranks.  RuntimeError where a rank has exited, or does not make this call within the group's timeout.
    """
    arguments = {
        "group": group, "trajectory": trajectory, "rewards": rewards, "step": step, "returns": returns,
        "episode_return": episode_return, "fingerprint": fingerprint, "observation": observation,
        "action_key": action_key, "action_parsed": action_parsed, "valid": valid, "truncated": truncated,
    }  # fmt: skip

    def prepare() -> _Own:
        checks.check_check(check)
        return _check_own(arguments, config, backend, num_threads, memory)

    held = None if memory is None else memory.state()
    try:
        result = _run(process_group, prepare)
    except BaseException:
        if memory is not None:
            memory.restore(held)  # its owner read bad rows before the other ranks knew of them
        raise
    back = interop.from_dlpack_of(arguments)
    return result if back is None else result.as_arrays(back)


@threads.using()
def cluster(
    fingerprint: Any,
    group: Any,
    epsilon: Any = 0.10,
    *,
    process_group: Any = None,
    trajectory: Any = None,
    step: Any = None,
    valid: Any = None,
    duplicates: Any = "count",
    on_invalid: Any = "raise",
    backend: str = "auto",
    num_threads: int | None = None,
) -> Tensor:
    """`bipace_kernels.cluster()` on the rows of all ranks in rank order; each rank gets the labels of its own rows.

    process_group    of torch.distributed; None: the default group
    valid            [N] bool or None: False rows (padding) are ignored and get −1
    duplicates       rows with equal (group, trajectory, step): "count" each, count them "once", or "raise"
    on_invalid       rows that are zero or not finite: "raise", or "singleton" gives each a cluster of its own
    fingerprint [N, D], group [N], epsilon (one number), trajectory [N], step [N], backend, num_threads
                     as in `bipace_kernels.cluster()`

    For trainers with a single controller: the workers cluster where the fingerprints are, and the controller calls
    `bipace_kernels.advantage(observation=labels)` under partition="exact".  That gives the same bits as
    partition="cosine" on the fingerprints; docs/distributed.md lists the requirements.
    Returns [N] int64, dense over the batch of all ranks, numbered by first appearance in processing order.
    Errors are those of `advantage()`.
    """

    def prepare() -> _Own:
        config = Config.bigpo(epsilon, duplicates=duplicates, on_invalid=on_invalid)
        if trajectory is None and step is not None:
            raise ValueError("trajectory is missing; step numbers count inside a trajectory.")
        if group is None:
            raise ValueError("group is missing; pass one id per row.")
        arguments = dict.fromkeys(_ARGUMENTS) | {
            "group": group, "trajectory": group if trajectory is None else trajectory, "step": step, "valid": valid,
            "fingerprint": fingerprint, "rewards": np.zeros(checks.length(group, "group")),
        }  # fmt: skip
        return _check_own(arguments, config, backend, num_threads)

    return _run(process_group, prepare).cluster


@threads.using()
def plan_owners(held: Any, cost: Any = None) -> Tensor:
    """The rank that owns each prompt group, for clusters made where the fingerprints are.

    held   [R, G] int   records of group g that rank r holds
    cost   [G] real ≥ 0 or None   cost of the group for its owner; None: its records squared, as clustering grows

    In order of size, largest first, each group goes to the rank that holds most of it among those whose load stays
    within 1.25 times the mean (or the cost of the largest group, if that is more); if there is none, to the rank with
    the least load.  So whole groups stay where they are unless the load would be unbalanced.
    Returns [G] int64, on the CPU.  It depends only on the arguments: all ranks get the same plan.
    """
    table = checks.to_tensor(held, "held", "counts of shape [R, G]").cpu()
    if table.ndim != 2 or table.shape[0] == 0 or table.dtype.is_floating_point or (table < 0).any():
        raise ValueError(f"held must be counts [R, G], a row per rank, got {table.dtype} {list(table.shape)}.")
    counts = table.to(torch.int64).numpy()
    n_ranks, n_groups = counts.shape
    if cost is None:
        price = counts.sum(axis=0).astype(np.float64) ** 2
    else:
        price = checks.real_vector(cost, "cost", n_groups).cpu().numpy()
        if not (np.isfinite(price) & (price >= 0)).all():
            raise ValueError("cost must be finite and at least 0, one number for each group.")
    room = max(_SLACK * price.sum() / n_ranks, price.max(initial=0.0))
    load = np.zeros(n_ranks)
    owner = np.zeros(n_groups, dtype=np.int64)
    for g in np.argsort(-price, kind="stable"):
        fits = np.flatnonzero(load + price[g] <= room)
        most = fits[counts[fits, g] == counts[fits, g].max()] if fits.size else np.arange(n_ranks)
        owner[g] = most[np.argmin(load[most])]
        load[owner[g]] += price[g]
    return torch.from_numpy(owner)


@dataclass(frozen=True)
class _Head:
    """What ranks tell each other before any data moves: what JSON holds.

    The fields after n_taken must be equal on all ranks that have records; those of `options` on all.
    """

    n: int
    n_taken: int
    values: dict[str, list[str]]  # distinct ids and observations that are not integers, as text, by argument
    options: dict[str, Any]  # the fields of Config, a function by its name; the backend; whether there is a memory
    device: str
    arguments: list[str]
    kinds: dict[str, str]  # of group, trajectory, observation, fingerprint
    width: int = 0  # D
    dtype: str | None = None  # of the fingerprints, equal on all ranks that give a tensor or an array


@dataclass(frozen=True)
class _Own:
    """The rows of this rank, checked for everything but values, and the options of the call."""

    head: _Head
    config: Config
    where: torch.device
    columns: dict[str, Tensor]  # [n] int64 | float64 | bool on the CPU
    fingerprint: Tensor | None  # [n, D]
    texts: list[bytes]  # [n] observations of partition "similar"; columns["observation"] holds their lengths
    num_threads: int | None
    memory: ValueMemory | None


def _check_own(
    args: Values, config: Config | str | None, backend: str, num_threads: int | None, memory: ValueMemory | None = None
) -> _Own:
    """The rows of this rank.  Bad arguments fail here, before the other ranks wait for data."""
    cfg = check_config(config)
    check_memory(memory, cfg)
    dispatch.check_name(backend)
    args = interop.all_to_torch(args)
    where = checks.one_device(args)
    dispatch.choose(backend, where)
    threads.checked(num_threads)
    if callable(cfg.estimator) and args["fingerprint"] is not None and not cfg.needs_fingerprint:
        raise ValueError(
            f"fingerprint must be None with an estimator function and partition={cfg.partition!r}: fingerprints do not "
            "travel to every rank, so the function could not read them; leave it out."
        )
    columns = check_columns(args, None, cfg, where, None)
    fingerprint = columns.pop("fingerprint")
    n = checks.length(args["group"], "group")
    if args["step"] is not None:
        columns["step"] = checks.integer_vector(args["step"], "step", n)
    valid = args["valid"]
    columns["valid"] = torch.ones(n, dtype=torch.bool) if valid is None else checks.bool_vector(valid, "valid", n)
    present = {name: column for name, column in columns.items() if column is not None}
    rows: dict[str, Tensor] = dict(zip(present, to_host(list(present.values())), strict=True))
    taken = torch.nonzero(rows["valid"]).flatten()

    kinds: dict[str, str] = {}
    values: dict[str, list[str]] = {}
    texts: list[bytes] = []
    for name in ("group", "trajectory"):
        ids = checks.take_rows(as_sequence(to_host([args[name]])[0], name), taken)
        number, numeric = ids_to_int(ids, name)
        kinds[name] = "integers" if numeric else "other ids"
        if not numeric:
            values[name] = [canonical(value, name) for value in _first_of_each(ids, number)]
        rows[name] = torch.zeros(n, dtype=torch.int64).index_copy_(0, taken, number)
    if cfg.needs_observation:
        items = as_sequence(to_host([args["observation"]])[0], "observation")
        if cfg.partition_row.by_code:
            kinds["observation"], rows["observation"], values["observation"] = _observation_codes(items, n, taken)
        else:
            kinds["observation"] = "a list"
            texts = [b""] * n  # padding stays empty
            for row, text in zip(taken.tolist(), _taken_of(items, taken), strict=True):
                check_text(text, row, cfg.longest_text)
                texts[row] = text.encode(*_UTF8)
            rows["observation"] = torch.tensor([len(text) for text in texts], dtype=torch.int64)
    width, dtype = 0, None
    if fingerprint is not None:
        width = fingerprint.shape[1]
        kinds["fingerprint"] = f"[N, {width}] {fingerprint.dtype}"
        if n or not isinstance(args["fingerprint"], (list, tuple)):
            dtype = str(fingerprint.dtype)
    own = {f"config.{field.name}": getattr(cfg, field.name) for field in fields(Config)}
    own |= {"config.estimator": cfg.estimator_name, "config.value": cfg.value_name, "backend": backend}
    own["memory"] = None if memory is None else "an argument"
    plain = {name: x if x is None or isinstance(x, (str, int)) else float(x) for name, x in own.items()}
    head = _Head(n, taken.numel(), values, plain, where.type, sorted(rows), kinds, width, dtype)
    return _Own(head, cfg, where, rows, fingerprint, texts, num_threads, memory)


def _first_of_each(items: Any, number: Tensor) -> list[Any]:
    """The items at the first appearances of the numbers 0, 1, …"""
    return _taken_of(items, torch.from_numpy(np.unique(number.numpy(), return_index=True)[1]))


def _taken_of(items: Any, rows: Tensor) -> list[Any]:
    chosen = checks.take_rows(items, rows)
    return list(chosen.tolist() if isinstance(chosen, (np.ndarray, Tensor)) else chosen)


def _observation_codes(items: Any, n: int, taken: Tensor) -> tuple[str, Tensor, list[str]]:
    """The kind of the observations, their codes [n] int64, and a hash of the observation of each code.

    Integers of an array or tensor are codes already, the same on all ranks, and have no hashes.
    """
    array = isinstance(items, (np.ndarray, Tensor))
    integers = is_integer(items) if isinstance(items, Tensor) else array and items.dtype.kind in "iub"
    if integers and items.ndim == 1:
        return "integers", number_objects(items), []
    here = checks.take_rows(items, taken)
    if isinstance(here, np.ndarray) and (here.dtype.hasobject or (here.dtype.kind in "US" and here.ndim == 1)):
        here = elements(here)
    number = number_objects(here)
    if isinstance(here, (np.ndarray, Tensor)):
        kind = f"an array [N, {', '.join(map(str, here.shape[1:]))}] of {here.dtype}"
        here = [here[i : i + 1] for i in range(len(here))]  # which canonical() compares by bytes, as codes do
    else:
        kind = "a list"
    distinct = [canonical(value, "observation").encode(*_UTF8) for value in _first_of_each(here, number)]
    hashes = [hashlib.blake2b(text, digest_size=32).hexdigest() for text in distinct]
    return kind, torch.zeros(n, dtype=torch.int64).index_copy_(0, taken, number), hashes


def _run(process_group: Any, prepare: Callable[[], _Own]) -> AdvantageResult:
    ranks = Ranks(process_group)
    own, notes = ranks.agree(prepare, lambda own: asdict(own.head))
    heads = [_Head(**note) for note in notes]
    head, cfg = _common(heads), own.config
    if own.where.type != head.device:  # of a rank without records
        own = replace(own, where=torch.device(head.device))
    counts = [h.n for h in heads]
    columns = _gather(ranks, own, heads, head)
    # Partitions that every rank computes itself, from the codes of all rows.
    of_codes = cfg.partition_row.by_code or not cfg.has_clusters
    state: Tensor | None = None
    failed: str | None = None
    if "fingerprint" in head.kinds or not of_codes:
        together = _makes_values(cfg) and (cfg.share != "group" or callable(cfg.value))
        plan = _Plan.make(ranks, columns, counts, together=together)
        labels, state, failed = _labels(ranks, plan, columns, head, own)
        if _makes_values(cfg):
            columns["value"], columns["raw_advantage"] = labels.view(torch.float64)
        else:
            columns["observation"] = labels[0]
    if bool(columns["valid"].all()):
        del columns["valid"]
    last = cfg if of_codes else replace(cfg, partition="exact")
    if callable(cfg.estimator):
        last = replace(last, estimator=_with_config(cfg, hidden="fingerprint" in head.kinds))

    def finish() -> tuple[AdvantageResult, Records]:
        try:
            result = _result(columns, last, own)
            return result, _records(result, cfg, state)
        except (ValueError, TypeError) as error:
            where = f" Rows are counted over the ranks in rank order; these have {counts} rows."
            if isinstance(error, InputError) and error.parts:
                raise type(error)(error.text + "{}", *error.parts, where) from error
            raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{error}{where}") from error

    # A function of the caller may fail on one rank alone; all else is computed from the same columns everywhere.
    result, records = ranks.all_or_none(finish) if callable(cfg.estimator) else finish()
    if failed is not None:
        raise RuntimeError(f"clustering failed on {failed}")
    begin = sum(counts[: ranks.rank])
    mine = slice(begin, begin + counts[ranks.rank])
    return result._with_rows(lambda rows: rows[mine].clone(), records=records)


def _result(
    columns: dict[str, Tensor], config: Config, own: _Own, memory: ValueMemory | None = None, **moved: Any
) -> AdvantageResult:
    """advantage() of columns [N], which are on the CPU, and of what was moved from other ranks."""
    there = {name: to_device(column, own.where, name) for name, column in columns.items()}
    arguments = {**dict.fromkeys(_ARGUMENTS), **there, **moved}
    return run(arguments, None, config, own.head.options["backend"], "now", own.num_threads, memory)


class _NoFingerprints(StepRecords):
    """Fingerprints do not travel to every rank: a function that reads them must not take None for their absence."""

    def __getattribute__(self, name: str) -> Any:
        if name == "fingerprint":
            raise ValueError(
                "an estimator function cannot read records.fingerprint in bipace_kernels.distributed, since "
                "fingerprints do not travel to every rank; use records.cluster, or gather the rows."
            )
        return super().__getattribute__(name)


def _with_config(cfg: Config, *, hidden: bool) -> Callable[[StepRecords], Tensor]:
    """The estimator function of `cfg`, given the caller's configuration and not the one of the last stages."""
    function: Any = cfg.estimator

    @functools.wraps(function)
    def call(records: StepRecords) -> Tensor:
        kind = _NoFingerprints if hidden else StepRecords
        return function(kind(**{**vars(records), "config": cfg}))  # type: ignore[no-any-return]

    return call


def _common(heads: Sequence[_Head]) -> _Head:
    """The value on which all ranks with records agree, or any rank's if none has records; ValueError if they differ."""
    with_rows = [rank for rank, head in enumerate(heads) if head.n_taken] or [0]
    first = with_rows[0]
    head = heads[first]

    def same(name: str, mine: Any, other: Any, rank: int) -> None:
        if mine != other:
            raise ValueError(f"{name} must be the same on all ranks, got {mine} on rank {first}, {other} on {rank}.")

    for rank, other in enumerate(heads):
        for name, option in head.options.items():
            same(name, option, other.options[name], rank)
    for rank in with_rows:
        other = heads[rank]
        same("the device of tensors", head.device, other.device, rank)
        for name in sorted({*head.arguments, *other.arguments}):
            here, there = ("an argument" if name in h.arguments else None for h in (head, other))
            same(name, here, there, rank)
        for name, kind in head.kinds.items():
            same(name, kind, other.kinds[name], rank)
    for rank, other in enumerate(heads):
        if head.dtype is not None and other.dtype is not None:  # also where a rank has no rows of it
            same("the dtype of fingerprint", head.dtype, other.dtype, rank)
    return head


def _gather(ranks: Ranks, own: _Own, heads: Sequence[_Head], head: _Head) -> dict[str, Tensor]:
    """The columns [N] of all ranks' rows in rank order, on the CPU."""
    mine = dict(own.columns)
    for name in head.values:
        # Numbered by first appearance over the ranks; each rank's numbers point into its own distinct values.
        lists = [h.values.get(name, []) for h in heads]
        number = number_objects([value for values in lists for value in values], name)
        if lists[ranks.rank]:
            mine[name] = number[sum(map(len, lists[: ranks.rank])) + mine[name]]
    nothing = torch.zeros(own.head.n, dtype=torch.int64)  # of a rank without records
    bits = [mine.get(name, nothing) for name in head.arguments]
    bits = [column.view(torch.int64) if column.dtype == torch.float64 else column.to(torch.int64) for column in bits]
    gathered = ranks.rows(torch.stack(bits, dim=1), [h.n for h in heads])
    columns = {name: gathered[:, k].contiguous() for k, name in enumerate(head.arguments)}
    for name, column in columns.items():
        if name in _REAL:
            columns[name] = column.view(torch.float64)
        elif name in _BOOL:
            columns[name] = column.to(torch.bool)
    return columns


def _records(result: AdvantageResult, cfg: Config, state: Tensor | None) -> Records:
    """The records of the batch under `cfg`, from a result made with labels instead of fingerprints.

    state   [N] uint8 of the fingerprints: 0 fine, 1 not finite, 2 zero; None: all fine.  ValueError for bad rows.
    """
    records = result._records()
    usable = None
    if state is not None:
        of_records = state[records.layout.order]
        if cfg.on_invalid == "raise":
            check_fingerprint(records.layout, of_records)
        usable = of_records == 0
    return replace(records, partition=cfg.partition, usable=usable)


@dataclass(frozen=True)
class _Plan:
    """Where the rows of the batch go, seen from one rank."""

    rank: Ints  # [N] that holds the row
    owner: Ints  # [N] of the row's group; −1 for padding
    begin: int  # the first row of this rank
    held: Ints  # rows of this rank that take part, by owner
    owned: Ints  # rows that this rank owns

    @staticmethod
    def make(ranks: Ranks, columns: dict[str, Tensor], counts: list[int], *, together: bool) -> _Plan:
        rank = np.repeat(np.arange(ranks.size), counts)
        valid = columns["valid"].numpy()
        ids, group = np.unique(columns["group"].numpy()[valid], return_inverse=True)
        held = np.bincount(rank[valid] * ids.size + group, minlength=ranks.size * ids.size)
        owner = np.full(rank.size, -1)
        owner[valid] = 0 if together else plan_owners(held.reshape(ranks.size, ids.size)).numpy()[group]
        mine = np.flatnonzero((rank == ranks.rank) & valid)
        mine = mine[np.argsort(owner[mine], kind="stable")]
        return _Plan(rank, owner, sum(counts[: ranks.rank]), mine, np.flatnonzero(owner == ranks.rank))

    def exchange(self, ranks: Ranks, data: Tensor, sizes: Ints | None = None) -> Tensor:
        """The data of the rows `owned`, given those of the rows `held`.

        sizes   [N] rows of `data` for each row of the batch; None: one
        """
        if bool(((self.owner == self.rank) | (self.owner < 0)).all()):
            return data  # every rank owns all groups of its rows
        send, receive = (
            np.bincount(other[rows], None if sizes is None else sizes[rows], ranks.size).astype(np.int64).tolist()
            for other, rows in ((self.owner, self.held), (self.rank, self.owned))
        )
        return ranks.exchange(data, send, receive)


def _labels(
    ranks: Ranks, plan: _Plan, columns: dict[str, Tensor], head: _Head, own: _Own
) -> tuple[Tensor, Tensor | None, str | None]:
    """The owners' results for their groups.

    [1, N] int64   equal inside a group where records share a cluster; of value="kernel" [2, N], the bits of V̂ and of
                   A_S before step_norm, float64
    [N] uint8      state of the fingerprints; None: all fine
    the first owner's error, on all ranks, or None
    """
    if "fingerprint" in head.kinds:
        moved: dict[str, Any] = {"fingerprint": _move_fingerprints(ranks, plan, head, own)}
    else:
        moved = {"observation": _move_texts(ranks, plan, columns["observation"].numpy(), own)}
    wide = 2 if _makes_values(own.config) else 1
    reply = torch.zeros(plan.owned.size, wide + 1, dtype=torch.int64)
    failed: Exception | None = None
    try:
        part = {name: column[plan.owned] for name, column in columns.items() if name not in ("valid", *moved)}
        if plan.owned.size:
            reply[:, :wide], reply[:, wide] = _cluster(part, own, moved)
    except Exception as error:  # of any kind: the other ranks wait for an answer
        failed = error
        reply[:, wide] = _FAILED
    taken = plan.owner >= 0
    replies = ranks.rows(reply, np.bincount(plan.owner[taken], minlength=ranks.size).tolist())
    place = torch.from_numpy(np.argsort(np.where(taken, plan.owner, ranks.size), kind="stable")[: replies.shape[0]])
    every = torch.zeros(wide + 1, plan.owner.size, dtype=torch.int64).index_copy_(1, place, replies.T)
    labels, state = every[:wide], every[wide]
    if not bool(state.any()):
        return labels, None, None
    note = None
    if bool((state == _FAILED).any()):
        notes = ranks.texts("" if failed is None else f"rank {ranks.rank}: {type(failed).__name__}: {failed}")
        note = next(text for text in notes if text)
    return labels, state.to(torch.uint8), note


def _cluster(columns: dict[str, Tensor], own: _Own, moved: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[m, 1] or [m, 2] of `_labels()` for the records this rank owns, and the states [m] of their fingerprints."""
    # Records that advantage() sets aside, and copies of a step, must not seed clusters here either.
    cfg = replace(own.config, on_invalid="singleton")
    if not _makes_values(cfg):
        cfg = replace(cfg, estimator="mean", step_norm="none")
    result = _result(columns, cfg, own, own.memory, **moved)
    records = result._records()
    state = torch.zeros(len(columns["group"]), dtype=torch.int64)
    if "fingerprint" in moved and records.usable is not None:
        bad = records.layout.order[~records.usable]
        finite = moved["fingerprint"][bad.to(own.where)].isfinite().all(dim=1).cpu()
        state[bad] = torch.where(finite, 2, 1)
    if not _makes_values(cfg):
        return result.cluster.cpu()[:, None], state
    unread = result.records
    assert isinstance(unread, Unread) and unread.value is not None and unread.raw is not None
    assert unread.source is not None
    if not unread.value.numel():
        return torch.zeros(unread.source.shape[0], 2, dtype=torch.int64), state
    both = torch.stack([unread.value, unread.raw], dim=1)[unread.source.clamp(min=0)]
    return both.masked_fill(unread.source[:, None] < 0, 0.0).cpu().view(torch.int64), state


def _makes_values(cfg: Config) -> bool:
    """Whether the owners of groups compute V̂ instead of clusters."""
    return cfg.needs_fingerprint and not cfg.has_clusters


def _move_fingerprints(ranks: Ranks, plan: _Plan, head: _Head, own: _Own) -> Tensor:
    """[m, D] fingerprints of the records this rank owns."""
    matrix, rows = own.fingerprint, torch.from_numpy(plan.held - plan.begin)
    if matrix is None or not len(rows):  # a rank without records may hold [0, anything]
        matrix = torch.zeros(0, head.width, dtype=_DTYPES[str(head.dtype)], device=own.where)
    elif not torch.equal(rows, torch.arange(matrix.shape[0])):
        matrix = matrix[rows.to(own.where)]
    return plan.exchange(ranks, matrix)


def _move_texts(ranks: Ranks, plan: _Plan, lengths: Ints, own: _Own) -> list[str]:
    """[m] observations of the records this rank owns; lengths [N]: of those of the batch, in bytes."""
    joined = b"".join(own.texts[row - plan.begin] for row in plan.held)
    data = torch.from_numpy(np.frombuffer(joined, np.uint8).copy()).reshape(-1, 1)
    received = plan.exchange(ranks, data, lengths).numpy().tobytes()
    ends = np.cumsum(lengths[plan.owned]).tolist()
    return [received[begin:end].decode(*_UTF8) for begin, end in itertools.pairwise([0, *ends])]
