"""ALFWorld: a scripted searcher with noise in real games, true values by playing on from each state.

    python -m bench.make_truth alfworld --games FOLDER     # of the games' folders, each with a game.tw-pddl

The searcher knows the goal's sentence, what it observed and the admissible commands, nothing else. What it remembers is
a function of its own commands and observations, so state, memory and steps left decide the distribution of its return:
values are shared between records that agree in all three.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..truth_sets import write
from . import example

NAME, NOISES = "alfworld_", (20, 40)  # random commands, per cent
ROLES = {"choose": 1, "hold": 2}  # and their seeds
GAMMA, GAMES, ROLLOUTS, HORIZON = 0.95, 24, 8, 30


def make(path: Path, percent: int, role: str, arguments: argparse.Namespace) -> None:
    noise, continuations, games = percent / 100, arguments.continuations, arguments.games
    example("alfworld")
    from alfworld_game import Game
    from searcher import Memory, Searcher

    seed = ROLES[role] * 1000 + round(1000 * noise)
    rows: list[tuple[Any, ...]] = []
    chosen = choose(games)[role]
    half = continuations // 2
    for group, file in enumerate(tqdm(chosen, desc=path.stem)):
        game = Game(file)
        policy = Searcher(game.task, noise)
        known: dict[Any, tuple[float, float]] = {}

        def play(
            node: Any, memory: Any, left: int, rng: random.Random, game: Any = game, policy: Any = policy
        ) -> float:
            """Discounted return of one continuation."""
            for t in range(left):
                command = policy.act(memory, node.commands, rng)
                node, observed = game.step(node, command)
                if node.won:
                    return float(GAMMA**t)
                memory = policy.remember(memory, command, observed)
            return 0.0

        for rollout in range(ROLLOUTS):
            rng = random.Random(f"{seed} {group} {rollout}")
            node, memory, observed = game.start, Memory(), game.intro
            for t in range(HORIZON):
                state = (node.key, memory, t)
                if state not in known:
                    fresh = random.Random(f"{seed} {group} value {len(known)}")
                    found = [play(node, memory, HORIZON - t, fresh) for _ in range(continuations)]
                    known[state] = float(np.mean(found[:half])), float(np.mean(found[half:]))
                command = policy.act(memory, node.commands, rng)
                node, answer = game.step(node, command)
                reward = float(node.won)
                rows.append((0, group, group * ROLLOUTS + rollout, t, reward, *known[state], observed, command))
                if node.won:
                    break
                memory, observed = policy.remember(memory, command, answer), answer
    meta = {
        "name": path.stem, "environment": "ALFWorld, real games", "role": role, "gamma": GAMMA,
        "policy": f"scripted searcher with {percent}% random admissible commands", "horizon": HORIZON,
        "continuations": continuations, "rollouts": ROLLOUTS, "seed": seed,
        "made_by": f"python -m bench.make_truth alfworld --continuations {continuations} --games FOLDER",
        "tasks": [str(file.parent.relative_to(games)) for file in chosen],
    }  # fmt: skip
    write(path, meta, rows, {})


def choose(games: Path) -> dict[str, list[Path]]:
    """Games of each role: all kinds of task in turn, no game and no kind-object-place-room in both."""
    kinds: dict[str, dict[str, Path]] = {}
    for file in sorted(games.glob("**/game.tw-pddl")):
        task = file.parent.parent.name  # kind-object-...-room
        kinds.setdefault(task.split("-")[0], {}).setdefault(task, file)
    if not kinds:
        raise ValueError(f"--games {games} must hold folders with game.tw-pddl, and holds none.")
    rng = random.Random("games")
    turns = [rng.sample(sorted(found), len(found)) for _, found in sorted(kinds.items())]
    order = [kinds[task.split("-")[0]][task] for turn in zip(*turns, strict=False) for task in turn]
    if len(order) < 2 * GAMES:
        raise ValueError(f"--games must hold {2 * GAMES} different tasks, evenly by kind, and gives {len(order)}.")
    return {"choose": order[:GAMES], "hold": order[GAMES : 2 * GAMES]}


def check(games: Path, steps: int = 25) -> int:
    """Compares TextWorld's own engine with this one in every game of the sets; returns the number of differences."""
    example("alfworld")
    from alfworld_game import compare

    found = 0
    for file in tqdm([file for files in choose(games).values() for file in files], desc="against TextWorld"):
        for difference in compare(file, steps, seed=0):
            print(f"{file}: {difference}", file=sys.stderr)
            found += 1
    return found
