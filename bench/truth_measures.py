"""What the truth benchmark measures on a set, and means over sets, with the draws of a bootstrap over prompts."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .truth_batches import Batch, Floats, batches, parts
from .truth_rows import BIPACE, SIZES, Estimator, estimators_of
from .truth_sets import read

DRAWS, SEED = 2000, 14
FAMILIES = ("planner", "model", "alfworld")


@dataclass
class Sums:
    """What a correlation needs, by prompt group, so that a bootstrap costs nothing."""

    of: Floats  # [groups, 6]: n, Σa, Σb, Σa², Σb², Σab

    @classmethod
    def make(cls, a: Floats, b: Floats, group: Any) -> Sums:
        _, number = np.unique(group, return_inverse=True)
        columns = (np.ones(len(a)), a, b, a * a, b * b, a * b)
        return cls(np.stack([np.bincount(number, column) for column in columns], axis=1))

    def r(self, draws: Any = None) -> Floats:
        """The correlation; with draws [B, groups] that of each of them."""
        total = self.of.sum(axis=0) if draws is None else self.of[draws].sum(axis=1)
        n, a, b, aa, bb, ab = np.moveaxis(total, -1, 0)
        spread = np.sqrt(np.maximum(aa - a * a / n, 0.0) * np.maximum(bb - b * b / n, 0.0))
        found: Floats = np.where(spread > 0, (ab - a * b / n) / np.where(spread > 0, spread, 1.0), 0.0)
        return found


@dataclass
class Gradients:
    """Policy gradients Σ A ∇ log π of the batches of a set, by prompt group."""

    of: Floats  # [batches, 2, groups of the set, K]: by the estimate, and by A*

    @classmethod
    def make(cls, batches: Sequence[Any], a: Sequence[Floats], b: Sequence[Floats]) -> Gradients:
        groups = np.unique(np.concatenate([batch.group for batch in batches]))

        def by_group(batch: Any, advantage: Floats) -> Floats:
            out = np.zeros((len(groups), batch.gradient.shape[1]))
            np.add.at(out, np.searchsorted(groups, batch.group), advantage[:, None] * batch.gradient)
            return out

        pairs = zip(batches, a, b, strict=True)
        return cls(np.stack([[by_group(batch, x), by_group(batch, y)] for batch, x, y in pairs]))

    def weight(self, draws: Any = None) -> Floats:
        """[(B,) groups] how often each of them is drawn."""
        n = self.of.shape[2]
        return np.ones(n) if draws is None else (draws[..., None] == np.arange(n)).sum(axis=1).astype(np.float64)

    def cosine(self, draws: Any = None) -> Floats:
        """Between the two, mean over the batches; with draws [B, groups] that of each of them."""
        a, b = np.moveaxis(self.weight(draws) @ self.of, 1, 0)  # each [batches, (B,) K]
        size = np.sqrt((a * a).sum(axis=-1) * (b * b).sum(axis=-1))
        found: Floats = np.where(size > 0, (a * b).sum(axis=-1) / np.where(size > 0, size, 1.0), 0.0).mean(axis=0)
        return found


class Expected(Gradients):
    """The second one estimates the expected policy gradient, by the returns of the batch's own rollouts.

    Inner products are means over pairs of different batches: no rollout is on both sides, and noise shrinks none.
    """

    def products(self, draws: Any = None) -> tuple[Floats, Floats, Floats, Floats]:
        """|a|² of one batch, |E a|², E a · g and |g|², where a is by the estimate and g is the expected gradient."""
        a, g = np.moveaxis(self.weight(draws) @ self.of, 1, 0)

        def pairs(x: Floats, y: Floats) -> Floats:
            found: Floats = (x.sum(axis=0) * y.sum(axis=0)).sum(axis=-1) - (x * y).sum(axis=(0, -1))
            return found / (len(x) * (len(x) - 1))

        return (a * a).sum(axis=-1).mean(axis=0), pairs(a, a), pairs(a, g), pairs(g, g)

    def cosine(self, draws: Any = None) -> Floats:
        """Of one batch's gradient and the expected one; 0 where noise leaves |g|² no estimate above 0."""
        one, _, ag, gg = self.products(draws)
        size = np.sqrt(np.maximum(one * gg, 0.0))
        return np.where(size > 0, ag / np.where(size > 0, size, 1.0), 0.0)

    def bias_and_variance(self) -> tuple[float, float]:
        """The share of |E a|² that does not point along g; variance of one batch, in units of |E a|²."""
        one, aa, ag, gg = self.products()
        return float(1 - ag**2 / (aa * gg)), float(one / aa - 1)


def others_mean(batch: Batch) -> Floats:
    """[N] mean return of the prompt's other rollouts at the same step, shrunk by three records to all of theirs."""

    def sums(*keys: Any) -> tuple[Floats, Any]:
        number = np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1)
        return np.bincount(number, batch.returns)[number], np.bincount(number)[number]

    total, records = sums(batch.group)
    own, length = sums(batch.trajectory)
    here, of_step = sums(batch.group, batch.step)
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
    sums: dict[tuple[str, int], Sums] = field(default_factory=dict)  # by estimator and G
    gradients: dict[tuple[str, int], Gradients] = field(default_factory=dict)  # where the set has gradients
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
    group = _measured(whole, [b.group for b in whole])
    half = float(Sums.make(first, second, group).r())
    trajectories = sum(len(np.unique(b.trajectory)) for b in whole)
    out = Found(
        found.meta, sum(map(len, whole)), sum(len(np.unique(b.group)) for b in whole), trajectories,
        sum(float(b.reward.sum()) for b in whole) / trajectories, 2 * half / (1 + half),
    )  # fmt: skip
    expected = found.meta.get("target") == "other rollouts"
    if found.gradient is not None and not expected:
        half = float(Gradients.make(whole, *zip(*(b.halves for b in whole), strict=True)).cosine())
        out.gradient_reliability = 2 * half / (1 + half)
    for size in sizes:
        cut = [part for batch in whole for part in parts(batch, size)]
        if not cut:
            continue
        truth, group = _measured(cut, [b.truth for b in cut]), _measured(cut, [b.group for b in cut])
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
            out.sums[estimator.name, size] = Sums.make(_measured(cut, each), truth, group)
            if found.gradient is None or (expected and (estimator.reads_truth or len(cut) < 2)):
                continue
            out.gradients[estimator.name, size] = (Expected if expected else Gradients).make(cut, each, beside)
        for batch in whole:
            batch.cache.clear()
    return out


def _measured(batches: Sequence[Any], columns: Sequence[Any]) -> Any:
    """The batches' columns at the records that have a true advantage, one after another."""
    return np.concatenate([column[b.measured] for b, column in zip(batches, columns, strict=True)])


class EstimatorError(ValueError):
    """A row of one's own that cannot be measured."""


def checked(estimator: Estimator, batch: Any) -> Floats:
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
class Summary:
    """Means over sets, with the bootstrap's draws, so that ratios and differences are paired."""

    sets: list[Found]
    draws: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, found in enumerate(self.sets):
            rng = np.random.default_rng([SEED, number])
            self.draws[found.name] = rng.integers(0, found.groups, (DRAWS, found.groups))

    def over(
        self, names: Iterable[str], estimator: str, size: int, corrected: bool = False
    ) -> tuple[float, Floats] | None:
        """(mean of r over the sets, its draws); None where a set lacks the row."""
        values, draws = [], []
        for found in self.sets:
            if found.name not in names:
                continue
            sums = found.sums.get((estimator, size))
            if sums is None:
                return None
            by = np.sqrt(found.reliability) if corrected else 1.0
            values.append(float(sums.r()) / by)
            draws.append(sums.r(self.draws[found.name]) / by)
        return (float(np.mean(values)), np.mean(draws, axis=0)) if values else None

    def cosine(self, found: Found, estimator: str, size: int) -> tuple[float, Floats] | None:
        """(cosine of the policy gradients on a set, its draws); None where it has none."""
        gradients = found.gradients.get((estimator, size))
        return None if gradients is None else (float(gradients.cosine()), gradients.cosine(self.draws[found.name]))

    def equivalent(self, names: list[str], estimator: str, size: int, reference: str = BIPACE) -> str:
        """Rollouts a prompt that the reference needs for the estimator's r."""
        own = self.over(names, estimator, size)
        curve = [(g, found[0]) for g in SIZES if (found := self.over(names, reference, g)) is not None]
        if own is None or len(curve) < 2:
            return "–"
        xs, ys = np.log2([g for g, _ in curve]), np.maximum.accumulate([r for _, r in curve])
        if own[0] > ys[-1]:
            return f"> {curve[-1][0]}"
        if own[0] < ys[0]:
            return f"< {curve[0][0]}"
        return f"{2 ** np.interp(own[0], ys, xs):.1f}"


def interval(draws: Floats) -> tuple[float, float]:
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)
