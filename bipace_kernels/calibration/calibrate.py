"""calibrate(): the layer, the pooling and the ε that suit a backbone, from forwards over a few hundred prompts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..backends import dispatch, threads
from ..clustering.cluster import _epsilons, cluster
from ..clustering.epsilon import choose_epsilon, measure_sizes, pair
from ..inputs import checks
from ..inputs.ids import number_objects
from ..settings import RADII
from ..support import optional
from ..support.progress import progress_bar
from .result import Calibration, Chosen, Scanned

if TYPE_CHECKING:
    from .states import Pair, States

DEGENERATE = 0.95  # of the prompts in singletons, or in the largest cluster of their group: as in the metrics' warnings


@threads.using()
def calibrate(
    model: Any,
    prompts: Any,
    labels: Any,
    *,
    tokenizer: Any = None,
    layers: Any = None,
    pooling: str | Sequence[str] = ("last", "mean", "attention"),
    epsilons: Sequence[float] = (0.05, 0.10, 0.15, 0.20),
    group: Any = None,
    folds: int = 5,
    min_clusters: int = 5,
    band: tuple[float, float] = (4, 8),
    bounds: tuple[float, float] = (0.02, 0.40),
    seed: int = 0,
    out: str | Path | None = None,
    restart: bool = False,
    token_budget: int | None = None,
    progress: bool | None = None,
    backend: str = "auto",
) -> Calibration:
    """Layers × poolings × ε on the same prompts, and the choice by the paper's rule.

        found = bk.calibrate(model, prompts, task_types, tokenizer=tokenizer, out="calibration/")
        found.choice.layer, found.choice.pooling, found.choice.epsilon

    model         a Hugging Face decoder on one device or several, not sharded over processes
    prompts       [N] texts, chat messages (their template's generation prompt is added) or token ids without padding
    labels        [N] labels that a linear probe predicts from the states: the task's type
    tokenizer     of the model; not needed for token ids
    layers        indices into hidden_states or "block 16", as in tap(); "all"; None: about seven over the depth and the
                  last block before the norm, on 28 blocks the paper's 4, 8, 12, 16, 20, 24, 27
    pooling       one or several of "last", "mean", "attention"
    epsilons      radii of the scan
    group         [N] ids of prompt groups; clusters stay inside them.  None: all prompts are one group, the paper's
                  scan
    folds         of the probe's cross-validation; each label needs as many distinct prompts
    min_clusters  least number of clusters for a partition to qualify
    band, bounds  target median cluster size and range of the chosen ε, as in choose_epsilon()
    seed          of the folds
    out           folder whose subfolder `states` keeps the states of each layer and pooling ([N, D] float32, .npy) and
                  the measurements; another call resumes there, and computes only what is missing.  ValueError for a
                  folder that belongs to another model or other prompts
    restart       discard what `out` holds
    token_budget  tokens of one forward, including padding; None: 512 on the CPU, 16,384 elsewhere
    progress      a bar on stderr for the forwards, another for clusters and probes; None: if stderr is a terminal
    backend       of the clusters

    Forwards end after the deepest layer and serve all layers and poolings; identical prompts run once.  The choice is
    the highest accuracy of a linear probe (scikit-learn; extra `calibrate`) among what qualifies, then ε by
    choose_epsilon(): docs/calibration.md has the rule.
    """
    from ..hidden._prompts import budget_of  # bk.hidden is loaded on demand
    from ..hidden.layers import find_decoder
    from ..hidden.tap import tap
    from .states import States, in_use, token_ids

    optional.need("sklearn", "calibrate(), for its linear probe,")
    dispatch.check_name(backend)
    decoder = find_decoder(model)
    budget = budget_of(token_budget, decoder.device)
    radii = _epsilons(epsilons if isinstance(epsilons, (list, tuple)) else [epsilons])
    assert isinstance(radii, list)
    if not radii:
        raise ValueError("epsilons must hold at least one radius, got none; e.g. (0.05, 0.1, 0.15, 0.2).")
    radii = sorted(set(radii))
    folds = checks.integer_at_least(folds, "folds", 2)
    min_clusters = checks.integer_at_least(min_clusters, "min_clusters", 1)
    seed = checks.integer_at_least(seed, "seed", 0)
    band, bounds = pair(band, "band", 1.0, float("inf")), pair(bounds, "bounds", *RADII)
    tapped = tap(model, layers=_candidates(layers, len(decoder.blocks)), pooling=pooling)  # checks the names
    by_depth = sorted(tapped.layers, key=lambda layer: (layer.block, layer.normed))
    pairs = [(layer, how) for layer in by_depth for how in tapped._poolings]
    rows = token_ids(prompts, tokenizer)
    numbers, names = _numbered(labels, "labels", len(rows))
    groups = torch.zeros(len(rows), dtype=torch.int64) if group is None else _numbered(group, "group", len(rows))[0]
    folder = None if out is None else checks.path(out, "out") / "states"
    same = number_objects([tuple(row) for row in rows]).numpy()  # equal prompts share a number, for the folds
    if len(names) < 2:
        raise ValueError(f"labels must hold at least two distinct values, got {len(names)}: {names[:1]}.")
    for number, label in enumerate(names):
        if (distinct := len(np.unique(same[numbers.numpy() == number]))) < folds:
            wish = f"labels must have {folds} distinct prompts, as folds"
            raise ValueError(f"{wish}, but {label!r} has {distinct}; give more.")
    digests = {"labels": _digest(numbers), "group": _digest(groups)}
    settings = {"epsilons": radii, "folds": folds, "seed": seed, **digests}
    seconds = {"states": 0.0, "clusters": 0.0, "probes": 0.0}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[part] += time.perf_counter() - start

    with in_use(folder):
        states = States(model, rows, folder, restart)
        with timed("states"):
            states.compute(pairs, budget, progress)
        measured: dict[Pair, Mapping[str, Any]] = {}
        with progress_bar(progress, "clusters and probes", len(pairs)) as bar:
            for item in pairs:
                result = states.remembered(item, settings)
                if result is None:
                    x = states.load(item)
                    with timed("clusters"):
                        clusters = _clustered(x, groups, radii, backend)
                    with timed("probes"):
                        result = {"scan": clusters, **_probed(x, numbers.numpy(), same, folds, seed)}
                    states.remember(item, settings, result)
                measured[item] = result
                bar.update()
        scan = tuple(_scanned(item, measured[item], e, min_clusters) for item in pairs for e in range(len(radii)))
        choice, reason = _choose(scan, states, groups, min_clusters, backend, band=band, bounds=bounds)
    causal: Any = decoder.causal
    name = Path(str(getattr(causal.config, "_name_or_path", "") or "")).name or type(causal).__name__
    counts = {"n_prompts": len(rows), "n_distinct": states.n_distinct, "n_labels": len(names)}
    counts["n_groups"] = len(np.unique(groups.numpy()))
    rule = {"folds": folds, "min_clusters": min_clusters, "seed": seed, "reused": states.reused}
    majority = int(numbers.bincount().max()) / len(rows)
    return Calibration(scan, choice, reason, name, **counts, majority=majority, **rule, seconds=seconds)


def _clustered(x: Tensor, groups: Tensor, radii: list[float], backend: str) -> list[dict[str, float]]:
    """Clusters of the states [N, D] under each ε."""
    if not bool((x != 0).any(dim=1).all()):
        raise ValueError("model must give non-zero states, but some are entirely zero; leave that layer out.")
    labels = cluster(x, groups, radii, backend=backend)
    scan = []
    for epsilon, row, sizes in zip(radii, labels, measure_sizes(labels), strict=True):
        _, first, counts = np.unique(row.numpy(), return_index=True, return_counts=True)
        largest = np.zeros(int(groups.max()) + 1, np.int64)  # cluster of each group
        np.maximum.at(largest, groups.numpy()[first], counts)
        measured = {"epsilon": epsilon, "clusters": sizes.clusters, "singletons": sizes.singletons}
        shares = {"largest": int(largest.sum()) / len(x), "alone": sizes.singletons * sizes.clusters / len(x)}
        scan.append({**measured, "median_size": sizes.median, **shares})
    return scan


def _probed(x: Tensor, labels: Any, same: Any, folds: int, seed: int) -> dict[str, float]:
    """Accuracy of the linear probe, mean and standard error over the folds."""
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_score  # type: ignore[import-untyped]
    from sklearn.pipeline import make_pipeline  # type: ignore[import-untyped]
    from sklearn.preprocessing import StandardScaler  # type: ignore[import-untyped]
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    cut = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    # One thread: the problems are small, and BLAS with threads is slower (7 times on two busy cores).
    with threadpool_limits(1):
        scores = cross_val_score(model, x.numpy(), labels, groups=same, cv=cut, error_score="raise")
    return {"accuracy": float(scores.mean()), "stderr": float(scores.std(ddof=1) / len(scores) ** 0.5)}


def _scanned(item: Pair, measured: Mapping[str, Any], e: int, min_clusters: int) -> Scanned:
    clusters = {**measured["scan"][e], "clusters": int(measured["scan"][e]["clusters"])}
    alone = clusters.pop("alone")
    qualifies = clusters["clusters"] >= min_clusters and clusters["largest"] < DEGENERATE and alone < DEGENERATE
    return Scanned(*item, **clusters, accuracy=measured["accuracy"], stderr=measured["stderr"], qualifies=qualifies)


def _choose(
    scan: Sequence[Scanned], states: States, groups: Tensor, min_clusters: int, backend: str, **rule: Any
) -> tuple[Chosen | None, str]:
    """The choice and its reason; rule: band and bounds of choose_epsilon()."""
    fitting = [row for row in scan if row.qualifies]
    if not fitting:
        few = all(row.clusters < min_clusters or row.largest >= DEGENERATE for row in scan)
        return None, (
            f"no layer and pooling has an ε with at least {min_clusters} clusters that are neither one giant nor all "
            f"singletons; scan {'smaller' if few else 'other'} epsilons, or more prompts."
        )
    # The first of equals is taken, and the scan is ordered by depth.
    best = max(fitting, key=lambda row: row.accuracy)
    x = states.load((best.layer, best.pooling))
    chosen = choose_epsilon(x, groups, **rule, backend=backend)
    (sizes,) = measure_sizes(cluster(x, groups, chosen.epsilon, backend=backend)[None])
    higher = [row for row in scan if row.accuracy > best.accuracy]
    reason = (
        f"highest probe accuracy ({best.accuracy:.3f}) among layers and poolings with at least {min_clusters} clusters "
        f"that are neither one giant nor all singletons; {chosen.reason}."
    )
    if higher:
        over = max(higher, key=lambda row: row.accuracy)
        reason = f"{reason} {over.layer}, {over.pooling}, has {over.accuracy:.3f} but no such ε."
    measured = (best.accuracy, sizes.clusters, sizes.singletons, sizes.median)
    return Chosen(best.layer, best.pooling, chosen.epsilon, *measured, chosen.probes), reason


def _candidates(layers: Any, n_blocks: int) -> Sequence[int | str]:
    if layers is None:
        gap = max(1, n_blocks // 7)
        return [f"block {block}" for block in sorted({*range(gap, n_blocks - 1, gap), n_blocks - 1})]
    if isinstance(layers, str) and layers == "all":
        return [f"block {block}" for block in range(n_blocks)]
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        raise ValueError(f"layers must be a list of layers, 'all' or None, got {layers!r}; write [{layers!r}] for one.")
    return layers


def _numbered(values: Any, name: str, n: int) -> tuple[Tensor, list[Any]]:
    """[N] int64 numbers by first appearance, and their values."""
    got = checks.length(values, name)
    if got != n:
        raise ValueError(f"{name} must have one entry per prompt, N = {n}, got {got}.")
    items = values.tolist() if isinstance(values, (Tensor, np.ndarray)) else list(values)
    if None in items:
        raise ValueError(f"{name}[{items.index(None)}] must be a value, got None; give one, or leave the prompt out.")
    return number_objects(items, name).cpu(), list(dict.fromkeys(items))


def _digest(numbers: Tensor) -> str:
    return hashlib.sha256(json.dumps(numbers.tolist()).encode()).hexdigest()[:16]
