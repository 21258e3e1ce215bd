"""advantage() and cluster() over the ranks of torch.distributed; imported at first use.

    rows of a rank ─► ids, rewards, keys, … ──────► every rank gets those of all rows: 8 bytes each
                      fingerprints or observations ► the rank that owns the prompt group, once; it makes the clusters
                                          labels ──► every rank gets those of all rows
                      advantage() of the whole batch with these labels, on every rank; each keeps its own rows

Clusters never cross prompt groups and take nearly all of the time, so the clustering is what is distributed.  The rest
is the same call as in one process, on the same columns, which gives equal bits, metrics and errors
(docs/distributed.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..backends import dispatch, threads
from ..backends.contract import FINGERPRINT_DTYPES
from ..config import Config
from ..diagnostics.records import Records, Unread
from ..estimators.memory import ValueMemory
from ..estimators.rows import PARTITIONS
from ..estimators.table import StepRecords
from ..inputs import checks, interop
from ..inputs.canonical import canonical
from ..inputs.columns import check_check, check_columns, check_config, check_memory
from ..inputs.ids import as_sequence, elements, ids_to_int, is_integer, number_objects
from ..inputs.observations import check_text
from ..inputs.transfer import to_device, to_host
from ..inputs.values import check_fingerprint
from ..pipeline import run
from ..result import AdvantageResult
from .ranks import Ranks

__all__ = ["advantage", "cluster", "plan_owners"]

Tensor = torch.Tensor
Ints = npt.NDArray[np.int64]
Given = dict[str, Any]

_REAL = ("rewards", "returns", "episode_return")
_BOOL = ("action_parsed", "valid", "truncated")
# Of the mean load: moving a record costs about as much as clustering it, so finer balance is not worth it.
_SLACK = 1.25
_DTYPES = {str(dtype): dtype for dtype in FINGERPRINT_DTYPES}
_FAILED = 255  # instead of a record's state, where its owner could not cluster
_UTF8 = "utf-8", "surrogatepass"  # for any str
_ARGUMENTS = ("group", "trajectory", "step", "observation", "action_key", "fingerprint", *_REAL, *_BOOL)


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
    config: Config | None = None,
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
    memory           a `ValueMemory` of share="memory"; only rank 0's holds the records, the others stay empty
    rewards, step, returns, episode_return, fingerprint, observation, action_key, action_parsed, valid, truncated,
    config, backend, num_threads      as in `bipace_kernels.advantage()`

    Bit-equal to one process on the concatenated rows, for every split, on ranks with one kind of device and instruction
    set.  Clusters are numbered over the batch; metrics() and value_r2() are the batch's, equal on all ranks.
    A fingerprint goes to the rank that owns its group, once and in its own dtype; all other values of a row go to
    every rank, 8 bytes each.  Rank 0 owns all groups where values are shared between them (share "batch" and "memory").
    Nothing that another rank sent is unpickled: so ids and observations must be of types that compare as text
    (docs/distributed.md); TypeError names any other.
    ValueError and TypeError are raised on all ranks: for an argument, naming the rank; for values, with rows counted
    over the ranks.  RuntimeError where a rank has exited, or does not make this call within the group's timeout.
    """
    given = {
        "group": group, "trajectory": trajectory, "rewards": rewards, "step": step, "returns": returns,
        "episode_return": episode_return, "fingerprint": fingerprint, "observation": observation,
        "action_key": action_key, "action_parsed": action_parsed, "valid": valid, "truncated": truncated,
    }  # fmt: skip

    def prepare() -> _Own:
        check_check(check)
        cfg = check_config(config)
        check_memory(memory, cfg)
        return _check_own(given, cfg, backend, num_threads)

    held = None if memory is None else memory.state()
    try:
        result = _run(process_group, prepare, num_threads, memory)
    except BaseException:
        if memory is not None:
            memory.restore(held)  # its owner read bad rows before the other ranks knew of them
        raise
    back = interop.from_dlpack_of(given)
    return result if back is None else result.as_arrays(back)


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

    fingerprint      [N, D] float32 | bfloat16 | float16 of this rank's rows, any length
    group            [N] prompt-group id
    epsilon          cosine distance, 0 or in [1e-4, 1]
    process_group    of torch.distributed; None: the default group
    trajectory       [N] trajectory id or None (the records of a group in row order, over the ranks)
    step             [N] int or None, order inside the trajectory
    valid            [N] bool or None: False rows (padding) are ignored and get −1
    duplicates       rows with equal (group, trajectory, step): "count" each, count them "once", or "raise"
    on_invalid       rows that are zero or not finite: "raise", or "singleton" gives each a cluster of its own
    backend, num_threads   as in `bipace_kernels.cluster()`

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
        given = dict.fromkeys(_ARGUMENTS) | {
            "group": group, "trajectory": group if trajectory is None else trajectory, "step": step, "valid": valid,
            "fingerprint": fingerprint, "rewards": np.zeros(checks.length(group, "group")),
        }  # fmt: skip
        return _check_own(given, config, backend, num_threads)

    return _run(process_group, prepare, num_threads).cluster


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
        raise ValueError(
            f"held must be counts of shape [R, G] with R ≥ 1, got {table.dtype} {list(table.shape)}; one row per rank."
        )
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
        if fits.size:
            most = fits[counts[fits, g] == counts[fits, g].max()]
        else:
            most = np.arange(n_ranks)
        owner[g] = most[np.argmin(load[most])]
        load[owner[g]] += price[g]
    return torch.from_numpy(owner)


# -------------------------------------------------------------------------------------------------- what one rank has


@dataclass(frozen=True)
class _Head:
    """What ranks tell each other before any data moves: what JSON holds.

    The fields after n_taken must be equal on all ranks that have records; those of `config` and `backend` on all.
    """

    n: int
    n_taken: int
    ids: dict[str, list[str]]  # distinct ids that are not integers, as canonical(), by argument
    config: dict[str, Any]  # the fields of Config; a function by its name
    backend: str
    device: str
    arguments: list[str]
    kinds: dict[str, str]  # of group, trajectory, observation, fingerprint
    width: int = 0  # D
    dtype: str | None = None  # of the fingerprints, equal on all ranks that give a tensor or an array


@dataclass(frozen=True)
class _Own:
    """The rows of this rank, checked for everything but values."""

    head: _Head
    config: Config
    where: torch.device
    columns: dict[str, Tensor]  # [n] int64 | float64 | bool on the CPU
    fingerprint: Tensor | None  # [n, D]
    objects: list[bytes]  # distinct observations; columns["observation"] says which


def _check_own(given: Given, cfg: Config, backend: str, num_threads: int | None) -> _Own:
    """The rows of this rank.  Bad arguments fail here, before the other ranks wait for data."""
    dispatch.check_name(backend)
    given = interop.all_to_torch(given)
    where = checks.one_device(given)
    dispatch.choose(backend, where)
    threads.checked(num_threads)
    if callable(cfg.estimator) and given["fingerprint"] is not None and not cfg.needs_fingerprint:
        raise ValueError(
            f"fingerprint must be None with an estimator function and partition={cfg.partition!r}: fingerprints do not "
            "travel to every rank, so the function could not read them; leave it out."
        )
    columns = check_columns(given, None, cfg, where, None)
    fingerprint = columns.pop("fingerprint")
    n = checks.length(given["group"], "group")
    if given["step"] is not None:
        columns["step"] = checks.integer_vector(given["step"], "step", n)
    columns["valid"] = torch.ones(n, dtype=torch.bool)
    if given["valid"] is not None:
        columns["valid"] = checks.bool_vector(given["valid"], "valid", n)
    on_host = dict(zip(columns, to_host(list(columns.values())), strict=True))
    rows: dict[str, Tensor] = {name: value for name, value in on_host.items() if value is not None}
    taken = torch.nonzero(rows["valid"]).flatten()

    kinds, ids = {}, {}
    for name in ("group", "trajectory"):
        here = checks.take_rows(as_sequence(to_host([given[name]])[0], name), taken)
        number, numeric = ids_to_int(here, name)
        kinds[name] = "integers" if numeric else "other ids"
        if not numeric:
            ids[name] = [canonical(item, name) for item in _first_of_each(here, number)]
        rows[name] = torch.zeros(n, dtype=torch.int64).index_copy_(0, taken, number)
    objects: list[bytes] = []
    if PARTITIONS[cfg.partition].argument == "observation":
        kinds["observation"], rows["observation"], objects = _check_observation(given["observation"], n, taken, cfg)
    if fingerprint is not None:
        kinds["fingerprint"] = f"[N, {fingerprint.shape[1]}] {fingerprint.dtype}"
    head = _Head(
        n=n, n_taken=taken.numel(), ids=ids, config=_plain_fields(cfg), backend=backend, device=where.type,
        arguments=sorted(rows), kinds=kinds, width=0 if fingerprint is None else fingerprint.shape[1],
        dtype=None if fingerprint is None or (n == 0 and isinstance(given["fingerprint"], (list, tuple)))
        else str(fingerprint.dtype),
    )  # fmt: skip
    return _Own(head, cfg, where, rows, fingerprint, objects)


def _plain_fields(cfg: Config) -> dict[str, Any]:
    """The configuration as JSON holds it, to be compared over the ranks."""
    plain = {field.name: getattr(cfg, field.name) for field in fields(Config)}
    plain["estimator"] = cfg.estimator_name
    return {name: x if x is None or isinstance(x, (str, int)) else float(x) for name, x in plain.items()}


def _first_of_each(items: Any, number: Tensor) -> list[Any]:
    """The items at the first appearances of the numbers 0, 1, …"""
    _, first = np.unique(number.numpy(), return_index=True)
    chosen = checks.take_rows(items, torch.from_numpy(first))
    return list(chosen.tolist() if isinstance(chosen, (np.ndarray, Tensor)) else chosen)


def _check_observation(observation: Any, n: int, taken: Tensor, cfg: Config) -> tuple[str, Tensor, list[bytes]]:
    """The kind of the observations, [n] int64 their numbers, and the distinct ones as bytes, equal where they are.

    Integers of an array or tensor are used as numbers directly; texts of partition "similar" are their UTF-8.
    """
    items = as_sequence(to_host([observation])[0], "observation")
    array = isinstance(items, (np.ndarray, Tensor))
    integers = is_integer(items) if isinstance(items, Tensor) else array and items.dtype.kind in "iub"
    if integers and items.ndim == 1 and PARTITIONS[cfg.partition].by_code:
        return "integers", number_objects(items), []
    here = checks.take_rows(items, taken)
    if isinstance(here, np.ndarray) and here.dtype.hasobject:
        here, array = elements(here), False
    kind = "a list"
    if not PARTITIONS[cfg.partition].by_code:
        for row, text in zip(taken.tolist(), here.tolist() if array else here, strict=True):
            check_text(text, row, cfg.longest_text)
    elif isinstance(here, Tensor) or (array and here.dtype.kind not in "OUS") or (array and here.ndim > 1):
        kind = f"an array [N, {', '.join(map(str, here.shape[1:]))}] of {here.dtype}"
    number = number_objects(here)
    if kind != "a list":
        distinct = _rows_as_bytes(here, number)
    elif PARTITIONS[cfg.partition].by_code:
        distinct = [canonical(item, "observation").encode(*_UTF8) for item in _first_of_each(here, number)]
    else:
        distinct = [text.encode(*_UTF8) for text in _first_of_each(here, number)]
    code = torch.zeros(n, dtype=torch.int64).index_copy_(0, taken, number)
    return kind, code, distinct


def _rows_as_bytes(rows: Any, number: Tensor) -> list[bytes]:
    """The rows of an array or tensor at the first appearances of the numbers 0, 1, …, as bytes."""
    _, first = np.unique(number.numpy(), return_index=True)
    if isinstance(rows, Tensor):
        rows = rows.detach().unsqueeze(-1).flatten(1).contiguous().view(torch.uint8).numpy()
    return [rows[i].tobytes() for i in first]


# ------------------------------------------------------------------------------------------------------- all of them


def _run(
    process_group: Any, prepare: Callable[[], _Own], num_threads: int | None, memory: ValueMemory | None = None
) -> AdvantageResult:
    ranks = Ranks(process_group)
    own, notes = ranks.agree(prepare, lambda own: asdict(own.head))
    heads = [_Head(**note) for note in notes]
    head, cfg = _common(heads), own.config
    where = own.where if own.where.type == head.device else torch.device(head.device)  # of a rank without records
    counts = [h.n for h in heads]
    columns = _gather(ranks, own, heads, head)
    row = PARTITIONS[cfg.partition]
    # Partitions that every rank computes itself, from the codes of all rows.
    of_codes = row.by_code or row.argument is None
    state: Tensor | None = None
    failed: str | None = None
    if cfg.needs_fingerprint or head.kinds.get("observation", "integers") != "integers":
        plan = _Plan.make(
            columns, counts, quadratic=cfg.needs_fingerprint or not of_codes,
            together=_makes_values(cfg) and cfg.share != "group",
        )  # fmt: skip
        found, state, failed = _labels(ranks, plan, columns, head, own, where, num_threads, memory)
        if _makes_values(cfg):
            columns["value"], columns["raw_advantage"] = found.view(torch.float64)
        else:
            columns["observation"] = found[0]
    if bool(columns["valid"].all()):
        del columns["valid"]
    last = cfg if of_codes else replace(cfg, partition="exact")
    if callable(cfg.estimator):
        last = replace(last, estimator=_with_config(cfg, hidden="fingerprint" in head.kinds))
    given = {name: to_device(value, where, name) for name, value in columns.items()}
    try:
        result = run({**dict.fromkeys(_ARGUMENTS), **given}, None, last, head.backend, "now", num_threads)
        records = _records(result, cfg, state)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{error} Rows are counted over the ranks in rank order; these have {counts} rows.") from error
    if failed is not None:
        raise RuntimeError(f"clustering failed on {failed}")
    begin = sum(counts[: ranks.rank])
    mine = slice(begin, begin + counts[ranks.rank])
    return result._with_rows(lambda rows: rows[mine].clone(), records=records)


class _NoFingerprints(StepRecords):
    """Fingerprints do not travel to every rank: a function that reads them must not take None for their absence."""

    def __getattribute__(self, name: str) -> Any:
        if name == "fingerprint":
            raise ValueError(
                "an estimator function cannot read records.fingerprint in bipace_kernels.distributed, since "
                "fingerprints do not travel to every rank; use records.cluster, or gather the rows and call "
                "bipace_kernels.advantage()."
            )
        return super().__getattribute__(name)


def _with_config(cfg: Config, *, hidden: bool) -> Callable[[StepRecords], Tensor]:
    """The estimator function of `cfg`, given the caller's configuration and not the one of the last stages."""
    function: Any = cfg.estimator

    @functools.wraps(function)
    def call(records: StepRecords) -> Tensor:
        columns = {field.name: getattr(records, field.name) for field in fields(StepRecords)}
        kind = _NoFingerprints if hidden else StepRecords
        return function(kind(**{**columns, "config": cfg}))  # type: ignore[no-any-return]

    return call


def _common(heads: Sequence[_Head]) -> _Head:
    """The value on which all ranks with records agree, or any rank's if none has records; ValueError if they differ."""
    with_rows = [rank for rank, head in enumerate(heads) if head.n_taken] or [0]
    first = with_rows[0]
    head = heads[first]

    def same(name: str, mine: Any, other: Any, rank: int) -> None:
        if mine != other:
            raise ValueError(
                f"{name} must be the same on all ranks, got {mine} on rank {first} and {other} on rank {rank}; "
                "change one of them."
            )

    for rank, other in enumerate(heads):
        for field in fields(Config):
            same(f"config.{field.name}", head.config[field.name], other.config[field.name], rank)
        same("backend", head.backend, other.backend, rank)
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
    for name in ("group", "trajectory"):
        if head.kinds[name] != "integers":
            # Numbered by first appearance over the ranks; each rank's numbers point into its own distinct ids.
            lists = [h.ids.get(name, []) for h in heads]
            number = number_objects([item for items in lists for item in items], name)
            begin = sum(map(len, lists[: ranks.rank]))
            if lists[ranks.rank]:
                mine[name] = number[begin + mine[name]]
    nothing = torch.zeros(own.head.n, dtype=torch.int64)  # of a rank without records
    bits = [mine.get(name, nothing) for name in head.arguments]
    bits = [column.view(torch.int64) if column.dtype == torch.float64 else column.to(torch.int64) for column in bits]
    gathered = ranks.rows(torch.stack(bits, dim=1), [h.n for h in heads])
    return {name: _from_int64(name, gathered[:, k].contiguous()) for k, name in enumerate(head.arguments)}


def _from_int64(name: str, bits: Tensor) -> Tensor:
    if name in _REAL:
        return bits.view(torch.float64)
    return bits.to(torch.bool) if name in _BOOL else bits


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
    """Where each rank's rows go; the same on every rank."""

    counts: list[int]  # rows of each rank
    rank: Ints  # [N] that holds the row
    owner: Ints  # [N] of the row's group; −1 for padding

    @staticmethod
    def make(columns: dict[str, Tensor], counts: list[int], *, quadratic: bool, together: bool) -> _Plan:
        rank = np.repeat(np.arange(len(counts)), counts)
        valid = columns["valid"].numpy()
        ids, group = np.unique(columns["group"].numpy()[valid], return_inverse=True)
        held = np.bincount(rank[valid] * ids.size + group, minlength=len(counts) * ids.size)
        held = held.reshape(len(counts), ids.size)
        owner = np.full(rank.size, -1)
        owner[valid] = 0 if together else plan_owners(held, None if quadratic else held.sum(axis=0)).numpy()[group]
        return _Plan(counts, rank, owner)

    def of(self, rank: int) -> Ints:
        """Owners of the rows of one rank."""
        begin = sum(self.counts[:rank])
        return self.owner[begin : begin + self.counts[rank]]

    @property
    def at_home(self) -> bool:
        """Whether every rank owns all groups of its rows."""
        return bool(((self.owner == self.rank) | (self.owner < 0)).all())


def _labels(
    ranks: Ranks, plan: _Plan, columns: dict[str, Tensor], head: _Head, own: _Own, where: torch.device,
    num_threads: int | None, memory: ValueMemory | None,
) -> tuple[Tensor, Tensor | None, str | None]:  # fmt: skip
    """The owners' results for their groups.

    [1, N] int64   equal inside a group where records share a cluster (partitions "exact" and "history": an
                   observation); of value="kernel" [2, N], the bits of V̂ and of A_S before step_norm, float64
    [N] uint8      state of the fingerprints; None: all fine
    the first owner's error, on all ranks, or None
    """
    rows = np.flatnonzero(plan.owner == ranks.rank)
    fingerprint = _move_fingerprints(ranks, plan, rows, head, own, where)
    objects, which = _move_objects(ranks, plan, rows, columns, own)
    wide = 2 if _makes_values(own.config) else 1
    reply = torch.zeros(rows.size, wide + 1, dtype=torch.int64)
    failed: Exception | None = None
    try:
        part = {name: column[rows] for name, column in columns.items() if name != "valid"}
        if rows.size:
            reply[:, :wide], reply[:, wide] = _cluster(
                part, own.config, head.backend, fingerprint, objects, which, where, num_threads, memory
            )
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


def _cluster(
    columns: dict[str, Tensor], cfg: Config, backend: str, fingerprint: Tensor | None, objects: list[bytes],
    which: Ints, where: torch.device, num_threads: int | None, memory: ValueMemory | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[m, 1] or [m, 2] of `_labels()` for the records this rank owns, and the states [m] of their fingerprints."""
    state = torch.zeros(which.size, dtype=torch.int64)
    if PARTITIONS[cfg.partition].by_code:
        return number_objects(objects)[which][:, None], state
    texts = [item.decode(*_UTF8) for item in objects]
    # Records that advantage() sets aside, and copies of a step, must not seed clusters here either.
    cfg = replace(cfg, on_invalid="singleton")
    if not _makes_values(cfg):
        cfg = replace(cfg, estimator="mean", step_norm="none")
    given: Given = {name: to_device(value, where, name) for name, value in columns.items()}
    given["observation"] = [texts[i] for i in which] if texts else None
    result = run(
        {**dict.fromkeys(_ARGUMENTS), **given, "fingerprint": fingerprint}, None, cfg, backend, "now", num_threads,
        memory,
    )  # fmt: skip
    records = result._records()
    if fingerprint is not None and records.usable is not None:
        bad = records.layout.order[~records.usable]
        finite = fingerprint[bad.to(where)].isfinite().all(dim=1).cpu()
        state[bad] = torch.where(finite, 2, 1)
    if not _makes_values(cfg):
        return result.cluster.cpu()[:, None], state
    assert isinstance(result.records, Unread) and result.records.value is not None and result.records.raw is not None
    source = result.records.source
    assert source is not None
    if not result.records.value.numel():
        return torch.zeros(source.shape[0], 2, dtype=torch.int64), state
    both = torch.stack([result.records.value, result.records.raw], dim=1)[source.clamp(min=0)]
    return both.masked_fill(source[:, None] < 0, 0.0).cpu().view(torch.int64), state


def _makes_values(cfg: Config) -> bool:
    """Whether the owners of groups compute V̂ instead of clusters."""
    return cfg.needs_fingerprint and not cfg.has_clusters


def _move_fingerprints(
    ranks: Ranks, plan: _Plan, rows: Ints, head: _Head, own: _Own, where: torch.device
) -> Tensor | None:
    """[m, D] fingerprints of the records this rank owns, in the order of `rows`; None where the partition has none."""
    if "fingerprint" not in head.kinds:
        return None
    mine, matrix = plan.of(ranks.rank), own.fingerprint
    if not own.head.n_taken or matrix is None:  # a rank without records may hold [0, anything]
        matrix = torch.zeros(0, head.width, dtype=_DTYPES[str(head.dtype)], device=where)
        order = np.zeros(0, dtype=np.int64)
    else:
        order = np.argsort(mine, kind="stable")[int((mine < 0).sum()) :]
    if plan.at_home:
        return matrix if order.size == matrix.shape[0] else matrix[torch.from_numpy(order).to(where)]
    send = np.bincount(mine[mine >= 0], minlength=ranks.size).tolist()
    receive = np.bincount(plan.rank[rows], minlength=ranks.size).tolist()
    return ranks.exchange(matrix[torch.from_numpy(order).to(where)], send, receive)


def _move_objects(
    ranks: Ranks, plan: _Plan, rows: Ints, columns: dict[str, Tensor], own: _Own
) -> tuple[list[bytes], Ints]:
    """Distinct observations of the records this rank owns, from each rank that has some, and each record's index."""
    if "observation" not in columns:
        return [], np.zeros(rows.size, dtype=np.int64)
    code = columns["observation"].numpy()
    mine = plan.of(ranks.rank)
    begin = sum(plan.counts[: ranks.rank])
    # Pairs (other rank, number of the object there), sorted: both sides derive the same list without a message.
    own_code = code[begin : begin + mine.size]
    pairs = np.unique(np.stack([mine, own_code], axis=1)[mine >= 0], axis=0)
    wanted, which = np.unique(np.stack([plan.rank[rows], code[rows]], axis=1), axis=0, return_inverse=True)
    send = np.bincount(pairs[:, 0], minlength=ranks.size)
    receive = np.bincount(wanted[:, 0], minlength=ranks.size)
    items = [own.objects[i] for i in pairs[:, 1]]
    length = np.array([len(item) for item in items], dtype=np.int64)
    lengths = ranks.exchange(torch.from_numpy(length).reshape(-1, 1), send.tolist(), receive.tolist()).flatten().numpy()
    data = torch.from_numpy(np.frombuffer(b"".join(items), np.uint8).copy()).reshape(-1, 1)
    to_each = np.bincount(pairs[:, 0], weights=length, minlength=ranks.size).astype(np.int64).tolist()
    from_each = np.bincount(wanted[:, 0], weights=lengths, minlength=ranks.size).astype(np.int64).tolist()
    blob = ranks.exchange(data, to_each, from_each).numpy().tobytes()
    ends = np.cumsum(lengths).tolist()
    return [blob[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)], which.reshape(-1)
