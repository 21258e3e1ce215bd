"""What a rank checks: `python distributed_ranks.py RANK FOLDER CASE...` writes FOLDER/RANK.json, a dict by case.

Four processes, and in them a process group for each number of ranks; a rank's number in its group is not its own.
Every rank makes the batch of all ranks from the seed, computes it alone, and compares what the group gave for its rows.
"""

import contextlib
import datetime
import json
import os
import pickle
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from batches import CONFIGS, OUTPUTS, make_batch
from torch.distributed import distributed_c10d

import bipace_kernels as bk
from bipace_kernels.distributed import pipeline as distributed

WORLD = 4
TIMEOUT = datetime.timedelta(seconds=300)  # a rank that is in few groups waits for those in many
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAME = "must be the same on all ranks, got"


def own_term(records: Any) -> torch.Tensor:
    """Depends on every column that it may read, and on the configuration."""
    count = torch.bincount(records.cluster)
    total = torch.zeros(len(count)).index_add_(0, records.cluster, records.returns)
    term = records.returns - (total / count)[records.cluster] + records.step.float() / 8
    term += len(records.trajectory_offsets)
    return term * records.config.epsilon + len(records.config.partition)


def reads_fingerprint(records: Any) -> torch.Tensor:
    return records.returns if records.fingerprint is None else records.returns * records.fingerprint[:, 0]


def fails_on_the_last(records: Any) -> torch.Tensor:
    """Fails on one rank alone, as a function does that reads a file of its machine."""
    if dist.get_rank() == WORLD - 1:  # of every group in these tests the last
        raise OSError("no such table")
    return records.returns.float()


def own_value(records: Any) -> torch.Tensor:
    """Depends on all records, also where values are not shared between groups."""
    return records.returns.double() * 0.5 + (0 if (x := records.fingerprint) is None else x.double().sum())


OWN = {
    f"own term, {partition}": bk.Config(partition=partition, estimator=own_term, epsilon=0.2)
    for partition in ("none", "exact", "cosine")
}
OWN["own value"] = bk.Config.gae(own_value, share="group", step_norm="none")


def take(value: Any, rows: Any) -> Any:
    """Some rows of an argument of any kind."""
    if value is None:
        return None
    return [value[i] for i in rows] if isinstance(value, list) else value[rows]


def split(rng: np.random.Generator, group: Any, trajectory: Any, size: int) -> list[Any]:
    """The rows of each rank: by row, trajectory, group or in one cut through the order; some ranks get nothing."""
    n = len(group)
    share = rng.dirichlet(np.ones(size)) * (rng.random(size) < 0.9)
    share = share / share.sum() if share.sum() > 0 else np.eye(size)[int(rng.integers(size))]
    how = rng.integers(4)
    if how == 3:
        rank = np.sort(rng.choice(size, n, p=share))
    else:
        by = (np.arange(n), group, trajectory)[how]
        _, number = np.unique(by, return_inverse=True)
        rank = rng.choice(size, n + 1, p=share)[number]
    return [np.flatnonzero(rank == r) for r in range(size)]


def random_batch(seed: int, size: int) -> tuple[dict[str, Any], list[Any], bk.Config]:
    """The arguments of all rows in rank order, the rows of each rank, and a configuration."""
    rng = np.random.default_rng(seed)
    config = list({**CONFIGS, **OWN}.values())[int(rng.integers(len(CONFIGS) + len(OWN)))]
    batch = make_batch(seed, groups=int(rng.integers(0, 7)), trajectories=5, longest=9, dim=int(rng.integers(1, 40)))
    rows = np.arange(batch.n)
    changes: dict[str, Any] = {"duplicates": str(rng.choice(["raise", "once", "count"]))}
    changes["on_invalid"] = str(rng.choice(["raise", "singleton", "singleton"]))
    if rng.random() < 0.4 and batch.n:  # copies of steps
        rows = np.concatenate([rows, rng.integers(0, batch.n, int(rng.integers(1, 6)))])
        changes["duplicates"] = str(rng.choice(["raise", "once", "once", "count", "count"]))
    rng.shuffle(rows)
    batch = batch.take(rows)
    n = batch.n
    fingerprint = torch.from_numpy(batch.fingerprint).to(DTYPES[int(rng.integers(3))])
    given = batch.arguments(
        fingerprint=fingerprint, action_parsed=rng.random(n) < 0.7 if rng.random() < 0.5 else None, valid=None,
        returns=None, episode_return=None,
    )  # fmt: skip
    given["group"] = given["group"] * int(rng.choice([1, -3, 2**40])) + 5
    if rng.random() < 0.3:  # uuids: numbered over the ranks
        given["group"] = [f"prompt {g}" for g in given["group"]]
        given["trajectory"] = [(uuid.UUID(int=int(t)), None) if t % 2 else f"rollout {t}" for t in given["trajectory"]]
    if rng.random() < 0.3:
        given["valid"] = rng.random(n) < 0.8
    if rng.random() < 0.3 and n:
        bad = rng.integers(0, n, 2)
        given["fingerprint"][bad[0]] = float(rng.choice([0.0, np.nan, np.inf]))
        if rng.random() < 0.5:
            given["rewards"][bad[1]] = np.nan
    if rng.random() < 0.2:
        _, number = np.unique(list(map(str, given["trajectory"])), return_inverse=True)
        given["episode_return"] = rng.normal(size=n + 1)[number]
        given["returns"] = rng.normal(size=n)
        if rng.random() < 0.5 and config.estimator != "gae":
            given["rewards"] = None
    how = rng.integers(3)
    if config.partition in ("exact", "history") and how:
        _, code = np.unique(np.asarray(given["observation"], dtype=object).astype(str), return_inverse=True)
        images = np.stack([code, code], axis=1).astype(np.float32)
        forms = (images, torch.from_numpy(images), list(images), images.astype(object), [mixed(c) for c in code])
        given["observation"] = code if how == 1 else forms[seed % 5]
    if callable(config.estimator) and config.partition != "cosine":
        given["fingerprint"] = None
    if callable(config.value) and seed % 2:
        given["fingerprint"], changes["action_noise"] = None, None
    given["truncated"] = rng.random(n) < 0.5 if rng.random() < 0.5 else None
    if rng.random() < 0.2:
        given["step"] = None
        changes["duplicates"] = "raise"
    parts = split(rng, np.asarray(given["group"]), np.asarray(list(map(str, given["trajectory"]))), size)
    order = np.concatenate(parts).astype(np.int64)
    whole = {name: take(value, order) for name, value in given.items()}
    return whole, in_rank_order(parts), replace(config, **changes)


def in_rank_order(parts: list[Any]) -> list[Any]:
    """The places of each rank's rows where the ranks' rows follow each other."""
    ends = np.cumsum([len(part) for part in parts])
    return [np.arange(end - len(part), end) for end, part in zip(ends, parts, strict=True)]


def mixed(code: int) -> Any:
    """A hashable value for each code: equal numbers of different types, texts, bytes, and tuples and sets of these."""
    numbers = (code, float(code), np.int64(code), 0.5 * code)
    return (*numbers, str(code), b"%d" % code, (code, "x"), frozenset({code, "\ud800"}))[code % 8]


def outcome(call: Any) -> tuple[Any, str]:
    try:
        return call(), ""
    except (ValueError, TypeError) as error:
        return None, f"{'TypeError' if isinstance(error, TypeError) else 'ValueError'}: {error}"


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.view(torch.int32) if value.dtype == torch.float32 else value


def check_advantage(group: Any, seed: int) -> str:
    """Empty where the group's bits, metrics and errors are those of one process; else what differs."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole, parts, config = random_batch(seed, size)
    mine = {name: take(value, parts[rank]) for name, value in whole.items()}
    one = ours = None
    if config.estimator == "gae" and config.share == "batch" and seed % 2:
        config = replace(config, share="memory")
    if config.needs_memory:
        one, ours = bk.ValueMemory(40), bk.ValueMemory(40)
        outcome(lambda: bk.advantage(**whole, config=config, memory=one))
        outcome(lambda: distributed.advantage(**mine, config=config, memory=ours, process_group=group))
    want, wanted_error = outcome(lambda: bk.advantage(**whole, config=config, memory=one))
    got, error = outcome(lambda: distributed.advantage(**mine, config=config, memory=ours, process_group=group))
    if want is None or got is None:
        same = wanted_error and error.startswith(wanted_error)
        return "" if same else f"seed {seed}: {error!r}, not {wanted_error!r}"
    for name in OUTPUTS:
        if not torch.equal(bits(getattr(got, name)), bits(getattr(want, name)[parts[rank]])):
            return f"seed {seed}: {name} differs under {config}"
    if config.estimator == "gae" and not torch.equal(bits(got.value), bits(want.value[parts[rank]])):
        return f"seed {seed}: value differs under {config}"
    if got.metrics() != want.metrics() or got.value_r2() != want.value_r2():
        return f"seed {seed}: metrics differ under {config}: {got.metrics()} not {want.metrics()}"
    return ""


@contextlib.contextmanager
def without_pickle() -> Iterator[None]:
    """Where what another rank sent is unpickled, that rank can run any code here."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a pickle of another rank was loaded")

    with patch.object(distributed_c10d, "_tensor_to_object", refuse), patch.object(pickle, "loads", refuse):
        yield


@without_pickle()
def case_advantage(group: Any, first: int, last: int) -> list[str]:
    return [text for seed in range(first, last) if (text := check_advantage(group, seed))]


def clustered(seed: int, size: int) -> tuple[dict[str, Any], list[Any]]:
    """Arguments of a batch for clustering, with copies of steps and padding, and the rows of each rank."""
    rng = np.random.default_rng(seed)
    batch = make_batch(seed, groups=5, trajectories=5, longest=9, dim=24)
    rows = np.concatenate([np.arange(batch.n), rng.integers(0, batch.n, 5)])
    rng.shuffle(rows)
    parts = split(rng, batch.group[rows], batch.trajectory[rows], size)
    batch = batch.take(rows[np.concatenate(parts)])
    fingerprint = torch.from_numpy(batch.fingerprint).to(DTYPES[seed % 3])
    return batch.arguments(fingerprint=fingerprint, valid=rng.random(batch.n) < 0.9), in_rank_order(parts)


def case_cluster(group: Any, first: int, last: int) -> list[str]:
    """distributed.cluster() is cluster() of the whole, and its labels serve the controller as well as states."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    wrong = []
    for seed in range(first, last):
        whole, parts = clustered(seed, size)
        mine = {name: take(value, parts[rank]) for name, value in whole.items()}
        lay = bk.layout(whole["group"], whole["trajectory"], whole["step"], whole["valid"])
        want = bk.cluster(whole["fingerprint"], epsilon=0.2, layout=lay)
        ids = {name: mine[name] for name in ("trajectory", "step", "valid")}
        got = distributed.cluster(mine["fingerprint"], mine["group"], 0.2, **ids, process_group=group)
        if not torch.equal(got, want[parts[rank]]):
            wrong.append(f"seed {seed}: labels")
        plain = distributed.cluster(mine["fingerprint"], mine["group"], 0.2, process_group=group)
        if not torch.equal(plain, bk.cluster(whole["fingerprint"], whole["group"], 0.2)[parts[rank]]):
            wrong.append(f"seed {seed}: labels in row order")
        for duplicates in ("count", "once"):
            config = bk.Config.bipace(0.2, duplicates=duplicates)
            how = {**ids, "duplicates": duplicates, "process_group": group}
            labels = distributed.cluster(mine["fingerprint"], mine["group"], 0.2, **how)
            every: list[Any] = [None] * size
            dist.all_gather_object(every, labels, group=group)
            known = {**whole, "fingerprint": None, "observation": torch.cat(every)}
            controller = bk.advantage(**known, config=replace(config, partition="exact"))
            states = bk.advantage(**whole, config=config)
            same = all(torch.equal(bits(getattr(controller, x)), bits(getattr(states, x))) for x in OUTPUTS)
            if not same or controller.metrics() != states.metrics():
                wrong.append(f"seed {seed}: controller, {duplicates}")
    return wrong


def small(rank: int, dim: int = 6) -> dict[str, Any]:
    """Three rows of one prompt group that straddles the ranks."""
    rng = np.random.default_rng(rank)
    return {
        "group": [7, 7, 7], "trajectory": [rank] * 3, "step": [0, 1, 2], "rewards": [0.0, 0.0, float(rank)],
        "fingerprint": torch.from_numpy(rng.normal(size=(3, dim)).astype(np.float32)), "action_key": [1, 2, 3],
        "observation": ["a", "b", "c"],
    }  # fmt: skip


#: What the last rank of three does wrong, and what all of them then say.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"rewards": [0.0]}, "ValueError: rank 2: rewards must have one entry per row, N = 3 like group, got 1"),
    "missing": ({"fingerprint": None}, "ValueError: rank 2: fingerprint is missing"),
    "float ids": ({"group": np.zeros(3)}, "TypeError: rank 2: group must hold ids"),
    "kinds of ids": ({"group": ["x"] * 3}, f"ValueError: group {SAME} integers on rank 0, other ids on 2"),
    "extra": ({"action_parsed": [True] * 3},
     f"ValueError: action_parsed {SAME} None on rank 0, an argument on 2"),
    "width": ({"fingerprint": torch.ones(3, 5)}, f"ValueError: fingerprint {SAME} [N, 6] torch.float32 on rank 0"),
    "dtype": ({"fingerprint": torch.ones(3, 6).half()},
     f"ValueError: fingerprint {SAME} [N, 6] torch.float32 on rank 0"),
    "dtype of no rows": (
        {**{name: [] for name in ("group", "trajectory", "step", "rewards", "action_key", "observation")},
         "fingerprint": torch.ones(0, 6).half()},
        f"ValueError: the dtype of fingerprint {SAME} torch.float32 on rank 0, torch.float16 on 2",
    ),
    "config": ({"config": bk.Config.bipace(0.3)}, f"ValueError: config.epsilon {SAME} 0.1 on rank 0, 0.3 on 2"),
    "memory": ({"memory": bk.ValueMemory(9)}, f"ValueError: memory {SAME} None on rank 0, an argument on 2"),
    "no config": ({"config": 3}, "TypeError: rank 2: config must be a bipace_kernels.Config"),
    "backend": ({"backend": "cuda"}, "RuntimeError: rank 2: backend='cuda' cannot run here"),
    "value": ({"rewards": [0.0, 0.0, float("nan")]},
     "InputError: rewards must be finite (and within ±1e37), got nan at row 8;"),
    "state": ({"fingerprint": torch.zeros(3, 6)},
     "InputError: fingerprint must have finite, non-zero rows, got zeros, which have no direction, at rows 6, 7"),
    "twice": ({"step": [0, 1, 1]}, "InputError: step must be unique inside a trajectory, but rows 7 and 8 share"),
    "two groups": ({"group": [7, 7, 8]}, "InputError: trajectory must belong to one group, but rows 6 and 8 hold"),
    "object": ({"observation": [object()] * 3},
     "TypeError: rank 2: observation must hold str, bytes, numbers, None, UUIDs"),
    "id": ({"trajectory": [object()] * 3}, "TypeError: rank 2: trajectory must hold str, bytes, numbers, None, UUIDs"),
    "long": ({"observation": ["a", "b" * 32_769, "c"]},
     "InputError: rank 2: observation must hold texts of at most longest_text"),
    "own term, exact": ({},
     "ValueError: rank 0: fingerprint must be None with an estimator function and partition='exact'"),
    "own term": ({},
                 "ValueError: estimator reads_fingerprint raised ValueError on a batch (records: 9, rollouts: 3, "
                 "prompt "
     "groups: 1): an estimator function cannot read records.fingerprint in bipace_kernels.distributed"),
    "text": ({"observation": [1, 2, 3]}, "InputTypeError: rank 2: observation must hold str for partition='similar'"),
}  # fmt: skip
CONFIGURED = {
    "object": bk.Config.gigpo(),
    "memory": bk.Config.gae(share="memory"),
    "own term": bk.Config(estimator=reads_fingerprint),
    "own term, exact": OWN["own term, exact"],
    **dict.fromkeys(("text", "long"), bk.Config.gigpo(partition="similar")),
}


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def case_errors(group: Any) -> dict[str, str]:
    """The error on each rank when the last one does something wrong; the group works afterwards."""
    rank, said = dist.get_rank(group), {}
    for name, (change, _) in WRONG.items():
        given = {**small(rank), "config": CONFIGURED.get(name)}
        if rank == dist.get_world_size(group) - 1:
            given.update(change)
        said[name] = error_of(lambda given=given: distributed.advantage(**given, process_group=group))
    bad = distributed.advantage(**small(rank), process_group=group).with_bad_states
    said["bad states"] = error_of(lambda: bad(torch.zeros(3, dtype=torch.bool)))
    own = {**small(rank), "config": bk.Config(estimator=fails_on_the_last)}
    said["own term of one"] = error_of(lambda: distributed.advantage(**own, process_group=group))
    said["after"] = check_advantage(group, 3)
    return said


def case_owner(group: Any) -> str:
    """A failure in the middle of one owner's work is raised on all ranks."""
    owns = dist.get_rank(group) == int(distributed.plan_owners(torch.full((3, 1), 3))[0])
    error, work = MemoryError("no room") if owns else None, distributed._cluster
    with patch.object(distributed, "_cluster", wraps=work, side_effect=error):
        return error_of(lambda: distributed.advantage(**small(dist.get_rank(group)), process_group=group))


@contextlib.contextmanager
def counted(sent: dict[str, int]) -> Iterator[None]:
    """Counts the bytes of tensors that this rank hands to torch.distributed for other ranks."""
    to_owners, to_all = dist.all_to_all_single, dist.all_gather

    def count_owners(out: Any, mine: Any, receive: Any, send: Any, group: Any) -> Any:
        rows = sum(send) - send[dist.get_rank(group)]
        sent["owners"] += rows * mine.shape[1] * mine.element_size()
        return to_owners(out, mine, receive, send, group=group)

    def count_all(parts: Any, mine: Any, group: Any) -> Any:
        sent["all" if mine.shape[1] > 1 else "heads"] += mine.numel() * mine.element_size()
        return to_all(parts, mine, group=group)

    with patch.object(dist, "all_to_all_single", count_owners), patch.object(dist, "all_gather", count_all):
        yield


def case_bytes(group: Any) -> list[list[int]]:
    """[bytes to owners, to all, of heads] where groups straddle all ranks, and where ranks hold whole groups."""
    rank, n = dist.get_rank(group), 40
    found = []
    for groups in ([g for g in range(4) for _ in range(10)], [rank] * n):
        trajectory = [rank * 10 + g for g in groups]
        sent = {"owners": 0, "all": 0, "heads": 0}
        with counted(sent):
            distributed.advantage(
                groups, trajectory, [0.0] * n, step=list(range(n)), fingerprint=torch.randn(n, 512).bfloat16(),
                action_key=[1] * n, process_group=group,
            )  # fmt: skip
        found.append([sent["owners"], sent["all"], sent["heads"]])
    return found


def case_silent(group: Any) -> Any:
    """The last rank does not call: the others raise within the group's timeout."""
    late = dist.new_group(list(range(WORLD)), timeout=datetime.timedelta(seconds=2))
    if dist.get_rank() == WORLD - 1:
        time.sleep(6)
        return ""
    return error_of(lambda: distributed.advantage(**small(dist.get_rank()), process_group=late))


def case_dies(group: Any) -> Any:
    """The last rank exits in the middle of a call: the others raise at once."""
    if dist.get_rank() == WORLD - 1:
        distributed._check_own = lambda *_: os._exit(7)
    return error_of(lambda: distributed.advantage(**small(dist.get_rank()), process_group=group))


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # of metrics() on batches made to look odd
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=TIMEOUT)
    groups = {size: dist.new_group(list(range(WORLD - size, WORLD)), timeout=TIMEOUT) for size in range(1, WORLD + 1)}
    found: dict[str, Any] = {}
    for case in sys.argv[3:]:
        name, *numbers = case.split(":")
        size, *rest = map(int, numbers)
        if rank < WORLD - size:
            continue
        try:
            found[case] = globals()[f"case_{name}"](groups[size], *rest)
        except Exception:
            found[case] = {"failed": traceback.format_exc()}
        (folder / f"{rank}.json").write_text(json.dumps(found))
        if isinstance(found[case], dict) and "failed" in found[case]:
            break  # the others are elsewhere
    os._exit(0)  # without a word to ranks that are gone


if __name__ == "__main__":
    main()
