"""`bipace advantage`: cluster, branch, returns and advantages of every record of some rollouts."""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.progress import Progress

import bipace_kernels as bk

from ..backends.schema import Branch
from ..config import PRESETS, Config
from ..estimators.rows import PARTITIONS
from ..features.embedders import EMBEDDERS, Ngram
from ..settings import EPSILON, settings_of
from ..support import files
from ..support.errors import InputError, Named, Rows, near
from . import output, rollouts, states
from ._console import CliError, grid, notes, plain, progress, stage, stdout
from .outcomes import format_r2

BRANCHES = tuple(branch.name.lower() for branch in Branch)
ACTION_MODES = ("text", "action_tag", "first_n")
SETTINGS = settings_of(Config)


def make_config(preset: str, changes: dict[str, Any], *, ngrams: bool, gigpo_mode: str | None = None) -> bk.Config:
    """The Config of a preset with the given options; CliError if they contradict each other.

    ngrams   whether the fingerprints are n-grams, which have their own defaults
    """
    if preset not in PRESETS:
        raise CliError(f"--preset must be one of {', '.join(PRESETS)}, got {preset!r}{near(preset, PRESETS)}")
    takes = inspect.signature(PRESETS[preset]).parameters
    if gigpo_mode is not None and "mode" not in takes:
        raise CliError(f"--gigpo-mode goes with --preset gigpo, got --preset {preset}.")
    chosen = {name: value for name, value in changes.items() if value is not None}
    chosen |= {name: None for name, row in SETTINGS.items() if row.off and chosen.get(name) == 0}
    # On these other fields of the preset depend.
    choices = {"mode": gigpo_mode, "value": chosen.get("value"), "embedder": "ngram" if ngrams else "actor_hidden"}
    with refused():
        config = PRESETS[preset](**{k: v for k, v in choices.items() if k in takes and v is not None})
        config = replace(config, **chosen)
        if ngrams and config.has_epsilon and "epsilon" not in chosen:
            config = replace(config, epsilon=EMBEDDERS["ngram"].epsilon)
        return config


def run(values: Mapping[str, Any]) -> None:
    """The whole command, on its options by name."""
    options, columns = SimpleNamespace(**values), rollouts.Columns.of(values)
    changes = {field.name: values[field.name] for field in fields(bk.Config) if field.name in values}
    depth = states.depth_of(options.state)
    from_file = options.fingerprint is not None or columns.fingerprint is not None
    config = make_config(options.preset, changes, ngrams=not from_file, gigpo_mode=options.gigpo_mode)
    _check_options(config, changes, columns, depth, options)
    output.check_table_path(options.out, [*options.rollouts, *([options.fingerprint] if options.fingerprint else [])])
    with notes(), progress() as bar:
        wanted = ["valid"]
        wanted += ["action"] if config.has_clusters or config.reads_keys else []
        wanted += ["truncated"] if config.needs_truncated else []
        records = read_records(options, columns, bar, ["action"] if config.needs_keys else [], wanted)
        stage(bar, "computing advantages")
        result = estimate(records, config, depth, options)
        valid = np.ones(len(records), bool) if records.valid is None else np.array(records.valid, bool)
        advantage = np.abs(result.advantage.numpy()[valid].astype(np.float64))
        summary: dict[str, float] = {
            **records.counts(),
            "mean_absolute_advantage": float(advantage.mean()) if advantage.size else 0.0,
            **{name.removeprefix("bipace/"): value for name, value in result.metrics().items()},
        }
        value_r2 = result.value_r2() if config.has_clusters else None
    with output.writing(options.out), files.atomic_file(Path(options.out)) as temporary:
        output.write_table(temporary, table(records, result), metadata(records, config, depth, options))
    _print_summary(records, config, summary, value_r2, options)


def read_records(
    options: SimpleNamespace, columns: rollouts.Columns, bar: Progress, needed: Sequence[str], wanted: Sequence[str]
) -> rollouts.Rollouts:
    """The records of the files, with their fingerprints if they are given."""
    paths = [Path(path) for path in options.rollouts]
    task = stage(bar, "reading", sum(path.stat().st_size for path in paths if path.is_file()))  # read() names others
    records = rollouts.read(
        options.rollouts,
        columns,
        needed=[*needed, *(["fingerprint"] if columns.fingerprint else [])],
        wanted=wanted,
        merge_files=options.merge_files,
        allow_nonfinite=options.on_invalid == "singleton",
        longest_line=options.longest_line,
        advance=lambda n: bar.advance(task, n),
    )
    if options.fingerprint is not None:
        records.fingerprint = states.load_fingerprints(options.fingerprint, len(records))
    return records


def _check_options(
    config: bk.Config, changes: dict[str, Any], columns: rollouts.Columns, depth: int, options: SimpleNamespace
) -> None:
    """Raises CliError for options that would be ignored: a user who gives one expects an effect."""
    for name, row in SETTINGS.items():
        if changes.get(name) is not None and not row.has_effect(config):
            value, choose = config.value_row, list[tuple[str, ...]](row.cure.items())
            if "partition" in row.cure and value is not None and not value.has_clusters:
                choose = [("value", "cluster"), *choose]
            elif "episode_weight" in row.cure and config.estimator_row.whole:
                choose = [("base_group",)]
            raise CliError(
                f"{option(name)} has no effect with partition {config.partition} and estimator {config.estimator}; "
                f"leave it out, or choose {' '.join(option(*item) for item in choose)}."
            )
    if config.needs_memory:
        raise CliError("--share memory needs earlier batches, which files do not have; use --share batch.")
    check_sources(options.action_mode, options.fingerprint, columns)
    if options.action_mode != "text" and not (config.has_clusters or config.reads_keys):
        raise CliError("--action-mode has no effect with partition none, which does not compare actions; leave it out.")
    from_file = options.fingerprint is not None or columns.fingerprint is not None
    if from_file and not config.needs_fingerprint:
        raise CliError(
            f"fingerprints go with --partition cosine and --preset gae, got {config.partition} and {config.estimator}."
        )
    if depth and from_file:
        raise CliError("--state only affects n-gram fingerprints, but these come from a file; leave --state out.")
    has_depth = SETTINGS["history_length"].has_effect(config)
    if depth and (has_depth or not config.has_clusters) and not config.needs_fingerprint:
        cure = "use --history-length" if has_depth else "leave it out"
        raise CliError(f"--state {states.name_of(depth)} has no effect with --partition {config.partition}; {cure}.")


def estimate(records: rollouts.Rollouts, config: bk.Config, depth: int, options: SimpleNamespace) -> Any:
    """The result of `bipace_kernels.advantage()` for these records."""
    arguments = shared_arguments(records, options.action_mode, options.backend, options.threads)
    if config.needs_fingerprint and records.fingerprint is not None:
        arguments["fingerprint"] = states.hidden_states(records)
    elif config.needs_fingerprint:
        arguments["fingerprint"] = Ngram().embed(states.texts(records, depth))
    elif config.needs_observation:
        column = states.observations if PARTITIONS[config.partition].by_code else states.texts
        arguments["observation"] = column(records, depth)
    with refused(records):
        return bk.advantage(config=config, **arguments)


def radii_of(text: str) -> list[float]:
    """Those of the option --epsilons."""
    with contextlib.suppress(ValueError):
        values = [float(part) for part in text.split(",")]
        if all(map(EPSILON.holds, values)):
            return values
    raise CliError(f"--epsilons must be numbers {EPSILON.text}, separated by commas, got {text!r}.")


def check_sources(action_mode: str, fingerprint: str | None, columns: rollouts.Columns) -> None:
    """Raises CliError for invalid options of action keys and fingerprints."""
    if action_mode not in ACTION_MODES:
        raise CliError(f"--action-mode must be one of {', '.join(ACTION_MODES)}, got {action_mode!r}.")
    if fingerprint is not None and columns.fingerprint is not None:
        raise CliError("--fingerprint and --fingerprint-column exclude each other; give one of them.")


def shared_arguments(records: rollouts.Rollouts, action_mode: str, backend: str, threads: int | None) -> dict[str, Any]:
    """The arguments of `bipace_kernels.advantage()` that do not depend on the partition."""
    valid = None if records.valid is None else np.array(records.valid, bool)
    shared: dict[str, Any] = {"rewards": np.array(records.reward, np.float64)}
    shared |= {"backend": backend, "num_threads": threads}
    with refused(records):
        shared["layout"] = bk.layout(records.group, records.trajectory, np.array(records.step, np.int64), valid)
    if records.action is not None:
        with refused(records, "action keys"):
            shared["action_key"], shared["action_parsed"] = bk.action_keys(records.action, mode=action_mode)
    if records.truncated is not None:
        shared["truncated"] = np.array(records.truncated, bool)
    return shared


@contextlib.contextmanager
def refused(records: rollouts.Rollouts | None = None, what: str = "") -> Iterator[None]:
    """Turns the package's errors into CliError, after `what` was computed."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        message = message_of(error, records)
        raise CliError(f"{what}: {message}" if what else message) from None


def option(name: str, *values: object) -> str:
    """A field of Config as an option: --step-norm, or --step-norm std."""
    return " ".join([f"--{name.replace('_', '-')}", *map(str, values)])


def message_of(error: Exception, records: rollouts.Rollouts | None = None) -> str:
    """The message of an error of the package, with fields of Config as options, and rows as files and lines."""

    def written(part: Named | Rows) -> str:
        if isinstance(part, Named):
            return option(part.name, *part.values) if part.name in SETTINGS else str(part)
        return str(part) if records is None else part.listed([records.where(row) for row in part.shown])

    return error.written(written) if isinstance(error, InputError) else str(error)


def table(records: rollouts.Rollouts, result: Any) -> dict[str, Any]:
    """The columns of the output, in the order of the records; docs/cli.md describes them."""

    def ids(values: list[str | int]) -> Any:
        if all(isinstance(value, int) for value in values):
            return np.array(values, np.int64)
        return [str(value) for value in values]

    return {
        "file": [records.sources[file].path for file in records.file],
        "line": np.array(records.line, np.int64),
        "task_id": ids(records.task),
        "rollout": ids(records.rollout),
        "step": np.array(records.step, np.int64),
        "cluster": result.cluster.numpy(),
        "branch": [BRANCHES[branch] for branch in result.branch.tolist()],
        "return": result.returns.numpy(),
        "episode_advantage": result.episode_advantage.numpy(),
        "step_advantage": result.step_advantage.numpy(),
        "advantage": result.advantage.numpy(),
        **({} if result.value is None else {"value": result.value.numpy()}),
    }


def metadata(records: rollouts.Rollouts, config: bk.Config, depth: int, options: SimpleNamespace) -> dict[str, Any]:
    """Everything needed to reproduce the table: version, configuration, inputs."""
    return {
        "version": bk.__version__,
        "config": asdict(config),
        "state": states.name_of(depth),
        "fingerprint": options.fingerprint or ("column" if records.fingerprint else "ngram"),
        "action_mode": options.action_mode,
        "merge_files": options.merge_files,
        "inputs": [{"path": s.path, "sha256": s.sha256, "records": s.records} for s in records.sources],
    }


def _print_summary(
    records: rollouts.Rollouts, config: bk.Config, summary: dict[str, float], value_r2: Any, options: SimpleNamespace
) -> None:
    clusters, keys = config.has_clusters, config.needs_keys
    size = "{mean_cluster_size:.1f} / {p90_cluster_size:.1f}"
    lines = (
        (True, "records", "{records:,.0f}"),
        (True, "trajectories", "{trajectories:,.0f}"),
        (True, "prompt groups", "{groups:,.0f}"),
        (clusters, "clusters", "{cluster_count:,.0f}"),
        (clusters, "singleton clusters", "{singleton_cluster_fraction:.1%}"),
        (clusters, "cluster size, mean / P90", size),
        (clusters, f"records: {'PACE' if keys else 'with peers'}", "{pace_row_fraction:.1%}"),
        (keys, "records: leave-one-out", "{leave_one_out_row_fraction:.1%}"),
        (clusters, "records: singleton (step term 0)", "{singleton_row_fraction:.1%}"),
        (summary.get("invalid_row_fraction"), "records set aside as invalid", "{invalid_row_fraction:.1%}"),
        ("value_explained_share" in summary, "returns explained by V̂", "{value_explained_share:.1%}"),
        (True, "mean |A|", "{mean_absolute_advantage:.3f}"),
        (value_r2 is not None, "value R² ± stderr (coverage)", format_r2(value_r2) if value_r2 is not None else ""),
    )
    rows = [(name, text.format(**summary)) for shown, name, text in lines if shown]
    title = f"{options.preset}: partition {config.partition}, estimator {config.estimator}"
    console = stdout()
    console.print(grid(("quantity", "value"), rows, title))
    plain(console, f"wrote {len(records):,} rows to {options.out}")
