"""`python -m bench [STAGE ...] [--quick] [--threads N] [--out DIR]`, also `bipace bench`.

Separate programs in addition to the stages: see PROGRAMS.
"""

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Sequence

from bipace_kernels.support import optional

from . import report, roofline, stages
from .measure import Effort, all_cores, threads

PROGRAMS = {
    "gpu": "the Triton and the CUDA backend on this machine's GPU; in a checkout only",
    "resources": "registers, spills and shared memory of the Triton kernels, or of the CUDA kernels; needs no GPU",
    "sass": "instructions and modelled cycles of the CUDA scan and of its workers; needs nvcc, no GPU",
    "bits": "digests of the CPU's results over random batches, to compare two builds",
    "distributed": "one batch on several processes, against one process",
    "hidden": "the cost of hidden states in a forward that a trainer runs anyway",
    "truth": "advantages against true ones, on committed rollouts",
    "trainers": "what the adapters add to a training step; needs TRL and verl",
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
            cure = 'install the package there with pip install -e ".[cli]"'
            sys.stderr.write(f"error: bench {words[0]} needs files of a checkout of the repository: {cure}\n")
            return 2
        return int(importlib.import_module(module).main(words[1:]))
    arguments = _parser().parse_args(words)
    # Not above: `bench gpu` runs on machines that have torch, Triton and little else.
    optional.need("rich", "bench")
    if arguments.out is not None:
        optional.need("matplotlib", "bench --out")
    from rich.console import Console
    from rich.progress import Progress

    quick, clock = arguments.quick, time.process_time if arguments.threads == 1 else time.perf_counter
    efforts = [Effort(arguments.rounds, seconds, clock=clock) for seconds in (6.0, 10.0)]
    if quick:
        efforts = [Effort(rounds=2, seconds=0.5, fewest=2, clock=clock, flush_bytes=1 << 16)] * 2
    chosen = list(stages.STAGES) if "all" in arguments.stages else list(dict.fromkeys(arguments.stages))  # once each
    results, calls = stages.Results(), iter(range(1, sys.maxsize))
    progress = Progress(*Progress.get_default_columns()[:2], "{task.completed}/{task.total} {task.description} "
                        "[dim]{task.fields[calls]} calls[/]", console=Console(stderr=True), transient=True)  # fmt: skip
    with threads(arguments.threads) as on, progress:
        on["thread_note"] += "; all times are CPU time of the process" * (arguments.threads == 1)
        task = progress.add_task("measuring the machine's ceilings", total=len(chosen), calls=0)
        context = stages.Context(
            quick, arguments.threads, *efforts, results,
            say=lambda text: progress.update(task, description=text),
            tick=lambda: progress.update(task, calls=next(calls)),
        )  # fmt: skip
        ceilings = roofline.measure(quick=quick, clock=clock)
        for name in chosen:
            stages.STAGES[name](context)
            progress.advance(task)
        context.say("measuring the machine's ceilings again")
        ceilings = roofline.best(ceilings, roofline.measure(quick=quick, clock=clock))
    results.hold_against(ceilings)
    reached = stages.targets(stages.Results() if quick else results)  # tiny sizes say nothing about a promise
    document = stages.document(on, ceilings, results, reached)
    pictures: list[str] = []
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        pictures = report.draw(arguments.out, document)
    report.publish("bench", document, stages.as_markdown(document, reached, pictures), arguments.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = report.parser("", "Benchmarks bipace_kernels against common alternatives.",
                           writes="bench.json, bench.md and pictures", quick="tiny sizes")  # fmt: skip
    programs = "; ".join(f"bench {name}: {what}" for name, what in PROGRAMS.items())
    parser.epilog = f"Separate programs, each with --help: {programs}."
    parser.add_argument("stages", nargs="*", default="all", choices=[*stages.STAGES, "all"], metavar="STAGE",
                        help=f"any of {', '.join(stages.STAGES)}, or all (the default)")  # fmt: skip
    sides = "of each side (%(default)s); with 1, all times are CPU time"
    parser.add_argument("--threads", type=_positive, default=all_cores(), metavar="N", help=sides)
    parser.add_argument("--rounds", type=_positive, default=15, metavar="N", help="calls of each side at most (15)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
