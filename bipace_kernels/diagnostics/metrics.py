"""Metrics of a result, for logging at every training step, and warnings."""

from typing import Any

import numpy as np

from ..backends.schema import Branch
from ..estimators.rows import PARTITIONS
from ..support.warnings import warn_of_unparsed, warn_once
from .records import Records

_F1_GROUP = 8  # smaller groups are not evidence of a collapsed partition


def compute_metrics(records: Records) -> dict[str, float]:
    """The metrics of docs/metrics.md, over the whole batch; an empty denominator gives 0.0."""
    out: dict[str, float] = {}
    lay = records.layout
    m = lay.n_records
    labels, branch = records.labels.numpy(), records.branch.numpy()
    if PARTITIONS[records.partition].has_clusters:
        sizes = np.bincount(labels) if m else np.zeros(0, dtype=np.int64)
        sizes = sizes[sizes > 0]
        out["singleton_cluster_fraction"] = _mean(sizes == 1)
        out["mean_cluster_size"] = _mean(sizes)
        out["p90_cluster_size"] = float(np.quantile(sizes, 0.9)) if sizes.size else 0.0
        out["median_cluster_size"] = float(np.median(sizes)) if sizes.size else 0.0
        out["cluster_count"] = float(sizes.size)
        pairs = float(np.sum(sizes.astype(np.float64) * (sizes - 1) / 2))
        out["pairs"] = pairs
        out["mean_delta_t"] = _sum_delta_t(labels, lay.time().numpy()) / pairs if pairs else 0.0
        if records.action_key is not None:
            unique = _unique_actions(labels, records.action_key.numpy())
            out["multi_action_cluster_fraction"] = _mean(unique >= 2)
            out["mean_unique_actions"] = _mean(unique)
        out["pace_row_fraction"] = _mean(branch == Branch.PACE)
        out["leave_one_out_row_fraction"] = _mean(branch == Branch.LEAVE_ONE_OUT)
        out["singleton_row_fraction"] = _mean(branch == Branch.SINGLETON)
        _warn_if_degenerate(records, labels)
    alone = 0 if records.usable is None else int((~records.usable).sum())  # made singletons, not set aside
    out["invalid_row_fraction"] = (records.n_checked - m + alone) / max(records.n_checked, 1)
    out["mean_advantage"] = _mean(records.advantage.numpy().astype(np.float64))  # one sum at any number of threads
    if records.value is not None:
        out["value_explained_share"] = _explained(records)
    if records.action_parsed is not None:
        out["action_parse_rate"] = _mean(records.action_parsed.numpy())
        if m and out["action_parse_rate"] < 0.5:
            warn_of_unparsed(out["action_parse_rate"], stacklevel=4)
    return {f"bipace/{name}": value for name, value in out.items()}


def _mean(values: Any) -> float:
    return float(values.mean()) if values.size else 0.0


def _explained(records: Records) -> float:
    """1 − Σ(R − V̂)² / Σ(R − μ_p)², over the records from which the values were estimated."""
    assert records.value is not None
    returns, value = records.returns.double().numpy(), records.value.double().numpy()
    group = records.layout.group_of_record().numpy()
    mean = np.bincount(group, returns) / np.maximum(np.bincount(group), 1) if returns.size else returns
    whole = float(np.sum((returns - mean[group]) ** 2)) if returns.size else 0.0
    return 1.0 - float(np.sum((returns - value) ** 2)) / whole if whole > 0 else 0.0


def _sum_delta_t(labels: Any, time: Any) -> float:
    """Σ |t_i − t_j| over the pairs of each cluster: sorted in time, the k-th of n counts (2k − n + 1) times."""
    order = np.lexsort((time, labels))
    c, t = labels[order], time[order]
    starts = np.flatnonzero(np.concatenate(([True], c[1:] != c[:-1])))
    n = np.diff(np.concatenate((starts, [c.size])))
    run = np.repeat(np.arange(starts.size), n)
    place = np.arange(c.size) - starts[run]
    t = (t - t[starts][run]).astype(np.float64)  # only differences count; small numbers keep the sum exact
    return float(np.sum((2 * place - n[run] + 1) * t))


def _unique_actions(labels: Any, keys: Any) -> Any:
    """Distinct action keys of each cluster of two or more."""
    if labels.size == 0:
        return np.zeros(0)
    sizes = np.bincount(labels)
    order = np.lexsort((keys, labels))  # np.unique() of pairs makes a TypeError of Ctrl-C
    c, key = labels[order], keys[order]
    first = np.concatenate(([True], (c[1:] != c[:-1]) | (key[1:] != key[:-1])))
    return np.bincount(c[first], minlength=sizes.size)[sizes >= 2]


def _warn_if_degenerate(records: Records, labels: Any) -> None:
    lay = records.layout
    offsets = lay.group_offsets.numpy()
    large = np.flatnonzero(np.diff(offsets) >= _F1_GROUP)
    if large.size:
        low = np.minimum.reduceat(labels, offsets[:-1])[large]
        high = np.maximum.reduceat(labels, offsets[:-1])[large]
        share = float((low == high).mean())
        if share >= 0.9:
            text = (
                f"{share:.0%} of the prompt groups with {_F1_GROUP} or more records hold one single cluster: the step "
                "term is a group baseline, since no states are distinguished. Lower epsilon or choose another layer."
            )
            warn_once("metrics: one_cluster", text, stacklevel=5)
    alone = float((np.bincount(labels)[labels] == 1).mean()) if labels.size else 0.0
    if alone >= 0.95:
        text = (
            f"{alone:.0%} of the rows are alone in their cluster: the step term is 0 nearly everywhere. Raise epsilon, "
            "or check that the fingerprints belong to these rows."
        )
        warn_once("metrics: all_alone", text, stacklevel=5)
