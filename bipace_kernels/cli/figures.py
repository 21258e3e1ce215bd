"""The figures of `bipace report` and `bipace calibrate`.

Colours are the Okabe-Ito set, which is safe for common kinds of colour blindness; no figure distinguishes two
things only by colour.  No pyplot: no global state is changed, and the same numbers give the same bytes.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from ..calibration.result import Calibration
from ..hidden import Layer
from ..support import png
from ._console import number
from .outcomes import Outcome

BLUE, VERMILLION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, BLACK, DARK = "#56B4E9", "#CC79A7", "#000000", "#333333"
ASIDE: dict[str, Any] = {"facecolor": "white", "edgecolor": "#8A8A8A", "hatch": "/////", "linewidth": 0.6}
POOLINGS = {"last": "last token", "mean": "mean over the prompt", "attention": "attention-weighted"}


def step_shares(path: Path, title: str, partitions: Sequence[Outcome]) -> None:
    """A bar per partition: the share of steps that are compared with peers, and of those without peers.

    If the records have action keys, steps with peers of their own action are shown separately.
    """
    keyed = any(outcome.actions for outcome in partitions)
    peers = "peers with the same action (HGPO: any peers)" if keyed else "peers in the same state"
    parts = [("pace_row_fraction", BLUE, peers)]
    if keyed:
        parts.append(("leave_one_out_row_fraction", SKY, "peers with other actions only"))
    parts.append(("singleton_row_fraction", VERMILLION, "no peers: no step term"))
    figure, axes = png.figure(8.6, 1.5 + 0.5 * len(partitions), 1, 1)
    axis, y, left = axes[0, 0], np.arange(len(partitions)), np.zeros(len(partitions))
    for name, colour, label in parts:
        share = np.array(_metric(partitions, name))
        bars = axis.barh(y, share, left=left, color=colour, height=0.62, label=label)
        texts = [f"{value:.0%}" if value >= 0.04 else "" for value in share]
        axis.bar_label(bars, texts, label_type="center", fontsize=9, color="black" if colour == SKY else "white")
        left += share
    axis.set_yticks(y, [outcome.label for outcome in partitions], fontsize=9)
    axis.set_ylim(len(partitions) - 0.5, -0.5)  # the first on top
    axis.set_xlim(0, 1)
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_xlabel("share of steps")
    axis.grid(False)
    _title(figure, f"What a step is compared with: {title}")
    figure.legend(loc="outside lower center", ncols=len(parts), frameon=False, fontsize=9)
    png.save(figure, path)


def epsilon_curve(
    path: Path, title: str, curves: Mapping[str, Sequence[Outcome]], levels: Sequence[Outcome], marked: float
) -> None:
    """Three panels over ε: share of singletons, mean cluster size, value R² with a band of ± one standard error.

    curves   by the kind of state, the outcomes of the same radii
    levels   partitions without an ε, drawn as lines across the panels
    marked   the ε of the report's tables, drawn as a vertical line
    """
    figure, axes = png.figure(8.6, 8.4, 3, 1, sharex=True)
    singles, sizes, r2 = axes[:, 0]
    x = np.array([outcome.settings["epsilon"] for outcome in next(iter(curves.values()))])
    for (label, curve), colour, marker in zip(curves.items(), (BLUE, ORANGE), ("o", "s"), strict=False):
        style = {"color": colour, "marker": marker, "markersize": 5}
        singles.plot(x, _metric(curve, "singleton_cluster_fraction"), label=f"cosine n-grams, {label}", **style)
        sizes.plot(x, _metric(curve, "mean_cluster_size"), **style)
        centre = np.array([outcome.value_r2.r2 for outcome in curve], np.float64)  # None: nan, which is not drawn
        spread = np.nan_to_num(np.array([outcome.value_r2.stderr for outcome in curve], np.float64))
        r2.fill_between(x, centre - spread, centre + spread, color=colour, alpha=0.2, linewidth=0)
        r2.plot(x, centre, **style)
    for level, colour, dash in zip(levels, (DARK, PURPLE), ((0, (5, 2)), (0, (1, 1.5))), strict=False):
        line = {"color": colour, "linewidth": 1.4, "linestyle": dash}
        singles.axhline(level.metrics["singleton_cluster_fraction"], label=level.label, **line)
        sizes.axhline(level.metrics["mean_cluster_size"], **line)
        if level.value_r2.r2 is not None:
            r2.axhline(level.value_r2.r2, **line)
    for axis in axes[:, 0]:
        axis.axvline(marked, color="#999999", linewidth=1, zorder=0)
    _note(singles, f"ε = {marked:g}", (marked, 1), (0, 2), xycoords=("data", "axes fraction"), va="bottom", ha="center")
    r2.axhline(0, color="#999999", linewidth=0.8)
    _note(r2, "0: no better than the group's mean", (0.005, 0), (0, 2), xycoords=("axes fraction", "data"))
    singles.set_ylim(0, 1)
    singles.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    singles.set_ylabel("singleton clusters\n(share of clusters)")
    sizes.set_yscale("log")
    sizes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    sizes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    sizes.yaxis.set_minor_formatter(NullFormatter())
    sizes.set_ylabel("mean cluster size\n(records, log scale)")
    r2.set_ylabel("value R²\n(band: ± standard error)")
    r2.set_xlabel("ε: largest cosine distance at which a record joins a cluster")
    r2.set_xticks(x, [f"{value:g}" for value in x])
    margin = 0.02 * max(float(x[-1] - x[0]), 0.01)
    r2.set_xlim(float(x[0]) - margin, float(x[-1]) + margin)
    _title(figure, f"Radius of the cosine clusters: {title}")
    figure.legend(*singles.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    png.save(figure, path)


def embedders(path: Path, title: str, rows: Sequence[Outcome], band: tuple[float, float]) -> None:
    """Three panels side by side, a row per embedder: singletons, median size, value R² with its interval.

    band   target median size, shaded
    """
    figure, axes = png.figure(9.5, 1.5 + 0.62 * len(rows), 1, 3, sharey=True)
    singles, sizes, r2 = axes[0]
    y = np.arange(len(rows))
    shares, medians = _metric(rows, "singleton_cluster_fraction"), _metric(rows, "median_cluster_size")
    sizes.axvspan(*band, color=GREEN, alpha=0.15, linewidth=0, label=f"wanted: {band[0]:g} to {band[1]:g}")
    for axis, values, colour, form in ((singles, shares, VERMILLION, "{:.0%}"), (sizes, medians, BLUE, "{:g}")):
        bars = axis.barh(y, values, color=colour, height=0.5)
        axis.bar_label(bars, fmt=form.format, padding=3, fontsize=9, color=DARK)
    r2.axvline(0, color="#999999", linewidth=0.8)
    for place, row in enumerate(rows):
        if row.value_r2.r2 is None:
            _note(r2, "undefined: returns do not differ", (0.0, place), (3, 0), color=DARK, va="center")
            continue
        interval = row.interval()
        if interval is not None:
            r2.plot(interval, [place, place], color=DARK, linewidth=1.6, solid_capstyle="butt")
        r2.plot(row.value_r2.r2, place, marker="o", markersize=7, color=DARK)
        _note(r2, number(row.value_r2.r2, ".3f"), (row.value_r2.r2, place), (0, 6), color=DARK, ha="center")
    singles.set_yticks(y, [row.label.replace(", ", "\n") for row in rows])
    singles.set_ylim(len(rows) - 0.5, -0.6)  # the first on top
    singles.set_xlim(0, 1.12)  # room for a number next to a full bar
    r2.locator_params(axis="x", nbins=5)  # more labels would touch each other
    singles.xaxis.set_major_formatter(PercentFormatter(1.0))
    sizes.set_xlim(0, 1.15 * max(band[1], *medians))
    texts = ("singletons (share of clusters)", "median cluster size (records)", "value R² (line: 95 % interval)")
    for axis, text in zip((singles, sizes, r2), texts, strict=True):
        axis.set_xlabel(text)
        axis.grid(False, axis="y")
        axis.grid(True, axis="x", color="#E5E5E5", linewidth=0.7)
    _title(figure, f"Embedders, each at its own ε: {title}")
    figure.legend(*sizes.get_legend_handles_labels(), loc="outside lower center", frameon=False, fontsize=9)
    png.save(figure, path)


def _metric(outcomes: Sequence[Outcome], name: str) -> list[float]:
    return [outcome.metrics[name] for outcome in outcomes]


def _note(axis: Any, text: str, at: tuple[float, float], offset: tuple[int, int], **style: Any) -> None:
    axis.annotate(text, at, offset, textcoords="offset points", fontsize=9, **{"color": "#666666", **style})


def _title(figure: Figure, text: str) -> None:
    """Any text on one line; matplotlib would read $ as mathematics."""
    png.set_title(figure, textwrap.shorten(text, 110, placeholder=" …").replace("$", r"\$"))


def heat_map(path: Path, result: Calibration) -> None:
    """A panel per pooling, a row per layer: the probe's accuracy, next to clusters and singletons of each ε."""
    layers = list(dict.fromkeys(row.layer for row in result.scan))
    epsilons = sorted({row.epsilon for row in result.scan})
    poolings = list(dict.fromkeys(row.pooling for row in result.scan))
    n, e = len(layers), len(epsilons)
    figure, axes = png.figure(2.3 + len(poolings) * (1.1 + 0.85 * e), 1.9 + 0.36 * n, 1, len(poolings), sharey=True)
    values = [row.accuracy for row in result.scan]
    low, high = min(values), max(values)
    scale = Normalize(low, high if high > low else low + 1e-3)
    count_scale = LogNorm(1, max(2, *(row.clusters for row in result.scan)))
    blues, greys = colormaps["Blues"], colormaps["Oranges"]
    panels = dict(zip(poolings, axes[0], strict=True))
    for row in result.scan:
        axis, y, x = panels[row.pooling], layers.index(row.layer), epsilons.index(row.epsilon)
        if x == 0:
            _cell(axis, 0, y, blues(0.1 + 0.75 * scale(row.accuracy)), f"{row.accuracy:.3f}", bold=True)
        colour = greys(0.05 + 0.5 * count_scale(row.clusters)) if row.qualifies else None
        _cell(axis, x + 1.15, y, colour, f"{row.clusters:,} · {row.singletons:.0%}")
    for pooling, axis in panels.items():
        axis.set_xlim(-0.55, e + 0.7)
        axis.set_ylim(n - 0.45, -0.55)  # the first layer on top
        columns = ["probe\naccuracy", *(f"ε = {value:g}" for value in epsilons)]
        axis.set_xticks([0, *(x + 1.15 for x in range(e))], columns)
        axis.set_yticks(range(n), [_short_layer(layer) for layer in layers])
        axis.set_title(f"pooling: {POOLINGS[pooling]}", loc="left", fontsize=10, fontweight="bold")
        axis.grid(False)
        axis.tick_params(length=0)
        axis.spines[["left", "bottom"]].set_visible(False)
    chosen = result.choice
    if chosen is not None:
        corner = (-0.5, layers.index(chosen.layer) - 0.5)
        frame = Rectangle(corner, e + 1.15, 1, fill=False, edgecolor=BLACK, linewidth=2, zorder=5)
        panels[chosen.pooling].add_patch(frame)
    probe = f"probe accuracy: darker is better, {low:.3f} to {high:.3f} (most frequent label: {result.majority:.3f})"
    handles = [
        Patch(facecolor=blues(0.7), label=probe),
        Patch(facecolor=greys(0.4), label="clusters · share of singleton clusters: darker is more clusters"),
        Patch(**ASIDE, label="does not qualify: too few clusters, one giant, or nearly all singletons"),
    ]
    if chosen is not None:
        label = f"chosen: {chosen.layer}, {POOLINGS[chosen.pooling]}, ε = {chosen.epsilon:.4g}"
        handles.append(Patch(facecolor="white", edgecolor=BLACK, linewidth=2, label=label))
    _title(figure, f"Calibration: {result.model}")
    figure.legend(handles=handles, loc="outside lower left", ncols=1, frameon=False, fontsize=9)
    png.save(figure, path)


def _short_layer(layer: Layer) -> str:
    """Short name of a layer: "block 16 [−12]"."""
    if layer.normed:
        return f"block {layer.block}, norm [−1]"
    back = layer.n_blocks - layer.block
    return f"block {layer.block} [−{back}]" if back > 1 else f"block {layer.block}"


def _cell(axis: Any, x: float, y: float, colour: Any, text: str, *, bold: bool = False) -> None:
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "fontweight": "bold" if bold else "normal"}
    if colour is None:
        patch = {**ASIDE, "linewidth": 0.2}
        style |= {"color": DARK, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6}}
    else:
        patch = {"facecolor": colour, "edgecolor": "white"}
        shade = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2]  # as the eye weighs it
        style["color"] = "white" if shade < 0.5 else DARK
    axis.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, **patch))
    axis.text(x, y, text, **style)
