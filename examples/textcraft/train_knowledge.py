"""TextCraft again, from a warm start that lacks knowledge instead of care, measured at every temperature.

The first campaign (train.py) begins with a policy that imitates stray commands, so sharpening it alone raises success.  This
one begins with a few of the planner's own commands, with the best temperature built into the weights, and compares with the
values that a reader would try first.  What is compared, and how, was fixed before the runs: setup.md.

python examples/textcraft/train_knowledge.py warm      # the warm start
python examples/textcraft/train_knowledge.py tune      # all tuning runs; resumes after interruptions
python examples/textcraft/train_knowledge.py final     # the final runs of tuned methods, then the report
python examples/textcraft/train_knowledge.py report
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison import Comparison, check_start, commands, mean, sharpened
from rich.console import Console
from settings import Settings

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
console = Console(stderr=True)
HERE = Path(__file__).resolve().parent / "knowledge"
VALIDATION = 200  # tasks that nothing trains on
DEFAULTS = Settings(noise=0.0, lesson_updates=2000, noisy_updates=0, updates=40, check_every=0)
LEARNED = 0.4  # success on the validation tasks at temperature 0.3 that ends the lesson, looked at every 50 updates
SHARPER = (1.0, 0.7, 0.5, 0.3)  # what the warm start's logits may be divided by

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

    Tasks and tokenizer are those of the first campaign.  ValueError where the policy solves less than 25 or more than 50 %
    of the validation tasks at its best temperature, or gains more than 5 points from temperature 1 to its best.
    """
    import torch
    import trainer
    from model import (
        FACTS,
        demonstration,
        imitate,
        lessons,
        load,
        load_split,
        made_already,
        make_model,
        save,
        save_split,
    )

    settings = Settings.of(change, DEFAULTS)
    if made_already(out, settings):
        return
    torch.set_num_threads(threads)
    started, first = time.time(), Path(__file__).resolve().parent / "warm_start"
    tokenizer, split = load(first)[1], load_split(first / "tasks.json.gz")
    world, parts = parts_of(split)
    shown = lessons(split, settings.most_commands, settings.known_goals)
    validation = {"validation": parts["validation"]}
    held = set(parts["validation"])
    shown = tuple([task for task in tasks if task not in held] for tasks in shown)
    history: list[dict[str, Any]] = []
    out.mkdir(parents=True, exist_ok=True)
    model = make_model(tokenizer, width=settings.width, blocks=settings.blocks, heads=settings.heads, seed=0)

    def advance(update: int, loss: float) -> bool:
        if update >= 300 and update % 50 == 0:
            (row,) = trainer.evaluate(model, tokenizer, world, settings, validation, (0.3,), 1)
            history.append({"update": update, "loss": round(loss, 4), "success at 0.3": row["success"][0]})
            model.train()
            console.print(json.dumps(history[-1]))
            return bool(row["success"][0] >= LEARNED)
        return False

    def draw(rng: random.Random) -> tuple[list[int], list[int]]:
        return demonstration(rng.choice(rng.choice(shown)), tokenizer, settings.noise, settings.horizon, True, rng)

    imitate(
        model, tokenizer.pad_token_id, draw, updates=settings.lesson_updates, batch=settings.lesson_batch,
        learning_rate=settings.lesson_rate, seed=0, advance=advance,
    )  # fmt: skip
    rows = trainer.evaluate(model, tokenizer, world, settings, validation, SHARPER)
    best = sharpened(model, rows)
    facts = {"logits_divided_by": best, "before": rows, "history": history, "seconds": round(time.time() - started, 1)}
    save(out / "unchecked", model, tokenizer, facts)
    model = load(out / "unchecked")[0]  # as it is kept
    measured = trainer.evaluate(model, tokenizer, world, settings, parts, (1.0, 0.7, 0.5, 0.3, 0.0))
    try:
        check_start(measured)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    test = next(mean(row["success"]) for row in measured if row["tasks"] == "test" and row["temperature"] == 1.0)
    save(out, model, tokenizer, {**facts, "test": test, "measured": measured, "settings": settings.of_warm_start()})
    save_split(out / "tasks.json.gz", split)
    (out / "unchecked" / FACTS).unlink()


def of_start(start: Path) -> tuple[Any, dict[str, Sequence[Any]]]:
    from model import load_split

    return parts_of(load_split(start / "tasks.json.gz"))


COMPARISON = Comparison(
    Path(__file__).resolve(),
    ("gae", "value-head", "step-means", "grpo", "gigpo", "bipace", "bipace-step", "gae-group", "trees"),
    DEFAULTS, of_start, HERE / "warm_start", HERE / "results", Path("out/knowledge/weights"),
)  # fmt: skip
commands(app, COMPARISON)

if __name__ == "__main__":
    app()
