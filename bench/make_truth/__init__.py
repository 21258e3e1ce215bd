"""Makers of the truth sets (`python -m bench.make_truth`)."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def example(name: str) -> None:
    """Makes the modules of an example importable: they import each other by their bare names."""
    if str(EXAMPLES / name) not in sys.path:
        sys.path.insert(0, str(EXAMPLES / name))
