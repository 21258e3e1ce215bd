"""Draws docs/images/speed.png, the README's four pairs of bars, from results of `python -m bench`.

python -m bench.readme_chart bench/results/cpu/bench.json bench/results/critic/bench.json docs/images/speed.png
"""

import json
import sys
from pathlib import Path

from bipace_kernels.support import png

# Title of a pair, stage, workload, the sides of both bars, and what the second one is.
PAIRS = [
    ("BiPACE, the whole call\n6,400 records × 3,584, synthetic", "advantage", "alfworld-7b", "bipace_kernels",
     "torch loop, one record at a time", "torch, record by record"),
    ("Config.gae(), the whole call\n6,400 records × 3,584, synthetic", "critic", "alfworld-7b",
     "bk.advantage, Config.gae()", "NumPy/BLAS and LAPACK, group by group", "NumPy and LAPACK, values only"),
    ("GiGPO, the whole call\n6,400 observations, synthetic", "gigpo", "alfworld-7b", "bipace_kernels, integer ids",
     "dict-of-lists GiGPO, integer ids", "dicts of lists"),
    ("action keys\n6,400 rows of 512 token ids, synthetic", "action_keys", "token ids", "bipace_kernels",
     "tokenizers' decode_batch + re + hash", "decode_batch and re"),
]  # fmt: skip
OURS, THEIRS = "#0072b2", "#999999"  # of the palette of Okabe and Ito


def main(*paths: Path) -> None:
    *sources, path = paths
    rows = [row for source in sources for row in json.loads(source.read_text())["rows"]]
    median = {(row["stage"], row["workload"], row["side"]): row["cpu_ms"] for row in rows}
    made, panels = png.figure(9.6, 4.4)
    axes = panels[0, 0]
    for place, (_, stage, workload, own, theirs, name) in enumerate(PAIRS):
        for shift, side, color, what in ((-0.2, own, OURS, "bipace_kernels"), (0.2, theirs, THEIRS, name)):
            value = median[stage, workload, side]
            axes.barh(place + shift, value, 0.38, color=color)
            axes.text(value * 1.08, place + shift, f"{value:,.3g} ms  {what}", va="center", fontsize=10)
    axes.set_yticks(range(len(PAIRS)), [pair[0] for pair in PAIRS], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(1, 6e4)
    axes.set_xlabel("milliseconds of CPU time, all threads; less is better", fontsize=10)
    axes.grid(False)
    png.set_title(made, "CPU time of four calls, and of plain implementations")
    png.save(made, path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
