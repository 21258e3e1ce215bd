"""The page and the JSON of the truth benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import report
from .measure import machine
from .truth_measures import DRAWS, FAMILIES, SEED, Expected, Floats, Found, Summary, interval
from .truth_rows import BASELINES, DEFAULT, SIZES
from .truth_sets import FOLDER

TITLES = {"planner": "TextCraft, scripted", "model": "TextCraft, model", "alfworld": "ALFWorld, scripted"}
RESULTS = FOLDER.parent / "results/truth/truth.json"
ABOUT = """\
A truth set holds rollouts of one policy and, for each record, the mean discounted return of M fresh continuations from
its state (bench/truth/README.md). From it follows the true advantage A* = r + γ V(next state) - V(state). An estimator
sees G rollouts a prompt, sixteen prompts or more at a time, and is judged by the correlation of its advantages with A*
over all records of a set; sets with more rollouts are cut into batches of G, so that every G is judged on the same
records.

- **r**: that correlation. **corrected**: r / √(reliability of the truth); reliability from the two halves of the
  continuations, by Spearman and Brown. Intervals: 95 %, bootstrap over prompt groups.
- **rollouts**: how many rollouts a prompt BiPACE as published (ε 0.1) needs for the same r, interpolated in log G.
- **policy gradient**: where a set holds the gradients of its commands' log-probabilities, the cosine between the
  batch's policy gradient under the estimate and under A*.
- Where a set holds hidden states of the policy, those before the last block are the fingerprints; else n-grams of the
  last three observations and the actions between them."""


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
    """One's own rows among the baselines, best first, and their differences to Config.gae(); nothing without any."""
    families = families_of(summary.sets)
    measured = {size for found in summary.sets for name, size in found.sums if name in own}
    if not measured:
        return []
    size = min(measured, key=lambda size: (abs(size - 8), size))
    by_name = {
        name: [found for names in families.values() if (found := summary.over(names, name, size)) is not None]
        for name in dict.fromkeys((*own, *BASELINES))
    }
    ranked = sorted(by_name.items(), key=lambda row: -sum(r for r, _ in row[1]))
    ranked = [(name, row) for name, row in ranked if len(row) == len(families)]
    less = [
        [name, *(difference((a - b, x - y)) for (a, x), (b, y) in zip(row, by_name[DEFAULT], strict=True))]
        for name, row in ranked
        if name != DEFAULT
    ]
    heads = ["estimator", *families]
    return [
        f"Correlation with the true advantage with {size} rollouts per prompt, and its 95 % interval, best first:",
        report.grid(heads, [[name, *map(shown, row)] for name, row in ranked]),
        f"Less that of {DEFAULT} on the same records:",
        report.grid(heads, less),
    ]


def difference(found: tuple[float, Floats]) -> str:
    low, high = interval(found[1])
    return f"{found[0]:+.3f} ({low:+.3f} to {high:+.3f})"


def leaderboard(document: dict[str, Any]) -> list[str]:
    """Every row with 8 rollouts a prompt in held-out results, best first: mean r over the sets of a kind."""
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
                "and for each G: cosine, bias (the share of the mean's square that does not point along the expected "
                "gradient; noise can take it below 0) and variance (of one batch, in squares of its mean).",
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
        f"two halves of the continuations: {reliability}. A bootstrap draw repeats prompts and lacks others, so "
        "intervals extend further below the estimate than above it.",
        report.grid(["estimator", "mean", *(found.name for found in sets)], rows),
    ]


def families_of(sets: list[Found]) -> dict[str, list[str]]:
    """{title of a kind, and its role unless that is "hold": names of its sets}."""
    out: dict[str, list[str]] = {}
    for family in (*FAMILIES, "other"):
        for role in dict.fromkeys(found.meta["role"] for found in sets):
            names = [found.name for found in sets if found.family == family and found.meta["role"] == role]
            if names:
                out[TITLES.get(family, family) + f" ({role})" * (role != "hold")] = names
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
                "low": round(low, 5), "high": round(high, 5), "cpu_seconds": round(found.seconds[name, size], 3),
                "corrected": round(float(sums.r()) / float(np.sqrt(found.reliability)), 5),
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
