"""What the truth benchmark measures on a set, and means over sets, with the draws of a bootstrap over prompts.

Every measure is a function of how often each prompt group counts: once, or as a draw of the bootstrap says.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .truth_batches import Batch, Floats, batches, mean_of, parts, sums_of
from .truth_rows import BIPACE, SIZES, Estimator, estimators_of
from .truth_sets import read

DRAWS, SEED = 2000, 14
FAMILIES = ("planner", "model", "alfworld", "smollm2_textcraft", "smollm2_babyai")


class Measure(Protocol):
    def value(self, weight: Floats) -> Floats:
        """Of prompt groups that count `weight` times; with [B, groups] that of each of B draws."""
        ...


@dataclass
class Sums:
    """A correlation, by what it needs of each prompt group."""

    of: Floats  # [groups, 6]: n, Σa, Σb, Σa², Σb², Σab
    scale: float = 1.0

    @classmethod
    def make(cls, a: Floats, b: Floats, group: Any) -> Sums:
        columns = (np.ones(len(a)), a, b, a * a, b * b, a * b)
        return cls(np.stack([of_groups(group, column) for column in columns], axis=1))

    def value(self, weight: Floats) -> Floats:
        n, a, b, aa, bb, ab = np.moveaxis(weight @ self.of, -1, 0)
        spread = np.maximum(aa - a * a / n, 0.0) * np.maximum(bb - b * b / n, 0.0)
        return self.scale * quotient(ab - a * b / n, np.sqrt(spread))

    def r(self) -> float:
        return float(self.value(np.ones(len(self.of))))


@dataclass
class Wins:
    """How often a is higher at a record with b > 0 than at one without: the area under its ROC curve."""

    of: Floats  # [groups, groups]: of the records with b > 0 of one against those without of another; a tie is a half
    above: Floats  # [groups]: records with b > 0
    other: Floats  # [groups]

    @classmethod
    def make(cls, a: Floats, b: Floats, group: Any) -> Wins:
        above = b > 0
        beaten = []
        for g in np.unique(group):
            others = np.sort(a[~above & (group == g)])
            less = (np.searchsorted(others, a, "left") + np.searchsorted(others, a, "right")) / 2
            beaten.append(of_groups(group, less * above))
        return cls(np.stack(beaten, axis=1), of_groups(group, above), of_groups(group, ~above))

    def value(self, weight: Floats) -> Floats:
        return quotient(((weight @ self.of) * weight).sum(axis=-1), (weight @ self.above) * (weight @ self.other))


@dataclass
class Gradients:
    """The cosine of policy gradients Σ A ∇ log π, mean over the batches of a set."""

    of: Floats  # [batches, 2, groups of the set, K]: by the estimate, and by A*

    @classmethod
    def make(cls, batches: Sequence[Batch], a: Sequence[Floats], b: Sequence[Floats]) -> Gradients:
        groups = np.unique(np.concatenate([batch.group for batch in batches]))

        def by_group(batch: Batch, advantage: Floats) -> Floats:
            assert batch.gradient is not None
            out = np.zeros((len(groups), batch.gradient.shape[1]))
            np.add.at(out, np.searchsorted(groups, batch.group), advantage[:, None] * batch.gradient)
            return out

        pairs = zip(batches, a, b, strict=True)
        return cls(np.stack([[by_group(batch, x), by_group(batch, y)] for batch, x, y in pairs]))

    def value(self, weight: Floats) -> Floats:
        a, b = np.moveaxis(weight @ self.of, 1, 0)  # each [batches, (B,) K]
        size = np.sqrt((a * a).sum(axis=-1) * (b * b).sum(axis=-1))
        found: Floats = quotient((a * b).sum(axis=-1), size).mean(axis=0)
        return found

    def cosine(self) -> float:
        return float(self.value(np.ones(self.of.shape[2])))


class Expected(Gradients):
    """The second one estimates the expected policy gradient, by the returns of the batch's own rollouts.

    Inner products are means over pairs of different batches: no rollout is on both sides, and noise shrinks none.
    """

    def products(self, weight: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """|a|² of one batch, |E a|², E a · g and |g|², where a is by the estimate and g is the expected gradient."""
        a, g = np.moveaxis(weight @ self.of, 1, 0)

        def pairs(x: Floats, y: Floats) -> Floats:
            found: Floats = (x.sum(axis=0) * y.sum(axis=0)).sum(axis=-1) - (x * y).sum(axis=(0, -1))
            return found / (len(x) * (len(x) - 1))

        return (a * a).sum(axis=-1).mean(axis=0), pairs(a, a), pairs(a, g), pairs(g, g)

    def value(self, weight: Floats) -> Floats:
        """Of one batch's gradient and the expected one; 0 where noise leaves |g|² no estimate above 0."""
        one, _, ag, gg = self.products(weight)
        return quotient(ag, np.sqrt(np.maximum(one * gg, 0.0)))

    def bias_and_variance(self) -> tuple[float, float]:
        """The share of |E a|² that does not point along g; variance of one batch, in units of |E a|²."""
        one, aa, ag, gg = self.products(np.ones(self.of.shape[2]))
        return float(1 - ag**2 / (aa * gg)), float(one / aa - 1)


def of_groups(group: Any, column: Any) -> Floats:
    """[groups] sums of a column."""
    return np.bincount(np.unique(group, return_inverse=True)[1], column)


def quotient(a: Floats, b: Floats) -> Floats:
    """a / b, 0 where b is not above 0."""
    found: Floats = np.where(b > 0, a / np.where(b > 0, b, 1.0), 0.0)
    return found


def ranks(x: Floats) -> Floats:
    """[N] rank of each number; equal ones share their mean."""
    _, number, count = np.unique(x, return_inverse=True, return_counts=True)
    mean: Floats = np.cumsum(count) - (count - 1) / 2
    return mean[number]


def others_mean(batch: Batch) -> Floats:
    """[N] mean return of the prompt's other rollouts at the same step, shrunk by three records to all of theirs."""
    total, records = sums_of(batch.group, batch.returns)
    own, length = sums_of(batch.trajectory, batch.returns)
    here, of_step = sums_of([batch.group, batch.step], batch.returns)
    mean = (total - own) / np.maximum(records - length, 1)
    found: Floats = (here - batch.returns + 3 * mean) / (of_step + 2)
    return found


@dataclass
class Found:
    """Results on one set."""

    meta: dict[str, Any]
    records: int
    groups: int
    trajectories: int
    success: float
    reliability: float
    measures: dict[tuple[str, int], dict[str, Measure]] = field(default_factory=dict)  # by estimator and G, by name
    gradient_reliability: float = float("nan")
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    cpu_seconds: float = 0.0  # of everything, also reading and the truth

    @property
    def name(self) -> str:
        return str(self.meta["name"])

    @property
    def family(self) -> str:
        return next((family for family in FAMILIES if family in self.name), "other")


def measure(path: Path, estimators: Sequence[Estimator], sizes: Sequence[int]) -> Found:
    """All estimators on one set."""
    found = read(path)
    whole = batches(found)
    first, second = (_measured(whole, halves) for halves in zip(*(b.halves for b in whole), strict=True))
    half = Sums.make(first, second, _measured(whole, [b.group for b in whole])).r()
    trajectories = sum(len(np.unique(b.trajectory)) for b in whole)
    out = Found(
        found.meta, sum(map(len, whole)), sum(len(np.unique(b.group)) for b in whole), trajectories,
        sum(float(b.reward.sum()) for b in whole) / trajectories, 2 * half / (1 + half),
    )  # fmt: skip
    expected = found.meta.get("target") == "other rollouts"
    if found.gradient is not None and not expected:
        half = Gradients.make(whole, *zip(*(b.halves for b in whole), strict=True)).cosine()
        out.gradient_reliability = 2 * half / (1 + half)
    for size in sizes:
        cut = [part for batch in whole for part in parts(batch, size)]
        if not cut:
            continue
        truth, group, trajectory = (
            _measured(cut, [getattr(b, name) for b in cut]) for name in ("truth", "group", "trajectory")
        )
        beside = [b.truth for b in cut]
        if expected:
            own = whole[0].returns - others_mean(whole[0])
            beside = [own[np.isin(whole[0].trajectory, b.trajectory)] for b in cut]
        for estimator in estimators:
            needs = estimator.needs
            if size not in estimator.sizes:
                continue
            if needs.startswith("hidden") and not all(int(k) in found.hidden for k in needs[6:].split("+")):
                continue
            begun = time.process_time()
            each = [checked(estimator, b) for b in cut]
            out.seconds[estimator.name, size] = time.process_time() - begun
            a = _measured(cut, each)
            inside = (np.round(x - mean_of(trajectory, x), 12) for x in (a, truth))  # 0 where only rounding is left
            r = Sums.make(a, truth, group)
            of = out.measures[estimator.name, size] = {
                "r": r,
                "corrected": Sums(r.of, 1 / np.sqrt(out.reliability)),
                "Spearman": Sums.make(ranks(a), ranks(truth), group),
                "within": Sums.make(*inside, group),
                "AUC": Wins.make(a, truth, group),
            }
            if found.gradient is not None and not (expected and (estimator.reads_truth or len(cut) < 2)):
                of["cosine"] = (Expected if expected else Gradients).make(cut, each, beside)
        for batch in whole:
            batch.cache.clear()
    return out


def _measured(batches: Sequence[Batch], columns: Sequence[Any]) -> Any:
    """The batches' columns at the records that have a true advantage, one after another."""
    return np.concatenate([column[b.measured] for b, column in zip(batches, columns, strict=True)])


class EstimatorError(ValueError):
    """A row of one's own that cannot be measured."""


def checked(estimator: Estimator, batch: Batch) -> Floats:
    of = f"{estimator.name} on the {len(batch)} records of {batch.meta['name']}"
    try:
        a = np.asarray(estimator.call(batch), dtype=np.float64)
    except Exception as error:
        first = error.__cause__ or error
        packages = {"bipace_kernels", "bench", "site-packages"}  # any other file is one's own
        frames = [f for f in traceback.extract_tb(first.__traceback__) if not packages & {*Path(f.filename).parts}]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise EstimatorError(f"{of}: {type(error).__name__}: {error}{where}") from error
    if a.shape != (len(batch),) or not np.isfinite(a[batch.measured] if estimator.reads_truth else a).all():
        raise EstimatorError(f"{of} must give [N] = [{len(batch)}] finite numbers, got shape {a.shape}.")
    return a


def measure_apart(work: tuple[Path, list[str], str, Sequence[int], list[str]]) -> Found:
    """In a separate process, which creates its own estimators: functions cannot be sent."""
    torch.set_num_threads(1)
    path, own, only, sizes, which = work
    begun = time.process_time()
    found = measure(path, estimators_of(own, only, which), sizes)
    found.cpu_seconds = time.process_time() - begun
    return found


@dataclass
class Estimate:
    """A number with its draws, so that differences are paired."""

    value: float
    draws: Floats

    def __sub__(self, other: Estimate) -> Estimate:
        return Estimate(self.value - other.value, self.draws - other.draws)

    @property
    def interval(self) -> tuple[float, float]:
        low, high = np.quantile(self.draws, (0.025, 0.975))
        return float(low), float(high)

    @property
    def rounded(self) -> list[float]:
        return [round(x, 5) for x in (self.value, *self.interval)]

    @property
    def difference(self) -> str:
        return "{:+.3f} ({:+.3f} to {:+.3f})".format(self.value, *self.interval)

    def __str__(self) -> str:
        return "{:.3f} ({:.2f} to {:.2f})".format(self.value, *self.interval)


@dataclass
class Summary:
    """Means over sets."""

    sets: list[Found]
    weight: dict[str, Floats] = field(default_factory=dict)  # [1 + DRAWS, groups] of each set: once each, then draws
    known: dict[Any, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, found in enumerate(self.sets):
            drawn = np.random.default_rng([SEED, number]).integers(0, found.groups, (DRAWS, found.groups))
            self.weight[found.name] = np.vstack([np.ones(found.groups), counts(drawn)])

    def over(self, names: Iterable[str], estimator: str, size: int, what: str = "r") -> Estimate | None:
        """Mean of a measure over the sets; None where a set lacks it."""
        values = []
        for found in self.sets:
            if found.name not in names:
                continue
            if (of := found.measures.get((estimator, size), {}).get(what)) is None:
                return None
            if (key := (found.name, estimator, size, what)) not in self.known:
                self.known[key] = of.value(self.weight[found.name])
            values.append(self.known[key])
        mean = np.mean(values, axis=0) if values else None
        return None if mean is None else Estimate(float(mean[0]), mean[1:])

    def mean(self, families: dict[str, list[str]], estimator: str, size: int, what: str = "r") -> float:
        """Over the kinds of sets that have the row."""
        found = [self.over(names, estimator, size, what) for names in families.values()]
        return float(np.mean([one.value for one in found if one is not None]))

    def names(self, size: int, what: str = "r") -> list[str]:
        """Rows measured with so many rollouts."""
        keys = {key: None for found in self.sets for key, of in found.measures.items() if what in of}
        return [name for name, of in keys if of == size]

    def equivalent(self, names: Sequence[str], estimator: str, size: int, reference: str = BIPACE) -> str:
        """Rollouts a prompt that the reference needs for the estimator's r."""
        own = self.over(names, estimator, size)
        curve = [(g, found.value) for g in SIZES if (found := self.over(names, reference, g)) is not None]
        if own is None or len(curve) < 2:
            return "–"
        xs, ys = np.log2([g for g, _ in curve]), np.maximum.accumulate([r for _, r in curve])
        if own.value > ys[-1]:
            return f"> {curve[-1][0]}"
        return f"< {curve[0][0]}" if own.value < ys[0] else f"{2 ** np.interp(own.value, ys, xs):.1f}"


def counts(drawn: Any) -> Floats:
    """[B, groups] how often each group is in a draw of [B, groups] numbers."""
    return np.stack([np.bincount(row, minlength=drawn.shape[1]) for row in drawn]).astype(np.float64)
