"""Trains a small model on TextCraft by critic-free methods, with TRL's GRPO trainer.

python examples/textcraft/train.py all                              # tuning, every run, report; resumes
python examples/textcraft/train.py run --method gae --seed 0 --out out/textcraft
python examples/textcraft/train.py again examples/textcraft/results/gae-g8-seed0.json     # repeats the run
python examples/textcraft/train.py report                           # table and curves of the finished runs
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import campaign
import typer
from rich.console import Console
from settings import METHODS, Settings

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
console = Console(stderr=True)
HERE = Path(__file__).resolve().parent
TUNED = HERE / "tuned.json"

Out = Annotated[Path, typer.Option(help="folder of the runs and the report")]
Set = Annotated[
    list[str], typer.Option("--set", help="NAME=VALUE, a setting of settings.py; may be given several times")
]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Threads = Annotated[int, typer.Option(help="threads of each process, on a CPU")]
Model = Annotated[
    Path, typer.Option(help="folder of the model to begin with: the warm start, or any of Hugging Face's")
]


@app.command()
def warm(
    out: Model = HERE / "warm_start", change: Set = [], device: Device = "cpu", threads: Threads = 1,  # noqa: B006
) -> None:  # fmt: skip
    """Makes tasks, tokenizer and model, and lets the model imitate the noisy planner; once for all runs."""
    settings = _settings(change)
    import torch
    from environment import TextCraft
    from model import (
        demonstration,
        lessons,
        made_already,
        make_split,
        make_tokenizer,
        save_split,
        save_warm_start,
        teach,
    )
    from trainer import World, success

    try:
        if made_already(out, settings):
            return
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    tokenizer = make_tokenizer(settings.vocabulary)
    split = make_split(
        tokenizer, train=settings.train_tasks, test=settings.test_tasks, new_goals=settings.new_goals,
        most_commands=settings.most_commands, prompt_tokens=settings.prompt_tokens,
    )  # fmt: skip
    save_split(out / "tasks.json.gz", split)
    world = World(split.train, split.test, TextCraft)
    shown = lessons(split, settings.most_commands, settings.known_goals)

    def draw(strays: bool, rng: random.Random) -> tuple[list[int], list[int]]:
        return demonstration(rng.choice(rng.choice(shown)), tokenizer, settings.noise, settings.horizon, strays, rng)

    def look(policy: Any) -> float:
        return success(policy, tokenizer, world, settings, split.train[:100])

    model, history = teach(out, tokenizer, settings, look, draw, console.print, device)
    found = {
        name: success(model, tokenizer, world, settings, tasks)
        for name, tasks in (("test", split.test), ("new_goals", split.new_goals))
    }
    console.print(f"warm start: {found['test']:.0%} of the test tasks")
    tasks = {"train": len(split.train), "test": len(split.test), "lessons": [len(tasks) for tasks in shown]}
    facts = {**found, "seconds": round(time.time() - started, 1), "tasks": tasks, "history": history}
    try:
        save_warm_start(out, model, tokenizer, settings, facts)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def run(
    method: Annotated[str, typer.Option(help=", ".join(METHODS))] = "gae",
    seed: int = 0, out: Out = Path("out/textcraft"), model: Model = HERE / "warm_start", change: Set = [],  # noqa: B006
    device: Device = "cpu", threads: Threads = 1,
) -> None:  # fmt: skip
    """One method and seed; a finished run is skipped, an unfinished one resumes from its last checkpoint."""
    if method not in METHODS:
        raise typer.BadParameter(f"--method must be one of {', '.join(METHODS)}, got {method!r}.")
    wanted = campaign.Run(method, seed, _settings(change), out)
    if wanted.done:
        console.print(f"{wanted.path} is there already")
        return
    if model == HERE / "warm_start":
        warm(model, change, device, threads)
    from trainer import train

    found = train(
        method,
        seed,
        wanted.settings,
        world(model, wanted.settings, out),
        model,
        wanted.work,
        device=device,
        threads=threads,
    )
    wanted.write(found)


@app.command()
def oracle(
    seed: int = 0, copies: Annotated[int, typer.Option(help="continuations of each state")] = 16,
    out: Out = HERE / "results" / "oracle", model: Model = HERE / "warm_start", change: Set = [],  # noqa: B006
    threads: Threads = 1,
) -> None:  # fmt: skip
    """A run with measured advantages, r + γ V(s′) − V(s), V by continuations of the policy itself.

    A minute of one core for each update; `--set updates=10` ends it sooner."""
    wanted = campaign.Run("oracle", seed, _settings(change), out)
    if wanted.done:
        console.print(f"{wanted.path} is there already")
        return
    if model == HERE / "warm_start":
        warm(model, change, threads=threads)
    from continuations import true_advantages
    from trainer import train

    settings = wanted.settings

    def credit(policy: Any, tokenizer: Any, episodes: Any, update: int) -> Any:
        return true_advantages(
            policy, tokenizer, episodes, horizon=settings.horizon, copies=copies, gamma=settings.gamma,
            seed=1_000_003 * (seed + 1) + update,
        )  # fmt: skip

    found = train(
        "grpo", seed, settings, world(model, settings, out), model, wanted.work, threads=threads, credit=credit
    )
    wanted.write(found | {"method": "oracle", "continuations": copies})


@app.command()
def again(
    path: Annotated[Path, typer.Argument(help="JSON of a finished run")], out: Out = Path("out/again"),
    model: Model = HERE / "warm_start", threads: Threads = 1,
) -> None:  # fmt: skip
    """Repeats a run; exit status 1 if a number of an update or a check differs."""
    differ = campaign.repeated(
        path, out, lambda method, seed, change, device: run(method, seed, out, model, change, device, threads)
    )
    console.print(f"different: {', '.join(differ)}" if differ else "the same numbers")
    raise typer.Exit(1 if differ else 0)


@app.command()
def evaluate(
    model: Model = HERE / "warm_start", change: Set = [], threads: Threads = 1,  # noqa: B006
    temperatures: Annotated[str,
                            typer.Option(help="with commas between them; 0 takes the likeliest token")] = "1,0.3,0",
    lucks: Annotated[int, typer.Option(help="seeds of sampling at each temperature")] = 3,
) -> None:  # fmt: skip
    """Success of a model on the test tasks and on the goals that nothing trains on, at several temperatures, as JSON
    lines."""
    import json

    import torch
    import trainer
    from environment import TextCraft
    from model import load, load_split

    torch.set_num_threads(threads)
    (policy, tokenizer), split = load(model), load_split(model / "tasks.json.gz")
    parts = {"test": split.test, "new_goals": split.new_goals}
    rows = trainer.evaluate(
        policy, tokenizer, trainer.World(split.train, split.test, TextCraft), _settings(change), parts,
        [float(text) for text in temperatures.split(",")], lucks,
    )  # fmt: skip
    for row in rows:
        Console().print_json(json.dumps(row), indent=None)


@app.command("all")
def everything(
    out: Out = HERE / "results", model: Model = HERE / "warm_start", change: Set = [], device: Device = "cpu",  # noqa: B006
    threads: Threads = 1, processes: Annotated[int, typer.Option(help="runs at a time")] = 2,
    methods: Annotated[str, typer.Option(help="only these, with commas between them")] = ",".join(METHODS),
    tune_only: Annotated[bool, typer.Option(help="stop after tuning")] = False,
) -> None:  # fmt: skip
    """Tuning, all runs, report; finished runs are skipped, interrupted ones resume from their last checkpoint."""
    settings = _settings(change)
    if model == HERE / "warm_start":
        warm(model, change, device, threads)
    tuned = TUNED if model == HERE / "warm_start" else out / "tuned.json"
    options = ["--model", str(model), "--device", device, "--threads", str(threads)]
    failed = campaign.complete(
        [__file__],
        options,
        settings,
        out,
        tuned,
        _methods(methods, METHODS),
        campaign.final,
        processes,
        console.print,
        tune_only,
    )
    if failed:
        console.print(f"these runs failed, their logs say why: {', '.join(str(run.work) + '.log' for run in failed)}")
        raise typer.Exit(1)
    if not tune_only:
        report(out, model)


@app.command()
def report(out: Out = HERE / "results", model: Model = HERE / "warm_start") -> None:
    """Table and curves of the finished runs of a folder, into the same folder."""
    from report import write_report

    for path in write_report(out, model):
        console.print(f"wrote {path}")


def world(model: Path, settings: Settings, out: Path) -> Any:
    """The tasks that came with the warm start; with another model they are made for its tokenizer, and the prompt has
    rules."""
    from environment import Explained, TextCraft
    from model import load, load_split, make_split, save_split
    from trainer import World

    kept, env = model / "tasks.json.gz", TextCraft
    if not kept.exists():
        kept, env = out / "tasks.json.gz", Explained
        if not kept.exists():
            split = make_split(
                load(model)[1], train=settings.train_tasks, test=settings.test_tasks, new_goals=settings.new_goals,
                most_commands=settings.most_commands, prompt_tokens=settings.prompt_tokens,
            )  # fmt: skip
            kept.parent.mkdir(parents=True, exist_ok=True)
            save_split(kept, split)
    split = load_split(kept)
    return World(split.train, split.test, env)


def _methods(text: str, known: Iterable[str]) -> list[str]:
    wanted = text.split(",")
    if unknown := sorted(set(wanted) - set(known)):
        raise typer.BadParameter(f"--methods takes {', '.join(known)}; got {', '.join(unknown)}.")
    return wanted


def _settings(change: list[str]) -> Settings:
    try:
        return Settings.of(change)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


if __name__ == "__main__":
    app()
