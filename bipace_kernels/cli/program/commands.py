"""The commands of `bipace` and their options.  Nothing of bipace_kernels is imported before a command runs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

STOPPED = 130  # exit status, as shells report SIGINT
NGRAM_EPSILON = 0.25

app = typer.Typer(
    name="bipace",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Step-level advantages for rollouts of LLM agents: compute them, compare partitions, look at them.",
)


def _version(wanted: bool) -> None:
    if wanted:
        from bipace_kernels._version import __version__

        typer.echo(f"bipace-kernels {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _run(command: str, given: dict[str, Any]) -> None:
    """Runs the module of a command, imported only now, on the options by their names in the signature below."""
    try:
        from bipace_kernels.cli._console import user_errors
    except KeyboardInterrupt:
        sys.stderr.write("stopped; nothing was written\n")
        raise typer.Exit(STOPPED) from None
    with user_errors():
        importlib.import_module(f"bipace_kernels.cli.{command}").run(given)


# ---- options that several commands share.  Values are checked where they are used, so that all mistakes give the same
# kind of error; the help lists the choices.

_COLUMNS = "Column names"
_ESTIMATOR = "Estimator (default: the preset's values)"
_INPUT = "Input"


def _column(name: str, what: str) -> Any:
    return typer.Option(f"--{name}-column", metavar="NAME", help=what, rich_help_panel=_COLUMNS)


def _field(flag: str, metavar: str, what: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=what, rich_help_panel=_ESTIMATOR)


def _input(flag: str, what: str, **more: Any) -> Any:
    return typer.Option(flag, help=what, rich_help_panel=_INPUT, **more)


Rollouts = Annotated[
    list[str],
    typer.Argument(metavar="ROLLOUTS...", help="Step records: one or more .jsonl, .jsonl.gz or .parquet files."),
]
TaskColumn = Annotated[str, _column("task", "Prompt group of a record.")]
RolloutColumn = Annotated[str, _column("rollout", "Rollout inside the task.")]
StepColumn = Annotated[str, _column("step", "Step number inside the rollout.")]
ObservationColumn = Annotated[str, _column("observation", "What the agent saw before it acted.")]
RewardColumn = Annotated[str, _column("reward", "Environment reward of the step.")]
ActionColumn = Annotated[str, _column("action", "Text from which the action key is made.")]
ValidColumn = Annotated[str, _column("valid", "False for padding records; optional.")]
TruncatedColumn = Annotated[
    str, _column("truncated", "True on the last step of a rollout that was cut off; optional, for GAE.")
]
SuccessColumn = Annotated[str, _column("success", "Whether the episode succeeded; optional.")]
FingerprintColumn = Annotated[str | None, _column("fingerprint", "Hidden states: a list of numbers per record.")]
MergeFiles = Annotated[bool, _input("--merge-files", "Equal task ids of different files are one group.")]
LongestLine = Annotated[
    int, _input("--longest-line", "Longest line of JSONL, in MiB.", metavar="MIB", min=1, max=1 << 20)
]
ActionMode = Annotated[
    str,
    _input(
        "--action-mode", "How a text becomes an action key: text, action_tag or first_n (64 bytes).", metavar="MODE"
    ),
]
Backend = Annotated[str, typer.Option(metavar="NAME", help="auto, reference or cpu.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="Threads of the cpu backend.")]

OutTable = Annotated[
    str, typer.Option("--out", metavar="FILE", help="Table to write: .parquet, .csv, .jsonl or .jsonl.gz.")
]
Preset = Annotated[str, typer.Option(metavar="NAME", help="grpo, gigpo, hgpo, bigpo, bipace or gae.")]
StateOption = Annotated[
    str, typer.Option("--state", metavar="KIND", help="What a state is: observation, or history:K for the last K + 1.")
]
Fingerprint = Annotated[
    str | None,
    typer.Option(metavar="FILE.npy", help="Hidden states [N, D], a row per record; default: n-grams, with ε 0.25."),
]


def _table() -> Any:
    """The table of settings.  Its package imports torch, so the file is loaded by itself."""
    (folder,) = importlib.util.find_spec("bipace_kernels").submodule_search_locations  # type: ignore[union-attr,misc]
    spec: Any = importlib.util.spec_from_file_location("bipace_settings", f"{folder}/settings.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _option_of(name: str, row: Any) -> Any:
    """A field of `Config` as an option, whose value the field checks; None: not given."""
    flag = f"--{name.replace('_', '-')}"
    panel = _INPUT if name in ("duplicates", "on_invalid") else _ESTIMATOR
    text = row.help.replace("; off:", "; 0:") + (f": {', '.join(row.accepts)}" if row.kind is str else "")
    text = text[0].upper() + text[1:] if text[0].isascii() else text
    if row.kind is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=f"{text}.", rich_help_panel=panel)]
    return Annotated[row.kind | None, typer.Option(flag, metavar=row.symbol, help=f"{text}.", rich_help_panel=panel)]


def _with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of `Config`, which it takes by **fields."""
    own = inspect.signature(command, eval_str=True)
    table = _table()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option_of(name, row))
        for name, row in table.settings_of(table.Fields).items()
    ]
    parameters = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*parameters, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in (*parameters, *options)}
    return command


@app.command("advantage")
@_with_fields
def _advantage(
    rollouts: Rollouts,
    out: OutTable,
    preset: Preset = "bipace",
    state: StateOption = "observation",
    fingerprint: Fingerprint = None,
    gigpo_mode: Annotated[
        str | None, _field("--gigpo-mode", "NAME", "With preset gigpo: verl-agent's mean_norm or mean_std_norm.")
    ] = None,
    action_mode: ActionMode = "text",
    merge_files: MergeFiles = False,
    longest_line: LongestLine = 64,
    task_column: TaskColumn = "task_id",
    rollout_column: RolloutColumn = "rollout",
    step_column: StepColumn = "step",
    observation_column: ObservationColumn = "observation",
    reward_column: RewardColumn = "reward",
    action_column: ActionColumn = "action",
    valid_column: ValidColumn = "valid",
    truncated_column: TruncatedColumn = "truncated",
    fingerprint_column: FingerprintColumn = None,
    backend: Backend = "auto",
    threads: Threads = None,
    **fields: Any,
) -> None:
    """Compute cluster, branch, returns and advantages for every record."""
    given = locals()
    _run("advantage", {**given.pop("fields"), **given})


@app.command("report")
def _report(
    rollouts: Rollouts,
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Folder for report.md, report.json and the figures.")
    ],
    gamma: Annotated[float, typer.Option(metavar="γ", help="Discount of the returns.")] = 0.95,
    history_length: Annotated[int, typer.Option("--history-length", min=1, metavar="K", help="Depth of history.")] = 2,
    epsilon: Annotated[float, typer.Option(metavar="ε", help="Radius of the cosine rows.")] = NGRAM_EPSILON,
    epsilons: Annotated[
        str, typer.Option(metavar="ε,ε,...", help="Radii of the ε curve.")
    ] = "0.05,0.1,0.15,0.2,0.25,0.3,0.35,0.4",
    similarity: Annotated[float, typer.Option(metavar="S", help="Least difflib ratio of similar texts.")] = 0.95,
    similar: Annotated[
        bool | None,
        typer.Option(
            "--similar/--no-similar", help="Similar partition: slow on long texts; default: only where cheap."
        ),
    ] = None,
    html: Annotated[
        bool,
        typer.Option("--html", help="Also inspector.html: every step's credit under every estimator, in a browser."),
    ] = False,
    duplicates: Annotated[
        str, _input("--duplicates", "Two records of one step: raise, once or count.", metavar="RULE")
    ] = "raise",
    on_invalid: Annotated[
        str, _input("--on-invalid", "Values that are not finite: raise or singleton.", metavar="RULE")
    ] = "raise",
    task_column: TaskColumn = "task_id",
    rollout_column: RolloutColumn = "rollout",
    step_column: StepColumn = "step",
    observation_column: ObservationColumn = "observation",
    reward_column: RewardColumn = "reward",
    action_column: ActionColumn = "action",
    valid_column: ValidColumn = "valid",
    success_column: SuccessColumn = "success",
    truncated_column: TruncatedColumn = "truncated",
    fingerprint_column: FingerprintColumn = None,
    sentence: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Sentence encoder to compare: a folder or a name on the hub.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(metavar="FILE.npy", help="Hidden states [N, D] to compare, a row per record.")
    ] = None,
    action_mode: ActionMode = "text",
    merge_files: MergeFiles = False,
    longest_line: LongestLine = 64,
    backend: Backend = "auto",
    threads: Threads = None,
) -> None:
    """Compare partitions on the same rollouts: tables and figures."""
    _run("report", locals())


@app.command("calibrate")
def _calibrate(
    model_dir: Annotated[str, typer.Argument(metavar="MODEL_DIR", help="Folder of a Hugging Face model.")],
    prompts: Annotated[
        str, typer.Argument(metavar="PROMPTS.jsonl", help="One prompt with its label per line; .jsonl or .jsonl.gz.")
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Folder of the tables, the heat map and the states.")
    ],
    label: Annotated[
        str, typer.Option(metavar="NAME", help="Column of the label that the probe predicts.")
    ] = "task_type",
    prompt_column: Annotated[
        str, typer.Option("--prompt-column", metavar="NAME", help="Column of the text, chat messages or token ids.")
    ] = "prompt",
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat a text as a user message and apply the chat template.")
    ] = False,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of prompt groups; default: all prompts are one group.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="L,L,...", help="all, or e.g. -8,-12,'block 27'; default: about seven.")
    ] = None,
    pooling: Annotated[str, typer.Option(metavar="P,P,...", help="last, mean, attention.")] = "last,mean,attention",
    epsilons: Annotated[str, typer.Option(metavar="ε,ε,...", help="Radii of the scan.")] = "0.05,0.1,0.15,0.2",
    folds: Annotated[int, typer.Option(min=2, help="Folds of the probe's cross-validation.")] = 5,
    min_clusters: Annotated[
        int, typer.Option("--min-clusters", min=1, help="Least number of clusters to qualify.")
    ] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the folds.")] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Recompute the states in --out.")] = False,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Default: a GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.")] = "auto",
    token_budget: Annotated[
        int | None,
        typer.Option("--token-budget", min=1, help="Tokens of one forward; default: 512 on the CPU, 16,384 on a GPU."),
    ] = None,
    longest_line: LongestLine = 64,
    backend: Backend = "auto",
) -> None:
    """Choose layer, pooling and ε for a model: linear probes and clusters over layers × poolings × ε."""
    _run("calibrate", locals())


@app.command("info")
def _info(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show versions, instruction set and backends, and why any backend is unavailable."""
    _run("info", locals())


# Options are forwarded to another program.
_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("bench", context_settings=_FORWARDED, add_help_option=False)
def _bench(context: typer.Context) -> None:
    """Benchmark the kernels on this machine, as python -m bipace_kernels.bench; --help shows its options."""
    _run("bench", {"args": context.args})


@app.command("truth", context_settings=_FORWARDED, add_help_option=False)
def _truth(context: typer.Context) -> None:
    """Compare estimators, including your own, with true advantages; as python -m bench truth, in a checkout."""
    _run("bench", {"args": ["truth", *context.args]})
