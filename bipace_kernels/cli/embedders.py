"""The embedders that `bipace report` compares: the same states, each clustered at an ε of its own."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..embedders import EMBEDDERS, EmbedderRow, Identity, Ngram
from . import rollouts, states
from ._console import CliError, number

if TYPE_CHECKING:
    import torch

    import bipace_kernels as bk

BAND = (4, 8)  # wanted median cluster size; that of bk.choose_epsilon()
Z95 = 1.96  # standard errors to both sides of value R²


@dataclass(frozen=True)
class Made:
    """Fingerprints of the records of one section."""

    row: EmbedderRow
    fingerprint: Any  # [N, D]


@dataclass(frozen=True)
class Entry:
    """An embedder's row of the comparison."""

    label: str
    choice: bk.EpsilonChoice
    outcome: Any  # report.Outcome

    @property
    def in_band(self) -> bool:
        return BAND[0] <= float(self.outcome.metrics["median_cluster_size"]) <= BAND[1]

    def interval(self) -> tuple[float, float] | None:
        """95 % of value R²."""
        r2 = self.outcome.value_r2
        if r2.r2 is None or r2.stderr is None:
            return None
        return r2.r2 - Z95 * r2.stderr, r2.r2 + Z95 * r2.stderr

    def as_json(self) -> dict[str, Any]:
        interval = self.interval()
        return {
            **self.outcome.as_json(),
            "epsilon_reason": self.choice.reason,
            "epsilon_probes": [list(probe) for probe in self.choice.probes],
            "value_r2_interval95": None if interval is None else list(interval),
        }


def load_encoder(model: str, advance: Callable[[int], None]) -> bk.embedders.Sentence:
    """The sentence encoder of --sentence; CliError where it cannot be had."""
    import bipace_kernels as bk

    with contextlib.suppress(ImportError):  # Sentence() says what is missing
        logging: Any = importlib.import_module("transformers.utils.logging")
        logging.disable_progress_bar()  # the program shows its own
        logging.set_verbosity_error()
    try:
        return bk.embedders.Sentence(model, progress=advance)
    except (ImportError, ValueError) as error:
        raise CliError(f"--sentence {model}: {error}") from None


def make(records: rollouts.Rollouts, sentence: torch.Tensor | None, on_invalid: str) -> list[Made]:
    """The fingerprints to compare: always identity and n-grams; a sentence encoder's and hidden states where given.

    sentence   [N, D] or None
    """
    texts = states.texts(records, states.State())
    made = [
        Made(EMBEDDERS["identity"], Identity().embed(texts)),
        Made(EMBEDDERS["ngram"], Ngram().embed(texts)),
    ]
    if sentence is not None:
        made.append(Made(EMBEDDERS["sentence"], sentence))
    if records.fingerprint is not None:
        rows = np.asarray(records.fingerprint)
        hidden = rows if rows.dtype in (np.float16, np.float32) else rows.astype(np.float32)
        if on_invalid == "raise":
            states.check_fingerprints(records, hidden)
        made.append(Made(EMBEDDERS["actor_hidden"], hidden))
    return made


def choose(made: Made, layout: Any, backend: str, threads: int | None) -> bk.EpsilonChoice:
    """ε for these fingerprints by the median cluster size, over the records [M] of a layout that have a direction."""
    import torch

    import bipace_kernels as bk

    if made.row.fixed:
        return bk.EpsilonChoice(made.row.epsilon, (), "only equal states share a cluster")
    rows = torch.as_tensor(made.fingerprint)
    good = rows.isfinite().all(dim=1) & (rows != 0).any(dim=1)
    usable = layout.restrict(good[layout.order])
    if usable.n_records == 0:
        return bk.EpsilonChoice(made.row.epsilon, (), "no record to choose from")
    return bk.choose_epsilon(rows, layout=usable, band=BAND, backend=backend, num_threads=threads)


# ---- tables

HEADINGS = ("ε", "singleton clusters", "median size", "mean size", "value R²", "95 % interval", "coverage")


def cells(entry: Entry) -> list[str]:
    """An entry under HEADINGS."""
    metrics, r2, interval = entry.outcome.metrics, entry.outcome.value_r2, entry.interval()
    outside = "" if entry.in_band else " *"
    return [
        f"{entry.choice.epsilon:.3g}",
        f"{metrics['singleton_cluster_fraction']:.1%}",
        f"{metrics['median_cluster_size']:g}{outside}",
        f"{metrics['mean_cluster_size']:.1f}",
        "–" if r2.r2 is None else number(r2.r2, ".3f"),
        "–" if interval is None else f"{number(interval[0], '.3f')} … {number(interval[1], '.3f')}",
        f"{r2.coverage:.0%}",
    ]


def explanation(entries: Sequence[Entry], sentence: str | None) -> str:
    """What the table shows, as a paragraph."""
    text = (
        "What makes the fingerprint of a state, here the observation alone. Each embedder has a geometry, so each has "
        f"its own ε: the paper's search for a median cluster size from {BAND[0]} to {BAND[1]} (`bk.choose_epsilon`). "
        "Identity knows equal states alone. The interval is 1.96 standard errors over prompt groups to both sides."
    )
    if sentence is not None:
        text += f" Sentence encoder: `{'/'.join(Path(sentence).parts[-2:])}`."
    if not all(entry.in_band for entry in entries):
        text += f" \\*: the median lies outside {BAND[0]} to {BAND[1]}."
    return text
