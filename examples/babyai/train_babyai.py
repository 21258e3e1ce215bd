"""BabyAI's rooms as text, drawn anew for every task: the comparison of examples/textcraft in an environment that
repeats hardly anything.

Needs minigrid==3.2.0 beside the trainers' environment.  What is compared, and how, was fixed before the runs:
README.md.

python examples/babyai/train_babyai.py warm      # the warm start
python examples/babyai/train_babyai.py tune      # all tuning runs; resumes after interruptions
python examples/babyai/train_babyai.py final     # the final runs of tuned methods, then the report
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from babyai import BabyAI, lesson, tasks
from rich.progress import track

TEXTCRAFT = Path(__file__).resolve().parent.parent / "textcraft"
if str(TEXTCRAFT) not in sys.path:  # the trainer and the comparison; its modules import each other by their bare names
    sys.path.insert(0, str(TEXTCRAFT))

from comparison import Comparison, Parts, commands, short_lesson  # noqa: E402
from settings import Settings  # noqa: E402

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
HERE = Path(__file__).resolve().parent
DEFAULTS = Settings(
    vocabulary=1024, train_tasks=1280, test_tasks=400, horizon=30, command_tokens=6, noise=0.0, lesson_updates=2000,
    noisy_updates=0, updates=80, check_every=0,
)  # fmt: skip
# Seeds of the rooms: none of one part is in another; some rooms of UnlockLocal are (README.md).
TRAIN, LESSONS, VALIDATION, TEST = 0, range(1_000_000, 2_000_000), 2_000_000, 3_000_000
VALIDATION_TASKS = 200
SHOWN = 6000  # episodes of the expert, drawn once: one takes three times as long as its share of an update
# What becomes a piece of its own: a command, a thing, where it stands.  BPE makes these one token or few.
PIECES = (
    r"</action>|<action>[a-z ]+|(?:(?:locked|closed|open) )?(?:red|green|blue|purple|yellow|grey) (?:ball|box|key|door)"
    r"|(?: \d ahead)?(?: \d (?:left|right))|(?: \d ahead)|holding |; |, |free \d|Goal: put the |Goal: open the door| "
    r"next to the "
    r"|nothing|Nothing happens\.|\n+"
)

Model = Annotated[Path, typer.Option(help="folder of the warm start")]
Set = Annotated[list[str], typer.Option("--set", help="NAME=VALUE, a setting of examples/textcraft/settings.py")]
Threads = Annotated[int, typer.Option(help="threads of the process")]


def world(start: Path | None = None, settings: Settings = DEFAULTS) -> tuple[Any, Parts]:
    """The rooms of training, and those to measure on, which are no warm start's."""
    from trainer import World

    test = tuple(tasks(settings.test_tasks, TEST))
    parts = {"validation": tuple(tasks(min(VALIDATION_TASKS, settings.test_tasks), VALIDATION)), "test": test}
    return World(tuple(tasks(settings.train_tasks, TRAIN)), test, BabyAI), parts


@app.command()
def warm(out: Model = HERE / "warm_start", change: Set = [], threads: Threads = 1) -> None:  # noqa: B006
    """Makes tokenizer and model; one short lesson of the expert's episodes, in rooms of their own."""
    from model import tokens_of, train_tokenizer
    from tokenizers import Regex

    settings = Settings.of(change, DEFAULTS)
    of_rooms, parts = world(settings=settings)
    rng = random.Random("tokenizer")
    episodes = [lesson(rng, settings.horizon, LESSONS) for _ in track(range(SHOWN), "The expert's episodes")]
    texts = ["".join(text for text, _ in episode) for episode in episodes[:500]]
    tokenizer = train_tokenizer(texts, Regex(PIECES), settings.vocabulary)
    shown = [tokens_of(episode, tokenizer) for episode in episodes]

    def draw(rng: random.Random) -> tuple[list[int], list[int]]:
        return rng.choice(shown)

    try:
        short_lesson(out, settings, tokenizer, of_rooms, parts, draw, threads)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


COMPARISON = Comparison(
    Path(__file__).resolve(), ("gae", "value-head", "step-means", "grpo", "gigpo"), DEFAULTS, world,
    HERE / "warm_start", HERE / "results", Path("out/babyai/weights"), seeds=range(3),
)  # fmt: skip
commands(app, COMPARISON)

if __name__ == "__main__":
    app()
