"""`python -m bench distributed [--ranks 2] [--out DIR]`: one batch whose rows are on several processes."""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import bipace_kernels as bk

from .measure import threads
from .report import about, page, parser, publish, table
from .workloads import TINY, TRAINING, Shape, fingerprints, steps

Tensor = torch.Tensor
ABOUT = """\
Every rank has one thread, and holds its part of the batch. Sides take turns, and each call starts at a barrier: the
time is that of the slowest rank, the CPU time that of all ranks together. Before anything is timed, the results of
every side are compared with those of one process, bit for bit.

- **one process**: `bk.advantage()` on all rows, which it holds already, with as many threads as there are ranks.
- **to one rank**: what a trainer does without this: fingerprints gathered on rank 0, `bk.advantage()` there with as
  many threads as there are ranks, advantages scattered.
- **bk.distributed**: `bk.distributed.advantage()`. "whole groups": each rank holds whole prompt groups, so no
  fingerprint moves; "straddling": trajectories are dealt to the ranks, so that every group straddles them.
- **labels known**: of it, what every rank does for all rows: `bk.advantage()` with one thread, clusters given.
"""
CONFIG = bk.Config.bipace(0.10)


def batch_of(shape: Shape) -> dict[str, Any]:
    """The arguments of all rows, in processing order."""
    batch = steps(shape)
    return {
        "group": torch.from_numpy(batch.group), "trajectory": torch.from_numpy(batch.trajectory),
        "step": torch.from_numpy(batch.step), "rewards": torch.from_numpy(batch.rewards),
        "fingerprint": fingerprints(batch, dtype=torch.bfloat16), "action_key": torch.from_numpy(batch.action_key),
    }  # fmt: skip


class Bench:
    """The sides, on one rank."""

    def __init__(self, rank: int, size: int, shape: Shape) -> None:
        self.rank, self.size, self.shape = rank, size, shape
        whole = batch_of(shape)
        # In rank order: all rows of rank 0, then those of rank 1.  Groups by halves, trajectories in turns.
        at = {"whole groups": whole["group"] * size // shape.groups, "straddling": whole["trajectory"] % size}
        order = {name: torch.argsort(of, stable=True) for name, of in at.items()}
        self.whole = {name: {key: value[rows] for key, value in whole.items()} for name, rows in order.items()}
        self.rows = {name: torch.nonzero(of[order[name]] == rank).flatten() for name, of in at.items()}
        self.mine = {name: {key: value[self.rows[name]] for key, value in self.whole[name].items()} for name in at}
        counts = torch.zeros(size, shape.groups, dtype=torch.int64)  # records of each group on each rank
        counts.index_put_((at["straddling"], whole["group"]), torch.tensor(1), accumulate=True)
        stays = int(counts[bk.distributed.plan_owners(counts), torch.arange(shape.groups)].sum())
        self.moved = {"whole groups": 0, "straddling": shape.records - stays}
        self.labels = bk.cluster(
            whole["fingerprint"], whole["group"], CONFIG.epsilon, trajectory=whole["trajectory"], step=whole["step"]
        )
        self.room = torch.empty_like(whole["fingerprint"])
        self.known = {**whole, "fingerprint": None, "observation": self.labels}

    def alone(self) -> Tensor | None:
        if self.rank:
            return None
        return bk.advantage(**self.whole["straddling"], config=CONFIG, num_threads=self.size).advantage

    def to_one_rank(self) -> Tensor:
        count = self.shape.records // self.size  # ranks hold equal numbers of rows here
        out, shares = torch.empty(count), None
        parts = list(self.room.split(count)) if self.rank == 0 else None
        dist.gather(self.mine["straddling"]["fingerprint"], parts)
        if self.rank == 0:
            whole = {**self.whole["straddling"], "fingerprint": self.room}
            shares = list(bk.advantage(**whole, config=CONFIG, num_threads=self.size).advantage.split(count))
        dist.scatter(out, shares)
        return out

    def distributed(self, split: str) -> Tensor:
        return bk.distributed.advantage(**self.mine[split], config=CONFIG, num_threads=1).advantage

    def labels_known(self) -> Tensor | None:
        if self.rank:
            return None
        return bk.advantage(**self.known, config=bk.Config.bipace(partition="exact"), num_threads=1).advantage

    def run(self, rounds: int) -> list[dict[str, Any]]:
        """Milliseconds of each side, CPU time of all ranks together, and MiB of fingerprints that change ranks."""
        sides: dict[str, Callable[[], Tensor | None]] = {
            "one process": self.alone,
            "to one rank": self.to_one_rank,
            **{f"bk.distributed, {name}": lambda name=name: self.distributed(name) for name in self.mine},
            "labels known": self.labels_known,
        }
        self._check()
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in sides}  # of wall clock and CPU
        for round_ in range(rounds + 1):  # the first warms up
            for name, call in sides.items():
                dist.barrier()
                cpu, began = time.process_time(), time.perf_counter()
                call()
                took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
                spent = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                dist.all_reduce(spent, dist.ReduceOp.SUM)
                if round_:
                    times[name][0].append(float(took) * 1e3)
                    times[name][1].append(float(spent) * 1e3)
        moved = {"to one rank": self.shape.records * (self.size - 1) // self.size}
        moved |= {f"bk.distributed, {name}": rows for name, rows in self.moved.items()}
        mib = self.shape.dim * 2 / 2**20
        rows = []
        for name, (wall, cpu) in times.items():
            row = {"name": name, "median_ms": statistics.median(wall), "fastest_ms": min(wall)}
            row |= {"cpu_ms": statistics.median(cpu), "rounds": rounds, "moved_mib": moved.get(name, 0) * mib}
            rows.append(row)
        return rows

    def _check(self) -> None:
        """Raises where a side does not give the bits of one process."""
        for split, rows in self.rows.items():
            want = bk.advantage(**self.whole[split], config=CONFIG).advantage[rows]
            if not torch.equal(self.distributed(split), want):
                raise RuntimeError(f"the advantages of split {split!r} are not those of one process")
        if not torch.equal(self.to_one_rank(), want):
            raise RuntimeError("the advantages gathered on one rank are not those of one process")


def _rank(rank: int, size: int, shape: Shape, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    rows = Bench(rank, size, shape).run(rounds)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows the table, writes distributed.json and distributed.md."""
    options = parser("distributed", "One batch on several processes (gloo).",
                     writes="distributed.json and distributed.md", quick="a tiny batch")  # fmt: skip
    options.add_argument("--ranks", type=int, default=2, metavar="N", help="processes of one thread (%(default)s)")
    options.add_argument("--rounds", type=int, default=15, metavar="N", help="calls of each side (%(default)s)")
    arguments = options.parse_args(argv)
    shape, rounds = (TINY, 2) if arguments.quick else (TRAINING[0], arguments.rounds)
    with tempfile.TemporaryDirectory() as folder, threads(arguments.ranks) as on:
        mp.spawn(_rank, (arguments.ranks, shape, rounds, folder), nprocs=arguments.ranks)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    columns = {
        "side": "{name}", "median ms": "{median_ms:.3g}", "fastest ms": "{fastest_ms:.3g}",
        "CPU ms of all ranks": "{cpu_ms:.3g}", "rounds": "{rounds}", "fingerprints that move, MiB": "{moved_mib:.1f}",
    }  # fmt: skip
    size = f"{arguments.ranks} ranks (gloo); {shape.records:,} records, {shape.text()}, bfloat16."
    document = {"schema": 1, "machine": on, "shape": asdict(shape), "ranks": arguments.ranks, "rows": rows}
    text = page("Several processes", about(on), size, ABOUT, table(columns, rows))
    publish("distributed", document, text, arguments.out)
    return 0
