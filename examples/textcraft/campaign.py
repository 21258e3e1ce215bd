"""The runs, their order, and the tuning of each method.

Tuning: every method has a short run at each of the same learning rates, on a separate seed; the rate whose rollouts
solved most wins.  Where that is the lowest rate tried, half of it is tried too, until a lower one is no better.  Then a
method with λ or ε has a run at each of the other values of that, which must beat the default by a margin. The choices
are written to tuned.json, which final runs read; a method that is not in it has no final run yet.
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

from settings import MAIN, METHODS, OWN, Settings
from trainer import as_text, last_checkpoint

RATES = (3e-4, 6e-4, 1.2e-3)
TUNING_SEED = 100
TUNING_SHARE = 0.5  # of the updates of a final run
TUNING_SKIPPED = 0.25  # the first updates of a tuning run, which its score leaves out
MARGIN = 0.02  # of the score, by which another λ or ε must beat the default: about a standard error of their difference
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
        there = json.loads(self.path.read_text(encoding="utf-8"))["settings"]
        if other := self.settings.differ(there, self.settings.as_json()):
            raise ValueError(f"{self.path} was made with other settings ({', '.join(other)}); use another --out.")
        return True

    def write(self, found: dict[str, Any]) -> None:
        write_whole(self.path, as_text(found))


def write_whole(path: Path, text: str) -> None:
    """As a whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def repeated(path: Path, out: Path, run: Callable[[str, int, list[str], str], None]) -> list[str]:
    """Repeats the finished run of `path` by run(method, seed, settings as "name=value", device), which writes into
    `out`.

    Gives the parts whose numbers differ: "updates", "checks".
    """
    before = json.loads(path.read_text(encoding="utf-8"))
    change = [f"{name}={value}" for name, value in before["settings"].items()]
    run(before["method"], before["seed"], change, before["machine"]["device"])
    after = json.loads((out / path.name).read_text(encoding="utf-8"))
    return [part for part in ("updates", "checks") if before[part] != after[part]]


def tuning(method: str, settings: Settings, out: Path, rates: Sequence[float] = RATES) -> list[Run]:
    """One run for each learning rate."""
    short = settings.changed(updates=round(settings.updates * TUNING_SHARE), check_every=0)
    return [Run(method, TUNING_SEED, short.changed(learning_rate=rate), out / "tuning" / f"{rate:g}") for rate in rates]


def lower(choice: dict[str, Any]) -> tuple[float, ...]:
    """Half of the chosen learning rate where that is the lowest one tried, else none."""
    tried = [float(rate) for rate in choice["scores"]]
    return (choice["learning_rate"] / 2,) if choice["learning_rate"] <= min(tried) else ()


def tuning_own(method: str, rate: float, settings: Settings, out: Path) -> dict[Any, Run]:
    """The runs of a method's own parameter at its learning rate, by value, the default first; empty where it has
    none."""
    if method not in OWN:
        return {}
    name, values = OWN[method]
    (default,) = tuning(method, settings, out, [rate])
    others = {
        value: Run(method, TUNING_SEED, default.settings.changed(**{name: value}), out / "tuning" / f"{name}={value}")
        for value in values[1:]
    }
    return {values[0]: default, **others}


def score(found: dict[str, Any]) -> float:
    """Share of a finished run's rollouts that solved their task, without those of its first updates."""
    rows = found["updates"]
    kept = [row["train"] for row in rows[round(len(rows) * TUNING_SKIPPED) :]]
    return sum(kept) / len(kept)


def read_tuned(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def choose(method: str, settings: Settings, out: Path, tuned: Path) -> None:
    """Adds to tuned.json what the method's finished tuning runs decide; what is decided already is not changed."""
    found = read_tuned(tuned)
    if method not in found:
        runs = tuning(method, settings, out)
        if not all(run.done for run in runs):
            return
        scores = {f"{run.settings.learning_rate:g}": _scored(run) for run in runs}
        best = max(runs, key=_scored).settings.learning_rate  # of equal ones the lowest
        found[method] = {"learning_rate": best, "scores": scores}
    choice = found[method]
    for run in tuning(method, settings, out, lower(choice)):
        if run.done:
            if (solved := _scored(run)) > max(choice["scores"].values()):
                choice["learning_rate"] = run.settings.learning_rate
                for name in (OWN[method][0], f"{OWN[method][0]}_scores") if method in OWN else ():
                    choice.pop(name, None)  # were found at the former rate
            choice["scores"] = {f"{run.settings.learning_rate:g}": solved, **choice["scores"]}
    own = {} if lower(choice) else tuning_own(method, choice["learning_rate"], settings, out)
    if own and not _own_decided(method, choice) and all(run.done for run in own.values()):
        name = OWN[method][0]
        by_value = {value: _scored(run) for value, run in own.items()}
        default = next(iter(by_value))
        best = max(by_value, key=lambda value: by_value[value])
        if by_value[best] < by_value[default] + MARGIN:
            best = default
        choice |= {name: best, f"{name}_scores": {str(value): one for value, one in by_value.items()}}
    write_whole(tuned, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def _own_decided(method: str, choice: dict[str, Any]) -> bool:
    """Whether the scores there are of all values of the method's own parameter."""
    name, values = OWN[method]
    return set(choice.get(f"{name}_scores", ())) == {str(value) for value in values}


def _scored(run: Run) -> float:
    return round(score(json.loads(run.path.read_text(encoding="utf-8"))), 4)


def chosen(settings: Settings, tuned: dict[str, Any]) -> Settings:
    """The settings with a method's choices, its entry in tuned.json."""
    names = settings.as_json()
    return settings.changed(**{name: value for name, value in tuned.items() if name in names})


def final(settings: Settings, out: Path, tuned: Path) -> Iterator[Run]:
    """Seed by seed over the main methods, so that any part of it compares them; then the rest."""
    choices = read_tuned(tuned)

    def run(method: str, seed: int, group: int = settings.group) -> Iterator[Run]:
        if method in choices:
            yield Run(method, seed, chosen(settings, choices[method]).changed(group=group), out)

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
                    f"{run.name} ({run.settings.learning_rate:g}): "
                    f"{'goes on' if last_checkpoint(run.work) else 'begins'}"
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
    plan: Callable[[Settings, Path, Path], Iterator[Run]], processes: int, say: Callable[[str], None],
    tune_only: bool = False,
) -> list[Run]:  # fmt: skip
    """Tuning of the methods that are not tuned, then the runs of the plan; gives those that failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended too
    failed: list[Run] = []
    for undecided in (_rates, _own):
        while not failed:  # a lower learning rate follows from the runs before it
            missing = [run for method in methods for run in undecided(method, settings, out, read_tuned(tuned))]
            if not missing:
                break
            failed += work_through(missing, program, options, processes, say)
            for method in methods:
                choose(method, settings, out, tuned)
    if failed or tune_only:
        return failed
    return work_through(
        [run for run in plan(settings, out, tuned) if run.method in methods], program, options, processes, say
    )


def _rates(method: str, settings: Settings, out: Path, choices: dict[str, Any]) -> list[Run]:
    return tuning(method, settings, out, lower(choices[method]) if method in choices else RATES)


def _own(method: str, settings: Settings, out: Path, choices: dict[str, Any]) -> list[Run]:
    """None where the learning rate, which these runs need, is not chosen."""
    if method not in choices or method not in OWN or _own_decided(method, choices[method]):
        return []
    return list(tuning_own(method, choices[method]["learning_rate"], settings, out).values())
