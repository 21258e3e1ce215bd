"""TextCraft with the noisy planner: generated tasks, true values by fresh continuations, hidden states of the warm
start."""

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..truth_sets import write
from . import example

NAME, NOISES = "textcraft_planner", (30, 50, 65)  # stray commands, per cent
ROLES = {"choose": 1, "hold": 2}  # and their seeds
GAMMA, PROMPTS, ROLLOUTS, BATCHES = 0.95, 16, 16, 2
POLICY = Path(__file__).resolve().parent / "policy"  # a model that imitated the planner on the published tasks
HORIZON, MOST_COMMANDS, PROMPT_TOKENS = 12, 10, 110
LAYERS = (2, 3)  # of hidden_states; 3 is what the example trains with (layer -2)
TEST_GOALS = 140  # goals of the hold sets


def make(path: Path, percent: int, role: str, arguments: argparse.Namespace) -> None:
    noise, continuations = percent / 100, arguments.continuations
    example("textcraft")
    import torch
    from environment import TextCraft
    from generate import generate, split_goals
    from model import load, prompt_text
    from planner import plan, stray
    from rollout import CLOSE, OPEN, answer_text

    torch.set_num_threads(1)
    model, tokenizer = load(POLICY)
    seed = ROLES[role] * 1000 + round(1000 * noise)

    def fits(task: Any) -> bool:
        return len(tokenizer(prompt_text(task)).input_ids) <= PROMPT_TOKENS

    def act(env: TextCraft, rng: random.Random) -> str:
        return stray(env, rng) if rng.random() < noise else plan(env)

    def value(start: TextCraft, left: int, rng: random.Random) -> tuple[float, float]:
        """Means of the discounted returns of the two halves of the continuations."""
        found = np.zeros(continuations)
        for m in range(continuations):
            env = TextCraft(start.task, start.recipes)
            env.inventory = dict(start.inventory)
            for t in range(left):
                if env.step(act(env, rng))[2]:
                    found[m] = GAMMA**t
                    break
        half = continuations // 2
        return float(found[:half].mean()), float(found[half:].mean())

    goals = split_goals(TEST_GOALS, seed=0)[role == "hold"]
    tasks = generate(BATCHES * PROMPTS, seed=seed, goals=goals, most_commands=MOST_COMMANDS, fits=fits)
    rows: list[tuple[Any, ...]] = []
    states: dict[int, list[Any]] = {layer: [] for layer in LAYERS}
    for group, task in enumerate(tqdm(tasks, desc=path.stem)):
        known: dict[Any, tuple[float, float]] = {}  # the planner is Markov in the inventory and the steps left
        for rollout in range(ROLLOUTS):
            rng = random.Random(f"{seed} {group} {rollout}")
            env, observed = TextCraft(task), task.text
            ids, places = list(tokenizer(prompt_text(task)).input_ids), []
            for t in range(HORIZON):
                state = (tuple(sorted(env.inventory.items())), t)
                if state not in known:  # a separate generator, so that values do not depend on the order
                    known[state] = value(env, HORIZON - t, random.Random(f"{seed} {group} {state}"))
                command = act(env, rng)
                places.append(len(ids) - 1)
                ids += tokenizer(OPEN + command + CLOSE).input_ids
                answer, reward, done = env.step(command)
                ids_of_row = (group // PROMPTS, group, group * ROLLOUTS + rollout, t)
                rows.append((*ids_of_row, reward, *known[state], observed, command))
                observed = answer
                if done:
                    break
                ids += tokenizer(answer_text(answer)).input_ids
            with torch.inference_mode():
                found = model.model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
            for layer in LAYERS:
                states[layer].append(found[layer][0, places].numpy())
    meta = {
        "name": path.stem, "environment": "TextCraft, generated tasks", "role": role, "gamma": GAMMA,
        "policy": f"planner with {percent}% stray commands", "horizon": HORIZON, "continuations": continuations,
        "rollouts": ROLLOUTS, "seed": seed, "hidden": "bench/make_truth/policy",
        "made_by": f"python -m bench.make_truth textcraft --continuations {continuations}",
        "tasks": [[task.goal, list(task.commands)] for task in tasks],
    }  # fmt: skip
    write(path, meta, rows, {layer: np.concatenate(found) for layer, found in states.items()})
