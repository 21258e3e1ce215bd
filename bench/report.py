"""Pages of all benchmarks: tables, targets, the description of the machine, files; and the pictures of the stages."""

from __future__ import annotations

import argparse
import json
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bipace_kernels.support import files, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Columns = Mapping[str, str | Callable[[Any], str]]
SAMPLE = Path(__file__).resolve().parent.parent / "examples/data/alfworld_scripted.jsonl.gz"  # recorded rollouts


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table whose rows are the texts of its cells."""
    return table({head: operator.itemgetter(i) for i, head in enumerate(heads)}, rows)


def table(columns: Columns, rows: Iterable[Any]) -> list[str]:
    """Lines of a Markdown table that is aligned as text too; a column is a format string or a function of a row."""
    cells = [
        [(c.format_map(row) if isinstance(c, str) else c(row)).replace("|", "\\|") for c in columns.values()]
        for row in rows
    ]
    by_column = list(zip(columns, *cells, strict=True))
    right = [all(text[:1] in "0123456789+-–<>≥≤" for text in texts[1:]) for texts in by_column]
    width = [max(3, *map(len, texts)) for texts in by_column]
    width[-1] = width[-1] if right[-1] else 3  # remarks are long: not padded

    def line(texts: Sequence[str]) -> str:
        padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, width, right, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = ["-" * (w - r) + ":" * r for w, r in zip(width, right, strict=True)]
    return [line(list(columns)), line(rule), *map(line, cells)]


def short(value: float | None) -> str:
    """Three figures, no exponents."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.01 else f"{value:.4f}"


def shorts(name: str) -> Callable[[Mapping[str, Any]], str]:
    """The column of a number of a row that may be None."""
    return lambda row: short(row[name])


def remark(row: Mapping[str, Any]) -> str:
    return "; ".join(text for text in (row["agreement"], row["note"]) if text)


@dataclass(frozen=True)
class Target:
    """A figure the project promises, and what was measured; `value` is None where its stage did not run."""

    name: str
    limit: float
    value: float | None
    at_least: bool = True
    unit: str = "×"
    stage: str = ""
    workload: str = ""
    sides: tuple[str, ...] = ()  # competitors the promise is about

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def asdict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{self.unit}"

    @property
    def measured(self) -> str:
        return "" if self.value is None else f"{self.value:.3g}{self.unit}"


def target_table(targets: Sequence[Target]) -> list[str]:
    said = {None: "not measured", True: "yes", False: "NO"}
    rows = [{"name": t.name, "wanted": t.wanted, "measured": t.measured, "met": said[t.met]} for t in targets]
    return table({"target": "{name}", "wanted": "{wanted}", "measured": "{measured}", "met": "{met}"}, rows)


def about(machine: Mapping[str, Any]) -> str:
    """The machine, the versions and the run in one paragraph."""
    return (
        "{cpu}, {cores} cores, {memory_gib} GiB, {system}; threads: {thread_note}; bipace_kernels {package} (commit "
        "{commit}, native: {native}), torch {torch}, NumPy {numpy}, Python {python}; BLAS: {blas}; {date}, load {load}."
    ).format_map(machine)


def page(title: str, *paragraphs: str | Sequence[str]) -> str:
    """Markdown with an empty line between paragraphs; a table is a list of lines."""
    texts = [text if isinstance(text, str) else "\n".join(text) for text in paragraphs]
    return "\n\n".join([f"# {title}", *(text.strip("\n") for text in texts if text)]) + "\n"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")  # one line, without the whole usage above it


def parser(name: str, description: str, *, writes: str, quick: str = "") -> Parser:
    """The parser of `bench NAME` with the options that all have: --out, and --quick where a tiny run makes sense."""
    program = "bipace" if name and Path(sys.argv[0]).name == "bipace" else "bench"
    made = Parser(prog=f"{program} {name}".strip(), description=description)
    if quick:
        made.add_argument("--quick", action="store_true", help=f"{quick}: shows that it runs, not how fast")
    made.add_argument("--out", type=Path, metavar="DIR", help=f"write {writes} there")
    return made


def publish(name: str, document: Mapping[str, Any], text: str, folder: Path | None) -> None:
    """Prints the page of a benchmark; with a folder, writes name.json and name.md there."""
    sys.stdout.write(text)
    if folder is not None:
        write(folder, name, document, text)


def write(folder: Path, name: str, document: Mapping[str, Any], text: str) -> list[Path]:
    """name.json and name.md; a kill leaves the previous ones."""
    with files.atomic_folder(folder) as made:
        rows = json.dumps(document, ensure_ascii=False).replace("}, {", "},\n{")  # a line each, for diffs
        (made / f"{name}.json").write_text(rows + "\n", encoding="utf-8")
        (made / f"{name}.md").write_text(text, encoding="utf-8")
    return [folder / f"{name}.json", folder / f"{name}.md"]


# Okabe and Ito's palette: distinguishable with common kinds of colour blindness, and in grey by lightness.
_OURS, _THEIRS, _BOUND, _LINE = "#0072B2", "#E69F00", "#999999", "#000000"


# Pictures, by the stages that they show.
PICTURES = {
    "clusters.png": ("clusters",),
    "calls.png": ("advantage", "critic", "gigpo", "loaded"),
    "texts.png": ("action_keys", "similar", "ngrams"),
}


def draw(folder: Path, document: Mapping[str, Any]) -> list[str]:
    """Pictures of speed-ups: their names, if any."""
    machine, drawn = document["machine"], []
    run = f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}, {machine['date'][:10]}"
    for name, stages in PICTURES.items():
        bars = [r for r in document["rows"] if r["ratio"] is not None and r["stage"] in stages]
        bars = [r for r in bars if r["kind"] in ("competitor", "bound")]
        if bars:
            lines = len(bars) + len({(r["stage"], r["workload"]) for r in bars})
            shown = ", ".join(dict.fromkeys(r["stage"] for r in bars))
            made, panels = png.figure(8.6, 0.22 * lines + 1.7)
            _bars(panels[0, 0], bars, document["targets"])
            png.set_title(made, f"Times slower than bipace_kernels {machine['package']}: {shown}\n{run}")
            png.save(made, folder / name)
            drawn.append(name)
    return drawn


def _bars(axes: Axes, rows: Sequence[Mapping[str, Any]], targets: Sequence[Mapping[str, Any]]) -> None:
    """Horizontal bars from 1."""
    from matplotlib.ticker import FuncFormatter

    wanted = {(t["stage"], t["workload"], side): t["limit"] for t in targets for side in t["sides"]}
    y, position, heading = 0.0, [], ""
    for row in rows:
        before, heading = heading, f"{row['stage']}: {row['workload']}"
        if heading != before:
            axes.text(0.005, y, heading, weight="bold", va="center", ha="left", fontsize=9, backgroundcolor="white",
                      transform=axes.get_yaxis_transform(), zorder=3)  # fmt: skip
            y += 1.0
        ratio, bound = row["ratio"], row["kind"] == "bound"
        axes.barh(y, ratio - 1.0, left=1.0, height=0.78, color=_BOUND if bound else _OURS if ratio >= 1 else _THEIRS,
                  hatch="//" if bound else None, edgecolor="white")  # fmt: skip
        limit = wanted.get((row["stage"], row["workload"], row["side"]))
        beside = limit if limit and 1 <= limit / ratio < 1.6 else ratio  # no number behind the target's line
        axes.annotate(f"{short(ratio)}×", (beside, y), xytext=(4 if ratio >= 1 else -4, 0), fontsize=9,
                      textcoords="offset points", va="center", ha="left" if ratio >= 1 else "right",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, zorder=4)  # fmt: skip
        if limit:
            axes.vlines(limit, y - 0.5, y + 0.5, color=_LINE, linewidth=2.5)
        position.append(y)
        y += 1.0
    axes.set_yticks(position, [row["side"] for row in rows], fontsize=9)
    axes.set_ylim(y - 0.4, -0.6)
    axes.set_xscale("log")
    ratios = [1.0, *(row["ratio"] for row in rows)]
    axes.set_xlim(min(ratios) / 3, max(ratios) * 4)
    axes.spines["left"].set_visible(False)  # the line at 1× is the axis
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.tick_params(axis="x", top=True, labeltop=True)
    axes.axvline(1.0, color=_LINE, linewidth=1)
    axes.grid(False, axis="y")
    axes.grid(True, axis="x", color="#E5E5E5", linewidth=0.7)
    notes = ["hatched: torch.clone, the lower bound"] * any(row["kind"] == "bound" for row in rows)
    notes += ["vertical line: the target"] * bool(axes.collections)
    axes.set_xlabel("time / time of bipace_kernels in the same run, log scale\n" + "; ".join(notes), fontsize=9)
