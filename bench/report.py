"""Results on the terminal and as JSON, Markdown and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bipace_kernels.support import png

from .measure import Machine
from .roofline import Ceilings
from .stages import CLONE, Point, Results, Row, Target, growth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

SCHEMA = 1

# Okabe and Ito's palette: distinguishable with common kinds of colour blindness, and in grey by lightness.
_OURS, _THEIRS, _BOUND, _LINE = "#0072B2", "#E69F00", "#999999", "#000000"

_COLUMNS = (
    "workload",
    "side",
    "dtype",
    "ms",
    "IQR",
    "CPU ms",
    "rounds",
    "slower",
    "GB/s",
    "% copy",
    "GFLOP/s",
    "% GEMM",
    "result",
)


def as_json(machine: Machine, ceilings: Ceilings, results: Results, targets: Sequence[Target]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "machine": machine.asdict(),
        "ceilings": asdict(ceilings),
        "rows": [row.asdict() for row in results.rows],
        "scaling": [asdict(p) for p in results.scaling],
        "growth": growth(results.scaling),
        "memory": [asdict(m) for m in results.memory],
        "targets": [t.asdict() for t in targets],
    }


def _cells(row: Row) -> tuple[str, ...]:
    remark = "; ".join(x for x in (row.agreement, row.note) if x)
    if row.median_ms is None:
        return row.workload, row.side, row.dtype, "not available", *[""] * 8, remark
    ratio = "" if row.ratio is None else f"{_short(row.ratio)}×"
    return (
        row.workload, row.side, row.dtype, _short(row.median_ms), _short(row.iqr_ms), _short(row.cpu_ms),
        str(row.rounds), ratio,
        _short(row.gb_s), _short(row.copy_percent), _short(row.gflop_s), _short(row.gemm_percent), remark,
    )  # fmt: skip


def _short(value: float | None) -> str:
    """Three figures, no exponents."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 else f"{value:.4f}"


def _memory_cells(results: Results) -> Iterable[tuple[str, ...]]:
    for m in results.memory:
        yield (m.name, m.shape, m.dtype, f"{m.clusters:,}", f"{m.peak_bytes / 2**20:,.1f}",
               f"{m.allowed_bytes / 2**20:,.1f}", "yes" if m.peak_bytes <= m.allowed_bytes else "NO")  # fmt: skip


def _scaling_cells(points: Sequence[Point]) -> Iterable[tuple[str, ...]]:
    for p in points:
        yield (p.series, f"{p.records:,}", f"{p.clusters:,}", str(p.dim), p.dtype, _short(p.median_ms),
               _short(p.iqr_ms), str(p.rounds), _short(p.median_ms * 1e3 / p.records))  # fmt: skip


def _target_cells(targets: Sequence[Target]) -> Iterable[tuple[str, ...]]:
    for t in targets:
        met = {None: "not run", True: "yes", False: "NO"}[t.met]
        yield (
            t.name,
            f"{'≥' if t.at_least else '≤'} {t.limit:g}{t.unit}",
            "" if t.value is None else f"{t.value:.3g}{t.unit}",
            met,
        )


_MEMORY_HEADER = ("case", "shape", "dtype", "clusters K", "peak MiB", "allowed MiB", "met")
_SCALING_HEADER = ("series", "records", "clusters", "D", "dtype", "ms", "IQR", "rounds", "µs/record")
_TARGET_HEADER = ("target", "wanted", "measured", "met")


def _machine_lines(machine: Machine, ceilings: Ceilings) -> list[tuple[str, str]]:
    return [
        ("machine", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.system}"),
        ("versions", f"bipace_kernels {machine.package} (native: {machine.native}), Python {machine.python}, "
                     f"torch {machine.torch}, NumPy {machine.numpy}; BLAS: {machine.blas}"),
        ("run", f"{machine.date}, commit {machine.commit}, threads: {machine.thread_note}; load: {machine.load}"),
        ("ceilings", f"copy {ceilings.copy_gb_s:.1f} GB/s, torch.clone {ceilings.clone_gb_s:.1f} GB/s, "
                     f"float32 product {ceilings.gemm_gflop_s:.0f} GFLOP/s"),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- terminal


def show(console: Console, machine: Machine, ceilings: Ceilings, results: Results, targets: Sequence[Target]) -> None:
    for name, text in _machine_lines(machine, ceilings):
        console.print(f"[bold]{name}[/]: {text}", highlight=False)
    for stage in dict.fromkeys(row.stage for row in results.rows):
        rows = [row for row in results.rows if row.stage == stage]
        _table(console, stage, _COLUMNS, [_cells(r) for r in rows], [r.kind == "ours" for r in rows])
    if results.scaling:
        _table(console, "scaling", _SCALING_HEADER, list(_scaling_cells(results.scaling)))
    if results.memory:
        _table(console, "memory beyond the inputs", _MEMORY_HEADER, list(_memory_cells(results)))
    _table(console, "targets", _TARGET_HEADER, list(_target_cells(targets)), [t.met is False for t in targets])


def _table(
    console: Console, title: str, header: Sequence[str], cells: Sequence[Sequence[str]], bold: Sequence[bool] = ()
) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for name in header:
        number = name not in ("workload", "side", "dtype", "result", "case", "shape", "series", "target")
        table.add_column(name, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for i, line in enumerate(cells):
        table.add_row(*line, style="bold" if i < len(bold) and bold[i] else None)
    console.print(table)


# ---------------------------------------------------------------------------------------------------------- Markdown


def as_markdown(
    machine: Machine, ceilings: Ceilings, results: Results, targets: Sequence[Target], picture: str | None
) -> str:
    lines = [
        "# Benchmark results",
        "",
        "Written by `python -m bench`; what each row means is in `bench/README.md`.",
        "",
    ]
    lines += [f"- **{name}**: {text}" for name, text in _machine_lines(machine, ceilings)]
    lines += ["", "## Targets", "", *_markdown(_TARGET_HEADER, _target_cells(targets)), ""]
    if picture:
        lines += [f"![Speed-ups and growth with the batch]({picture})", ""]
    for stage in dict.fromkeys(row.stage for row in results.rows):
        rows = [row for row in results.rows if row.stage == stage]
        shapes = "; ".join(dict.fromkeys(f"{r.workload}: {r.shape}" for r in rows))
        lines += [f"## {stage}", "", shapes, "", *_markdown(_COLUMNS, (_cells(r) for r in rows)), ""]
    if results.scaling:
        grown = growth(results.scaling)
        lines += ["## scaling", "", *_markdown(_SCALING_HEADER, _scaling_cells(results.scaling)), ""]
        if grown is not None:
            lines += [f"Time per record at the largest size over the smallest: {grown:.2f}.", ""]
    if results.memory:
        lines += ["## memory beyond the inputs", "", *_markdown(_MEMORY_HEADER, _memory_cells(results)), ""]
    return "\n".join(lines)


def _markdown(header: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(x.replace("|", "\\|") for x in line) + " |" for line in cells),
    ]


# ----------------------------------------------------------------------------------------------------------- picture


def draw(path: Path, machine: Machine, results: Results, targets: Sequence[Target]) -> bool:
    """Bars of speed-ups and the scaling curve; False where there is nothing to draw."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [r for r in results.rows if r.ratio is not None and r.kind in ("competitor", "bound")]
    if not bars and not results.scaling:
        return False
    heights = [height for height in (_height(bars), 4.0 if results.scaling else 0.0) if height]
    figure = Figure(figsize=(9.5, sum(heights) + 1.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = iter(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    if bars:
        _bars(next(panels), bars, targets)
    if results.scaling:
        _curves(next(panels), results.scaling)
    figure.suptitle(
        f"bipace_kernels {machine.package} against plain implementations written for this benchmark\n"
        f"{machine.cpu}, {machine.threads} threads, {machine.date[:10]}; time of the row / time of bipace_kernels in the same run\n"
        "hatched: torch.clone, the lower bound; |: the target",
        fontsize=11,
    )
    png.save(figure, path)
    return True


def _height(rows: Sequence[Row]) -> float:
    """Inches: a bar is 0.25 high, and so is the heading of a workload."""
    headings = {(r.stage, r.workload) for r in rows}
    return 0.25 * (len(rows) + len(headings)) + 0.7 if rows else 0.0


def _bars(axes: Axes, rows: Sequence[Row], targets: Sequence[Target]) -> None:
    """Horizontal bars from 1."""
    from matplotlib.ticker import FuncFormatter

    wanted = {(t.stage, t.workload, side): t.limit for t in targets for side in t.sides}
    y, position, labels = 0.0, [], []
    before: tuple[str, str] | None = None
    for row in rows:
        if (row.stage, row.workload) != before:
            before = row.stage, row.workload
            heading = f"{row.stage}: {row.workload}"
            axes.text(0.005, y, heading, weight="bold", va="center", ha="left", fontsize=9,
                      transform=axes.get_yaxis_transform(), backgroundcolor="white", zorder=3)  # fmt: skip
            y += 1.0
        ratio = row.ratio or 1.0
        bound = row.kind == "bound"
        axes.barh(y, ratio - 1.0, left=1.0, height=0.78, color=_BOUND if bound else _OURS if ratio >= 1 else _THEIRS,
                  hatch="//" if bound else None, edgecolor="white")  # fmt: skip
        axes.annotate(f"{_short(ratio)}×", (ratio, y), xytext=(4 if ratio >= 1 else -4, 0), fontsize=9,
                      textcoords="offset points", va="center", ha="left" if ratio >= 1 else "right",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, zorder=4)  # fmt: skip
        limit = wanted.get((row.stage, row.workload, row.side))
        if limit is not None:
            axes.vlines(limit, y - 0.5, y + 0.5, color=_LINE, linewidth=2.5)
        position.append(y)
        labels.append(row.side)
        y += 1.0
    axes.set_yticks(position, labels, fontsize=9)
    axes.set_ylim(y - 0.4, -0.6)
    axes.set_xscale("log")
    low, high = min(1.0, *(r.ratio or 1.0 for r in rows)), max(1.0, *(r.ratio or 1.0 for r in rows))
    axes.set_xlim(low / 4, high * 4)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.tick_params(axis="x", top=True, labeltop=True)
    axes.axvline(1.0, color=_LINE, linewidth=1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("times slower than bipace_kernels (log scale; above 1×, bipace_kernels is faster)", fontsize=9)


def _curves(axes: Axes, points: Sequence[Point]) -> None:
    style = {CLONE: (_BOUND, "s", ":")}
    for series in dict.fromkeys(p.series for p in points):
        own = sorted((p for p in points if p.series == series), key=lambda p: p.records)
        colour, marker, line = style.get(series, (_OURS, "o", "-"))
        axes.errorbar([p.records for p in own], [p.median_ms for p in own], yerr=[p.iqr_ms / 2 for p in own],
                      color=colour, marker=marker, linestyle=line, label=series, capsize=3)  # fmt: skip
    own = sorted((p for p in points if p.series != CLONE), key=lambda p: p.records)
    records = [p.records for p in own]
    linear = [own[0].median_ms * n / records[0] for n in records]
    axes.plot(records, linear, color=_LINE, linestyle="--", linewidth=1, label="linear from the smallest batch")
    axes.plot(
        records, [1.2 * t for t in linear], color=_THEIRS, linestyle="-.", linewidth=1, label="1.2 × linear, the limit"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(records, [f"{n:,}" for n in records])
    axes.minorticks_off()
    axes.set_xlabel("step records in the batch")
    axes.set_ylabel("ms per call")
    axes.set_title(f"Growth at {own[0].clusters} clusters, D = {own[0].dim}, {own[0].dtype}", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


# ------------------------------------------------------------------------------------------------------------- files


def write(
    folder: Path, machine: Machine, ceilings: Ceilings, results: Results, targets: Sequence[Target]
) -> list[Path]:
    """bench.json, bench.md and bench.png in `folder`; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "bench.png"
    drawn = draw(picture, machine, results, targets)
    document = folder / "bench.json"
    document.write_text(json.dumps(as_json(machine, ceilings, results, targets), indent=1, ensure_ascii=False) + "\n")
    page = folder / "bench.md"
    page.write_text(as_markdown(machine, ceilings, results, targets, picture.name if drawn else None))
    return [document, page] + ([picture] if drawn else [])
