"""gpu.json and gpu.md: parts measured by different processes, or on different days, on one page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .gpu_rows import EAGER, REPLAY
from .report import _markdown, _short
from .stages import NUMPY, NUMPY_POOL, Target

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

Found = Mapping[str, Any]


def by(backend: str, what: str) -> str:
    """The name of a backend's row."""
    return f"{backend}: {what}"


def load(path: Path) -> list[dict[str, Any]]:
    """The parts in a gpu.json; none if there is no such file."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    if found.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {found.get('schema')!r}, this program writes {SCHEMA}; use another folder")
    return list(found["parts"])


def merged(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last one of each name.  ValueError if they are from different kinds of GPU, which must not be compared."""
    found = list({part["name"]: part for part in parts}.values())
    names = sorted({part["gpu"]["name"] for part in found})
    if len(names) > 1:
        raise ValueError(f"a page holds figures of one kind of GPU, got {', '.join(names)}; use a folder for each")
    return found


def write(folder: Path, parts: Sequence[dict[str, Any]]) -> list[Path]:
    """gpu.json and gpu.md; each is replaced atomically, so that a kill leaves the previous one."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"schema": SCHEMA, "targets": [t.asdict() for t in targets(parts)], "parts": list(parts)}
    texts = {
        folder / "gpu.json": json.dumps(document, indent=1, ensure_ascii=False) + "\n",
        folder / "gpu.md": as_markdown(parts),
    }
    for path, text in texts.items():
        fresh = path.with_suffix(f"{path.suffix}.{os.getpid()}")
        fresh.write_text(text)
        fresh.replace(path)
    return list(texts)


# ------------------------------------------------------------------------------------------------------------ targets


def targets(parts: Sequence[Found]) -> list[Target]:
    """The promises, on the planted batches; a dry run reaches none."""
    parts = [p for p in parts if p["status"] != "dry run"]

    def row(workload: str, name: str, how: str = REPLAY) -> Found:
        wanted = (workload, name, how)
        found = (r for p in parts for r in p["rows"] if (r["workload"], r["name"], r["how"]) == wanted)
        return next((r for r in found if r["kind"] in ("ours", "competitor")), {})

    def median(workload: str, name: str, how: str = REPLAY) -> float | None:
        return row(workload, name, how).get("median_ms")

    def ratio(over: Iterable[float | None], under: float | None) -> float | None:
        known = [x for x in over if x is not None]
        return min(known) / under if known and under else None

    short, large, long = "16x400, K = 20", "64x2048, K = 64", "1x32768, K = 512"
    out = []
    for backend, (whole, eager, much, *loops) in LIMITS.items():
        ours = by(backend, WHOLE)
        out += [
            Target(by(backend, "16 × 400 × 3,584, whole chain"), whole, median(short, ours), at_least=False, unit=" ms"),
            Target(by(backend, "the same, eager with a layout"), eager, median(short, ours, EAGER), at_least=False,
                   unit=" ms"),
            Target(by(backend, "64 × 2,048 × 3,584, whole chain"), much, median(large, ours), at_least=False, unit=" ms"),
        ]  # fmt: skip
        for workload, loop in zip((short, large), loops, strict=True):
            clustering = median(workload, by(backend, CLUSTERING))
            where = by(backend, f"clustering of {workload.partition(',')[0].replace('x', ' × ')} against")
            numpy = [median(workload, name, "wall") for name in (NUMPY, NUMPY_POOL)]
            communities = [median(workload, COMMUNITIES, "wall")]
            out += [
                Target(f"{where} the NumPy/BLAS loop, all cores", loop, ratio(numpy, clustering)),
                Target(
                    f"{where} the torch loop on the GPU", 100.0, ratio([median(workload, LOOP, "wall")], clustering)
                ),
                Target(f"{where} community_detection", 1.0, ratio(communities, clustering)),
            ]
        swept = ratio([median(short, by(backend, SWEEP))], median(short, by(backend, CLUSTERING)))
        out.append(Target(by(backend, "sweep of 32 ε at 16 × 400 over one clustering"), 4.0, swept, at_least=False))

    def cuda(workload: str, name: str) -> Found:
        return row(workload, by("cuda", name))

    ratios: list[tuple[str, float, float | None, bool, str]] = [
        ("16 × 400 × 3,584, clustering", 0.12, median(short, by("cuda", CLUSTERING)), False, " ms"),
        ("1 × 32,768 × 3,584, whole chain", 40.0, median(long, by("cuda", WHOLE)), False, " ms"),
    ]
    for workload, said in ((short, "16 × 400"), (large, "64 × 2,048")):
        gram, scan = cuda(workload, GRAM), cuda(workload, DECISIONS)
        alone = gram["median_ms"] + scan["median_ms"] if gram and scan else None
        ratios += [
            (f"clustering of {said} over Gram matrices + decisions, each by itself", 1.3,
             ratio([cuda(workload, STAGE).get("median_ms")], alone), False, "×"),
            (f"decisions of {said} by themselves over their chain", 2.0,
             ratio([scan.get("median_ms")], scan.get("floor_chain_ms")), False, "×"),
        ]  # fmt: skip
    keys = median(short, by("cuda", KEYS))
    figures = {name: value for p in parts for name, value in p.get("figures", {}).items()}
    ratios += [
        ("largest |cosine − float64| in 16 × 400 × 3,584", 2e-6, figures.get(ACCURACY), False, ""),
        ("action keys of 6,400 × 512 tokens", 0.04, keys, False, " ms"),
        ("tap over the log-prob forward at 7B shape", 0.5, figures.get(TAP), False, " %"),
    ]
    known = [ns for k, ns in steps(parts, "cuda") if k <= 128]
    gram = cuda(large, GRAM)
    ratios += [
        ("one decision in a group of 2,048 at K ≤ 128", 150.0, max(known, default=None), False, " ns"),
        ("Gram matrices of 64 × 2,048, only triangles, of the measured product's rate", 0.6,
         ratio([gram.get("floor_flop_ms")], gram.get("median_ms")), True, "×"),
        ("16 × 400 × 3,584, whole chain: Triton's time over it", 1.5,
         ratio([median(short, by("triton", WHOLE))], median(short, by("cuda", WHOLE))), True, "×"),
    ]  # fmt: skip
    return out + [Target(by("cuda", what), limit, value, least, unit) for what, limit, value, least, unit in ratios]


def steps(parts: Sequence[Found], backend: str) -> list[tuple[int, float]]:
    """(K, nanoseconds of a decision) of a backend's scan over one group, by K: its time over the group's records."""
    found = {}
    for row in (r for p in parts for r in p["rows"]):
        size = re.fullmatch(r"1x(\d+), K = ([\d,]+)", row["workload"])
        if size and row["name"] == by(backend, DECISIONS) and row["median_ms"] is not None:
            found[int(size[2].replace(",", ""))] = row["median_ms"] * 1e6 / int(size[1])
    return sorted(found.items())


# ----------------------------------------------------------------------------------------------------------- Markdown

_HEADER = ("workload", "what", "how", "ms", "IQR", "rounds", "bytes ms", "FLOP ms", "chain ms", "floor ms", "× floor",
           "SM MHz", "result")  # fmt: skip
_MET = {None: "not measured", True: "yes", False: "NO"}


def as_markdown(parts: Sequence[Found]) -> str:
    lines = ["# GPU results", "", "Written by `bench/gpu.sh`; what each row means is in `bench/README.md`.", ""]
    for text in dict.fromkeys(_about(p) for p in parts):
        lines += [f"- {text}"]
    if any(p["status"] == "dry run" for p in parts):
        lines += ["", "**Dry run: no GPU took part, and no figure on this page is a measurement.**"]
    lines += ["", "## Targets", "", *_markdown(("target", "wanted", "measured", "met"), _target_cells(parts)), ""]
    for part in parts:
        lines += _section(part)
    return "\n".join(lines)


def _about(part: Found) -> str:
    m, g = part["machine"], part["gpu"]
    device = "no GPU"
    if g["capability"]:
        device = (
            f"{g['name']} (sm_{g['capability'].replace('.', '')}, {g['multiprocessors']} multiprocessors, L2 "
            f"{g['l2_mib']:.0f} MiB, {g['memory_gib']} GiB, driver {g['driver']}, at most {g['clocks']})"
        )
    return (
        f"**{device}**; host: {m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}; bipace_kernels "
        f"{m['package']} (commit {m['commit']}, sources {g['sources']}), torch {m['torch']} (CUDA {g['cuda']}), Triton "
        f"{g['triton']}, CUDA kernels: {g['kernels']}, Python {m['python']}, NumPy {m['numpy']}; BLAS: "
        f"{m['blas']}; {m['date'][:10]}"
    )


def verdicts(parts: Sequence[Found]) -> list[str]:
    """A line for each target, those that were met first, those that nobody measured last."""
    order = {True: "met", False: "MISSED", None: "not measured"}
    found = [(t.met, cells) for t, cells in zip(targets(parts), _target_cells(parts), strict=True)]
    return [
        f"{word}: {name} {wanted}" + (f", measured {measured}" if measured else "")
        for met, word in order.items()
        for this, (name, wanted, measured, _) in found
        if this is met
    ]


def _target_cells(parts: Sequence[Found]) -> Iterable[tuple[str, ...]]:
    for t in targets(parts):
        sign = "≥" if t.at_least else "≤"
        yield t.name, f"{sign} {t.limit:g}{t.unit}", "" if t.value is None else f"{t.value:.3g}{t.unit}", _MET[t.met]


def _section(part: Found) -> list[str]:
    lines = [f"## {part['name']}", "", f"{part['status']}, {part['began']}, {part['seconds']:.0f} s", ""]
    if part["ceilings"]:
        x = part["ceilings"]
        lines += [
            f"Ceilings of this process: copy {x['copy_gb_s']:,.0f} GB/s (bytes read + written), bfloat16 product "
            f"{x['gemm_tflop_s']:,.0f} TFLOP/s; a replayed graph that does nothing takes {x['empty_us']:.1f} µs.",
            "",
        ]
    if part["chain"]:
        chain = ", ".join(f"{s['ns']:.0f} ns at K = {s['k']:,} ({s['threads']} threads)" for s in part["chain"])
        lines += [f"One dependent step of a scan (bench/chain.cu): {chain}.", ""]
    if part["chain_note"]:
        lines += [f"One dependent step of a scan (bench/chain.cu): not available: {part['chain_note']}", ""]
    for backend in LIMITS:
        if found := steps([part], backend):
            times = ", ".join(f"{ns:.0f} ns at K = {k:,}" for k, ns in found)
            grow = "in one group, a mean while clusters grow from 0 to K"
            lines += [f"One decision of {backend}'s scan, {grow}: {times}.", ""]
    if part["rows"]:
        lines += [*_markdown(_HEADER, (_cells(r) for r in part["rows"])), ""]
    if sides := _sides(part):
        lines += [*_markdown(("workload", "what", "how", "Triton ms", "CUDA ms", "Triton over CUDA"), sides), ""]
    return [*lines, *part["lines"], *([""] if part["lines"] else [])]


def _sides(part: Found) -> list[tuple[str, ...]]:
    """If both backends have a row, the ratio of Triton's time to CUDA's: below 1 CUDA is slower."""
    medians = {(r["workload"], r["name"], r["how"]): r["median_ms"] for r in part["rows"] if r["kind"] == "ours"}
    found = []
    for (workload, name, how), ours in medians.items():
        backend, _, what = name.partition(": ")
        theirs = medians.get((workload, by("triton", what), how))
        if backend == "cuda" and ours and theirs:
            found.append((workload, what, how, _short(theirs), _short(ours), f"{theirs / ours:.2f}×"))
    return found


def _cells(row: Found) -> tuple[str, ...]:
    remark = "; ".join(x for x in (row["agreement"], row["note"]) if x)
    if row["median_ms"] is None:
        return (row["workload"], row["name"], row["how"], row["kind"], *[""] * 8, remark)
    floors = (row["floor_bytes_ms"], row["floor_flop_ms"], row["floor_chain_ms"], row["floor_ms"], row["over_floor"])
    kind = "" if row["kind"] != "failed" else "FAILED: "
    return (
        row["workload"], row["name"], row["how"], kind + _short(row["median_ms"]), _short(row["iqr_ms"]),
        str(row["rounds"]), *(_short(x) for x in floors), str(row.get("sm_mhz") or ""), remark,
    )  # fmt: skip
