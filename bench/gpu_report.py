"""gpu.json and gpu.md: parts measured by different processes, or on different days, on one page."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import report
from .gpu_rows import EAGER, REPLAY
from .report import Columns, Target, short, shorts, table
from .stages import NUMPY, NUMPY_POOL

SCHEMA = 2
WHOLE = "keys, returns, clustering, means, combination"
CLUSTERING = "only clustering"
STAGE = "clusters: rows, Gram, decisions, numbers"  # clustering as a stage, in one process with the three below
GRAM = "inside clusters: Gram matrices"
BY_WARPS = ", by warps"  # another way than the one that is taken, where groups of four warps feed the tensor cores
DECISIONS = "inside clusters: decisions, state apart"
KEYS = "action_keys: tags from token ids, hashed"
ACCURACY, TAP = "accuracy", "tap"  # figures of parts
SWEEP = "32 ε from 0.02 to 0.40"
LOOP = "torch loop on the GPU, one record at a time"
COMMUNITIES = "community_detection (sentence_transformers) on the GPU"

# Whole chain at 16 × 400, the same eager, whole chain at 64 × 2,048: milliseconds; NumPy loop over clustering at both.
LIMITS = {"triton": (0.5, 1.5, 10.0, 100.0, 100.0), "cuda": (0.18, 0.6, 4.0, 100.0, 1000.0)}

Part = Mapping[str, Any]


def by(backend: str, what: str) -> str:
    """The name of a backend's row."""
    return f"{backend}: {what}"


def load(path: Path) -> list[dict[str, Any]]:
    """The parts in a gpu.json; none if there is no such file."""
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {document.get('schema')!r}, this writes {SCHEMA}; use another folder")
    return list(document["parts"])


def merged(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last one of each name.  ValueError if they are from different kinds of GPU, which must not be compared."""
    last = list({part["name"]: part for part in parts}.values())
    names = sorted({part["gpu"]["name"] for part in last})
    if len(names) > 1:
        raise ValueError(f"a page holds figures of one kind of GPU, got {', '.join(names)}; use a folder for each")
    return last


def write(folder: Path, parts: Sequence[dict[str, Any]]) -> list[Path]:
    """gpu.json and gpu.md."""
    document = {"schema": SCHEMA, "targets": [t.asdict() for t in targets(parts)], "parts": list(parts)}
    return report.write(folder, "gpu", document, as_markdown(parts))


def targets(parts: Sequence[Part]) -> list[Target]:
    """The promises, on the planted batches; a dry run reaches none."""
    parts = [p for p in parts if p["status"] != "dry run"]
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in (r for p in parts for r in p["rows"] if r["kind"] in ("ours", "competitor")):
        rows.setdefault((row["workload"], row["name"], row["how"]), row)

    def ms(workload: str, name: str, how: str = REPLAY, figure: str = "median_ms") -> float | None:
        return rows.get((workload, name, how), {}).get(figure)

    def ratio(over: float | None, under: float | None) -> float | None:
        return over / under if over is not None and under else None

    def at_most(what: str, limit: float, value: float | None, unit: str = "×") -> Target:
        return Target(by(backend, what), limit, value, at_least=False, unit=unit)

    def at_least(what: str, limit: float, value: float | None) -> Target:
        return Target(by(backend, what), limit, value)

    small, large, long = "16x400, K = 20", "64x2048, K = 64", "1x32768, K = 512"
    out = []
    for backend, (whole, eager, much, *loops) in LIMITS.items():
        ours, clustering = by(backend, WHOLE), by(backend, CLUSTERING)
        out += [
            at_most("16 × 400 × 3,584, whole chain", whole, ms(small, ours), " ms"),
            at_most("the same, eager with a layout", eager, ms(small, ours, EAGER), " ms"),
            at_most("64 × 2,048 × 3,584, whole chain", much, ms(large, ours), " ms"),
        ]
        for workload, loop in zip((small, large), loops, strict=True):
            where = f"clustering of {workload.partition(',')[0].replace('x', ' × ')} against"
            numpy = [t for t in (ms(workload, name, "wall") for name in (NUMPY, NUMPY_POOL)) if t is not None]
            for what, limit, theirs in (
                ("the NumPy/BLAS loop, all cores", loop, min(numpy, default=None)),
                ("the torch loop on the GPU", 100.0, ms(workload, LOOP, "wall")),
                ("community_detection", 1.0, ms(workload, COMMUNITIES, "wall")),
            ):
                out.append(at_least(f"{where} {what}", limit, ratio(theirs, ms(workload, clustering))))
        swept = ratio(ms(small, by(backend, SWEEP)), ms(small, clustering))
        out.append(at_most("sweep of 32 ε at 16 × 400 over one clustering", 4.0, swept))

    backend = "cuda"
    gram, scan, stage, whole_chain = (by(backend, what) for what in (GRAM, DECISIONS, STAGE, WHOLE))
    out += [
        at_most("16 × 400 × 3,584, clustering", 0.12, ms(small, by(backend, CLUSTERING)), " ms"),
        at_most("1 × 32,768 × 3,584, whole chain", 40.0, ms(long, whole_chain), " ms"),
    ]
    for workload, title in ((small, "16 × 400"), (large, "64 × 2,048")):
        products, decisions = ms(workload, gram), ms(workload, scan)
        alone = products + decisions if products is not None and decisions is not None else None
        what = f"clustering of {title} over Gram matrices + decisions, each by itself"
        out.append(at_most(what, 1.3, ratio(ms(workload, stage), alone)))
    figures = {name: value for p in parts for name, value in p.get("figures", {}).items()}
    slowest = max((ns for k, ns in steps(parts, backend) if k <= 128), default=None)
    of_400 = ratio(ms("1x400, K = 20", scan), 400e-6)
    of_rate = ratio(ms(large, gram, figure="floor_flop_ms"), ms(large, gram))
    over_cuda = ratio(ms(small, by("triton", WHOLE)), ms(small, whole_chain))
    return [
        *out,
        at_most("largest |cosine − float64| in 16 × 400 × 3,584", 2e-6, figures.get(ACCURACY), ""),
        at_most("action keys of 6,400 × 512 tokens", 0.04, ms(small, by(backend, KEYS)), " ms"),
        at_most("tap over the log-prob forward at 7B shape", 0.5, figures.get(TAP), " %"),
        at_most("one decision in a group of 400 at K = 20", 150.0, of_400, " ns"),
        at_most("one decision in a group of 2,048 at K ≤ 128", 200.0, slowest, " ns"),
        at_least("Gram matrices of 64 × 2,048, only triangles, of the measured product's rate", 0.6, of_rate),
        at_least("16 × 400 × 3,584, whole chain: Triton's time over it", 1.5, over_cuda),
    ]


def steps(parts: Sequence[Part], backend: str) -> list[tuple[int, float]]:
    """(K, nanoseconds of a decision) of a backend's scan over one group, by K: its time over the group's records."""
    by_clusters = {}
    for row in (r for p in parts for r in p["rows"]):
        size = re.fullmatch(r"1x2048, K = ([\d,]+)", row["workload"])
        if size and row["name"] == by(backend, DECISIONS) and row["median_ms"] is not None:
            by_clusters[int(size[1].replace(",", ""))] = row["median_ms"] * 1e6 / 2048
    return sorted(by_clusters.items())


def verdicts(parts: Sequence[Part]) -> list[str]:
    """A line for each target, those that were met first, those that nobody measured last."""
    order = {True: "met", False: "MISSED", None: "not measured"}
    return [
        f"{word}: {t.name} {t.wanted}" + (f", measured {t.measured}" if t.measured else "")
        for met, word in order.items()
        for t in targets(parts)
        if t.met is met
    ]


_ROWS: Columns = {
    "workload": "{workload}", "what": "{name}", "how": "{how}",
    "ms": lambda r: "FAILED: " * (r["kind"] == "failed") + short(r["median_ms"]) if r["median_ms"] else r["kind"],
    "IQR": shorts("iqr_ms"), "rounds": "{rounds}", "bytes ms": shorts("floor_bytes_ms"),
    "FLOP ms": shorts("floor_flop_ms"), "floor ms": shorts("floor_ms"),
    "× floor": shorts("over_floor"), "SM MHz": lambda r: str(r.get("sm_mhz") or ""), "result": report.remark,
}  # fmt: skip
_BOTH: Columns = {
    "workload": "{workload}", "what": "{what}", "how": "{how}", "Triton ms": shorts("triton"),
    "CUDA ms": shorts("cuda"),
    "Triton over CUDA": lambda r: f"{r['triton'] / r['cuda']:.2f}×",
}  # fmt: skip


def as_markdown(parts: Sequence[Part]) -> str:
    machines = dict.fromkeys(f"- {_about(p)}" for p in parts)
    dry = any(p["status"] == "dry run" for p in parts)
    return report.page(
        "GPU results", "Written by `bench/gpu.sh`; what each row means is in `bench/README.md`.", list(machines),
        "**Dry run: no GPU took part, and no figure on this page is a measurement.**" if dry else "",
        "## Targets", report.target_table(targets(parts)), *(text for part in parts for text in _section(part)),
    )  # fmt: skip


def _about(part: Part) -> str:
    g, device = part["gpu"], "no GPU"
    if g["capability"]:
        device = (
            f"{g['name']} (sm_{g['capability'].replace('.', '')}, {g['multiprocessors']} multiprocessors, L2 "
            f"{g['l2_mib']:.0f} MiB, {g['memory_gib']} GiB, driver {g['driver']}, at most {g['clocks']})"
        )
    return (
        f"**{device}**; sources {g['sources']}, CUDA {g['cuda']}, Triton {g['triton']}, CUDA kernels: {g['kernels']}; "
        f"host: {report.about(part['machine'])}"
    )


def _section(part: Part) -> list[str | list[str]]:
    out: list[str | list[str]] = [f"## {part['name']}", f"{part['status']}, {part['began']}, {part['seconds']:.0f} s"]
    if x := part["ceilings"]:
        out.append(
            f"Ceilings of this process: copy {x['copy_gb_s']:,.0f} GB/s (bytes read + written), bfloat16 product "
            f"{x['gemm_tflop_s']:,.0f} TFLOP/s; a replayed graph that does nothing takes {x['empty_us']:.1f} µs."
        )
    for backend in LIMITS:
        if times := ", ".join(f"{ns:.0f} ns at K = {k:,}" for k, ns in steps([part], backend)):
            grow = "in one group, a mean while clusters grow from 0 to K"
            out.append(f"One decision of {backend}'s scan, {grow}: {times}.")
    medians = {(r["workload"], r["name"], r["how"]): r["median_ms"] for r in part["rows"] if r["kind"] == "ours"}
    both = []  # rows that either backend has
    for (workload, name, how), ours in medians.items():
        backend, _, what = name.partition(": ")
        theirs = medians.get((workload, by("triton", what), how))
        if backend == "cuda" and ours and theirs:
            both.append({"workload": workload, "what": what, "how": how, "triton": theirs, "cuda": ours})
    tables = [table(columns, rows) for columns, rows in ((_ROWS, part["rows"]), (_BOTH, both)) if rows]
    return [*out, *tables, part["lines"]]
