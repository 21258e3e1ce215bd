"""The page and the JSON of the truth benchmark, and the tables of other pages that are written from the JSON."""

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import report
from .measure import machine
from .truth_measures import DRAWS, FAMILIES, SEED, Estimate, Expected, Found, Summary
from .truth_rows import BASELINES, DEFAULT, SIZES
from .truth_sets import FOLDER

Parts = list[str | list[str]]  # of a page
HELD = {"planner": "TextCraft, scripted", "model": "TextCraft, model", "alfworld": "ALFWorld, scripted"}
SMOLLM2 = {"smollm2_textcraft": "TextCraft, SmolLM2", "smollm2_babyai": "BabyAI, SmolLM2"}
TITLES = HELD | SMOLLM2
ROOT = FOLDER.parents[1]
RESULTS = ROOT / "bench/results"
LESS = f"less {DEFAULT}"
OTHERS = ("corrected", "Spearman", "within", "AUC")
ABOUT = """\
A truth set holds rollouts of one policy and, for each record, the mean discounted return of M fresh continuations from
its state (bench/truth/README.md). From it follows the true advantage A* = r + γ V(next state) - V(state). An estimator
sees G rollouts a prompt, sixteen prompts or more at a time, and is judged by the correlation of its advantages with A*
over all records of a set; sets with more rollouts are cut into batches of G, so that every G is judged on the same
records.

- **policy gradient**: where a set holds the gradients of its commands' log-probabilities, the cosine between the
  batch's policy gradient under the estimate and under A*. Training follows this sum, so its table is the first.
- **r**: that correlation. **corrected**: r / √(reliability of the truth); reliability from the two halves of the
  continuations, by Spearman and Brown.
- **Spearman**: the correlation of ranks. **within**: r after subtracting each rollout's mean from the estimate and from
  A*, so that only differences between the turns of a rollout count. **AUC**: how often the estimate is higher at a
  record with A* > 0 than at one without; 0.5 by chance.
- **rollouts**: how many rollouts a prompt BiPACE as published (ε 0.1) needs for the same r, interpolated in log G.
- Intervals: 95 %, bootstrap over prompt groups; those of differences to Config.gae() are paired.
- **The limit of GRPO and RLOO**, which give all turns of a rollout the same advantage, is the r of A*'s own mean over
  each rollout; of other measures it is no limit. This row and those with the exact V read the truth: no estimator can
  use them.
- Where a set holds hidden states of the policy, those before the last block are the fingerprints; else n-grams of the
  last three observations and the actions between them."""

_SETS: report.Columns = {
    "set": "{name}", "policy": "{policy}", "records": "{records:,}", "groups": "{groups}", "rollouts": "{per_group}",
    "solved": "{success:.0%}", "continuations": "{continuations}", "reliability of A*": "{reliability:.2f}",
}  # fmt: skip


def families_of(sets: Sequence[Found]) -> dict[str, list[str]]:
    """{title of a kind, and its role unless that is "hold": names of its sets}."""
    out: dict[str, list[str]] = {}
    for family in (*FAMILIES, "other"):
        for found in (found for found in sets if found.family == family):
            role = found.meta["role"]
            out.setdefault(TITLES.get(family, family) + f" ({role})" * (role != "hold"), []).append(found.name)
    return out


def less(summary: Summary, sets: Sequence[str], name: str, size: int, what: str = "r") -> Estimate | None:
    """The row's lead over Config.gae() on the same draws."""
    own, standard = (summary.over(sets, row, size, what) for row in (name, DEFAULT))
    return None if name == DEFAULT or own is None or standard is None else own - standard


def shown(found: Estimate | None, form: str = "{0}") -> str:
    """A cell: as it is, or `{0.difference}`, `{0.value:.3f}`."""
    return "–" if found is None else form.format(found)


def rows_of(
    summary: Summary, names: Sequence[str], size: int, what: str, columns: dict[str, list[str]], leads: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: a measure on the sets of each column, then its differences to Config.gae() in some of them."""
    heads, rows = ["estimator", *columns, *(f"{column}, {LESS}" for column in leads)], []
    for name in names:
        found = [shown(summary.over(sets, name, size, what)) for sets in columns.values()]
        differences = (shown(less(summary, columns[x], name, size, what), "{0.difference}") for x in leads)
        rows.append([name, *found, *differences])
    return heads, rows


def comparison(summary: Summary, own: Sequence[str]) -> Parts:
    """One's own rows among the baselines, best first, and their differences to Config.gae(); nothing without any."""
    sizes = [size for size in SIZES if set(own) & set(summary.names(size))]
    if not sizes:
        return []
    size, families = min(sizes, key=lambda size: (abs(size - 8), size)), families_of(summary.sets)
    names = [name for name in dict.fromkeys((*own, *BASELINES)) if name in summary.names(size)]
    names.sort(key=lambda name: -summary.mean(families, name, size))
    heads, rows = rows_of(summary, names, size, "r", families, list(families))
    count = len(families) + 1
    return [
        f"Correlation with the true advantage with {size} rollouts per prompt, and its 95 % interval, best first:",
        report.grid(heads[:count], [row[:count] for row in rows]),
        f"Less that of {DEFAULT} on the same records:",
        report.grid(heads[:count], [[row[0], *row[count:]] for row in rows if row[0] != DEFAULT]),
    ]


def as_markdown(sets: list[Found], seconds: float, command: str, own: Sequence[str] = ()) -> str:
    summary, families = Summary(sets), families_of(sets)
    cpu = sum(found.cpu_seconds for found in sets)
    on = "{cpu}, {cores} cores, torch {torch}, commit {commit}.".format_map(machine(1, ""))
    about = [{**found.meta, **vars(found), "per_group": found.trajectories // found.groups} for found in sets]
    parts: Parts = [f"`{command}`: {cpu:.0f} s of CPU time, {seconds:.0f} s in all.\n{on}", ABOUT]
    parts += [*comparison(summary, own), "## Sets", report.table(_SETS, about)]
    parts += [*gradient_table(summary), *expected_table(summary)]
    for size in sorted(SIZES, key=lambda size: (size != 8, size)):
        if names := summary.names(size):
            heads, rows = rows_of(summary, names, size, "r", families, list(families))
            heads += [f"{family}, rollouts" for family in families]
            for row in rows:
                row += [summary.equivalent(names, row[0], size) for names in families.values()]
            parts += [f"## r at {size} rollouts a prompt, means over the sets of a kind", report.grid(heads, rows)]
    columns = {f"{family}, {what}": (what, of) for what in OTHERS for family, of in families.items()}
    rows = [
        [name, *(shown(summary.over(of, name, 8, what), "{0.value:.3f}") for what, of in columns.values())]
        for name in summary.names(8)
    ]
    parts += ["## Other measures at 8 rollouts a prompt", report.grid(["estimator", *columns], rows)]
    each = {found.name: [found.name] for found in sets}
    parts += ["## r on every set at 8 rollouts a prompt"]
    parts += [report.grid(*rows_of(summary, summary.names(8), 8, "r", each, []))]
    return report.page("True advantages: how near each estimator comes", *parts)


def gradient_table(summary: Summary) -> Parts:
    """Cosines of policy gradients at 8 rollouts a prompt, best first, by set; nothing where no set has gradients."""
    sets = [found for found in summary.sets if np.isfinite(found.gradient_reliability)]
    if not sets:
        return []
    columns = {"mean": [found.name for found in sets], **{found.name: [found.name] for found in sets}}
    names = sorted(summary.names(8, "cosine"), key=lambda name: -summary.mean({"": columns["mean"]}, name, 8, "cosine"))
    reliability = ", ".join(f"{found.gradient_reliability:.2f} ({found.name})" for found in sets)
    return [
        "## Policy gradient at 8 rollouts a prompt",
        "Cosine between the batch's Σ A ∇ log π(command) under the estimate and under A*, best first. Its reliability, "
        f"from the two halves of the continuations: {reliability}. A bootstrap draw repeats prompts and lacks others, "
        "so intervals extend further below the estimate than above it.",
        report.grid(*rows_of(summary, names, 8, "cosine", columns, ["mean"])),
    ]


def expected_table(summary: Summary) -> Parts:
    """Cosine with the expected policy gradient, bias and variance for each G; nothing without sets that have one."""
    parts: Parts = []
    for found in summary.sets:
        of = {key: x for key, each in found.measures.items() if isinstance(x := each.get("cosine"), Expected)}
        texts = {key: "{:.2f}, {:.2f}, {:.1f}".format(x.cosine(), *x.bias_and_variance()) for key, x in of.items()}
        names = list(dict.fromkeys(name for name, _ in of))
        heads, rows = rows_of(summary, names, 8, "cosine", {"G 8": [found.name]}, ["G 8"])
        for row in rows:
            row += [texts.get((row[0], size), "–") for size in SIZES]
        if rows:
            parts += [
                f"## Expected policy gradient, {found.name}",
                "Cosine of a batch's Σ A ∇ log π(command) with its expectation under the true advantages, which other "
                "rollouts of the same prompts estimate without bias; its difference to Config.gae() on the same ones; "
                "and for each G: cosine, bias (the share of the mean's square that does not point along the expected "
                "gradient; noise can take it below 0) and variance (of one batch, in squares of its mean).",
                report.grid([*heads, *(f"G {size}" for size in SIZES)], rows),
            ]
    return parts


def numbers(summary: Summary, names: Sequence[str], name: str, size: int) -> dict[str, Any]:
    """A row's figures on these sets; `less`: its difference to Config.gae(), low and high end of the interval."""

    def of(what: str) -> dict[str, Any]:
        found, more = summary.over(names, name, size, what), less(summary, names, name, size, what)
        if found is None:
            return {}
        figures = dict(zip((what, "low", "high"), found.rounded, strict=True))
        return figures if more is None else {**figures, "less": more.rounded}

    others = {what.lower(): found.rounded[0] for what in OTHERS if (found := summary.over(names, name, size, what))}
    gradient = of("cosine")
    return {**of("r"), **others, **({"gradient": gradient} if gradient else {})}


def as_json(sets: list[Found], seconds: float, command: str) -> dict[str, Any]:
    """`rows` by set, `means` over the sets of a kind."""
    summary, rows = Summary(sets), []
    for found in sets:
        for (name, size), measures in found.measures.items():
            row = {"set": found.name, "estimator": name, "rollouts": size, **numbers(summary, [found.name], name, size)}
            row["cpu_seconds"] = round(found.seconds[name, size], 3)
            if isinstance(of := measures.get("cosine"), Expected):
                row["gradient"] |= dict(zip(("bias", "variance"), of.bias_and_variance(), strict=True))
            rows.append(row)
    means = [
        {"sets": family, "estimator": name, "rollouts": size, **found}
        for family, of in families_of(sets).items() for size in SIZES for name in summary.names(size)
        if (found := numbers(summary, of, name, size))
    ]  # fmt: skip
    about = []
    for found in sets:
        known = {"reliability": found.reliability, "gradient_reliability": found.gradient_reliability}
        known = {"success": found.success, **known}
        about.append({
            **{k: v for k, v in found.meta.items() if k != "tasks"}, "records": found.records, "groups": found.groups,
            **{name: round(value, 4) for name, value in known.items() if np.isfinite(value)},
        })  # fmt: skip
    return {"schema": 1, "command": command, "seconds": round(seconds, 1), "bootstrap": {"draws": DRAWS, "seed": SEED},
            "sets": about, "means": means, "rows": rows}  # fmt: skip


# ---- tables of other pages: `--pages` writes them again between their marks

MARK = re.compile(r"(<!-- bench truth --pages: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PAGES = (ROOT / "docs/leaderboard.md", FOLDER / "FINDINGS.md")
VALUE, WITH_INTERVAL, LEAD = "{value:.3f}", "{value:.3f} ({low:.2f} to {high:.2f})", "{:+.3f} ({:+.3f} to {:+.3f})"


@dataclass(frozen=True)
class Column:
    """Of a marked table: a measure of the rows with 8 rollouts, from committed results."""

    head: str
    folder: str
    sets: str
    what: str
    form: str = VALUE

    def cell(self, name: str) -> str:
        row = means_at_8(self.folder).get(name, {}).get(self.sets, {})
        of = row.get("gradient", {}) if self.what == "cosine" else row
        if self.what not in of or (self.form == LEAD and "less" not in of):
            return "–"
        return LEAD.format(*of["less"]) if self.form == LEAD else self.form.format(value=of[self.what], **of)


ALONG = ("truth_along", HELD["model"])


def of_language_model(title: str) -> list[Column]:
    sets = ("truth_smollm2", title)
    return [
        Column("cosine", *sets, "cosine", WITH_INTERVAL),
        Column(f"cosine, {LESS}", *sets, "cosine", LEAD),
        Column("r", *sets, "r", WITH_INTERVAL),
        Column(f"r, {LESS}", *sets, "r", LEAD),
        *(Column(what, *sets, what.lower()) for what in OTHERS[1:]),
    ]


COLUMNS = {
    "leads": [
        Column("cosine, six policies", *ALONG, "cosine"),
        Column(f"cosine, {LESS}", *ALONG, "cosine", LEAD),
        *(Column(f"r, {title}", "truth", title, "r") for title in HELD.values()),
        *(Column(f"{title}, {LESS}", "truth", title, "r", LEAD) for title in HELD.values()),
    ],
    "others": [Column(f"{what}, {title}", "truth", title, what.lower()) for what in OTHERS for title in HELD.values()],
    **{kind: of_language_model(title) for kind, title in SMOLLM2.items()},
}


def write_pages() -> None:
    for path in PAGES:
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


def rewritten(page: str) -> str:
    """The page with its marked tables by the committed results.  A table keeps its rows; the leaderboard has all."""

    def table(found: re.Match[str]) -> str:
        begin, kind, lines, end = found.groups()
        names = [line.split("|")[1].strip() for line in lines.splitlines() if line.startswith("| ")]
        return begin + "\n".join(leaderboard() if kind == "leaderboard" else chosen_rows(names[2:], kind)) + "\n" + end

    return MARK.sub(table, page)


@functools.cache
def means_at_8(folder: str) -> dict[str, dict[str, Any]]:
    """{row: {kind of set: its figures}} of committed results."""
    document = json.loads((RESULTS / folder / "truth.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for row in document["means"]:
        if row["rollouts"] == 8:
            found.setdefault(row["estimator"], {})[row["sets"]] = row
    return found


def chosen_rows(names: Sequence[str], kind: str) -> list[str]:
    columns = COLUMNS[kind]
    if unknown := [name for name in names if name not in means_at_8(columns[-1].folder)]:
        raise ValueError(f"a marked table of FINDINGS.md has rows that the committed results lack: {unknown}.")
    heads = ["estimator", *(column.head for column in columns)]
    return report.grid(heads, [[name, *(column.cell(name) for column in columns)] for name in names])


def leaderboard() -> list[str]:
    """The table of docs/leaderboard.md: every row with 8 rollouts a prompt, best mean r first."""
    known = means_at_8("truth")
    mean = {
        name: float(np.mean([row["r"] for row in of.values()])) for name, of in known.items() if len(of) == len(HELD)
    }
    heads = ["estimator", "mean r", *(column.head for column in COLUMNS["leads"])]
    rows = [
        [name, f"{mean[name]:.3f}", *(column.cell(name) for column in COLUMNS["leads"])]
        for name in sorted(mean, key=lambda name: -mean[name])
    ]
    return report.grid(heads, rows)
