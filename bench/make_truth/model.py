"""TextCraft with the example's model as policy: at the warm start, half-way and at the end of a training run.

`train` runs the example's own training once, in the trainers' environment (`make test-integrations` makes it), and keeps weights of
some updates; `make` needs torch and transformers only.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..truth_sets import FOLDER, write
from .textcraft import GAMMA, HORIZON, LAYERS, MOST_COMMANDS, POLICY, PROMPT_TOKENS, ROLES, example

UPDATES = (30, 60, 0)  # in the order of making
EARLIER = 2  # updates before, whose batches may serve as memory
METHOD, SEED, BATCH = "bipace", 0, 64
PROMPTS, ROLLOUTS = 18, 8
STATES = 16  # of one call of the model: times the continuations, rows of its cache


def split(tokenizer: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Published tasks of depth 2 and 3 that fit, by a fixed shuffle: those that the policy was trained on, and 25 others."""
    from environment import published
    from model import commands_needed, prompt_text

    fitting = [
        task for task in published()
        if task.depth in (2, 3) and commands_needed(task) <= MOST_COMMANDS
        and len(tokenizer(prompt_text(task)).input_ids) <= PROMPT_TOKENS
    ]  # fmt: skip
    random.Random(0).shuffle(fitting)
    return tuple(fitting[:-25]), tuple(fitting[-25:])


def train(out: Path) -> None:
    """Weights after the updates that `make` needs, as out/update<k>.pt, by the trainer of examples/textcraft."""
    example()
    import torch
    import trainer
    from environment import TextCraft
    from model import load
    from settings import Settings

    wanted = {update - back for update in UPDATES for back in range(EARLIER + 1)}
    out.mkdir(parents=True, exist_ok=True)

    def keep(update: int, model: Any) -> None:
        if update in wanted:
            torch.save(
                {name: x.to(torch.bfloat16) for name, x in model.state_dict().items()}, out / f"update{update}.pt"
            )

    settings = Settings().changed(updates=max(UPDATES), batch=BATCH, learning_rate=5e-4, check_every=0)
    world = trainer.World(*split(load(POLICY)[1]), TextCraft)
    found = trainer.train(METHOD, SEED, settings, world, POLICY, out / "work", after_update=keep)
    (out / "run.json").write_text(json.dumps(found), encoding="utf-8")


def make(update: int, role: str, continuations: int, out: Path, again: bool) -> None:
    path = FOLDER / f"textcraft_model{update}_{role}.npz"
    if path.exists() and not again:
        print(f"{path} is there already", file=sys.stderr)
        return
    example()
    import torch
    from environment import TextCraft
    from model import load
    from rollout import play

    from .continuations import State, returns_from

    torch.set_num_threads(1)
    model, tokenizer = load(POLICY)
    trained, _ = split(tokenizer)
    seed = 10_000 * ROLES[role] + update
    shuffled = list(trained)
    random.Random("truth").shuffle(shuffled)
    first = PROMPTS * list(ROLES).index(role)
    tasks = shuffled[first : first + PROMPTS]
    columns: dict[str, list[Any]] = {
        name: [] for name in
        ("batch", "group", "trajectory", "step", "reward", "value_a", "value_b", "observation", "action")
    }  # fmt: skip
    states: dict[int, list[Any]] = {layer: [] for layer in LAYERS}
    unknown: dict[tuple[int, ...], tuple[State, list[int]]] = {}  # distinct pasts, and the rows that have them

    def add(batch: int, tasks: list[Any], rollouts: int, seed: int) -> None:
        envs = [TextCraft(task) for task in tasks for _ in range(rollouts)]
        episodes: Any = play(model, tokenizer, envs, horizon=HORIZON, seed=seed)
        begin = columns["group"][-1] + 1 if columns["group"] else 0
        trajectory = columns["trajectory"][-1] + 1 if columns["trajectory"] else 0
        for number, episode in enumerate(episodes):
            places, t = [], 0
            env = type(episode.env)(episode.env.task, episode.env.recipes)
            for at, own in enumerate(episode.own):
                if not own or (at and episode.own[at - 1]):
                    continue  # not the first token of a command
                past = [*episode.prompt_ids, *episode.ids[:at]]
                places.append(len(past) - 1)
                if batch >= 0:
                    here = type(env)(env.task, env.recipes)
                    here.inventory = dict(env.inventory)
                    state = State(here, tuple(past), HORIZON - t)
                    unknown.setdefault(tuple(past), (state, []))[1].append(len(columns["group"]))
                row = (batch, begin + number // rollouts, trajectory + number, t, episode.rewards[t], 0.0, 0.0,
                       episode.observations[t], episode.commands[t])  # fmt: skip
                for name, cell in zip(columns, row, strict=True):
                    columns[name].append(cell)
                env.step(episode.commands[t])
                t += 1
            if t != len(episode.commands):
                raise RuntimeError(f"{t} commands found in the tokens of an episode of {len(episode.commands)}.")
            with torch.inference_mode():
                ids = torch.tensor([[*episode.prompt_ids, *episode.ids]])
                found = model.model(input_ids=ids, output_hidden_states=True).hidden_states
            for layer in LAYERS:
                states[layer].append(found[layer][0, places].numpy())

    def at(update: int) -> None:
        if update > 0:
            model.load_state_dict(torch.load(out / f"update{update}.pt", weights_only=True))

    at(update)
    add(0, tasks, ROLLOUTS, seed)
    # Transcripts with as many commands left stand together: their rows end at about the same time.
    pasts = sorted(unknown.values(), key=lambda past: (past[0].left, len(past[0].ids)))
    log = out / f"{path.stem}-{continuations}.jsonl"  # what is measured already, state by state
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    half = continuations // 2
    with open(log, "a", encoding="utf-8") as file:
        for chunk in tqdm(range(0, len(pasts), STATES), desc=path.stem):
            if chunk < len(known):
                continue
            generator = torch.Generator().manual_seed(1_000_003 * seed + chunk)
            here = [state for state, _ in pasts[chunk : chunk + STATES]]
            found = returns_from(model, tokenizer, here, copies=continuations, gamma=GAMMA, generator=generator)
            values = np.stack([found[:, :half].mean(axis=1), found[:, half:].mean(axis=1)], axis=1).tolist()
            known += values
            file.write("".join(json.dumps(value) + "\n" for value in values))
            file.flush()
    for (_, rows_of), values in zip(pasts, known, strict=True):
        for row in rows_of:
            columns["value_a"][row], columns["value_b"][row] = values
    if update > 0:
        for back in range(1, EARLIER + 1):
            at(update - back)
            drawn = random.Random(f"{seed} {back}").sample(list(trained), BATCH // ROLLOUTS)
            add(-back, drawn, ROLLOUTS, seed + 100 * back)
    meta = {
        "name": path.stem, "environment": "TextCraft, published tasks that the model was trained on", "role": role,
        "policy": f"the example's model, temperature 1, after {update} updates of {METHOD}, seed {SEED}", "gamma": GAMMA,
        "horizon": HORIZON, "continuations": continuations, "rollouts": ROLLOUTS, "seed": seed,
        "hidden": "the policy's own", "tasks": [task.task_id for task in tasks],
        "made_by": f"python -m bench.make_truth model --continuations {continuations}",
    }  # fmt: skip
    write(path, meta, columns, {layer: np.concatenate(rows) for layer, rows in states.items()})
