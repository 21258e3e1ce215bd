"""`python -m bench truth [--estimator mine.py:NAME] [--out DIR]`: which estimator comes nearest to true advantages?

Needs the committed files of bench/truth and nothing else: no environment, no model.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import report
from .truth_sets import FOLDER, read

Floats = NDArray[np.float64]

DRAWS, SEED = 2000, 14
SIZES = (2, 4, 8, 16)
LAMBDAS = (0.0, 0.3, 0.5, 0.8, 1.0)
EPSILONS = (0.05, 0.1, 0.2, 0.3)
FAMILIES = ("planner", "model", "alfworld")
TITLES = {
    "planner": "TextCraft, scripted policy",
    "model": "TextCraft, small model",
    "alfworld": "ALFWorld, scripted policy",
}
Q_STYLE = "BiPACE Q-style"
BIPACE = f"{Q_STYLE} ε 0.1"
STEP_ONLY = ", step term only"
DEFAULT = "Config.gae()"
CONTROL = "gae group λ 0.5"
STEP_MEANS = "gae step means λ 0.5"
BASELINES = (DEFAULT, CONTROL, STEP_MEANS, "GRPO", BIPACE)  # measured whatever --only says
RESULTS = FOLDER.parent / "results/truth/truth.json"
KINDS = ("hidden2", "ngram1", "ngram3", "ngram6", "sentence1")
EMBEDDER_OF = {"hidden": "actor_hidden", "ngram": "ngram", "sentence": "sentence"}  # a kind without its number
ABOUT = """\
A truth set holds rollouts of one policy and, for each record, the mean discounted return of M fresh continuations from
its state (bench/truth/README.md). From it follows the true advantage A* = r + γ V(next state) - V(state). An estimator
sees G rollouts a prompt, sixteen prompts or more at a time, and is judged by the correlation of its advantages with A*
over all records of a set; sets with more rollouts are cut into batches of G, so that every G is judged on the same
records.

- **r**: that correlation. **corrected**: r / √(reliability of the truth); reliability from the two halves of the
  continuations, by Spearman and Brown. Intervals: 95 %, bootstrap over prompt groups.
- **rollouts**: how many rollouts a prompt BiPACE as published (Q-style, ε 0.1, with its episode term) needs for the
  same r, interpolated in log G.
- **policy gradient**: where a set holds the gradients of its commands' log-probabilities, the cosine between the
  batch's policy gradient under the estimate and under A*.
- Where a set holds hidden states of the policy, those before the last block are the fingerprints; else n-grams of the
  last three observations and the actions between them."""


@dataclass(frozen=True)
class Estimator:
    """One row of the table: [N] advantages of a batch."""

    name: str
    call: Callable[[Any], Floats]
    sizes: tuple[int, ...] = (8,)  # G that it is measured at
    needs: str = ""  # a fingerprint without which the row is left out
    reads_truth: bool = False  # which may be there for a sample of the records only


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


def others_mean(batch: Any) -> Floats:
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


# ---- estimators


def ours(config: Any, kind: str | None = None, *, step_only: bool = False) -> Callable[[Any], Floats]:
    """A preset of the package, on the fingerprints of a kind; "main" is the set's own.

    config   a Config, or a function of `embedder` that makes one
    """

    def call(batch: Any) -> Floats:
        from .truth_batches import advantages

        used = batch.kinds()[0] if kind == "main" else kind
        own = config(embedder=EMBEDDER_OF[str(used).rstrip("0123456789")]) if callable(config) else config
        result = advantages(batch, own, used)
        return (result.step_advantage if step_only else result.advantage).numpy().astype(np.float64)

    return call


def gae_of_exact(batch: Any) -> Floats:
    """GAE(0.5) over the true values."""
    from .truth_batches import deltas, discounted

    delta = deltas(batch.reward, batch.exact, batch.trajectory, batch.step, batch.gamma)
    return discounted(delta, batch.trajectory, batch.step, 0.5 * batch.gamma)


def step_means(batch: Any) -> Floats:
    """GAE(0.5) over the mean of each prompt and step, which sees no states."""
    import bipace_kernels as bk

    ids = {"group": batch.group, "trajectory": batch.trajectory, "step": batch.step}
    found = bk.advantage(**ids, rewards=batch.reward, observation=batch.step, config=bk.Config.gae("cluster"))
    return found.advantage.numpy().astype(np.float64)


def table() -> list[Estimator]:
    """All rows, in the order of the table."""
    import bipace_kernels as bk

    gae, kernel = bk.Config.gae, functools.partial(functools.partial, bk.Config.gae)
    rows = [
        Estimator("exact V as baseline of whole returns", lambda b: b.returns - b.exact, SIZES, reads_truth=True),
        Estimator("GAE over the exact V, λ 0.5", gae_of_exact, reads_truth=True),
        Estimator("GRPO", ours(bk.Config.grpo()), SIZES),
        Estimator("GiGPO", ours(bk.Config.gigpo()), SIZES),
        Estimator("GiGPO" + STEP_ONLY, ours(bk.Config.gigpo(), step_only=True), SIZES),
        Estimator("GiGPO mean_std_norm", ours(bk.Config.gigpo(mode="mean_std_norm"))),
        Estimator("GiGPO mean_std_norm" + STEP_ONLY, ours(bk.Config.gigpo(mode="mean_std_norm"), step_only=True)),
        Estimator("HGPO", ours(bk.Config.hgpo()), SIZES),
        Estimator("HGPO with its episode term as depth 0", ours(bk.Config.hgpo(base_group=True))),
    ]
    for name, make in {"BiGPO": bk.Config.bigpo, Q_STYLE: bk.Config.bipace,
                       "BiPACE diff-peer": lambda e: bk.Config.bipace(e, estimator="diff_peer")}.items():  # fmt: skip
        for epsilon in EPSILONS:
            for only in (False, True):
                sizes = SIZES if epsilon == 0.1 or name == Q_STYLE else (8,)
                label = f"{name} ε {epsilon:g}" + STEP_ONLY * only
                rows.append(Estimator(label, ours(make(epsilon), "main", step_only=only), sizes))
    rows += [
        Estimator(DEFAULT, ours(gae, "main"), SIZES),
        Estimator(DEFAULT + ", with the episode term", ours(kernel(episode_weight=1.0), "main")),
        Estimator("Config.gae(action_noise=None)", ours(kernel(action_noise=None), "main"), SIZES),
        Estimator("Config.gae(share='group')", ours(kernel(share="group"), "main"), SIZES),
        Estimator("Config.gae(share='memory')", ours(kernel(share="memory"), "main"), SIZES),
        Estimator(STEP_MEANS, step_means, SIZES),
    ]
    for lam in LAMBDAS:
        sizes = SIZES if lam == 0.5 else (8,)
        cosine = {"partition": "cosine", "epsilon": 0.1}
        rows += [
            Estimator(f"gae group λ {lam:g}", ours(gae("group", gae_lambda=lam)), sizes),
            Estimator(f"gae cluster (exact) λ {lam:g}", ours(gae("cluster", gae_lambda=lam)), sizes),
            Estimator(f"gae cluster (cosine ε 0.1) λ {lam:g}", ours(gae("cluster", gae_lambda=lam, **cosine), "main")),
        ]
        for share in ("group", "batch", "memory"):
            rows.append(Estimator(f"gae kernel {share} λ {lam:g}", ours(kernel(share=share, gae_lambda=lam), "main")))
    for kind in KINDS:
        for share in ("group", "batch"):
            rows.append(Estimator(f"gae kernel {share}, {kind}", ours(kernel(share=share), kind), needs=kind))
    return rows


def settings() -> list[Estimator]:
    """Other settings of the kernel (`--settings`)."""
    import bipace_kernels as bk

    changes: list[dict[str, Any]] = [
        *({"kernel_width": x} for x in (0.1, 0.2, 0.3, 1.0)), *({"kernel_time": x} for x in (2.0, 4.0, 16.0, None)),
        *({"kernel_noise": x} for x in (0.5, 1.0, 4.0, 8.0)), *({"kernel_same": x} for x in (0.0, 0.1, 1.0, 3.0)),
        *({"action_noise": x} for x in (None, 0.1, 1.0, 3.0)),
        {"step_norm": "group"}, {"step_norm": "none"}, *({"episode_weight": x} for x in (0.1, 0.25, 0.5, 1.0)),
        {"kernel_width": 0.3, "kernel_time": 4.0},
    ]  # fmt: skip
    rows = []
    for change in changes:
        name = ", ".join(f"{key}={value}" for key, value in change.items())
        for share in ("batch",) if "kernel_same" in change else ("batch", "group"):
            config = functools.partial(bk.Config.gae, share=share, **change)
            rows.append(Estimator(f"Config.gae(share='{share}', {name})", ours(config, "main")))
    return rows


# ---- measuring


def measure(path: Path, estimators: Sequence[Estimator], sizes: Sequence[int]) -> Found:
    """All estimators on one set."""
    from .truth_batches import batches, parts

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


def checked(estimator: Estimator, batch: Any) -> Floats:
    try:
        a = np.asarray(estimator.call(batch), dtype=np.float64)
    except Exception as error:
        name, what = batch.meta["name"], f"{type(error).__name__}: {error}"
        raise RuntimeError(f"estimator {estimator.name!r} failed on {len(batch)} records of {name}, {what}") from error
    if a.shape != (len(batch),) or not np.isfinite(a[batch.measured] if estimator.reads_truth else a).all():
        raise ValueError(
            f"estimator {estimator.name!r} must give [N] = [{len(batch)}] finite numbers, got shape {a.shape}."
        )
    return a


def _measure(work: tuple[Path, list[str], str, Sequence[int], list[str]]) -> Found:
    """In a separate process, which creates its own estimators: functions cannot be sent."""
    import torch

    torch.set_num_threads(1)
    path, own, only, sizes, which = work
    begun = time.process_time()
    found = measure(path, estimators_of(own, only, which), sizes)
    found.cpu_seconds = time.process_time() - begun
    return found


def estimators_of(own: Sequence[str], only: str, which: Sequence[str]) -> list[Estimator]:
    """Rows of the table, and those of `own`; ValueError for a name that is none."""
    import bipace_kernels as bk
    from bipace_kernels.support.optional import named

    rows = table() + (settings() if "settings" in which else [])
    if "tried" in which:
        from .truth_tried import tried

        rows += [Estimator(name, call) for name, call in tried().items()]
    rows = [row for row in rows if "sentence" in which or not row.needs.startswith("sentence")]
    rows = [row for row in rows if only.lower() in row.name.lower() or row.name in BASELINES]
    for text in own:
        if ":" not in text:
            raise ValueError(f"--estimator wants MODULE:NAME or FILE.py:NAME, got {text!r}.")
        try:
            found = named(text)
        except ValueError as error:
            raise ValueError(f"--estimator {error}") from error
        call = ours(found, "main") if isinstance(found, bk.Config) else found
        if not callable(call):
            raise ValueError(f"--estimator {text} must be a function or a bipace_kernels.Config, got {found!r}.")
        rows.append(Estimator(text, call, SIZES))
    return rows


# ---- reading the results


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


def shown(found: tuple[float, Floats] | None) -> str:
    if found is None:
        return "–"
    low, high = interval(found[1])
    return f"{found[0]:.3f} ({low:.2f} to {high:.2f})"


_SETS: report.Columns = {
    "set": "{name}", "policy": "{policy}", "records": "{records:,}", "groups": "{groups}", "rollouts": "{per_group}",
    "solved": "{success:.0%}", "continuations": "{continuations}", "reliability of A*": "{reliability:.2f}",
}  # fmt: skip


def comparison(summary: Summary, own: Sequence[str]) -> list[str | list[str]]:
    """One's own rows among the baselines, best first, with their differences to Config.gae(); nothing without own
    rows."""
    families = families_of(summary.sets)
    measured = {size for found in summary.sets for name, size in found.sums if name in own}
    if not measured:
        return []
    size = min(measured, key=lambda size: (abs(size - 8), size))
    rows = []
    for name in dict.fromkeys((*own, *BASELINES)):
        found = [summary.over(names, name, size) for names in families.values()]
        standard = [summary.over(names, DEFAULT, size) for names in families.values()]
        pairs = [(a, b) for a, b in zip(found, standard, strict=True) if a is not None and b is not None]
        less = ["–" if name == DEFAULT else difference((a[0] - b[0], a[1] - b[1])) for a, b in pairs]
        if len(less) == len(families):
            rows.append((float(np.mean([a[0] for a, _ in pairs])), [name, *map(shown, found), *less]))
    heads = ["estimator", *families, *(f"{family}, less Config.gae()" for family in families)]
    return [
        f"## Yours, at {size} rollouts a prompt",
        "r, best first, and the difference to Config.gae() on the same records, each with its 95 % interval.",
        report.grid(heads, [row for _, row in sorted(rows, key=lambda pair: -pair[0])]),
    ]


def difference(found: tuple[float, Floats]) -> str:
    low, high = interval(found[1])
    return f"{found[0]:+.3f} ({low:+.3f} to {high:+.3f})"


def leaderboard(document: dict[str, Any]) -> list[str]:
    """Every row with 8 rollouts a prompt in results of the held-out sets, best first: mean r over the sets of a
    kind."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in document["rows"]:
        if row["rollouts"] == 8:
            family = next(family for family in FAMILIES if family in row["set"])
            found.setdefault(row["estimator"], {}).setdefault(family, []).append(row["r"])
    means = {name: [float(np.mean(of[f])) for f in FAMILIES] for name, of in found.items() if len(of) == len(FAMILIES)}
    ranked = sorted(means.items(), key=lambda item: -float(np.mean(item[1])))
    cells = [[name, *(f"{r:.3f}" for r in rs), f"{np.mean(rs):.3f}"] for name, rs in ranked]
    return report.grid(["estimator", *TITLES.values(), "mean"], cells)


def as_markdown(sets: list[Found], seconds: float, command: str, own: Sequence[str] = ()) -> str:
    from .measure import machine  # imports torch, which --help does not need

    summary, families = Summary(sets), families_of(sets)
    order = list(dict.fromkeys(name for found in sets for name, _ in found.sums))
    cpu = sum(found.cpu_seconds for found in sets)
    on = "{cpu}, {cores} cores, torch {torch}, commit {commit}.".format_map(machine(1, ""))
    rows = [{**found.meta, **vars(found), "per_group": found.trajectories // found.groups} for found in sets]
    parts = [f"`{command}`: {cpu:.0f} s of CPU time, {seconds:.0f} s in all.\n{on}", ABOUT]
    parts += [*comparison(summary, own), "## Sets", report.table(_SETS, rows)]
    heads = ["estimator", *(f"{family}, {what}" for what in ("r", "corrected", "rollouts") for family in families)]
    for size in SIZES:
        cells = []
        for name in order:
            measured = [summary.over(names, name, size) for names in families.values()]
            if any(measured):
                corrected = (summary.over(names, name, size, corrected=True) for names in families.values())
                equal = (summary.equivalent(names, name, size) for names in families.values())
                means = ("–" if mean is None else f"{mean[0]:.3f}" for mean in corrected)
                cells.append([name, *map(shown, measured), *means, *equal])
        if cells:
            parts += [f"## {size} rollouts a prompt, means over the sets of a kind", report.grid(heads, cells)]
    at_8 = [[name, *(shown(summary.over([found.name], name, 8)) for found in sets)] for name in order]
    at_8 = [row for row in at_8 if set(row[1:]) != {"–"}]
    parts += ["## Every set at 8 rollouts a prompt", report.grid(["estimator", *(found.name for found in sets)], at_8)]
    return report.page(
        "True advantages: how near each estimator comes", *parts, *gradient_table(summary), *expected_table(summary)
    )


def expected_table(summary: Summary) -> list[str | list[str]]:
    """Cosine with the expected policy gradient, bias and variance for each G; nothing without sets that have one."""
    parts: list[str | list[str]] = []
    for found in summary.sets:
        of = {key: gradients for key, gradients in found.gradients.items() if isinstance(gradients, Expected)}
        texts = {key: "{:.2f}, {:.2f}, {:.1f}".format(x.cosine(), *x.bias_and_variance()) for key, x in of.items()}
        standard, rows = summary.cosine(found, DEFAULT, 8), []
        for name in dict.fromkeys(name for name, _ in of):
            own, lead = summary.cosine(found, name, 8), "–"
            if own and standard and name != DEFAULT:
                lead = difference((own[0] - standard[0], own[1] - standard[1]))
            rows.append([name, shown(own), lead, *(texts.get((name, size), "–") for size in SIZES)])
        if rows:
            parts += [
                f"## Expected policy gradient, {found.name}",
                "Cosine of a batch's Σ A ∇ log π(command) with its expectation under the true advantages, which other "
                "rollouts of the same prompts estimate without bias; its difference to Config.gae() on the same ones; "
                "and "
                "for each G: cosine, bias (the share of the mean's square that does not point along the expected "
                "gradient; "
                "noise can take it below 0) and variance (of one batch, in squares of its mean).",
                report.grid(["estimator", "G 8", f"less {DEFAULT}", *(f"G {size}" for size in SIZES)], rows),
            ]
    return parts


def gradient_table(summary: Summary) -> list[str | list[str]]:
    """Cosines of policy gradients at 8 rollouts a prompt, by set; nothing where no set has gradients."""
    sets = [found for found in summary.sets if found.gradients and np.isfinite(found.gradient_reliability)]
    if not sets:
        return []
    rows = []
    for name in dict.fromkeys(name for found in sets for name, size in found.gradients if size == 8):
        cells = [summary.cosine(found, name, 8) for found in sets]
        there = [cell for cell in cells if cell is not None]
        mean = (float(np.mean([value for value, _ in there])), np.mean([draws for _, draws in there], axis=0))
        rows.append([name, shown(mean), *map(shown, cells)])
    reliability = ", ".join(f"{found.gradient_reliability:.2f} ({found.name})" for found in sets)
    return [
        "## Policy gradient at 8 rollouts a prompt",
        "Cosine between the batch's Σ A ∇ log π(command) under the estimate and under A*. Its reliability, from the "
        "two halves "
        f"of the continuations: {reliability}. "
        "A bootstrap draw repeats prompts and lacks others, so intervals extend further below the estimate than above "
        "it.",
        report.grid(["estimator", "mean", *(found.name for found in sets)], rows),
    ]


def families_of(sets: list[Found]) -> dict[str, list[str]]:
    """{kind and role: names of its sets}."""
    out: dict[str, list[str]] = {}
    for family in (*FAMILIES, "other"):
        for role in dict.fromkeys(found.meta["role"] for found in sets):
            names = [found.name for found in sets if found.family == family and found.meta["role"] == role]
            if names:
                out[f"{family} ({role})"] = names
    return out


def as_json(sets: list[Found], seconds: float, command: str) -> dict[str, Any]:
    summary = Summary(sets)
    rows = []
    for found in sets:
        for (name, size), sums in found.sums.items():
            draws = sums.r(summary.draws[found.name])
            low, high = interval(draws)
            row = {
                "set": found.name, "estimator": name, "rollouts": size, "r": round(float(sums.r()), 5),
                "low": round(low, 5),
                "high": round(high, 5), "corrected": round(float(sums.r()) / float(np.sqrt(found.reliability)), 5),
                "cpu_seconds": round(found.seconds[name, size], 3),
            }  # fmt: skip
            if (cosine := summary.cosine(found, name, size)) is not None:
                low, high = interval(cosine[1])
                row["gradient"] = {"cosine": round(cosine[0], 5), "low": round(low, 5), "high": round(high, 5)}
                if isinstance(of := found.gradients[name, size], Expected):
                    row["gradient"] |= dict(zip(("bias", "variance"), of.bias_and_variance(), strict=True))
            rows.append(row)
    about = [
        {k: v for k, v in found.meta.items() if k != "tasks"}
        | {"records": found.records, "groups": found.groups, "success": round(found.success, 4),
           "reliability": round(found.reliability, 4)}
        | ({"gradient_reliability": round(known, 4)} if np.isfinite(known := found.gradient_reliability) else {})
        for found in sets
    ]  # fmt: skip
    return {"schema": 1, "command": command, "seconds": round(seconds, 1), "bootstrap": {"draws": DRAWS, "seed": SEED},
            "sets": about, "rows": rows}  # fmt: skip


# colours, in drawing order; Q-style at the ε that is best with 8 rollouts, or the most there are, in the panel
PICTURE = {
    "GRPO": "#999999",
    "GiGPO": "#CC79A7",
    Q_STYLE: "#D55E00",
    CONTROL: "#009E73",
    Q_STYLE + STEP_ONLY: "#E69F00",
    DEFAULT: "#0072B2",
}


OWN_COLOURS = ("#000000", "#8C564B", "#6A3D9A", "#17BECF")  # of one's own rows, in turn


IN_LEGEND = {
    Q_STYLE: "BiPACE (best of 4 radii)",
    Q_STYLE + STEP_ONLY: "BiPACE without GRPO's advantage",
    CONTROL: "GAE with one value per prompt",
}


def drawn_row(summary: Summary, sets: Sequence[str], name: str) -> str:
    """The row of the table that a line of the picture shows."""
    if not name.startswith(Q_STYLE):
        return name
    rows = [f"{Q_STYLE} ε {epsilon:g}{name.removeprefix(Q_STYLE)}" for epsilon in EPSILONS]
    for size in (8, *SIZES[::-1]):
        found = {row: point[0] for row in rows if (point := summary.over(sets, row, size)) is not None}
        if found:
            return max(found, key=lambda row: found[row])
    return rows[0]


def draw(sets: list[Found], path: Path, own: Sequence[str]) -> None:
    """Accuracy against rollouts per prompt, a panel for each kind of policy."""
    from bipace_kernels.support import png

    summary = Summary(sets)
    families = families_of(sets)
    n, mine = len(families), {name: OWN_COLOURS[i % len(OWN_COLOURS)] for i, name in enumerate(own)}
    names_in_legend = len(PICTURE) + len(own)
    figure, axes = png.figure(max(3.2 * n, 6.4), 3.4 + 0.22 * -(-names_in_legend // min(n, 3)), 1, n, sharey=True)
    for axis, (family, names) in zip(axes[0], families.items(), strict=True):
        for line, colour in (PICTURE | mine).items():
            name = drawn_row(summary, names, line)
            points = [(g, found) for g in SIZES if (found := summary.over(names, name, g)) is not None]
            if not points:
                continue
            xs, ys = [g for g, _ in points], [found[0] for _, found in points]
            low, high = np.array([interval(found[1]) for _, found in points]).T
            axis.plot(xs, ys, "o-", color=colour, linewidth=1.8, label=IN_LEGEND.get(line, line))
            axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES, [str(g) for g in SIZES])
        kind, _, role = family.partition(" ")
        axis.set_title(TITLES.get(kind, kind) + f"\n{role}" * (role != "(hold)"), loc="left", fontsize=10)
        axis.set_xlabel("rollouts per prompt")
    axes[0][0].set_ylabel("correlation")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", ncols=min(n + 1, 3), frameon=False)
    held = "held-out rollouts, " * all(family.endswith("(hold)") for family in families)
    between = " " if n > 1 else "\n"
    png.set_title(figure, f"Correlation with the true advantage{between}({held}band: 95 % interval)")
    png.save(figure, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints the tables, writes truth.md, truth.json and truth.png."""
    parser = report.parser("truth", ABOUT, writes="truth.md, truth.json and truth.png")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    option = functools.partial(parser.add_argument, metavar="TEXT", default="")
    option("--estimator", action="append", default=[], metavar="FILE.py:NAME",
           help="your own, or MODULE:NAME: a bipace_kernels.Config, or a function that takes a Batch "
                "(bench.truth_batches) "
           "and gives [N] advantages; may be repeated")  # fmt: skip
    option("--role", default="hold", choices=("choose", "hold", "all"), metavar=None,
           help="which sets (default: %(default)s)")  # fmt: skip
    option("--sets", help="only sets whose name contains this")
    option(
        "--only",
        help="only rows whose name contains this, yours, and GRPO, BiPACE, step means, control and Config.gae()",
    )
    option("--rollouts", type=int, nargs="*", default=list(SIZES), choices=SIZES, metavar="G", help="(%(default)s)")
    for name, what in (
        ("settings", "other settings of the kernel"),
        ("sentence", "fingerprints of a sentence encoder; half a minute more per set"),
        ("tried", "ideas that were not implemented (bench/truth_tried.py)"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=f"also {what}")
    parser.add_argument("--leaderboard", action="store_true", help="print the table of docs/leaderboard.md, and end")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the sets are")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="(default: %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.leaderboard:
        sys.stdout.write("\n".join(leaderboard(json.loads(RESULTS.read_text(encoding="utf-8")))) + "\n")
        return 0
    from .truth_batches import encoder_missing

    paths = [path for path in sorted(arguments.folder.glob("*.npz")) if arguments.sets in path.stem]
    paths = [path for path in paths if arguments.role == "all" or path.stem.endswith(arguments.role)]
    if not paths:
        parser.error(f"no truth set in {arguments.folder} fits --role and --sets")
    begun = time.perf_counter()
    which = [name for name in ("settings", "sentence", "tried") if getattr(arguments, name)]
    try:
        estimators_of(arguments.estimator, arguments.only, which)
    except ValueError as error:
        parser.error(str(error))
    if arguments.sentence and (missing := encoder_missing()):
        parser.error(f"--sentence {missing}")
    work = [(path, arguments.estimator, arguments.only, arguments.rollouts, which) for path in paths]
    sets = run(work, max(1, arguments.processes))
    seconds = time.perf_counter() - begun
    command = " ".join(["python -m bench truth", *(sys.argv[2:] if argv is None else argv)])
    report.publish(
        "truth",
        as_json(sets, seconds, command),
        as_markdown(sets, seconds, command, arguments.estimator),
        arguments.out,
    )
    if arguments.out is not None:
        draw(sets, arguments.out / "truth.png", arguments.estimator)
    return 0


def run(work: list[Any], processes: int) -> list[Found]:
    """The sets, in order, one process each at a time; a bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    def shown(done: Iterable[Found]) -> list[Found]:
        return list(track(done, "truth sets", len(work), console=Console(stderr=True), transient=True))

    if processes == 1:
        return shown(map(_measure, work))
    import multiprocessing

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # of the processes begun below: a core each
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return shown(pool.map(_measure, work))


if __name__ == "__main__":
    sys.exit(main())
