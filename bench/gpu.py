"""`python -m bench gpu [PART ...] [--out DIR]`: the estimator on a GPU, with the floor under every figure.

A part is what one process measures; bench/gpu.sh gives each its own, so that a part that dies takes no other with it.
"""

import argparse
import dataclasses
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bipace_kernels as bk

from . import competitors as c, gpu_checks, gpu_hidden, gpu_report, gpu_stages, workloads as w
from .gpu_cases import BACKENDS, SWEEP, Batch, absent, dry_cuda, expected
from .gpu_measure import Clock, DryClock, gpu
from .gpu_report import CLUSTERING, COMMUNITIES, LOOP, WHOLE, by
from .gpu_rows import EAGER, WALL, Bench, Part
from .measure import all_cores, now, threads
from .stages import NUMPY, NUMPY_POOL, OURS

SHORT, LARGE, LONG = w.ON_GPU
CLUSTERS = (16, 128, 512, 2048)  # that one decision is measured among


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts one after another, writes gpu.json and gpu.md after every figure; 1 where something failed."""
    arguments = _parser().parse_args(argv)
    if arguments.targets:
        _tell(*gpu_report.verdicts(gpu_report.load(arguments.out / "gpu.json")))
        return 0
    if arguments.merge:
        parts = gpu_report.merged(p for folder in arguments.merge for p in gpu_report.load(folder / "gpu.json"))
        _tell(*(f"wrote {path}" for path in gpu_report.write(arguments.out, parts)))
        return 0
    if not arguments.dry and not torch.cuda.is_available():
        _tell("not measured: torch sees no GPU here (--dry goes through the motions without one)")
        return 0 if not arguments.parts else 1
    if arguments.dry:
        dry_cuda()
    if arguments.watched:
        gpu_checks.watched()
    failed = [name for name in arguments.parts or DEFAULT if not _run(name, arguments)]
    if failed:
        _tell(f"FAILED: {', '.join(failed)}")
    return int(bool(failed))


def _run(name: str, arguments: argparse.Namespace) -> bool:
    """One part; results are written to the files immediately."""
    file, here, began = arguments.out / "gpu.json", gpu(), time.monotonic()
    # A page of another GPU is refused before anything is measured.
    gpu_report.merged([*gpu_report.load(file), {"name": "", "gpu": here}])
    with threads(all_cores()) as about:
        about["commit"] = arguments.commit or about["commit"]
        part = Part(name, about, here, now())

        def save() -> None:
            part.seconds = time.monotonic() - began
            others = [p for p in gpu_report.load(file) if p["name"] != name]  # watched programs write theirs meanwhile
            gpu_report.write(arguments.out, [*others, dataclasses.asdict(part)])

        save()
        try:
            if name in CHECKS:
                fine = CHECKS[name](gpu_checks.Run(part, arguments.out, arguments.seconds, arguments.limit,
                                                   arguments.dry, save, _tell))  # fmt: skip
            else:
                fine = _measure(name, part, arguments, save)
        except Exception as error:  # what it found before stays; the parts after it still run
            _tell(traceback.format_exc())
            fine = False
            part.lines.append(f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        if arguments.dry:
            part.status = "dry run"
        elif part.status == "running":
            part.status = "done" if fine else "failed"
        save()
    return fine


def _measure(name: str, part: Part, arguments: argparse.Namespace, save: Callable[[], None]) -> bool:
    clock: Clock | DryClock = DryClock() if arguments.dry else Clock()
    ceilings = clock.ceilings()
    part.ceilings = dataclasses.asdict(ceilings)
    save()
    bench = Bench(part, clock, ceilings, seconds=arguments.seconds, save=save, say=_tell)
    PARTS[name](bench, arguments.dry)
    return bench.failures == 0


def _shapes(shape: w.Shape, *, dry: bool) -> list[w.Shape]:
    """The promised number of states, then N/4 and one per record; tiny ones where nothing is measured."""
    if dry:
        shape = dataclasses.replace(w.TINY, name=shape.name)
    return [dataclasses.replace(shape, states=k) for k in (shape.states, shape.per_group // 4, shape.per_group)]


def _title(shape: w.Shape) -> str:
    return f"{shape.name}, K = {shape.states:,}"


def _make(shape: w.Shape, dry: bool) -> Batch:
    gc.collect()  # the batch before is gone, and with it most of the device's memory in use
    if not dry:
        torch.cuda.empty_cache()
    return Batch(shape, torch.device("cpu" if dry else "cuda"), tokens=48 if dry else 512)


def _backends(bench: Bench, at: str) -> Iterator[str]:
    """Backends that run here; a row gives the reason for the others, which is a failure where they should run."""
    for backend in BACKENDS:
        if why := absent(backend):
            bench.absent(at, by(backend, "all of it"), why)
            bench.failures += expected(backend)
        else:
            yield backend


def one_case(
    bench: Bench, dry: bool, *, shape: w.Shape, case: Callable[[Batch, str], gpu_stages.Case], backend: str
) -> None:
    """One figure of one backend, replayed and eager: a call that synchronizes cannot be replayed."""
    gpu_checks.phase("preparing")
    x = _make(_shapes(shape, dry=dry)[0], dry)
    name, call, need, check = made = case(x, backend)
    gpu_checks.phase("running")
    _rows(bench, x, backend, [made])
    bench.row(_title(x.shape), by(backend, name), call, how=EAGER, need=need, check=check, rounds=30)


def _rows(bench: Bench, x: Batch, backend: str, cases: Iterable[gpu_stages.Case]) -> None:
    for name, call, need, check in cases:
        row = bench.row(_title(x.shape), by(backend, name), call, need=need, check=check)
        if name == gpu_report.DECISIONS and row.median_ms:
            bench.note(f"{row.median_ms * 1e6 / x.shape.per_group:.0f} ns a record")


def first(run: gpu_checks.Run) -> bool:
    """The figures that a first run is for; a process for each."""
    more = ["--out", str(run.folder), "--seconds", f"{run.limit:g}"]
    found = [run.watch(name, [str(__package__), "gpu", name, *more]) for name in FIRST]
    return all(found)


def batches(bench: Bench, dry: bool, shape: w.Shape) -> None:
    """One of the promised sizes: the whole chain replayed and eager, only clustering, competitors."""
    for i, with_states in enumerate(_shapes(shape, dry=dry)):
        _batch(bench, with_states, dry, compared=i == 0)


def _batch(bench: Bench, shape: w.Shape, dry: bool, *, compared: bool) -> None:
    bench.say(f"making {_title(shape)}")
    x = _make(shape, dry)
    at = _title(shape)
    for backend in _backends(bench, at):
        _rows(bench, x, backend, [gpu_stages.clustering(x, backend), gpu_stages.with_keys(x, backend)])
        try:
            name, whole, need, check = gpu_stages.whole(x, backend)
        except ImportError as error:
            bench.absent(at, by(backend, WHOLE), f"the responses need tokenizers and transformers: {error}")
            continue
        made = partial(x.chain_with_layout_made, backend)
        bench.row(at, by(backend, name), whole, need=need, check=check)
        for what, call, rounds, note in ((name, whole, 30, "layout made before"),
                                         (f"{name}, and the layout", made, 10, "ids on the host")):  # fmt: skip
            bench.row(at, by(backend, what), call, how=EAGER, need=need, rounds=rounds, note=note)
    if compared:
        _others(bench, x, at)
    else:
        bench.row(at, f"{OURS}, CPU, clustering", x.cpu_cluster, kind="competitor", how=WALL, check=x.check_labels,
                  rounds=3, seconds=20, warm_up=False)  # fmt: skip


def _others(bench: Bench, x: Batch, at: str) -> None:
    """Common alternatives, and our own CPU backend; only clustering, since the loops do nothing else."""
    quick = x.shape.records <= 10_000
    rounds = 5 if quick else 2
    cores = f"{all_cores()} cores"
    sides: list[tuple[str, Callable[[], Any], str]] = [
        (f"{OURS}, CPU, clustering", x.cpu_cluster, cores),
        (NUMPY, x.numpy, cores),
        (NUMPY_POOL, x.numpy_pool, f"{cores}; as many groups at a time as there are threads"),
        (LOOP, x.torch_loop, ""),
        (COMMUNITIES, x.communities, "another algorithm: largest neighbourhoods first, no centroids"),
    ]
    try:
        c.community_detection()  # importing it takes seconds that are not its own
    except ImportError as error:
        bench.absent(at, COMMUNITIES, str(error))
        sides.pop()
    for name, call, note in sides:
        bench.row(at, name, call, kind="competitor", how=WALL, need=x.cluster_need, check=x.check_labels,
                  note=note, rounds=rounds, seconds=20.0, warm_up=quick)  # fmt: skip
        _say_ratios(bench)
    bench.row(at, f"{OURS}, CPU, BiPACE with given keys", x.cpu_advantage, kind="competitor", how=WALL,
              need=x.advantage_need, note=cores, rounds=rounds, seconds=20.0, warm_up=quick)  # fmt: skip
    _say_ratios(bench)


def _say_ratios(bench: Bench) -> None:
    """In the last row: its ratio to ours."""
    last = bench.part.rows[-1]
    if last["median_ms"] is None:
        return
    for backend in BACKENDS:
        for what in (CLUSTERING, WHOLE):
            if ours := bench.median(last["workload"], name := by(backend, what)):
                bench.note(f"{last['median_ms'] / ours:,.3g}× {name}")


def sweep(bench: Bench, dry: bool) -> None:
    """32 thresholds at once against one clustering, 16 × 400."""
    shape = _shapes(SHORT, dry=dry)[0]
    x = _make(shape, dry)
    at = _title(shape)
    epsilons = SWEEP[::8] if dry else SWEEP
    need = dataclasses.replace(x.cluster_need, bytes=x.cluster_need.bytes + 8 * shape.records * (len(epsilons) - 1))
    for backend in _backends(bench, at):
        _rows(bench, x, backend, [gpu_stages.clustering(x, backend)])
        bench.row(at, by(backend, gpu_report.SWEEP), partial(gpu_stages.sweep, x, epsilons, backend), need=need,
                  check=lambda found: gpu_stages.check_sweep(x, found, epsilons))  # fmt: skip
        call = partial(bk.cluster, x.fingerprint, None, epsilons, layout=x.layout, backend=backend)
        bench.row(at, by(backend, "bk.cluster with a tensor of 32 ε"), call, how=EAGER, rounds=20, need=need)


def stages(bench: Bench, dry: bool) -> None:
    """Each stage separately, on both promised batches; and the scan of one group over more and more clusters."""
    for shape in (SHORT, LARGE):
        x = _make(_shapes(shape, dry=dry)[0], dry)
        for backend in _backends(bench, _title(x.shape)):
            _rows(bench, x, backend, gpu_stages.stages(x, backend))
    for k in CLUSTERS:
        x = _make(dataclasses.replace(w.TINY, groups=1) if dry else dataclasses.replace(w.ONE_GROUP, states=k), dry)
        for backend in _backends(bench, _title(x.shape)):
            _rows(bench, x, backend, [gpu_stages.decisions(x, backend)])


def others(bench: Bench, dry: bool) -> None:
    """Presets without fingerprints, ε = 0, the critic's values over the batch and over prompt groups."""
    x = _make(_shapes(SHORT, dry=dry)[0], dry)
    for backend in _backends(bench, _title(x.shape)):
        values = [gpu_stages.gae(x, backend, share) for share in ("batch", "group")]
        _rows(bench, x, backend, [*gpu_stages.presets(x, backend), *values])


def hidden(bench: Bench, dry: bool) -> None:
    """Taps and early exit at Qwen2.5-7B's shape, random weights."""
    try:
        gpu_hidden.run(bench, torch.device("cpu" if dry else "cuda"), dry=dry)
    except ImportError as error:
        bench.absent("hidden states", "tap and early exit", str(error))


def _of_both(name: str, call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A part for each backend: the CUDA kernels' first, as they are the ones that nothing has run yet."""
    return {f"{name}-cuda": partial(call, backend="cuda"), name: partial(call, backend="triton")}


FIRST: dict[str, Callable[[Bench, bool], None]] = {
    part: call
    for name, shape, case in (
        ("clustering", SHORT, gpu_stages.clustering),
        ("decisions-400", dataclasses.replace(SHORT, name="1x400", groups=1), gpu_stages.decisions),
        ("decisions-2048", dataclasses.replace(w.ONE_GROUP, states=LARGE.states), gpu_stages.decisions),
        ("gae", SHORT, gpu_stages.gae),
        ("chain", SHORT, gpu_stages.whole_or_with_keys),
    )
    for part, call in _of_both(f"first-{name}", partial(one_case, shape=shape, case=case)).items()
}
PARTS: dict[str, Callable[[Bench, bool], None]] = {
    "ceilings": lambda *_: None,  # only what every part measures first: copy, product, empty graph
    "short": partial(batches, shape=SHORT),
    "sweep": sweep,
    "stages": stages,
    "large": partial(batches, shape=LARGE),
    "long": partial(batches, shape=LONG),
    "others": others,
    "hidden": hidden,
    **FIRST,
}
DEFAULT = [name for name in PARTS if name not in FIRST]
CHECKS: dict[str, Callable[[gpu_checks.Run], bool]] = {
    "smoke": gpu_checks.smoke,
    "first": first,
    "accuracy": gpu_checks.accuracy,
    **_of_both("tests", gpu_checks.tests),
    **_of_both("sanitize", gpu_checks.sanitize),
}


def _parser() -> argparse.ArgumentParser:
    every = [*CHECKS, *PARTS]
    about = "Measures the Triton and the CUDA backend on the current GPU; writes gpu.json and gpu.md."
    parser = argparse.ArgumentParser(prog="bench gpu", description=about)

    def part(text: str) -> str:
        if text not in every:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(every)}, got {text!r}")
        return text

    parser.add_argument(
        "parts", nargs="*", metavar="PART", type=part, help=f"any of {', '.join(every)} (default: {', '.join(DEFAULT)})"
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=480.0, metavar="S", help="for each part (default: 480)")
    parser.add_argument("--limit", type=float, default=gpu_checks.LIMITS["running"], metavar="S",
                        help="for each check of smoke and first, after its preparation (%(default)s)")  # fmt: skip
    parser.add_argument("--watched", action="store_true", help=gpu_checks.WATCHED)
    parser.add_argument("--commit", default="", metavar="ID", help="of the sources, where this is no checkout")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, emulated: measures nothing")
    parser.add_argument("--targets", action="store_true", help="only say which targets the figures in --out meet")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="DIR",
                        help="one gpu.json and gpu.md out of those in these folders; of a part, the later")  # fmt: skip
    return parser


def _tell(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)
