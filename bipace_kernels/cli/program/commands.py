"""The commands of `bipace` and their options.  Nothing of bipace_kernels is imported before a command runs."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
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


def _run(command: str, values: dict[str, Any]) -> None:
    """Runs the module of a command, imported only now, on the options by their names in its table."""
    try:
        from bipace_kernels.cli._console import user_errors
    except KeyboardInterrupt:
        sys.stderr.write("stopped; nothing was written\n")
        raise typer.Exit(STOPPED) from None
    with user_errors():
        importlib.import_module(f"bipace_kernels.cli.{command}").run(values)


REQUIRED = inspect.Parameter.empty
_COLUMN, _ESTIMATOR, _INPUT = "Column names", "Estimator (default: the preset's values)", "Input"


@dataclass(frozen=True)
class _Option:
    """An option --NAME of a command, or its argument.  Values are checked where they are used, so that all mistakes
    give the same kind of error; the help lists the choices."""

    kind: Any
    default: Any
    help: str
    metavar: str | None = None
    panel: str | None = None
    min: int | None = None
    max: int | None = None
    is_argument: bool = False

    def parameter(self, name: str) -> inspect.Parameter:
        """As a parameter of the command's function."""
        flag = f"--{name.replace('_', '-')}"
        if self.kind == bool | None:
            flag = f"{flag}/--no-{flag[2:]}"
        same: Any = {"metavar": self.metavar, "help": self.help, "rich_help_panel": self.panel}
        made = typer.Argument(**same) if self.is_argument else typer.Option(flag, min=self.min, max=self.max, **same)
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=self.default, annotation=Annotated[self.kind, made])


def _command(name: str, about: str, options: Mapping[str, _Option]) -> None:

    def command(**values: Any) -> None:
        _run(name, values)

    parameters = [option.parameter(key) for key, option in options.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(name, help=about)(command)


def _fields() -> dict[str, _Option]:
    """The fields of `Config`, which checks their values; None: not given.

    The package of the table of settings imports torch, so the file is loaded by itself.
    """
    (folder,) = importlib.util.find_spec("bipace_kernels").submodule_search_locations  # type: ignore[union-attr,misc]
    spec: Any = importlib.util.spec_from_file_location("bipace_settings", f"{folder}/settings.py")
    table = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    options = {}
    for name, row in table.settings_of(table.Fields).items():
        panel = _INPUT if name in ("duplicates", "on_invalid") else _ESTIMATOR
        text = row.help.replace("; off:", "; 0:") + (f": {', '.join(row.accepts)}" if row.kind is str else "")
        text = text[0].upper() + text[1:] if text[0].isascii() else text
        options[name] = _Option(row.kind | None, None, f"{text}.", None if row.kind is bool else row.symbol, panel)
    return options


_ROLLOUTS = _Option(
    list[str], REQUIRED, "Step records: .jsonl, .jsonl.gz or .parquet files.", "ROLLOUTS...", is_argument=True
)
_COLUMNS = {
    f"{name}_column": _Option(str, default, text, "NAME", _COLUMN)
    for name, default, text in (
        ("task", "task_id", "Prompt group of a record."),
        ("rollout", "rollout", "Rollout inside the task."),
        ("step", "step", "Step number inside the rollout."),
        ("observation", "observation", "What the agent saw before it acted."),
        ("reward", "reward", "Environment reward of the step."),
        ("action", "action", "Text from which the action key is made."),
        ("valid", "valid", "False for padding records; optional."),
        ("truncated", "truncated", "True on the last step of a rollout that was cut off; optional, for GAE."),
    )
} | {"fingerprint_column": _Option(str | None, None, "Hidden states: a list of numbers per record.", "NAME", _COLUMN)}
_LONGEST_LINE = _Option(int, 64, "Longest line of JSONL, in MiB.", "MIB", _INPUT, min=1, max=1 << 20)
_READING = {
    "action_mode": _Option(
        str, "text", "Action key of a text: text, action_tag or first_n (64 bytes).", "MODE", _INPUT
    ),
    "merge_files": _Option(bool, False, "Equal task ids of different files are one group.", panel=_INPUT),
    "longest_line": _LONGEST_LINE,
}
_BACKEND = _Option(str, "auto", "auto, reference or cpu.", "NAME")
_RUNNING = {"backend": _BACKEND, "threads": _Option(int | None, None, "Threads of the cpu backend.", min=1)}

_ADVANTAGE = {
    "rollouts": _ROLLOUTS,
    "out": _Option(str, REQUIRED, "Table to write: .parquet, .csv, .jsonl or .jsonl.gz.", "FILE"),
    "preset": _Option(str, "bipace", "grpo, gigpo, hgpo, bigpo, bipace or gae.", "NAME"),
    "state": _Option(str, "observation", "What a state is: observation, or history:K for the last K + 1.", "KIND"),
    "fingerprint": _Option(str | None, None, "Hidden states [N, D]; default: n-grams, with ε 0.25.", "FILE.npy"),
    "gigpo_mode": _Option(str | None, None, "Of preset gigpo: mean_norm or mean_std_norm.", "NAME", _ESTIMATOR),
    **_READING,
    **_COLUMNS,
    **_RUNNING,
}
_REPORT = {
    "rollouts": _ROLLOUTS,
    "out": _Option(str, REQUIRED, "Folder for report.md, report.json and the figures.", "DIR"),
    "gamma": _Option(float, 0.95, "Discount of the returns.", "γ"),
    "history_length": _Option(int, 2, "Depth of history.", "K", min=1),
    "epsilon": _Option(float, NGRAM_EPSILON, "Radius of the cosine rows.", "ε"),
    "epsilons": _Option(str, "0.05,0.1,0.15,0.2,0.25,0.3,0.35,0.4", "Radii of the ε curve.", "ε,ε,..."),
    "similarity": _Option(float, 0.95, "Least difflib ratio of similar texts.", "S"),
    "similar": _Option(bool | None, None, "Similar partition: slow on long texts; default: only where cheap."),
    "html": _Option(bool, False, "Also inspector.html: every step's credit under every estimator, in a browser."),
    "success_above": _Option(float, 0.0, "With --html: a larger sum of rewards is a success, if none is given.", "X"),
    "duplicates": _Option(str, "raise", "Two records of one step: raise, once or count.", "RULE", _INPUT),
    "on_invalid": _Option(str, "raise", "Values that are not finite: raise or singleton.", "RULE", _INPUT),
    **_COLUMNS,
    "success_column": _Option(str, "success", "Whether the episode succeeded; optional.", "NAME", _COLUMN),
    "sentence": _Option(str | None, None, "Sentence encoder to compare: a folder or a name on the hub.", "MODEL"),
    "fingerprint": _Option(str | None, None, "Hidden states [N, D] to compare, a row per record.", "FILE.npy"),
    **_READING,
    **_RUNNING,
}
_CALIBRATE = {
    "model_dir": _Option(str, REQUIRED, "Folder of a Hugging Face model.", "MODEL_DIR", is_argument=True),
    "prompts": _Option(str, REQUIRED, "A prompt and its label per line.", "PROMPTS.jsonl", is_argument=True),
    "out": _Option(str, REQUIRED, "Folder of the tables, the heat map and the states.", "DIR"),
    "label": _Option(str, "task_type", "Column of the label that the probe predicts.", "NAME"),
    "prompt_column": _Option(str, "prompt", "Column of the text, chat messages or token ids.", "NAME"),
    "chat": _Option(bool, False, "Treat a text as a user message and apply the chat template."),
    "group": _Option(str | None, None, "Column of prompt groups; default: all prompts are one group.", "NAME"),
    "layers": _Option(str | None, None, "all, or e.g. -8,-12,'block 27'; default: about seven.", "L,L,..."),
    "pooling": _Option(str, "last,mean,attention", "last, mean, attention.", "P,P,..."),
    "epsilons": _Option(str, "0.05,0.1,0.15,0.2", "Radii of the scan.", "ε,ε,..."),
    "folds": _Option(int, 5, "Folds of the probe's cross-validation.", min=2),
    "min_clusters": _Option(int, 5, "Least number of clusters to qualify.", min=1),
    "seed": _Option(int, 0, "Seed of the folds.", min=0),
    "restart": _Option(bool, False, "Recompute the states in --out."),
    "device": _Option(str | None, None, "Default: a GPU if there is one.", "NAME"),
    "dtype": _Option(str, "auto", "auto, float32, bfloat16 or float16.", "NAME"),
    "token_budget": _Option(int | None, None, "Tokens of one forward; default: 512, on a GPU 16,384.", min=1),
    "longest_line": _LONGEST_LINE,
    "backend": _BACKEND,
}

_command("advantage", "Compute cluster, branch, returns and advantages for every record.", _ADVANTAGE | _fields())
_command("report", "Compare partitions on the same rollouts: tables and figures.", _REPORT)
_command("calibrate", "Choose layer, pooling and ε for a model by linear probes and clusters.", _CALIBRATE)


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
