"""`python -m bench [STAGE ...] [--quick] [--threads N] [--out DIR]`, also `bipace bench`.

Separate programs in addition to the stages: see PROGRAMS.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bipace_kernels.support import optional

from . import report, roofline
from .measure import Effort, machine, threads
from .stages import STAGES, Context, Results, targets

if TYPE_CHECKING:
    from rich.progress import Progress

PROGRAMS = {
    "gpu": "the Triton and the CUDA backend on this machine's GPU; in a checkout only",
    "resources": "registers, spills and shared memory of the Triton kernels; needs no GPU",
    "cuda_resources": "registers, spills and shared memory of the CUDA kernels; needs nvcc, no GPU",
    "sass": "instructions and modelled cycles of one decision of the CUDA scan; needs nvcc, no GPU",
    "eager": "host time of a call on a GPU, with nothing launched; needs no GPU",
    "bits": "digests of the CPU's results over random batches, to compare two builds",
    "drift": "an ε that follows the policy against a fixed one; a simulation, nothing is timed",
    "distributed": "one batch on several processes, against one process",
    "hidden": "the cost of hidden states in a forward that a trainer runs anyway",
    "truth": "advantages against true ones, on committed rollouts",
    "trainers": "what the adapters add to a training step; needs TRL and verl",
    "trainer_steps": "whole steps of TRL with BiPACE, alternating with stock GRPO, and verl's calculation; needs TRL and verl",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the stages, shows the tables, writes the files. A missed target is shown; the exit status stays 0."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except optional.MissingPackageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _run(words: Sequence[str]) -> int:
    if words and words[0] in PROGRAMS:
        module = f"{__package__}.{words[0]}"
        if importlib.util.find_spec(module) is None:  # setup.py leaves some out of a wheel
            sys.stderr.write(f"error: bench {words[0]} needs a checkout of the repository\n")
            return 2
        return int(importlib.import_module(module).main(words[1:]))
    arguments = _parser().parse_args(words)
    # Not above: `bench gpu` runs on machines that have torch, Triton and little else.
    optional.need("rich", "bench")
    if arguments.out is not None:
        optional.need("matplotlib", "bench --out")
    from rich.console import Console

    chosen = list(STAGES) if "all" in arguments.stages else list(dict.fromkeys(arguments.stages))  # once each
    console = Console(width=None if sys.stdout.isatty() else 200)
    results = Results()
    with threads(arguments.threads) as note:
        about = machine(arguments.threads, note)
        with _progress() as bar:
            task = bar.add_task("measuring the machine's ceilings", total=len(chosen), calls=0)
            calls = 0

            def tick() -> None:
                nonlocal calls
                calls += 1
                bar.update(task, calls=calls)

            ceilings = roofline.measure(quick=arguments.quick)
            context = Context(
                quick=arguments.quick,
                threads=arguments.threads,
                effort=_effort(arguments, seconds=6.0),
                slow=_effort(arguments, seconds=10.0),
                results=results,
                say=lambda text: bar.update(task, description=text),
                tick=tick,
            )
            for name in chosen:
                STAGES[name](context)
                bar.advance(task)
            bar.update(task, description="measuring the machine's ceilings again")
            ceilings = roofline.best(ceilings, roofline.measure(quick=arguments.quick))
    results.hold_against(ceilings)
    reached = targets(Results() if arguments.quick else results)  # tiny sizes say nothing about a promise
    report.show(console, about, ceilings, results, reached)
    if arguments.out is not None:
        for path in report.write(arguments.out, about, ceilings, results, reached):
            console.print(f"wrote {path}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    programs = "; ".join(f"bench {name}: {what}" for name, what in PROGRAMS.items())
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Benchmarks bipace_kernels against common alternatives.",
        epilog=f"Separate programs, each with --help: {programs}.",
    )
    parser.add_argument("stages", nargs="*", default="all", choices=[*STAGES, "all"], metavar="STAGE",
                        help=f"any of {', '.join(STAGES)}, or all (the default)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, not how fast")
    parser.add_argument(
        "--threads", type=_positive, default=_cores(), metavar="N", help="for every side (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=_positive, default=15, metavar="N", help="calls of each side at most (default: 15)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write bench.json, bench.md and bench.png there")
    return parser


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _effort(arguments: argparse.Namespace, *, seconds: float) -> Effort:
    if arguments.quick:
        return Effort(rounds=2, seconds=0.5, fewest=2, flush_bytes=1 << 16)
    return Effort(rounds=arguments.rounds, seconds=seconds)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TextColumn("[dim]{task.fields[calls]} calls[/]"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


if __name__ == "__main__":
    sys.exit(main())
