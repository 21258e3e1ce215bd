"""Trains a small model on real ALFWorld games by critic-free methods, with the trainer of examples/textcraft.

python examples/alfworld/train_alfworld.py games --games FOLDER   # once: this needs textworld[pddl]==1.7.0
python examples/alfworld/train_alfworld.py all                    # warm start, tuning, runs, report; resumes
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from alfworld_world import (
    DEFAULTS,
    METHODS,
    NAMED,
    PIECES,
    SEEDS,
    demonstration,
    kinds_of,
    measured,
    prepare,
    renamed,
    tasks_of,
    texts,
    world,
)
from rich.console import Console

import campaign  # isort: skip  of examples/textcraft, as what follows
from settings import Settings  # isort: skip

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
console = Console(stderr=True)
HERE = Path(__file__).resolve().parent

Out = Annotated[Path, typer.Option(help="folder of the runs and the report")]
Games = Annotated[Path, typer.Option("--prepared", help="folder that `games` filled")]
Set = Annotated[list[str], typer.Option("--set", help="NAME=VALUE, a setting of examples/textcraft/settings.py")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Threads = Annotated[int, typer.Option(help="threads of each process, on a CPU")]
Model = Annotated[
    Path, typer.Option(help="folder of the model to begin with: the warm start, or any of Hugging Face's")
]
GAMES, START = Path("out/alfworld/games"), HERE / "warm_start"


@app.command()
def games(
    source: Annotated[Path, typer.Option("--games", help="folder with a game.tw-pddl for each game")],
    out: Games = GAMES,
    own_split: Annotated[
        bool, typer.Option(help="all games of the folder, split anew, not those of games.json")
    ] = False,
) -> None:
    """Reads the games once and splits them by task; half a second each.  Games that cannot be read are skipped and
    named."""
    try:
        broken = prepare(source, out, console.print, None if own_split else NAMED)
    except (ValueError, ImportError) as error:
        raise typer.BadParameter(str(error)) from None
    console.print({side: len(tasks_of(out, side)) for side in ("train", "test")} | {"skipped": len(broken)})
    for text in broken:
        console.print(f"skipped {text}")


@app.command()
def warm(
    out: Model = START, prepared: Games = GAMES, change: Set = [], device: Device = "cpu", threads: Threads = 1,  # noqa: B006
) -> None:  # fmt: skip
    """Makes tokenizer and model, and lets the model imitate the noisy searcher in the train games."""
    settings = Settings.of(change, DEFAULTS)
    import torch
    from model import made_already, save_warm_start, teach, tokens_of, train_tokenizer
    from tokenizers import Regex
    from trainer import success

    try:
        if made_already(out, settings):
            return
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    torch.set_num_threads(threads)
    started = time.time()
    of_games = world(prepared, settings)
    kinds = kinds_of(of_games.train)
    tokenizer = train_tokenizer(texts(of_games.train, settings), Regex(PIECES), settings.vocabulary)

    def draw(strays: bool, rng: Any) -> tuple[list[int], list[int]]:
        task = rng.choice(of_games.train)
        shown = demonstration(task, settings.noise, settings.horizon, strays, rng)
        return tokens_of(renamed(shown, kinds, rng), tokenizer)

    def look(policy: Any) -> float:
        return success(policy, tokenizer, of_games, settings, measured(of_games.train, 50))

    out.mkdir(parents=True, exist_ok=True)
    model, history = teach(out, tokenizer, settings, look, draw, console.print, device)
    found = success(model, tokenizer, of_games, settings)
    known = success(model, tokenizer, of_games, settings, measured(of_games.train, settings.test_tasks))
    console.print(f"warm start: {known:.0%} of the train episodes, {found:.0%} of the test episodes")
    tasks = {"train": len(of_games.train), "test": len(tasks_of(prepared, "test"))}
    facts = {
        "train": known,
        "test": found,
        "seconds": round(time.time() - started, 1),
        "tasks": tasks,
        "history": history,
    }
    try:
        save_warm_start(out, model, tokenizer, settings, facts, "train")  # where it is trained
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def run(
    method: Annotated[str, typer.Option(help="a method of examples/textcraft")] = "gae", seed: int = 0,
    out: Out = Path("out/alfworld/runs"), model: Model = START, prepared: Games = GAMES, change: Set = [],  # noqa: B006
    device: Device = "cpu", threads: Threads = 1,
) -> None:  # fmt: skip
    """One method and seed; a finished run is skipped, an unfinished one resumes from its last checkpoint."""
    wanted = campaign.Run(method, seed, Settings.of(change, DEFAULTS), out)
    if wanted.done:
        console.print(f"{wanted.path} is there already")
        return
    if model == START:
        warm(model, prepared, change, device, threads)
    from trainer import train

    of_games = world(prepared, wanted.settings)
    wanted.write(train(method, seed, wanted.settings, of_games, model, wanted.work, device=device, threads=threads))


@app.command()
def again(
    path: Annotated[Path, typer.Argument(help="JSON of a finished run")], out: Out = Path("out/alfworld/again"),
    model: Model = START, prepared: Games = GAMES, threads: Threads = 1,
) -> None:  # fmt: skip
    """Repeats a run; exit status 1 if a number of an update or a check differs."""
    differ = campaign.repeated(
        path, out, lambda method, seed, change, device: run(method, seed, out, model, prepared, change, device, threads)
    )
    console.print(f"different: {', '.join(differ)}" if differ else "the same numbers")
    raise typer.Exit(1 if differ else 0)


@app.command("all")
def everything(
    out: Out = HERE / "results", model: Model = START, prepared: Games = GAMES, change: Set = [],  # noqa: B006
    device: Device = "cpu", threads: Threads = 1, processes: Annotated[int, typer.Option(help="runs at a time")] = 2,
    tune_only: Annotated[bool, typer.Option(help="stop after tuning")] = False,
) -> None:  # fmt: skip
    """Warm start, tuning, all runs, report; what is finished is skipped."""
    settings = Settings.of(change, DEFAULTS)
    if model == START:
        warm(model, prepared, change, device, threads)
    options = ["--model", str(model), "--prepared", str(prepared), "--device", device, "--threads", str(threads)]
    failed = campaign.complete(
        [__file__], options, settings, out, HERE / "tuned.json" if model == START else out / "tuned.json", METHODS,
        plan,
        processes, console.print, tune_only,
    )  # fmt: skip
    if failed:
        console.print(f"these runs failed, their logs say why: {', '.join(str(run.work) + '.log' for run in failed)}")
        raise typer.Exit(1)
    if not tune_only:
        report(out, model)


def plan(settings: Settings, out: Path, tuned: Path) -> Iterator[campaign.Run]:
    """Seed by seed."""
    choices = campaign.read_tuned(tuned)
    for seed in SEEDS:
        for method in METHODS:
            if method in choices:
                yield campaign.Run(method, seed, campaign.chosen(settings, choices[method]), out)


@app.command()
def report(out: Out = HERE / "results", model: Model = START) -> None:
    """Table and curves of the finished runs of a folder, into the same folder."""
    from report import write_report

    for path in write_report(out, model, "ALFWorld"):
        console.print(f"wrote {path}")


@app.command()
def check(prepared: Games = GAMES) -> None:
    """How often the searcher itself wins the test games, without and with its noise."""
    import random

    found = {}
    for noise in (0.0, DEFAULTS.noise):
        rng = random.Random(0)
        won = [
            demonstration(task, noise, DEFAULTS.horizon, True, rng)[-1][1] == 1 for task in tasks_of(prepared, "test")
        ]
        found[f"{noise:.0%} noise"] = round(sum(won) / len(won), 3)
    console.print(json.dumps(found))


if __name__ == "__main__":
    app()
