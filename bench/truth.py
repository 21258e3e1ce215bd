"""`python -m bench truth [--estimator mine.py:NAME] [--out DIR]`: which estimator comes nearest to true advantages?

Needs the committed files of bench/truth and nothing else: no environment, no model.  Rows: truth_rows.py and
truth_rivals.py; what is measured: truth_measures.py; page and JSON: truth_tables.py; figure: truth_figure.py.
"""

import argparse
import functools
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from . import report
from .truth_batches import encoder_missing
from .truth_figure import draw
from .truth_measures import EstimatorError, Found, Summary, measure_apart
from .truth_rows import SIZES, estimators_of
from .truth_sets import FOLDER
from .truth_tables import ABOUT, as_json, as_markdown, comparison, leaderboard, write_pages


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes truth.md, truth.json and truth.png."""
    description, _, more = ABOUT.partition("\n\n- ")
    parser = report.parser("truth", description, writes="truth.md, truth.json and truth.png")
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, f"- {more}"
    option = functools.partial(parser.add_argument, metavar="TEXT", default="")
    about = "your own, or MODULE:NAME: a bk.Config, or a function of a Batch (truth_batches.py) that gives advantages"
    option("--estimator", action="append", default=[], metavar="FILE.py:NAME", help=f"{about}; may be repeated")
    about = "which sets: to choose settings on, held out, or all (default: %(default)s)"
    option("--role", default="hold", choices=("choose", "hold", "all"), metavar=None, help=about)
    option("--sets", help="only sets whose name contains this")
    option("--only", help="only rows whose name contains this, yours, and those that every table has")
    option("--rollouts", type=int, nargs="*", default=list(SIZES), choices=SIZES, metavar="G", help="(%(default)s)")
    for name, what in (
        ("settings", "other settings of the kernel"),
        ("sentence", "fingerprints of a sentence encoder; half a minute more per set"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=f"also {what}")
    parser.add_argument("--leaderboard", action="store_true", help="print the table of docs/leaderboard.md, and end")
    parser.add_argument("--pages", action="store_true", help="write the pages' tables from committed results, and end")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the sets are")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="(default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.leaderboard:
        sys.stdout.write("\n".join(leaderboard()) + "\n")
        return 0
    if arguments.pages:
        write_pages()
        return 0
    role, there = arguments.role, sorted(arguments.folder.glob("*.npz"))
    paths = [path for path in there if arguments.sets in path.stem and (role == "all" or path.stem.endswith(role))]
    if not paths:
        names = ", ".join(path.stem for path in there) or "none"
        asked = f"--role {role} and --sets {arguments.sets!r}"
        parser.error(f"no truth set in {arguments.folder} fits {asked}; there are {names}.")
    begun = time.perf_counter()
    which = [name for name in ("settings", "sentence") if getattr(arguments, name)]
    try:
        estimators_of(arguments.estimator, arguments.only, which)
    except ValueError as error:
        parser.error(str(error))
    if arguments.sentence and (missing := encoder_missing()):
        parser.error(f"--sentence {missing}")
    work = [(path, arguments.estimator, arguments.only, arguments.rollouts, which) for path in paths]
    try:
        sets = run(work, max(1, arguments.processes))
    except EstimatorError as error:
        parser.error(str(error))
    seconds = time.perf_counter() - begun
    command = "python -m bench truth " + shlex.join(sys.argv[2:] if argv is None else argv)
    page, out = as_markdown(sets, seconds, command, arguments.estimator), arguments.out
    if out is not None:
        report.write(out, "truth", as_json(sets, seconds, command), page)
        draw(sets, out / "truth.png", arguments.estimator)
    if own := comparison(Summary(sets), arguments.estimator):
        page = "\n\n".join("\n".join(part) if isinstance(part, list) else part for part in own)
        page += f"\n\nEvery table: {f'{out}/truth.md; figure: {out}/truth.png' if out else '--out DIR writes it'}.\n"
    sys.stdout.write(page)
    return 0


def run(work: list[Any], processes: int) -> list[Found]:
    """The sets, in order, one process each at a time; a bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    def shown(done: Iterable[Found]) -> list[Found]:
        return list(track(done, "truth sets", len(work), console=Console(stderr=True), transient=True))

    if processes == 1:
        return shown(map(measure_apart, work))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # of the processes begun below: a core each
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return shown(pool.map(measure_apart, work))
