"""ALFWorld: a scripted searcher with noise in real games, true values by playing on from each state.

    python -m bench.make_truth alfworld --games FOLDER     # of the games' folders, each with a game.tw-pddl

The searcher knows the goal's sentence, what it observed and the admissible commands, nothing else. What it remembers is a function
of its own commands and observations, so state, memory and steps left decide the distribution of its return: values are shared
between records that agree in all three.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..truth_sets import FOLDER, write
from .alfworld_game import Game, Node, compare, goal_of

NOISES = (0.2, 0.4)
ROLES = {"choose": 1, "hold": 2}  # and their seeds
GAMMA, GAMES, ROLLOUTS, HORIZON = 0.95, 24, 8, 30
APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


@dataclass(frozen=True)
class Memory:
    """What the searcher remembers; hashable, so that values can be shared."""

    at: str = ""  # the receptacle it stands at
    closed: bool = False  # and whether that is closed
    held: str = ""
    changed: frozenset[str] = frozenset()  # objects that were cleaned, heated, cooled
    placed: frozenset[str] = frozenset()  # of the goal's objects, those that it put into the goal's place
    visited: frozenset[str] = frozenset()
    seen: frozenset[tuple[str, str]] = frozenset()  # (thing that matters, receptacle)


class Searcher:
    """The policy: `act` draws a command, `remember` takes in what it was answered by."""

    def __init__(self, task: str, noise: float) -> None:
        self.goal, self.noise = goal_of(task), noise
        self.lamp = self.goal["place"] if self.goal["change"] == "light" else ""

    def act(self, memory: Memory, commands: tuple[str, ...], rng: random.Random) -> str:
        if rng.random() < self.noise:
            return rng.choice(commands)
        wish = self._wish(memory, commands, rng)
        return wish if wish in commands else rng.choice(commands)

    def _wish(self, memory: Memory, commands: tuple[str, ...], rng: random.Random) -> str:
        goal, held, at = self.goal, memory.held, memory.at
        if held and _kind(held) == goal["object"]:
            if goal["change"] == "light":
                use = next((c for c in commands if c.startswith(f"use {self.lamp}")), None)
                return use or self._look_for(self.lamp, memory, commands, rng)
            if goal["change"] and held not in memory.changed:
                appliance = APPLIANCES[goal["change"]]
                change = next((c for c in commands if c.startswith(f"{goal['change']} {held} with {appliance}")), None)
                return change or self._go(commands, appliance, rng)
            if _kind(at) == goal["place"]:
                return f"open {at}" if memory.closed else f"put {held} in/on {at}"
            return self._go(commands, goal["place"], rng)
        if held:  # picked up by a stray command
            return (
                f"open {at}"
                if memory.closed
                else next((c for c in commands if c.startswith("put ")), "") or self._go(commands, "", rng)
            )
        return self._look_for(goal["object"], memory, commands, rng)

    def _look_for(self, kind: str, memory: Memory, commands: tuple[str, ...], rng: random.Random) -> str:
        known = sorted(place for thing, place in memory.seen if _kind(thing) == kind and thing not in memory.placed)
        if memory.at in known:
            if memory.closed:
                return f"open {memory.at}"
            things = sorted(
                t for t, place in memory.seen if place == memory.at and _kind(t) == kind and t not in memory.placed
            )
            return f"take {things[0]} from {memory.at}"
        if known:
            return f"go to {known[0]}"
        if memory.closed:
            return f"open {memory.at}"
        fresh = [c for c in commands if c.startswith("go to ") and c[6:] not in memory.visited]
        return rng.choice(fresh) if fresh else self._go(commands, "", rng)

    def _go(self, commands: tuple[str, ...], kind: str, rng: random.Random) -> str:
        fitting = [c for c in commands if c.startswith("go to ") and (not kind or _kind(c[6:]) == kind)]
        return rng.choice(fitting) if fitting else rng.choice(commands)

    def remember(self, memory: Memory, command: str, observed: str) -> Memory:
        if observed == "Nothing happens.":
            return memory
        if command.startswith("go to "):
            memory = replace(memory, at=command[6:], visited=memory.visited | {command[6:]})
            return self._see(memory, memory.at, observed)
        if command.startswith("open "):
            return self._see(memory, command[5:], observed)
        if command.startswith("close "):
            return replace(memory, closed=True)
        if match := re.fullmatch(r"take (.+) from (.+)", command):
            return replace(
                memory, held=match[1], placed=memory.placed - {match[1]},
                seen=frozenset(pair for pair in memory.seen if pair[0] != match[1]),
            )  # fmt: skip
        if match := re.fullmatch(r"put (.+) in/on (.+)", command):
            placed, seen = memory.placed, memory.seen
            if _kind(match[1]) == self.goal["object"]:
                seen |= {(match[1], match[2])}
                done = not self.goal["change"] or match[1] in memory.changed
                if _kind(match[2]) == self.goal["place"] and done:
                    placed |= {match[1]}
            return replace(memory, held="", placed=placed, seen=seen)
        if match := re.fullmatch(r"(clean|heat|cool) (.+) with (.+)", command):
            change = self.goal["change"]
            if match[1] == change:
                return replace(memory, changed=memory.changed | {match[2]})
            if {match[1], change} == {"heat", "cool"}:  # one undoes the other
                return replace(memory, changed=memory.changed - {match[2]})
        return memory

    def _see(self, memory: Memory, place: str, observed: str) -> Memory:
        closed = observed.endswith("is closed.")
        listed = observed.rpartition("you see ")[2] if "you see " in observed else ""
        things = re.findall(r"a ([a-z]+ \d+)", listed)
        matter = {t for t in things if _kind(t) in (self.goal["object"], self.lamp)}
        seen = {pair for pair in memory.seen if pair[1] != place} if not closed else set(memory.seen)
        return replace(memory, closed=closed, seen=frozenset(seen | {(t, place) for t in matter}))


def _kind(name: str) -> str:
    return name.rpartition(" ")[0]


def make(noise: float, role: str, continuations: int, games: Path, again: bool) -> None:
    path = FOLDER / f"alfworld_{round(100 * noise)}_{role}.npz"
    if path.exists() and not again:
        print(f"{path} is there already", file=sys.stderr)
        return
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
            node: Node, memory: Memory, left: int, rng: random.Random, game: Game = game, policy: Searcher = policy
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
    """Plays TextWorld's own engine beside this one in every game that the sets use; the number of differences."""
    found = 0
    for file in tqdm([file for files in choose(games).values() for file in files], desc="against TextWorld"):
        for difference in compare(file, steps, seed=0):
            print(f"{file}: {difference}", file=sys.stderr)
            found += 1
    return found
