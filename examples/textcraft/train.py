"""Trains a small model on TextCraft by BiPACE and its baselines, with TRL's GRPO trainer.

python examples/textcraft/train.py run --method bipace_q --seed 0 --out out/textcraft
python examples/textcraft/train.py all --out out/textcraft          # every method and seed; goes on where it was stopped
python examples/textcraft/train.py report --out out/textcraft       # table and curves
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from settings import METHODS, SEEDS, Settings

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
console = Console(stderr=True)

Out = Annotated[Path, typer.Option(help="folder of the warm start, the runs and the report")]
Set = Annotated[
    list[str], typer.Option("--set", help="NAME=VALUE, a setting of settings.py; may be given several times")
]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Threads = Annotated[int, typer.Option(help="threads of each process, on a CPU")]
KEPT = ("singleton_cluster_fraction", "mean_cluster_size", "value_r2", "value_r2_coverage", "epsilon", "pace_fraction",
        "leave_one_out_fraction", "multi_action_cluster_fraction", "action_parse_rate")  # fmt: skip


@app.command()
def warm(out: Out = Path("out/textcraft"), change: Set = [], device: Device = "cpu", threads: Threads = 1) -> None:  # noqa: B006
    """Makes tokenizer and model, and lets the model imitate the noisy planner; once for all runs of a folder."""
    settings = _settings(change)
    folder = out / "warm_start"
    if (folder / "warm_start.json").exists():
        _same_settings(folder / "warm_start.json", settings.of_warm_start())
        return
    import torch
    from model import imitate, lessons, make_model, make_tokenizer, save, split_tasks

    torch.set_num_threads(threads)
    started = time.time()
    tokenizer = make_tokenizer(settings.vocabulary)
    split = split_tasks(
        tokenizer,
        most_commands=settings.most_commands,
        prompt_tokens=settings.prompt_tokens,
        held_out=settings.held_out,
    )
    model = make_model(tokenizer, width=settings.width, blocks=settings.blocks, heads=settings.heads, seed=0).to(device)
    shown = lessons(split, settings.most_commands)
    history: list[dict[str, Any]] = []
    lessons_of = (("own commands", settings.lesson_rate, settings.lesson_updates, settings.enough),
                  ("all commands", settings.noisy_rate, settings.noisy_updates, 1.0))  # fmt: skip
    with _progress() as bar:
        for number, (name, rate, updates, enough) in enumerate(lessons_of):
            task = bar.add_task(f"warm start, {name}", total=updates, note="")

            def look(update: int, loss: float, task: Any = task, name: str = name, enough: float = enough) -> bool:
                bar.update(task, completed=update, note=f"loss {loss:.2f}" + (_note(history[-1]) if history else ""))
                if update % settings.lesson_check:
                    return False
                success = _check(model, tokenizer, split, settings, 1)
                history.append({"lesson": name, "update": update, "loss": round(loss, 4), **success})
                model.train()
                if not console.is_terminal:  # where a bar shows nothing
                    console.print(f"warm start: {json.dumps(history[-1])}")
                return success["train"] >= enough

            imitate(
                model, tokenizer, shown, updates=updates, batch=settings.lesson_batch, learning_rate=rate,
                noise=settings.noise, horizon=settings.horizon, strays=number > 0, seed=number, advance=look,
            )  # fmt: skip
    model = model.to(torch.bfloat16).float()  # as it is kept
    found = _check(model, tokenizer, split, settings, settings.check_rollouts)
    facts = {
        "train": found["train"], "held_out": found["held_out"], "seconds": round(time.time() - started, 1),
        "tasks": {"train": [t.task_id for t in split.train], "held_out": [t.task_id for t in split.held_out]},
        "lessons": [len(tasks) for tasks in shown], "parameters": sum(p.numel() for p in model.parameters()), "history": history,
        "settings": settings.of_warm_start(),
    }  # fmt: skip
    console.print(f"warm start: {found['train']:.0%} of train tasks, {found['held_out']:.0%} of held-out tasks")
    if not 0.2 <= found["train"] <= 0.5:
        raise typer.BadParameter(
            f"the warm start solves {found['train']:.0%} of the train tasks, and 20 to 50 % leave room for training: change "
            "enough, lesson_updates or noise."
        )
    save(folder, model, tokenizer, facts)


@app.command()
def run(
    method: Annotated[str, typer.Option(help=", ".join(METHODS))] = "bipace_q",
    seed: int = 0, out: Out = Path("out/textcraft"), change: Set = [], device: Device = "cpu", threads: Threads = 1,  # noqa: B006
) -> None:  # fmt: skip
    """One method and seed, from the warm start on; a finished run is left alone, an unfinished one starts anew."""
    settings = _settings(change)
    if method not in METHODS:
        raise typer.BadParameter(f"--method must be one of {', '.join(METHODS)}, got {method!r}.")
    path = out / f"{method}-seed{seed}.json"
    if path.exists():
        _same_settings(path, settings.as_json())
        console.print(f"{path} is there already")
        return
    warm(out, change, device, threads)
    found = train(method, seed, settings, out, device, threads)
    temporary = path.with_suffix(".part")
    temporary.write_text(_compact(found), encoding="utf-8")
    temporary.replace(path)  # so that a run is there as a whole or not at all


@app.command("all")
def everything(
    out: Out = Path("out/textcraft"), change: Set = [], device: Device = "cpu", threads: Threads = 1,  # noqa: B006
    processes: Annotated[int, typer.Option(help="runs at a time")] = 2,
) -> None:  # fmt: skip
    """Every method and seed, seed by seed; runs that are finished are skipped."""
    settings = _settings(change)
    warm(out, change, device, threads)
    waiting = []
    for seed in SEEDS:
        for method in METHODS:
            if (path := out / f"{method}-seed{seed}.json").exists():
                _same_settings(path, settings.as_json())
            else:
                waiting.append((method, seed))
    running: dict[subprocess.Popen[bytes], tuple[str, int, Any]] = {}
    failed: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the runs are ended too
    with _progress() as bar:
        done = len(SEEDS) * len(METHODS) - len(waiting)
        whole = bar.add_task("all runs", total=len(SEEDS) * len(METHODS), completed=done, note="")
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    method, seed = waiting.pop(0)
                    name = f"{method}-seed{seed}"
                    command = [sys.executable, __file__, "run", "--method", method, "--seed", str(seed), "--out", str(out),
                               "--device", device, "--threads", str(threads)]  # fmt: skip
                    command += [part for text in change for part in ("--set", text)]
                    with open(out / f"{name}.log", "wb") as log:
                        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
                    running[child] = (method, seed, bar.add_task(name, total=settings.updates, note=""))
                time.sleep(2)
                for child, (method, seed, task) in list(running.items()):
                    name = f"{method}-seed{seed}"
                    lines = _lines(out / f"{name}.jsonl")
                    if lines:
                        bar.update(task, completed=lines[-1]["update"], note=_note(lines[-1]))
                    if child.poll() is not None:
                        del running[child]
                        bar.remove_task(task)
                        if (out / f"{name}.json").exists():
                            bar.advance(whole)
                        else:
                            failed.append(name)
        finally:
            for child in running:
                child.terminate()
    if failed:
        console.print(
            f"these runs failed, their logs say why: {', '.join(str(out / name) + '.log' for name in failed)}"
        )
        raise typer.Exit(1)
    report(out)


@app.command()
def report(out: Out = Path("out/textcraft")) -> None:
    """Table and curves of the finished runs in a folder, into the same folder."""
    from report import write_report

    for path in write_report(out):
        console.print(f"wrote {path}")


def train(
    method: str, seed: int, settings: Settings, out: Path, device: str, threads: int,
    after_update: Callable[[int, Any], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One run: what happened in each update and evaluation, and what it was made of.

    `after_update(number, model)` is called after each update; it must draw no random numbers of torch's.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is one of its experiments
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from model import load, prompt_text, split_tasks
    from rollout import play
    from transformers import TrainerCallback

    import bipace_kernels as bk
    from bipace_kernels.integrations.trl import BiPACEGRPOConfig, BiPACEGRPOTrainer

    torch.set_num_threads(threads)
    model, tokenizer = load(out / "warm_start")
    split = split_tasks(
        tokenizer,
        most_commands=settings.most_commands,
        prompt_tokens=settings.prompt_tokens,
        held_out=settings.held_out,
    )
    task_of = {prompt_text(task): task for task in split.train}
    spent = {"rollouts": 0.0}

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        begun = time.perf_counter()
        policy = trainer.accelerator.unwrap_model(trainer.model)
        generator = torch.Generator(policy.device).manual_seed(1_000_003 * (seed + 1) + trainer.state.global_step)
        episodes = play(
            policy, tokenizer, [task_of[prompt] for prompt in prompts], horizon=settings.horizon, generator=generator
        )
        spent["rollouts"] += time.perf_counter() - begun
        return {
            "prompt_ids": [e.prompt_ids for e in episodes],
            "completion_ids": [e.ids for e in episodes],
            "logprobs": [e.logprobs for e in episodes],
            "env_mask": [e.own for e in episodes],
            "step_rewards": [e.rewards for e in episodes],
            "observations": [e.observations[: len(e.commands)] for e in episodes],
        }

    def solved(completions: list[str], step_rewards: list[list[float]], **_: Any) -> list[float]:
        return [sum(rewards) for rewards in step_rewards]

    history: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    progress = out / f"{method}-seed{seed}.jsonl"
    progress.parent.mkdir(parents=True, exist_ok=True)
    progress.write_text("")

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.look(0)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs is None or "reward" not in logs:
                return
            row = {"update": state.global_step, "train": logs["reward"], "entropy": logs.get("entropy"),
                   "grad_norm": logs.get("grad_norm"), "seconds": round(time.perf_counter() - started, 2)}  # fmt: skip
            row |= {name: logs[f"bipace/{name}"] for name in KEPT if f"bipace/{name}" in logs}
            history.append({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
            with open(progress, "a", encoding="utf-8") as file:
                file.write(json.dumps(history[-1]) + "\n")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if after_update is not None:
                after_update(state.global_step, trainer.accelerator.unwrap_model(trainer.model))
            if state.global_step % settings.check_every == 0 or state.global_step == settings.updates:
                self.look(state.global_step)

        def look(self, update: int) -> None:
            begun = time.perf_counter()
            policy = trainer.accelerator.unwrap_model(trainer.model)
            both = update in (0, settings.updates)
            checks.append(
                {"update": update, **_check(policy, tokenizer, split, settings, settings.check_rollouts, both)}
            )
            spent["checks"] = spent.get("checks", 0.0) + time.perf_counter() - begun

    batch = settings.tasks * settings.rollouts
    micro = min(batch, settings.micro_batch)
    if batch % micro:
        raise typer.BadParameter(f"micro_batch must divide tasks * rollouts = {batch}, got {micro}.")
    args = BiPACEGRPOConfig(
        output_dir=str(out / "trainer"), save_strategy="no", report_to=[], disable_tqdm=not sys.stderr.isatty(),
        logging_steps=1, use_cpu=device == "cpu", bf16=False, seed=seed, max_steps=settings.updates,
        per_device_train_batch_size=micro, gradient_accumulation_steps=batch // micro, num_generations=settings.rollouts,
        learning_rate=settings.learning_rate, lr_scheduler_type="constant", max_grad_norm=1.0, beta=0.0,
        gradient_checkpointing=False, max_completion_length=4096, temperature=1.0,
        bipace_gamma=settings.gamma, bipace_step_weight=settings.step_weight,
        bipace_layer=settings.layer, bipace_epsilon=settings.epsilon,
        **{f"bipace_{name}": value for name, value in METHODS[method].items()},
    )  # fmt: skip
    trainer = BiPACEGRPOTrainer(
        model=model, reward_funcs=solved, args=args, processing_class=tokenizer, rollout_func=rollouts,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in task_of]), callbacks=[Keep()],
    )  # fmt: skip
    started, computed = time.perf_counter(), time.process_time()
    trainer.train()
    progress.unlink()
    return {
        "method": method, "seed": seed, "settings": settings.as_json(), "bipace": METHODS[method],
        "seconds": round(time.perf_counter() - started, 1), "cpu_seconds": round(time.process_time() - computed, 1),
        "seconds_of": {k: round(v, 1) for k, v in spent.items()},
        "machine": {"processor": _processor(), "device": device, "threads": threads, "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
                     "trl": trl.__version__, "bipace_kernels": bk.__version__},
        "checks": checks, "updates": history,
    }  # fmt: skip


def _check(
    model: Any, tokenizer: Any, split: Any, settings: Settings, rollouts: int, train: bool = True
) -> dict[str, float]:
    """Success on all held-out tasks, and on all train tasks, by the same random numbers each time."""
    import torch
    from rollout import play

    found = {}
    for name, tasks in (("train", split.train),) * train + (("held_out", split.held_out),):
        generator = torch.Generator(model.device).manual_seed(7)
        n = max(1, rollouts // 2) if name == "train" else rollouts
        repeated = [task for task in tasks for _ in range(n)]
        episodes = play(model, tokenizer, repeated, horizon=settings.horizon, generator=generator)
        found[name] = round(sum(episode.solved for episode in episodes) / len(episodes), 5)
    return found


def _settings(change: list[str]) -> Settings:
    try:
        return Settings.of(change)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _same_settings(path: Path, wanted: dict[str, Any]) -> None:
    """Runs of one folder are compared with each other, so they share all settings."""
    there = json.loads(path.read_text(encoding="utf-8"))["settings"]
    other = [name for name in wanted if there.get(name) != wanted[name]]
    if other:
        raise typer.BadParameter(
            f"{path} was made with other settings ({', '.join(f'{n}={there.get(n)!r}' for n in other)}); use another --out."
        )


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that is being written."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _note(row: dict[str, Any]) -> str:
    return f"  success {row['train']:.0%}"


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[note]}"))  # fmt: skip
    return Progress(*columns, console=console)


def _compact(found: dict[str, Any]) -> str:
    """JSON with one line for each update, which is small and shows what changed."""
    lists = {name: found[name] for name in ("checks", "updates")}
    text = json.dumps({k: v for k, v in found.items() if k not in lists}, indent=1)[:-2]
    for name, rows in lists.items():
        text += f',\n "{name}": [\n  ' + ",\n  ".join(json.dumps(row) for row in rows) + "\n ]"
    return text + "\n}\n"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    app()
