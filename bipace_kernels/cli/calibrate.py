"""`bipace calibrate`: layer, pooling and ε for a model in a local folder, from prompts with labels."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typer
from rich.text import Text

import bipace_kernels as bk

from ..calibration.result import HEADINGS
from ..support import files, optional
from . import output
from ._console import INTERRUPTED, CliError, grid, notes, number, plain, stderr, stdout
from .advantage import radii_of
from .rollouts import json_lines


def run(values: Mapping[str, Any]) -> None:
    """The whole command, on its options by name."""
    options = SimpleNamespace(**values)
    radii, layers = radii_of(options.epsilons), _layers(options.layers)
    output.check_folder(options.out, "--out")
    for package in ("matplotlib", "sklearn", "transformers"):
        optional.need(package, "bipace calibrate")
    prompts, labels, group = read_prompts(options.prompts, options)
    try:
        with notes():
            model, tokenizer = load_model(options.model_dir, options)
            same = ("folds", "min_clusters", "seed", "out", "restart", "token_budget", "backend")
            given = {name: values[name] for name in same} | {"layers": layers, "epsilons": radii, "group": group}
            given["pooling"] = [item.strip() for item in options.pooling.split(",")]
            calibration = bk.calibrate(model, prompts, labels, tokenizer=tokenizer, **given)
            _write(calibration, options)
    except (ImportError, TypeError, ValueError, bk.BackendError) as error:
        raise CliError(str(error)) from None
    except OSError as error:
        raise CliError(f"--out {options.out} cannot be written: {error.strerror or error}.") from None
    except KeyboardInterrupt:
        plain(stderr(), "stopped; the same command resumes from the states in --out")
        raise typer.Exit(INTERRUPTED) from None
    _show(calibration, options)
    if calibration.choice is None:
        raise CliError(f"nothing was chosen: {calibration.reason}")


def read_prompts(path: str, options: SimpleNamespace) -> tuple[list[Any], list[Any], list[Any] | None]:
    """Prompts, labels and groups of a .jsonl or .jsonl.gz file; CliError names the line and the field."""
    prompts: list[Any] = []
    labels: list[Any] = []
    groups: list[Any] | None = None if options.group is None else []
    if not Path(path).is_file():
        raise CliError(f"{path} is not a file; give a .jsonl or .jsonl.gz file with one prompt per line.")
    for line, record in json_lines(path, longest_line=options.longest_line):
        where = f"{path}, line {line}"
        prompt = _field(record, options.prompt_column, "--prompt-column", where)
        if not isinstance(prompt, (str, list)) or not prompt:
            raise CliError(
                f'{where}, field "{options.prompt_column}": expected a prompt, got {json.dumps(prompt)[:40]}.'
            )
        as_chat = options.chat and isinstance(prompt, str)
        prompts.append([{"role": "user", "content": prompt}] if as_chat else prompt)
        labels.append(_id(record, options.label, "--label", where))
        if groups is not None:
            groups.append(_id(record, options.group, "--group", where))
    if not prompts:
        raise CliError(f"{path} holds no prompts; give a file with one JSON object per line.")
    return prompts, labels, groups


def _field(record: dict[str, Any], name: str, option: str, where: str) -> Any:
    if name not in record:
        names = ", ".join(f'"{key}"' for key in list(record)[:12])
        raise CliError(f'{where}: the field "{name}" is missing; name its column with {option}. Found: {names}.')
    return record[name]


def _id(record: dict[str, Any], name: str, option: str, where: str) -> Any:
    value = _field(record, name, option, where)
    if not isinstance(value, (str, int)):
        raise CliError(f'{where}, field "{name}": expected a string or an integer, got {json.dumps(value)[:40]}.')
    return value


def load_model(folder: str, options: SimpleNamespace) -> tuple[Any, Any]:
    """The causal model and its tokenizer, from local files; CliError if they are missing."""
    if not (Path(folder) / "config.json").is_file():
        raise CliError(f"{folder} must be a folder of a Hugging Face model but has no config.json; download one first.")
    transformers = optional.need("transformers", "bipace calibrate")
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype, None)
    if dtype != "auto" and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CliError(f"--dtype must be auto, float32, bfloat16 or float16, got {options.dtype!r}.")
    transformers.utils.logging.disable_progress_bar()
    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA raises AssertionError
        raise CliError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}.") from None
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **{name: dtype})
        model = model.to(device).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise CliError(f"{folder} cannot be loaded as a causal language model: {error}") from None
    return model, tokenizer


def _layers(text: str | None) -> Any:
    if text is None or text == "all":
        return text
    with contextlib.suppress(ValueError):
        return [part if part.startswith("block ") else int(part) for part in map(str.strip, text.split(","))]
    raise CliError(f"--layers must be all, or numbers and blocks, such as -8,'block 27', got {text!r}.")


def _write(result: Any, options: SimpleNamespace) -> None:
    from . import figures

    with files.atomic_folder(Path(options.out)) as folder:
        (folder / "calibration.md").write_text(result.markdown("calibration.png"), encoding="utf-8")
        text = json.dumps({"label": options.label, **result.as_json()}, indent=1, ensure_ascii=False, allow_nan=False)
        (folder / "calibration.json").write_text(text + "\n", encoding="utf-8")
        figures.heat_map(folder / "calibration.png", result)
        if result.choice is not None:
            (folder / "calibration.yaml").write_text(result.yaml(), encoding="utf-8")
    if result.choice is None:  # one of an earlier run would contradict this run
        (Path(options.out) / "calibration.yaml").unlink(missing_ok=True)


def _show(result: Any, options: SimpleNamespace) -> None:
    console = stdout()
    rows: Sequence[Any] = result.slice()
    title = f"{result.model}: {result.n_prompts:,} prompts, pooling {rows[0].pooling}, ε = {rows[0].epsilon:g}"
    console.print(grid(HEADINGS, result.cells(lambda cell: Text(cell, "bold")), title))
    if (c := result.choice) is not None:
        plain(console, f"chosen: {c.layer}, pooling {c.pooling}, ε = {c.epsilon:.4g}\n{result.reason}")
    if result.reused:
        plain(console, f"resumed an earlier run with the states of {result.reused:,} of {result.n_prompts:,} prompts")
    times = ", ".join(f"{name} {number(seconds, '.1f')} s" for name, seconds in result.seconds.items())
    plain(console, f"time: {times}")
    for suffix in ("md", "json", "png", *(["yaml"] if result.choice is not None else [])):
        plain(console, str(Path(options.out) / f"calibration.{suffix}"))
