"""One run: a policy trained by one method and seed with TRL, checked on tasks that it never trains on.

This module is independent of the environment: a World defines the tasks and the start of an episode.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from settings import METHODS, OWN, RIVALS, Settings

KEPT = ("singleton_cluster_fraction", "mean_cluster_size", "value_r2", "value_r2_coverage", "epsilon",
        "action_parse_rate")  # fmt: skip
SAVE_EVERY = 10  # updates
CREDIT = "credit.pt"  # in a checkpoint's folder: what a credit has learned
PROGRESS = "progress.json"  # in a checkpoint's folder: what the run measured so far


@dataclass(frozen=True)
class World:
    """Tasks of a run.

    train   prompts of training; no two begin with the same text
    test    tasks to measure on
    env     makes the environment of one episode: rollout.Environment
    play    plays episodes as rollout.play() does, which None is
    """

    train: Sequence[Any]
    test: Sequence[Any]
    env: Callable[[Any], Any]
    play: Callable[..., list[Any]] | None = None


LUCK = 7  # the seed of sampling in a check; evaluate() takes the next ones too


def success(model: Any, tokenizer: Any, world: World, settings: Settings, tasks: Sequence[Any] | None = None) -> float:
    """Share of the tasks (None: the test tasks) that are solved, one episode each, under the same luck every time."""
    return measure(model, tokenizer, world, settings, world.test if tasks is None else tasks)["success"]


def measure(
    model: Any, tokenizer: Any, world: World, settings: Settings, tasks: Sequence[Any], *, temperature: float = 1.0,
    luck: int = LUCK,
) -> dict[str, float]:  # fmt: skip
    """Share of the tasks that are solved, one episode each, and the mean entropy of a token (nats, as it was drawn)."""
    from rollout import play

    episodes = (world.play or play)(
        model, tokenizer, [world.env(task) for task in tasks], horizon=settings.horizon, seed=luck,
        temperature=temperature, command_tokens=settings.command_tokens,
    )  # fmt: skip
    tokens = sum(sum(episode.own) for episode in episodes)
    return {
        "success": round(sum(episode.solved for episode in episodes) / len(episodes), 5),
        "entropy": round(sum(episode.entropy for episode in episodes) / tokens, 5),
    }


def evaluate(
    model: Any, tokenizer: Any, world: World, settings: Settings, parts: dict[str, Sequence[Any]],
    temperatures: Sequence[float] = (1.0, 0.3, 0.0), lucks: int = 3,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each part of the tasks and each temperature, by `lucks` seeds of sampling; one at temperature 0."""
    rows = []
    for part, tasks in parts.items():
        for temperature in temperatures:
            by_luck = [
                measure(model, tokenizer, world, settings, tasks, temperature=temperature, luck=LUCK + i)
                for i in range(lucks if temperature > 0 else 1)
            ]
            found = {name: [row[name] for row in by_luck] for name in ("success", "entropy")}
            rows.append({"tasks": part, "temperature": temperature, **found})
    return rows


def train(
    method: str, seed: int, settings: Settings, world: World, start: Path, work: Path, *, device: str = "cpu",
    threads: int = 1, after_update: Callable[[int, Any], None] | None = None,
    credit: Callable[[Any, Any, Sequence[Any], int], Sequence[Sequence[float]]] | None = None,
    finish: Callable[[Any, Any], dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Log of each update and check of one run, and its settings.

    start    folder of the initial model and its tokenizer
    work     a separate folder of checkpoints, for resuming; removed at the end
    `after_update(number, model)` is called after each update; it must draw no random numbers of torch's.
    `credit(model, tokenizer, episodes, update)` gives the advantage of each command of each episode, instead of the
    method's; what a `credit` with state_dict() and load_state_dict() has learned is kept in checkpoints.  RIVALS have
    their own credit. `finish(model, tokenizer)` is called at the end, and what it gives joins the result.
    """
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is one of its experiments
    import torch
    import transformers
    import trl
    from bipace_kernels.integrations.trl import BiPACEGRPOConfig, BiPACEGRPOTrainer
    from datasets import Dataset
    from language_model import upper
    from model import FACTS, load
    from rivals import CREDITS
    from rollout import play
    from transformers import TrainerCallback

    import bipace_kernels as bk

    if method in RIVALS and credit is None:
        credit = CREDITS[method](settings, seed)
    torch.set_num_threads(threads)
    if settings.batch % settings.group or settings.batch % settings.micro_batch:
        raise ValueError(
            f"group and micro_batch must divide batch = {settings.batch}, got {settings.group} and "
            f"{settings.micro_batch}."
        )
    model, tokenizer = load(start)
    if settings.upper:
        upper(model, settings.upper)
    model.get_decoder().register_forward_pre_hook(causal_mask, with_kwargs=True)
    task_of = {world.env(task).prompt: task for task in world.train}
    prompts = list(task_of)
    groups = settings.updates * (settings.batch // settings.group)
    if len(prompts) < groups:  # in a second epoch TRL resumes with the order of the first
        prompts = rounds(prompts, groups, seed)
    history: list[dict[str, Any]] = []
    played: list[Any] = []  # the episodes of the latest batch
    masks: list[list[int]] = []  # 1 on their own tokens, as TRL has them
    checks: list[dict[str, Any]] = []
    spent = {"rollouts": 0.0, "scoring": 0.0, "checks": 0.0, "cpu": 0.0, "wall": 0.0}

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        begun = time.perf_counter()
        policy = trainer.accelerator.unwrap_model(trainer.model)
        envs = [world.env(task_of[prompt]) for prompt in prompts]
        episodes = (world.play or play)(
            policy, tokenizer, envs, horizon=settings.horizon, seed=1_000_003 * (seed + 1) + trainer.state.global_step,
            command_tokens=settings.command_tokens,
        )  # fmt: skip
        spent["rollouts"] += time.perf_counter() - begun
        spent["scoring"] -= time.perf_counter() - begun
        played[:] = episodes
        shortest = min(len(e.prompt_ids) for e in episodes)
        masks[:] = [[0] * (len(e.prompt_ids) - shortest) + e.own for e in episodes]
        return {
            # Prompts of one length need no padding at their left, without which attention is causal: causal_mask().
            "prompt_ids": [e.prompt_ids[:shortest] for e in episodes],
            "completion_ids": [e.prompt_ids[shortest:] + e.ids for e in episodes],
            "logprobs": [[0.0] * (len(e.prompt_ids) - shortest) + e.logprobs for e in episodes],
            "env_mask": list(masks),
            "step_rewards": [e.rewards for e in episodes],
            "observations": [e.observations[: len(e.commands)] for e in episodes],
            **({} if world.play is None else {"actions": [e.commands for e in episodes]}),  # else by their tags
        }

    def solved(completions: list[str], step_rewards: list[list[float]], **_: Any) -> list[float]:
        return [sum(rewards) for rewards in step_rewards]

    class Timed(BiPACEGRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            begun = time.perf_counter()
            output = super()._generate_and_score_completions(inputs)
            if credit is not None:
                policy = self.accelerator.unwrap_model(self.model)
                given = credit(policy, tokenizer, played, self.state.global_step)
                output["advantages"] = on_tokens(given, masks, output["completion_ids"])
            spent["scoring"] += time.perf_counter() - begun
            return output

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            before = self._buffered_inputs
            found = super()._prepare_inputs(generation_batch)
            if self._buffered_inputs is before:
                return found
            self._buffered_inputs = by_length(self._buffered_inputs)
            return self._buffered_inputs[self._step % self.args.steps_per_generation]

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            return super()._compute_loss(model, trimmed(inputs))

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if (
                settings.check_every and not checks and not (start / FACTS).exists()
            ):  # else the warm start's facts have it
                self.look(0)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs is None or "reward" not in logs:
                return
            row = {"update": state.global_step, "train": logs["reward"], "entropy": logs.get("entropy"),
                   "grad_norm": logs.get("grad_norm")}  # fmt: skip
            row |= {name: logs[f"bipace/{name}"] for name in KEPT if f"bipace/{name}" in logs}
            history.append({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if after_update is not None:
                after_update(state.global_step, trainer.accelerator.unwrap_model(trainer.model))
            if settings.check_every and state.global_step % settings.check_every == 0:
                self.look(state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            folder = work / f"checkpoint-{state.global_step}"
            if hasattr(credit, "state_dict"):
                torch.save(credit.state_dict(), folder / CREDIT)
            (folder / PROGRESS).write_text(
                json.dumps({"updates": history, "checks": checks, "spent": clock()}), encoding="utf-8"
            )

        def look(self, update: int) -> None:
            begun = time.perf_counter()
            policy = trainer.accelerator.unwrap_model(trainer.model)
            checks.append({"update": update, "test": success(policy, tokenizer, world, settings)})
            spent["checks"] += time.perf_counter() - begun

    def clock() -> dict[str, float]:
        """Seconds so far, of all the processes that this run took."""
        cpu, wall = time.process_time() - computed, time.perf_counter() - started
        return {**spent, "cpu": spent["cpu"] + cpu, "wall": spent["wall"] + wall}

    own, bipace = OWN[method][0] if method in OWN else None, {**METHODS, **RIVALS}[method]
    args = BiPACEGRPOConfig(
        output_dir=str(work), save_strategy="steps", save_steps=SAVE_EVERY, save_total_limit=1,
        report_to=[], disable_tqdm=True, logging_steps=1, use_cpu=device == "cpu",
        bf16=device != "cpu" or settings.half > 0,
        seed=seed, max_steps=settings.updates, per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.batch // settings.micro_batch, num_generations=settings.group,
        learning_rate=settings.learning_rate, lr_scheduler_type="constant", max_grad_norm=1.0, beta=0.0,
        gradient_checkpointing=False, max_completion_length=4096, temperature=1.0,
        shuffle_dataset=len(prompts) == len(task_of),
        bipace_gamma=settings.gamma, bipace_step_weight=settings.step_weight, bipace_layer=settings.layer,
        **({} if own is None else {f"bipace_{own}": getattr(settings, own)}),
        **{f"bipace_{name}": value for name, value in bipace.items()},
    )  # fmt: skip
    trainer = Timed(
        model=model, reward_funcs=solved, args=args, processing_class=tokenizer, rollout_func=rollouts,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]), callbacks=[Keep()],
    )  # fmt: skip
    checkpoint = last_checkpoint(work)
    if checkpoint is not None:
        before = json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
        history += before["updates"]
        checks += before["checks"]
        spent |= before["spent"]
        if hasattr(credit, "load_state_dict"):
            credit.load_state_dict(torch.load(checkpoint / CREDIT, weights_only=True))
    started, computed = time.perf_counter(), time.process_time()
    if checkpoint is not None and _update(checkpoint) >= settings.updates:  # transformers would train one more
        trained = load(checkpoint)[0]
    else:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trained = trainer.accelerator.unwrap_model(trainer.model)
    seconds = {name: round(value, 1) for name, value in clock().items()}
    finished = {} if finish is None else finish(trained, tokenizer)
    shutil.rmtree(work, ignore_errors=True)
    return {
        "method": method, "seed": seed, "settings": settings.as_json(), "bipace": bipace, "seconds": seconds,
        "machine": {"processor": _processor(), "device": device, "threads": threads, "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__,
                     "trl": trl.__version__, "bipace_kernels": bk.__version__},
        **finished, "checks": checks, "updates": history,
    }  # fmt: skip


def rounds(prompts: Sequence[str], groups: int, seed: int) -> list[str]:
    """One prompt for each group, or some more: all prompts in random order, then all of them in another, and so on."""
    rng = random.Random(seed)
    return [prompt for _ in range(-(-groups // len(prompts))) for prompt in rng.sample(prompts, len(prompts))]


def on_tokens(given: Sequence[Sequence[float]], masks: Sequence[Sequence[int]], ids: Any) -> Any:
    """[B, T] as ids: each command's advantage on its tokens, where the masks are 1, divided by the root mean square
    over the commands, as GAE's is."""
    flat = [a for of_episode in given for a in of_episode]
    scale = (sum(a * a for a in flat) / len(flat)) ** 0.5 or 1.0
    found = ids.new_zeros(ids.shape).float()
    for row, (of_episode, mask) in enumerate(zip(given, masks, strict=True)):
        t = -1
        for at, own in enumerate(mask):
            t += bool(own and not (at and mask[at - 1]))  # the first token of a command
            if own:
                found[row, at] = float(of_episode[t]) / scale
    return found


def by_length(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a batch with its rows in order of length, so that little of a part is padding: the same sum of
    losses."""
    import torch

    order = torch.cat([part["completion_mask"].sum(dim=1) for part in parts]).argsort(stable=True)
    found: list[dict[str, Any]] = [dict(part) for part in parts]
    for name, value in parts[0].items():
        if getattr(value, "ndim", 0):
            for part, rows in zip(found, torch.cat([p[name] for p in parts])[order].chunk(len(parts)), strict=True):
                part[name] = rows
    return found


def causal_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before a decoder's forward: rows without padding at their left need no mask but the causal one, which is fast."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2 and bool(mask[:, 0].all()):
        return args, {**kwargs, "attention_mask": None}
    return None


def trimmed(inputs: dict[str, Any]) -> dict[str, Any]:
    """A part of a batch without the columns that are padding in all its rows: the same loss, for half the time."""
    left = int(inputs["prompt_mask"].any(dim=0).int().argmax())
    longest = int(inputs["completion_mask"].sum(dim=1).max())
    whole = inputs["completion_mask"].shape[1]
    found = dict(inputs)
    for name, value in inputs.items():
        if name in ("prompt_ids", "prompt_mask"):
            found[name] = value[:, left:]
        elif getattr(value, "ndim", 0) == 2 and value.shape[1] == whole:
            found[name] = value[:, :longest]
    return found


def last_checkpoint(work: Path) -> Path | None:
    """The latest one that was written to its end."""
    found = [path for path in work.glob("checkpoint-*") if _progress(path)]
    return max(found, key=_update, default=None)


def _update(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _progress(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def as_text(found: dict[str, Any]) -> str:
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
