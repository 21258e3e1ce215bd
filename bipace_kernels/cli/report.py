"""`bipace report`: compares partitions on the same rollouts, as tables (Markdown, JSON) and figures (PNG)."""

import contextlib
import importlib
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.progress import Progress

import bipace_kernels as bk

from ..calibration.result import markdown_table, markdown_text
from ..diagnostics.value_r2 import value_r2
from ..features.embedders import EMBEDDERS, EmbedderRow, Identity, Ngram, Sentence
from ..settings import EPSILON
from ..support import files, optional
from . import output, rollouts, states
from ._console import CliError, grid, notes, number, plain, progress, stage, stdout
from .advantage import check_sources, radii_of, read_records, refused, shared_arguments
from .outcomes import BAND, CURVE, EMBEDDED, PARTITIONS, TERMINAL, Outcome, format_r2, table_rows

CHEAP_SIMILAR = 2_000_000  # characters of distinct observations up to which "similar" runs by default
INSPECTOR = "inspector.html"
RECORDED = ["truncated", *(name for name in rollouts.CHECKS if name.startswith("trained_"))]  # for the inspector alone
NOTHING = bk.ValueR2(None, 0.0, None)
CONSTANT = "one value for the whole batch"


@dataclass
class Section:
    """Everything about the records of one file (or of all files, merged)."""

    name: str
    slug: str  # start of its figures' file names
    records: rollouts.Rollouts
    table: list[Outcome] = field(default_factory=list)
    curves: dict[str, list[Outcome]] = field(default_factory=dict)  # by state
    sentence: Any = None  # [N, D] fingerprints of the sentence encoder
    compared: list[Outcome] = field(default_factory=list)  # embedders, each at its own ε
    values: dict[str, bk.ValueR2] = field(default_factory=dict)  # of Config.gae()'s kernel, by state
    constant: bk.ValueR2 = NOTHING  # of the mean over all other rollouts of the batch


def run(values: Mapping[str, Any]) -> None:
    """The whole command, on its options by name."""
    options, columns = SimpleNamespace(**values), rollouts.Columns.of(values)
    epsilons = radii_of(options.epsilons)
    if not EPSILON.holds(options.epsilon):
        raise CliError(f"--epsilon must be {EPSILON.text}, got {options.epsilon:g}.")
    epsilons = sorted({*epsilons, options.epsilon})
    check_sources(options.action_mode, options.fingerprint, columns)
    if options.similar is False and options.similarity != bk.Config.similarity:
        raise CliError("--similarity has no effect with --no-similar; leave one of them out.")
    _base_config(options, actions=True)  # raises for wrong options before anything is read
    output.check_folder(options.out, "--out")
    optional.need("matplotlib", "bipace report")
    if options.html:
        optional.need("jinja2", "bipace report --html")
    with notes(), progress() as bar:
        wanted = ["action", "valid", "success", *(RECORDED if options.html else [])]
        records = read_records(options, columns, bar, [], wanted)
        sections = _sections(records)
        if options.sentence is not None:
            _encode(sections, options.sentence, bar)
        n_embedders = 2 + (options.sentence is not None) + (records.fingerprint is not None)
        comparing = stage(bar, "comparing", len(sections) * (6 + 2 * len(epsilons) + n_embedders))
        for section in sections:
            _compare(section, options, epsilons, lambda: bar.advance(comparing))
        drawing = stage(bar, "drawing", len(sections))
        with output.writing(options.out), files.atomic_folder(Path(options.out)) as folder:
            for section in sections:
                _draw(section, options, folder)
                bar.advance(drawing)
            if options.html:
                stage(bar, "writing the inspector")
                (folder / INSPECTOR).write_text(_inspector(sections, options), encoding="utf-8")
            (folder / "report.json").write_text(_json(sections, options), encoding="utf-8")
            (folder / "report.md").write_text(_markdown(sections, options), encoding="utf-8")
    _print_summary(sections, options)


def _sections(records: rollouts.Rollouts) -> list[Section]:
    names = records.file_names()
    if records.merged or len(names) == 1:
        return [Section(" + ".join(names), _slug(names[0] if len(names) == 1 else "all", set()), records)]
    taken: set[str] = set()
    slugs = [_slug(Path(source.path).name, taken) for source in records.sources]
    rows = [[row for row, file in enumerate(records.file) if file == index] for index in range(len(names))]
    parts = map(records.select, rows)
    return [Section(name, slug, part) for name, slug, part in zip(names, slugs, parts, strict=True)]


def _slug(name: str, taken: set[str]) -> str:
    """A file name's stem in plain characters, unique among those taken."""
    stem = re.sub(r"\.(jsonl|ndjson|json|parquet|pq)(\.gz)?$", "", name, flags=re.IGNORECASE)
    slug = base = re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_") or "rollouts"
    number = 2
    while slug in taken:
        slug, number = f"{base}_{number}", number + 1
    taken.add(slug)
    return slug


def _compare(section: Section, options: SimpleNamespace, radii: Sequence[float], advance: Callable[[], None]) -> None:
    records = section.records
    shared = shared_arguments(records, options.action_mode, options.backend, options.threads)
    base = _base_config(options, actions=records.action is not None)

    def outcome(key: str, label: str, settings: dict[str, Any], choice: Any = None, **arguments: Any) -> Outcome:
        fields = {name: value for name, value in settings.items() if name not in ("state", "embedder")}
        if "codes" in arguments:  # known clusters: records of equal code share one
            fields, arguments = {"partition": "exact"}, {"observation": arguments["codes"]}
        with refused(records, f"{section.name}, partition {label}"):
            result = bk.advantage(config=replace(base, **fields), **shared, **arguments)
        with warnings.catch_warnings():  # ε covers both extremes on purpose; the table shows what a warning would say
            warnings.simplefilter("ignore", RuntimeWarning)
            metrics = {name.removeprefix("bipace/"): value for name, value in result.metrics().items()}
        advance()
        return Outcome(key, label, settings, metrics, result.value_r2(), result, records.action is not None, choice)

    depth = options.history_length
    seen = records.observation
    section.table.append(outcome("exact", "exact (GiGPO)", {"partition": "exact"}, observation=seen))
    history = {"partition": "history", "history_length": depth}
    section.table.append(outcome("history", f"history {depth}, deepest level", history, observation=seen))
    hgpo = {**history, "estimator": "hgpo"}
    section.table.append(outcome("hgpo", f"HGPO, all levels to {depth}", hgpo, observation=seen))
    if _runs_similar(records, options):
        longest = max(bk.Config.longest_text, *map(len, records.observation))
        similar = {"partition": "similar", "similarity": options.similarity, "longest_text": longest}
        section.table.append(outcome("similar", f"similar {options.similarity:g}", similar, observation=seen))
    counted = section.table[0].result._records()
    taking_part = counted.layout  # without ignored copies and rows set aside
    ids = taking_part.trajectory_of_record(), taking_part.group_of_record(), taking_part.n_groups
    section.constant = value_r2(counted.returns, torch.zeros_like(counted.labels), *ids)
    for name, before in (("observation", 0), ("history", depth)):
        fingerprint = Ngram().embed(states.texts(records, before))
        of = "" if name == "observation" else f" of history {depth}"
        with refused(records, f"{section.name}, partition cosine n-grams{of}"):
            swept = bk.cluster(
                fingerprint, epsilon=radii, layout=taking_part, backend=options.backend, num_threads=options.threads
            )
        curve = []
        for epsilon, codes in zip(radii, swept, strict=True):
            settings = {"partition": "cosine", "state": states.name_of(before), "epsilon": epsilon}
            curve.append(outcome(f"cosine_{name}", f"cosine n-grams{of}, ε {epsilon:g}", settings, codes=codes))
        section.curves[name] = curve
        section.table.append(curve[list(radii).index(options.epsilon)])
        gae = partial(bk.Config.gae, gamma=options.gamma)
        with refused(records, f"{section.name}, partition kernel over n-grams{of}"):
            section.values[f"{states.name_of(before)}, n-grams"] = bk.kernel_value_r2(
                curve[0].result, fingerprint, gae(embedder="ngram")
            )
        advance()
    for name, fingerprint in _fingerprints(section).items():
        row = EMBEDDERS[name]
        with refused(records, f"{section.name}, partition {row.label}"):
            choice = _choose(row, fingerprint, taking_part, options)
        settings = {"partition": "cosine", "state": "observation", "embedder": name, "epsilon": choice.epsilon}
        label = f"{row.label}, ε {choice.epsilon:.3g}"
        section.compared.append(outcome(name, label, settings, choice, fingerprint=fingerprint))
        if name in ("sentence", "actor_hidden"):
            with refused(records, f"{section.name}, partition kernel over {row.label}"):
                section.values[row.label] = bk.kernel_value_r2(section.table[0].result, fingerprint, gae(embedder=name))


def _fingerprints(section: Section) -> dict[str, torch.Tensor]:
    """[N, D] by embedder: always identity and n-grams; a sentence encoder's and hidden states if given."""
    observations = section.records.observation
    rows = {"identity": Identity().embed(observations), "ngram": Ngram().embed(observations)}
    if section.sentence is not None:
        rows["sentence"] = section.sentence
    if section.records.fingerprint is not None:
        rows["actor_hidden"] = torch.as_tensor(states.hidden_states(section.records))
    return rows


def _choose(row: EmbedderRow, fingerprint: torch.Tensor, layout: Any, options: SimpleNamespace) -> bk.EpsilonChoice:
    """ε for these fingerprints by the median cluster size, over the records [M] of a layout that have a direction."""
    if row.fixed:
        return bk.EpsilonChoice(row.epsilon, (), "only equal states share a cluster")
    good = fingerprint.isfinite().all(dim=1) & (fingerprint != 0).any(dim=1)
    usable = layout.restrict(good[layout.order])
    if usable.n_records == 0:
        return bk.EpsilonChoice(row.epsilon, (), "no record to choose from")
    backend, threads = options.backend, options.threads
    return bk.choose_epsilon(fingerprint, layout=usable, band=BAND, backend=backend, num_threads=threads)


def _encode(sections: Sequence[Section], model: str, bar: Progress) -> None:
    stage(bar, "loading the encoder")
    distinct = sum(len(set(section.records.observation)) for section in sections)
    with contextlib.suppress(ImportError):  # Sentence() raises an error for what is missing
        logging: Any = importlib.import_module("transformers.utils.logging")
        logging.disable_progress_bar()  # the program shows its own
        logging.set_verbosity_error()
    try:
        encoder = Sentence(model, progress=lambda done: bar.advance(task, done))
    except (ImportError, ValueError) as error:
        raise CliError(f"--sentence {model}: {error}") from None
    task = stage(bar, "encoding", distinct)
    for section in sections:
        section.sentence = encoder.embed(section.records.observation).cpu()


def _base_config(options: SimpleNamespace, *, actions: bool) -> bk.Config:
    """Fields shared by the configurations of all partitions."""
    estimator = "q_style" if actions else "mean"
    same = {name: getattr(options, name) for name in ("gamma", "duplicates", "on_invalid")}
    with refused():
        return bk.Config(estimator=estimator, **same)


def _runs_similar(records: rollouts.Rollouts, options: SimpleNamespace, *, cheap: int = CHEAP_SIMILAR) -> bool:
    if options.similar is None:
        lengths = [len(text) for text in set(records.observation)]
        return sum(lengths) <= cheap and max(lengths, default=0) <= bk.Config.longest_text
    return bool(options.similar)


def _draw(section: Section, options: SimpleNamespace, folder: Path) -> None:
    from . import figures

    figures.step_shares(folder / f"{section.slug}_steps.png", section.name, section.table)
    curves = {
        "state: the observation": section.curves["observation"],
        f"state: the last {options.history_length + 1} observations": section.curves["history"],
    }
    levels = [outcome for outcome in section.table if outcome.key in ("exact", "history")]
    figures.epsilon_curve(folder / f"{section.slug}_epsilon.png", section.name, curves, levels, options.epsilon)
    figures.embedders(folder / f"{section.slug}_embedders.png", section.name, section.compared, BAND)


def _inspector(sections: Sequence[Section], options: SimpleNamespace) -> str:
    """The page of `--html`: with hidden states at the ε chosen for them, if there are any; else with n-grams."""
    from . import inspector

    def part(section: Section) -> inspector.Part:
        chosen = {outcome.key: outcome.settings["epsilon"] for outcome in section.compared} | {"ngram": options.epsilon}
        name = "actor_hidden" if "actor_hidden" in chosen else "ngram"
        fingerprint = _fingerprints(section)[name]
        return inspector.Part(section.name, section.records, fingerprint, name, chosen[name])

    return inspector.page([part(section) for section in sections], options)


def _json(sections: Sequence[Section], options: SimpleNamespace) -> str:
    sources = sections[0].records.sources
    content = {
        "version": bk.__version__,
        "gamma": options.gamma,
        "epsilon": options.epsilon,
        "history_length": options.history_length,
        "inputs": [{"file": Path(s.path).name, "sha256": s.sha256, "records": s.records} for s in sources],
        "sections": [
            {
                "name": section.name,
                **section.records.counts(),
                "partitions": {outcome.key: outcome.as_json() for outcome in section.table},
                "epsilon_curve": {name: [o.as_json() for o in curve] for name, curve in section.curves.items()},
                "embedders": {o.key: o.as_json() for o in section.compared},
                "values": {name: asdict(r2) for name, r2 in section.values.items()},
                "constant": asdict(section.constant),
            }
            for section in sections
        ],
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _markdown(sections: Sequence[Section], options: SimpleNamespace) -> str:
    about = (
        f"Made by `bipace report` {bk.__version__}; γ = {options.gamma:g}. A *partition* decides which records of one "
        "prompt group count as the same state. Singleton clusters give no step-level signal. Matched pairs are pairs "
        "of records in one cluster, Δt their distance in steps. Value R² says how well the other rollouts "
        "in a record's cluster predict its return: 0 is no better than the group's mean, below 0 is worse. "
        "± is the standard error over prompt groups; the share in brackets is that of records predicted by their "
        "cluster."
    )
    parts = [part for section in sections for part in _markdown_section(section, options)]
    return "\n\n".join(["# Partitions compared on the same rollouts", about, *parts]) + "\n"


def _markdown_section(section: Section, options: SimpleNamespace) -> list[str]:
    """Its paragraphs, headings, tables and figures."""
    counts = "{records:,} records of {trajectories:,} rollouts in {groups:,} prompt groups."
    return [
        f"## {markdown_text(section.name)}",
        counts.format(**section.records.counts()),
        markdown_table(PARTITIONS, table_rows(PARTITIONS, section.table)),
        f"![What a step is compared with]({section.slug}_steps.png)",
        "### Values by kernel regression",
        "The values of `Config.gae()`, which uses no clusters, by the same measure: each rollout predicted by all "
        "others.",
        markdown_table(("value", "value R²"), [[name, format_r2(r2)] for name, r2 in _values(section).items()]),
        "### ε of the cosine partition",
        markdown_table(CURVE, table_rows(CURVE, [o for curve in section.curves.values() for o in curve])),
        f"![ε curve]({section.slug}_epsilon.png)",
        "### Embedders, each at its own ε",
        _explanation(section.compared, options.sentence),
        markdown_table(EMBEDDED, table_rows(EMBEDDED, section.compared)),
        f"![Embedders]({section.slug}_embedders.png)",
    ]


def _values(section: Section) -> dict[str, bk.ValueR2]:
    """Values that use no clusters, by what they are called in tables."""
    kernels = {f"GAE's kernel over {name}": r2 for name, r2 in section.values.items()}
    return {**kernels, CONSTANT: section.constant}


def _explanation(compared: Sequence[Outcome], sentence: str | None) -> str:
    text = (
        "An embedder makes the fingerprint of a state, here of the observation. Each has its own geometry, so each has "
        f"its own ε: the paper's search for a median cluster size from {BAND[0]} to {BAND[1]} (`bk.choose_epsilon`). "
        "Identity joins only equal states. The interval is ± 1.96 standard errors over prompt groups."
    )
    if sentence is not None:
        text += f" Sentence encoder: `{'/'.join(Path(sentence).parts[-2:])}`."
    if not all(outcome.in_band for outcome in compared):
        text += f" \\*: the median lies outside {BAND[0]} to {BAND[1]}."
    return text


def _verdict(section: Section) -> str:
    """One sentence: what predicts the returns of other rollouts best, states or one value for all."""
    by_label = {outcome.label: outcome.value_r2 for outcome in section.table} | _values(section)
    known = {label: float(of.r2) for label, of in by_label.items() if of.r2 is not None}
    if not known:
        return f"{section.name}: returns do not differ within prompt groups, so there is no credit to divide."
    best, second = sorted(known, key=lambda label: -known[label])[:2]
    if known[best] <= 0:
        return f"{section.name}: nothing predicts returns better than the mean of the prompt group."
    other = CONSTANT if best != CONSTANT and CONSTANT in known else second
    error, alone = by_label[best].stderr, section.table[0].metrics["singleton_row_fraction"]
    spread = "" if error is None else f" ± {error:.3f}"
    return (
        f"{section.name}: {best} predicts the returns of other rollouts best (value R² {known[best]:.3f}{spread}; "
        f"{other} has {number(known[other], '.3f')}); with equal observations {alone:.0%} of the steps have no peers."
    )


def _print_summary(sections: Sequence[Section], options: SimpleNamespace) -> None:
    """A table for each file; report.md has the others."""
    console, folder = stdout(), Path(options.out)
    for section in sections:
        # Identity's clusters are those of the exact partition.
        outcomes = [*section.table, *(outcome for outcome in section.compared if outcome.key != "identity")]
        rows = [[name, *[""] * (len(TERMINAL) - 2), format_r2(r2)] for name, r2 in _values(section).items()]
        headings = ["\n".join(heading.rsplit(" ", 1)) for heading in TERMINAL]
        title = f"{section.name}: {section.records.counts()['records']:,} records"
        console.print(grid(headings, [*table_rows(TERMINAL, outcomes), *rows], title))
    plain(console, "\n".join(map(_verdict, sections)))
    page = folder / (INSPECTOR if options.html else "report.md")
    plain(console, f"{folder} has more tables and figures. Open {page}.")
