"""The runs, their order, and the tuning of each method.

Tuning: every method has a short run at each of the same learning rates, on a separate seed; the rate whose rollouts solved
most wins.  The choices are written to tuned.json, which final runs read; a method that is not in it has no final run yet.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from settings import MAIN, METHODS, Settings
from trainer import as_text, last_checkpoint

RATES = (3e-4, 6e-4, 1.2e-3)
TUNING_SEED = 100
TUNING_SHARE = 0.5  # of the updates of a final run
TUNING_SKIPPED = 0.25  # the first updates of a tuning run, which its score leaves out
SEEDS, FEWER_SEEDS = range(5), range(3)
FEWER_ROLLOUTS = (4, 2)
OF_FEWER_ROLLOUTS = ("grpo", "bipace", "gae")


@dataclass(frozen=True)
class Run:
    method: str
    seed: int
    settings: Settings
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.method}-g{self.settings.group}-seed{self.seed}"

    @property
    def path(self) -> Path:
        """There when the run is finished."""
        return self.folder / f"{self.name}.json"

    @property
    def work(self) -> Path:
        """Its checkpoints and its log, which are removed once it is finished."""
        return self.folder / "work" / self.name

    @property
    def done(self) -> bool:
        """ValueError where the file there is of other settings: runs of one folder are compared with each other."""
        if not self.path.exists():
            return False
        there, wanted = json.loads(self.path.read_text(encoding="utf-8"))["settings"], self.settings.as_json()
        other = [f"{name}={there.get(name)!r}" for name in wanted if there.get(name) != wanted[name]]
        if other:
            raise ValueError(f"{self.path} was made with other settings ({', '.join(other)}); use another --out.")
        return True

    def write(self, found: dict[str, Any]) -> None:
        """As a whole or not at all."""
        part = self.path.with_suffix(".part")
        part.write_text(as_text(found), encoding="utf-8")
        part.replace(self.path)


def repeated(path: Path, out: Path, run: Callable[[str, int, list[str], str], None]) -> list[str]:
    """Repeats the finished run of `path` by run(method, seed, settings as "name=value", device), which writes into `out`.

    Gives the parts whose numbers differ: "updates", "checks".
    """
    before = json.loads(path.read_text(encoding="utf-8"))
    change = [f"{name}={value}" for name, value in before["settings"].items()]
    run(before["method"], before["seed"], change, before["machine"]["device"])
    after = json.loads((out / path.name).read_text(encoding="utf-8"))
    return [part for part in ("updates", "checks") if before[part] != after[part]]


def tuning(method: str, settings: Settings, out: Path) -> list[Run]:
    short = settings.changed(updates=round(settings.updates * TUNING_SHARE), check_every=0)
    return [Run(method, TUNING_SEED, short.changed(learning_rate=rate), out / "tuning" / f"{rate:g}") for rate in RATES]


def score(found: dict[str, Any]) -> float:
    """Share of a finished run's rollouts that solved their task, without those of its first updates."""
    rows = found["updates"]
    kept = [row["train"] for row in rows[round(len(rows) * TUNING_SKIPPED) :]]
    return sum(kept) / len(kept)


def read_tuned(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def choose(method: str, settings: Settings, out: Path, tuned: Path) -> None:
    """Adds the method to tuned.json, once all its tuning runs are finished; existing entries are not changed."""
    found, runs = read_tuned(tuned), tuning(method, settings, out)
    if method in found or not all(run.done for run in runs):
        return
    found_by = ((run, json.loads(run.path.read_text(encoding="utf-8"))) for run in runs)
    scores = {run.settings.learning_rate: round(score(of_run), 4) for run, of_run in found_by}
    best = max(scores, key=lambda rate: scores[rate])
    found[method] = {"learning_rate": best, "scores": {f"{rate:g}": value for rate, value in scores.items()}}
    tuned.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def final(settings: Settings, out: Path, tuned: Path) -> Iterator[Run]:
    """Seed by seed over the main methods, so that any part of it compares them; then the rest."""
    chosen = read_tuned(tuned)

    def run(method: str, seed: int, group: int = settings.group) -> Iterator[Run]:
        if method in chosen:
            rate = chosen[method]["learning_rate"]
            yield Run(method, seed, settings.changed(learning_rate=rate, group=group), out)

    for seed in SEEDS:
        for method in MAIN:
            yield from run(method, seed)
    for seed in FEWER_SEEDS:
        for group in FEWER_ROLLOUTS:
            for method in OF_FEWER_ROLLOUTS:
                yield from run(method, seed, group)
    for seed in FEWER_SEEDS:
        for method in METHODS:
            if method not in MAIN:
                yield from run(method, seed)


def work_through(
    runs: Sequence[Run], program: Sequence[str], options: Sequence[str], processes: int, say: Callable[[str], None]
) -> list[Run]:
    """Runs what is not finished, `processes` at a time, each in a separate process; returns those that failed."""
    waiting = [run for run in runs if not run.done]
    running: dict[subprocess.Popen[bytes], tuple[Run, float]] = {}
    failed: list[Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                run = waiting.pop(0)
                run.work.mkdir(parents=True, exist_ok=True)
                say(
                    f"{run.name} ({run.settings.learning_rate:g}): {'goes on' if last_checkpoint(run.work) else 'begins'}"
                )
                given = [
                    part for name, value in run.settings.as_json().items() for part in ("--set", f"{name}={value}")
                ]
                whole = [sys.executable, *program, "run", "--method", run.method, "--seed", str(run.seed), "--out",
                         str(run.folder), *options, *given]  # fmt: skip
                with open(run.folder / "work" / f"{run.name}.log", "ab") as log:
                    running[subprocess.Popen(whole, stdout=log, stderr=subprocess.STDOUT)] = run, time.monotonic()
            time.sleep(0.1)
            for child, (run, begun) in list(running.items()):
                if child.poll() is None:
                    continue
                del running[child]
                if not run.path.exists():
                    failed.append(run)
                took = f"{(time.monotonic() - begun) / 60:.1f} minutes"
                say(f"{run.name}: {'finished' if run.path.exists() else 'FAILED'} after {took}, {len(waiting)} waiting")
    finally:
        for child in running:
            child.terminate()
    return failed


def complete(
    program: Sequence[str], options: Sequence[str], settings: Settings, out: Path, tuned: Path, methods: Sequence[str],
    plan: Callable[[Settings, Path, Path], Iterator[Run]], processes: int, say: Callable[[str], None], tune_only: bool = False,
) -> list[Run]:  # fmt: skip
    """Tuning of the methods that are not tuned, then the runs of the plan; gives those that failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended too
    chosen = read_tuned(tuned)
    missing = [run for method in methods if method not in chosen for run in tuning(method, settings, out)]
    failed = work_through(missing, program, options, processes, say)
    for method in methods:
        choose(method, settings, out, tuned)
    if tune_only:
        return failed
    return failed + work_through(
        [run for run in plan(settings, out, tuned) if run.method in methods], program, options, processes, say
    )
