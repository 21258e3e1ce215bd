"""A comparison that was fixed before its runs: equal tuning for every method, one primary endpoint, the rest by Holm.

A Comparison says which methods, seeds and settings; `commands()` adds what it takes to a program: run, tune, final,
report. Validation tasks decide rates, variants, each method's temperature and the rival; test tasks decide nothing.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import campaign
import typer
from rich.console import Console
from settings import Settings

Out = Annotated[Path, typer.Option(help="folder of the runs and the report")]
Model = Annotated[Path, typer.Option(help="folder of the warm start")]
Set = Annotated[list[str], typer.Option("--set", help="NAME=VALUE, a setting of settings.py")]
Processes = Annotated[int, typer.Option(help="runs at a time")]
Method = Annotated[str, typer.Option(help="of the comparison")]
Threads = Annotated[int, typer.Option(help="threads of the process")]
Final = Annotated[bool, typer.Option(help="measure on all tasks and keep the weights")]
Methods = Annotated[str, typer.Option(help="only these, with commas between them")]
console = Console(stderr=True)
TEMPERATURES = (1.0, 0.3, 0.0)
TUNING_SEEDS, TUNING_UPDATES = (100, 101), 50
LEARNED = 0.4  # success on the validation tasks at temperature 0.3 that ends the warm start's lesson
LESSON_BEGIN, LESSON_CHECK = 300, 50  # updates of the lesson: the first look at that, and between two
NEAR = 0.03  # of the best success, where a higher temperature is taken
SHARPER = (1.0, 0.7, 0.5, 0.3)  # what the warm start's logits may be divided by
# Tuning: three learning rates, then two variants at the best of them; as many runs for each method.
RATES = (5e-5, 1e-4, 2e-4)  # lower than the first campaign's: there is little entropy to learn from
VARIANTS: dict[str, tuple[tuple[str, Any], ...]] = {
    "grpo": (("learning_rate", 0.7), ("learning_rate", 1.4)),  # times the best of the three
    "gigpo": (("step_weight", 0.5), ("step_weight", 2.0)),
    **dict.fromkeys(("bipace", "bipace-step"), (("epsilon", "0.1"), ("epsilon", "0.2"))),
    **dict.fromkeys(("gae", "gae-group", "step-means", "trees"), (("gae_lambda", 0.3), ("gae_lambda", 0.8))),
    "value-head": (("gae_lambda", 0.8), ("gae_lambda", 0.95)),
}

Parts = dict[str, Sequence[Any]]  # tasks to measure on: "validation", "test", and whatever else


@dataclass(frozen=True)
class Comparison:
    """`gae` against the better of `rivals`, which have `primary_seeds`; every other method has `seeds`.

    world(start)  the world of training and the tasks to measure on, of a warm start's folder
    """

    program: Path
    methods: tuple[str, ...]
    defaults: Settings
    world: Callable[[Path], tuple[Any, Parts]]
    start: Path
    results: Path
    weights: Path  # final weights in float16, 2 MB each: outside git
    rivals: tuple[str, ...] = ("value-head", "step-means")
    seeds: range = range(5)
    primary_seeds: range = range(8)

    def seeds_of(self, method: str) -> range:
        return self.primary_seeds if method in ("gae", *self.rivals) else self.seeds


def commands(app: typer.Typer, of: Comparison) -> None:
    """Adds run, tune, final and report to a program."""
    every = ",".join(of.methods)

    @app.command("run")
    def run_one(
        method: Method, seed: int = 0, out: Out = of.results, model: Model = of.start, change: Set = [],  # noqa: B006
        threads: Threads = 1, final: Final = False,
    ) -> None:  # fmt: skip
        """One method and seed; a finished run is skipped, an unfinished one resumes from its last checkpoint."""
        if method not in of.methods:
            raise typer.BadParameter(f"--method must be one of {', '.join(of.methods)}, got {method!r}.")
        run(of, campaign.Run(method, seed, Settings.of(change, of.defaults), out), model, threads, final)

    @app.command()
    def tune(
        out: Out = of.results, model: Model = of.start, change: Set = [], processes: Processes = 2,  # noqa: B006
        methods: Methods = every,
    ) -> None:  # fmt: skip
        """All tuning runs, method by method; writes tuned.json into the folder."""
        settings = Settings.of(change, of.defaults)
        while missing := [run for method in methods.split(",") for run in decide(method, settings, out)[0]]:
            _work(of, missing, ["--model", str(model)], processes)
        tuned = {method: decide(method, settings, out)[1] for method in methods.split(",")}
        path = out / "tuned.json"
        campaign.write_whole(path, json.dumps({**campaign.read_tuned(path), **tuned}, indent=1) + "\n")

    @app.command("final")
    def final_runs(
        out: Out = of.results, model: Model = of.start, change: Set = [], processes: Processes = 2,  # noqa: B006
    ) -> None:  # fmt: skip
        """The final runs of the tuned methods, then the report."""
        runs = list(planned(of, Settings.of(change, of.defaults), out))
        if not runs:
            raise typer.BadParameter(f"{out}/tuned.json names no method; begin with `tune`.")
        _work(of, runs, ["--model", str(model), "--final"], processes)
        report(out)

    @app.command()
    def report(out: Out = of.results) -> None:
        """results.json, results.md and success.png of the finished runs."""
        from comparison_report import write

        try:
            for path in write(of, out):
                console.print(str(path))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


def _work(of: Comparison, runs: Sequence[campaign.Run], options: Sequence[str], processes: int) -> None:
    if failed := campaign.work_through(runs, [str(of.program)], options, processes, console.print):
        console.print(f"these runs failed, their logs say why: {', '.join(str(run.work) + '.log' for run in failed)}")
        raise typer.Exit(1)


def run(of: Comparison, wanted: campaign.Run, start: Path, threads: int = 1, final: bool = False) -> None:
    if wanted.done:
        console.print(f"{wanted.path} is there already")
        return
    import trainer

    world, parts = of.world(start)

    def finish(policy: Any, tokenizer: Any) -> dict[str, Any]:
        begun = time.process_time()
        if final:
            keep(policy, of.weights / f"{wanted.name}.safetensors")
        asked = parts if final else {"validation": parts["validation"]}
        rows = trainer.evaluate(policy, tokenizer, world, wanted.settings, asked, TEMPERATURES, 3 if final else 1)
        return {"measured": rows, "seconds_of_measuring": round(time.process_time() - begun, 1)}

    wanted.write(
        trainer.train(
            wanted.method, wanted.seed, wanted.settings, world, start, wanted.work, threads=threads, finish=finish
        )
    )


def keep(model: Any, path: Path) -> None:
    """The weights in float16; tied ones once."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: weight.detach().half() for name, weight in model.state_dict().items() if name not in tied}
    save_file(state, path)


# ---- the warm start


def short_lesson(
    out: Path,
    settings: Settings,
    tokenizer: Any,
    world: Any,
    parts: Parts,
    draw: Callable[[random.Random], Any],
    threads: int,
) -> None:
    """Imitates drawn demonstrations until LEARNED, then builds its best temperature into the weights: sharpened().

    ValueError where the policy solves less than 25 or more than 50 % of the validation tasks at its best temperature,
    or gains more than 5 points from temperature 1 to its best: it would have too little to learn, or could win by a
    sharper policy.
    """
    import torch
    import trainer
    from model import imitate, load, made_already, make_model, save

    if made_already(out, settings):
        return
    torch.set_num_threads(threads)
    started = time.process_time()
    history: list[dict[str, Any]] = []
    validation = {"validation": parts["validation"]}
    model = make_model(tokenizer, width=settings.width, blocks=settings.blocks, heads=settings.heads, seed=0)

    def advance(update: int, loss: float) -> bool:
        if update < LESSON_BEGIN or update % LESSON_CHECK:
            return False
        (row,) = trainer.evaluate(model, tokenizer, world, settings, validation, (0.3,), 1)
        model.train()
        history.append({"update": update, "loss": round(loss, 4), "success at 0.3": row["success"][0]})
        console.print(json.dumps(history[-1]))
        return bool(row["success"][0] >= LEARNED)

    imitate(
        model, tokenizer.pad_token_id, draw, updates=settings.lesson_updates, batch=settings.lesson_batch,
        learning_rate=settings.lesson_rate, seed=0, advance=advance,
    )  # fmt: skip
    before = trainer.evaluate(model, tokenizer, world, settings, validation, SHARPER)
    divided = sharpened(model, before)
    facts = {"logits_divided_by": divided, "before": before, "history": history}
    save(out / "unchecked", model, tokenizer, facts)
    model = load(out / "unchecked")[0]  # as it is kept
    measured = trainer.evaluate(model, tokenizer, world, settings, parts, (*SHARPER, 0.0))
    check_start(measured)
    facts |= {"cpu_seconds": round(time.process_time() - started, 1), "measured": measured}
    save(out, model, tokenizer, {**facts, "settings": settings.of_warm_start()})
    shutil.rmtree(out / "unchecked")


def check_start(measured: Sequence[dict[str, Any]]) -> None:
    """ValueError where a warm start would leave too little to learn, or could win by a sharper policy."""
    by_temperature = {row["temperature"]: mean(row["success"]) for row in measured if row["tasks"] == "validation"}
    most = max(by_temperature.values())
    if not (0.25 <= most <= 0.5 and most - by_temperature[1.0] <= 0.05):
        raise ValueError(
            f"the warm start solves {by_temperature} of the validation tasks by temperature; 25 to 50 % at the best, "
            "and at "
            "most 5 points less at 1, are wanted."
        )


def sharpened(model: Any, by_temperature: Sequence[dict[str, Any]]) -> float:
    """Divides the model's logits, in place, by the highest temperature that solves within NEAR of the best; gives it.

    The highest, since a policy that explores less learns less.
    """
    import torch

    solved = {float(row["temperature"]): mean(row["success"]) for row in by_temperature}
    best = max(temperature for temperature, share in solved.items() if share >= max(solved.values()) - NEAR)
    with torch.no_grad():  # the logits are linear in the last norm's output
        model.model.norm.weight /= best
    return best


# ---- tuning


def tuning_runs(method: str, label: str, changes: dict[str, Any], settings: Settings, out: Path) -> list[campaign.Run]:
    short = settings.changed(updates=TUNING_UPDATES, **changes)
    return [campaign.Run(method, seed, short, out / "tuning" / label) for seed in TUNING_SEEDS]


def choices(method: str, rate: float | None, settings: Settings, out: Path) -> dict[str, tuple[dict[str, Any], Any]]:
    """{label: (changes, runs)}: the three rates; with the best of them as `rate`, the four variants of the method
    too."""
    asked: dict[str, dict[str, Any]] = {f"learning_rate={value:g}": {"learning_rate": value} for value in RATES}
    if rate is not None:
        for name, value in VARIANTS[method]:
            changed = {"learning_rate": rate} | ({name: rate * value} if name == "learning_rate" else {name: value})
            label = f"learning_rate={changed[name]:g}" if name == "learning_rate" else f"{name}={value}"
            asked.setdefault(f"{label} ({rate:g})" if label in asked else label, changed)
    return {label: (changes, tuning_runs(method, label, changes, settings, out)) for label, changes in asked.items()}


def score(runs: Sequence[campaign.Run]) -> float:
    """Success on the validation tasks at the temperature that is best over the runs together."""
    measured = [json.loads(run.path.read_text(encoding="utf-8"))["measured"] for run in runs]
    return max(mean([mean(success(rows, "validation", t)) for rows in measured]) for t in TEMPERATURES)


def decide(method: str, settings: Settings, out: Path) -> tuple[list[campaign.Run], dict[str, Any] | None]:
    """(runs that are missing, None), or ([], what was chosen): the best of all settings, of equal ones the first."""
    rate = None
    for _ in range(2):
        asked = choices(method, rate, settings, out)
        if missing := [run for _, runs in asked.values() for run in runs if not run.done]:
            return missing, None
        scores = {label: round(score(runs), 5) for label, (_, runs) in asked.items()}
        best = max(scores, key=lambda label: scores[label])
        rate = asked[best][0]["learning_rate"]
    return [], {**asked[best][0], "scores": scores}


def planned(of: Comparison, settings: Settings, out: Path) -> Iterator[campaign.Run]:
    """Seed by seed."""
    tuned = campaign.read_tuned(out / "tuned.json")
    for seed in of.primary_seeds:
        for method in of.methods:
            if method in tuned and seed in of.seeds_of(method):
                yield campaign.Run(method, seed, campaign.chosen(settings, tuned[method]), out)


# ---- the report


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def success(rows: Sequence[dict[str, Any]], tasks: str, temperature: float) -> list[float]:
    """Of one run, by seed of sampling."""
    (values,) = [row["success"] for row in rows if (row["tasks"], row["temperature"]) == (tasks, temperature)]
    return list(values)


def holm(p: Sequence[float]) -> list[float]:
    """Corrected for as many comparisons, in the same order."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    out, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        out[i] = least
    return out


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """mean(a) − mean(b), half of its 95 % interval, and the two-sided p, by Welch's t test over seeds."""
    from scipy import stats

    found = stats.ttest_ind(a, b, equal_var=False)
    low, high = found.confidence_interval(0.95)
    return mean(a) - mean(b), float(high - low) / 2, float(found.pvalue)


def finished(folder: Path) -> dict[str, dict[int, Any]]:
    """{method: {seed: what was measured}} of the final runs."""
    runs: dict[str, dict[int, Any]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        runs.setdefault(found["method"], {})[found["seed"]] = found["measured"]
    return runs


def summary(of: Comparison, folder: Path) -> dict[str, Any]:
    """By method its best temperature on the validation tasks and its success there; once all runs of `gae` and its
    rivals are finished, the primary endpoint, and all other comparisons by Holm."""
    runs = finished(folder)
    by_method: dict[str, Any] = {}
    measured = next(iter(next(iter(runs.values())).values())) if runs else []
    parts = [part for part in dict.fromkeys(row["tasks"] for row in measured) if part != "validation"]
    for method in (m for m in of.methods if m in runs):
        of_seeds = [runs[method][seed] for seed in sorted(runs[method])]
        validation = {t: mean([mean(success(rows, "validation", t)) for rows in of_seeds]) for t in TEMPERATURES}
        best = max(validation, key=lambda t: validation[t])
        by_method[method] = {
            "seeds": sorted(runs[method]), "temperature": best, "validation": validation[best],
            **{part: [mean(success(rows, part, best)) for rows in of_seeds] for part in parts},
        }  # fmt: skip
    if any(by_method.get(method, {}).get("seeds") != list(of.primary_seeds) for method in ("gae", *of.rivals)):
        return {"methods": by_method}
    rival = max(of.rivals, key=lambda method: by_method[method]["validation"])
    lead = welch(by_method["gae"]["test"], by_method[rival]["test"])
    others = [
        (m, part)
        for part in parts
        for m in by_method
        if m != "gae" and (m, part) != (rival, "test") and len(by_method[m]["seeds"]) > 1
    ]
    leads = [welch(by_method["gae"][part], by_method[m][part]) for m, part in others]
    corrected = holm([p for _, _, p in leads])
    return {
        "methods": by_method,
        "primary": {"rival": rival, "lead": lead[0], "half": lead[1], "p": lead[2]},
        "exploratory": [
            {"method": m, "tasks": part, "lead": d, "half": half, "p_holm": p}
            for (m, part), (d, half, _), p in zip(others, leads, corrected, strict=True)
        ],
    }
