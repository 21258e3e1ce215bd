"""BabyAI's levels as text: a room drawn anew for every task, an instruction, and what stands in the agent's view.

Levels and the expert are those of the package minigrid (3.2.0): Chevalier-Boisvert et al., BabyAI (2019).  A task is a
level and a seed, so there are as many tasks as seeds, and no task needs to come twice.  The agent sees 7 x 7 cells
before it, as the original one does; the text lists the things in them by their place ("red ball 2 ahead 1 left") and
how far it can go.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMMANDS = (
    "turn left",
    "turn right",
    "forward",
    "pick up",
    "drop",
    "open",
)  # minigrid's first six actions, in its order
LEVELS = ("PutNextLocal", "UnlockLocal")  # the expert needs 4 to 29 commands


@dataclass(frozen=True)
class Task:
    """One room and its instruction."""

    level: str
    seed: int


class BabyAI:
    """One episode.  A command that is none changes nothing; reward 1 where the instruction is carried out, which ends
    it."""

    def __init__(self, task: Task) -> None:
        self.task, self.done = task, False
        self.env = _made(task)
        self.opening = f"Goal: {self.env.mission}\n{described(self.env)}"

    @property
    def prompt(self) -> str:
        return self.opening + "\n"

    def step(self, command: str) -> tuple[str, float, bool]:
        if self.done:
            raise RuntimeError("the instruction is carried out and the episode over; make a new BabyAI.")
        if command not in COMMANDS:
            return "Nothing happens.", 0.0, False
        _, reward, self.done, _, _ = self.env.step(COMMANDS.index(command))
        self.done = bool(self.done and reward > 0)
        return described(self.env), float(self.done), self.done


def _made(task: Task) -> Any:
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # it prints a greeting where it is imported
    from minigrid.envs import babyai

    with contextlib.redirect_stdout(io.StringIO()):  # minigrid prints each draw that it rejects
        env = getattr(babyai, task.level)()
        env.reset(seed=task.seed)
    env.gen_obs = dict  # described() says what is seen; minigrid's own observation would look a second time
    return env


def described(env: Any) -> str:
    """What the agent holds, how many cells ahead are free, and the things it sees, the nearest first."""
    grid, visible = env.gen_obs_grid()
    own, last = grid.width // 2, grid.height - 1  # where the agent stands in its view, looking up
    things = []
    for x in range(grid.width):
        for y in range(grid.height):
            thing = grid.get(x, y)
            if not visible[x, y] or thing is None or thing.type == "wall" or (x, y) == (own, last):
                continue
            ahead, aside = last - y, x - own
            state = (
                ("open " if thing.is_open else "locked " if thing.is_locked else "closed ")
                if thing.type == "door"
                else ""
            )
            where = [f"{ahead} ahead"] * bool(ahead) + [f"{abs(aside)} {'right' if aside > 0 else 'left'}"] * bool(
                aside
            )
            things.append((ahead + abs(aside), f"{state}{thing.color} {thing.type} {' '.join(where)}"))
    free = 0
    while free < last and visible[own, last - 1 - free] and _free(grid.get(own, last - 1 - free)):
        free += 1
    held = f"holding {env.carrying.color} {env.carrying.type}; " if env.carrying else ""
    return f"{held}free {free}; " + (", ".join(text for _, text in sorted(things)) or "nothing")


def _free(thing: Any) -> bool:
    return thing is None or bool(thing.can_overlap())


def tasks(count: int, first_seed: int) -> Iterator[Task]:
    """The levels taking turns, `count` tasks of seeds from the first one on; tasks that open alike come once."""
    seen: set[str] = set()
    seed = first_seed
    while len(seen) < count:
        task = Task(LEVELS[seed % len(LEVELS)], seed)
        seed += 1
        opening = BabyAI(task).opening
        if opening not in seen:
            seen.add(opening)
            yield task


def expert(task: Task, horizon: int) -> list[str] | None:
    """The commands of minigrid's own expert, which sees the whole room; None where it needs more than `horizon`."""
    from minigrid.utils.baby_ai_bot import BabyAIBot

    env = _made(task)
    bot, action, commands = BabyAIBot(env), None, []
    for _ in range(horizon):
        action = bot.replan(action)
        if not 0 <= int(action) < len(COMMANDS):
            return None
        commands.append(COMMANDS[int(action)])
        if env.step(action)[2]:
            return commands
    return None


def demonstration(task: Task, horizon: int) -> list[tuple[str, int]] | None:
    """The texts of the expert's episode, each with whether it is to be learned; None where it is too long."""
    from rollout import CLOSE, OPEN, answer_text

    commands = expert(task, horizon)
    if commands is None:
        return None
    world = BabyAI(task)
    parts = [(world.prompt, 0)]
    for command in commands:
        observation, _, done = world.step(command)
        parts.append((OPEN + command + CLOSE, 1))
        if not done:
            parts.append((answer_text(observation), 0))
    return parts


def lesson(rng: random.Random, horizon: int, seeds: range) -> list[tuple[str, int]]:
    """One of the expert's episodes, of a seed drawn from these."""
    while True:
        seed = rng.choice(seeds)
        if (parts := demonstration(Task(LEVELS[seed % len(LEVELS)], seed), horizon)) is not None:
            return parts
