"""TextCraft again, from a warm start that lacks knowledge instead of care, measured at every temperature.

The first campaign (train.py) begins with a policy that imitates stray commands, so sharpening it alone raises success.
This one begins with a few of the planner's own commands, with the best temperature built into the weights, and compares
with the values that a reader would try first.  What is compared, and how, was fixed before the runs: setup.md.

python examples/textcraft/train_knowledge.py warm      # the warm start
python examples/textcraft/train_knowledge.py tune      # all tuning runs; resumes after interruptions
python examples/textcraft/train_knowledge.py final     # the final runs of tuned methods, then the report
python examples/textcraft/train_knowledge.py report
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison import Comparison, commands, short_lesson
from settings import Settings

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
HERE = Path(__file__).resolve().parent / "knowledge"
VALIDATION = 200  # tasks that nothing trains on
DEFAULTS = Settings(noise=0.0, lesson_updates=2000, noisy_updates=0, updates=150, check_every=0)

Model = Annotated[Path, typer.Option(help="folder of the warm start")]
Set = Annotated[list[str], typer.Option("--set", help="NAME=VALUE, a setting of settings.py")]
Threads = Annotated[int, typer.Option(help="threads of the process")]


def parts_of(split: Any) -> tuple[Any, dict[str, Sequence[Any]]]:
    """The world of training, and the tasks to measure on: validation tasks come from the train tasks and leave them."""
    from environment import TextCraft
    from trainer import World

    parts = {"validation": split.train[-VALIDATION:], "test": split.test, "new_goals": split.new_goals}
    return World(split.train[:-VALIDATION], split.test, TextCraft), parts


@app.command()
def warm(out: Model = HERE / "warm_start", change: Set = [], threads: Threads = 1) -> None:  # noqa: B006
    """One short lesson of the planner's own commands; then the best temperature goes into the weights.

    Tasks and tokenizer are those of the first campaign.  ValueError where the policy solves less than 25 or more than
    50 % of the validation tasks at its best temperature, or gains more than 5 points from temperature 1 to its best.
    """
    from model import demonstration, lessons, load, load_split, save_split

    settings, first = Settings.of(change, DEFAULTS), Path(__file__).resolve().parent / "warm_start"
    tokenizer, split = load(first)[1], load_split(first / "tasks.json.gz")
    world, parts = parts_of(split)
    held = set(parts["validation"])
    shown = [
        [task for task in tasks if task not in held]
        for tasks in lessons(split, settings.most_commands, settings.known_goals)
    ]

    def draw(rng: random.Random) -> tuple[list[int], list[int]]:
        return demonstration(rng.choice(rng.choice(shown)), tokenizer, settings.noise, settings.horizon, True, rng)

    try:
        short_lesson(out, settings, tokenizer, world, parts, draw, threads)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    save_split(out / "tasks.json.gz", split)


def of_start(start: Path) -> tuple[Any, dict[str, Sequence[Any]]]:
    from model import load_split

    return parts_of(load_split(start / "tasks.json.gz"))


COMPARISON = Comparison(
    Path(__file__).resolve(),
    ("gae", "value-head", "step-means", "grpo", "gigpo", "bipace", "bipace-step", "gae-group", "trees"),
    DEFAULTS, of_start, HERE / "warm_start", HERE / "results", Path("out/knowledge/weights"),
    seeds=range(3),
)  # fmt: skip
commands(app, COMPARISON)

if __name__ == "__main__":
    app()
