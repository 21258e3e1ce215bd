"""ALFWorld: a scripted searcher with noise in real games, true values by playing on from each state.

    python -m bench.make_truth alfworld --games FOLDER     # of the games' folders, each with a game.tw-pddl

The searcher knows the goal's sentence, what it observed and the admissible commands, nothing else. What it remembers is a function
of its own commands and observations, so state, memory and steps left decide the distribution of its return: values are shared
between records that agree in all three.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..truth_sets import FOLDER, write

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "alfworld"

NOISES = (0.2, 0.4)
ROLES = {"choose": 1, "hold": 2}  # and their seeds
GAMMA, GAMES, ROLLOUTS, HORIZON = 0.95, 24, 8, 30


def example() -> None:
    """Makes the modules of the example importable: they import each other by their bare names."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))


def make(noise: float, role: str, continuations: int, games: Path, again: bool) -> None:
    path = FOLDER / f"alfworld_{round(100 * noise)}_{role}.npz"
    if path.exists() and not again:
        print(f"{path} is there already", file=sys.stderr)
        return
    example()
    from alfworld_game import Game
    from searcher import Memory, Searcher

    seed = ROLES[role] * 1000 + round(1000 * noise)
    columns: dict[str, list[Any]] = {
        name: [] for name in
        ("batch", "group", "trajectory", "step", "reward", "value_a", "value_b", "observation", "action")
    }  # fmt: skip
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
                row = (0, group, group * ROLLOUTS + rollout, t, float(node.won), *known[state], observed, command)
                for name, cell in zip(columns, row, strict=True):
                    columns[name].append(cell)
                if node.won:
                    break
                memory, observed = policy.remember(memory, command, answer), answer
    meta = {
        "name": path.stem, "environment": "ALFWorld, real games", "role": role, "gamma": GAMMA,
        "policy": f"scripted searcher with {noise:.0%} random admissible commands", "horizon": HORIZON,
        "continuations": continuations, "rollouts": ROLLOUTS, "seed": seed,
        "made_by": f"python -m bench.make_truth alfworld --continuations {continuations} --games FOLDER",
        "tasks": [str(file.parent.relative_to(games)) for file in chosen],
    }  # fmt: skip
    write(path, meta, columns, {})


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
    example()
    from alfworld_game import compare

    found = 0
    for file in tqdm([file for files in choose(games).values() for file in files], desc="against TextWorld"):
        for difference in compare(file, steps, seed=0):
            print(f"{file}: {difference}", file=sys.stderr)
            found += 1
    return found
