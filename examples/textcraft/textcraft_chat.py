"""TextCraft for a language model that answers in turns of a conversation: rules, tasks and an expert's commands."""

from __future__ import annotations

from functools import cache
from typing import Any

from environment import Task, TextCraft
from generate import generate, split_goals
from planner import plan

HORIZON = 8
RULES = (
    "Craft the goal. Answer each message with one command and nothing else:\n"
    "get 2 ITEM: takes what no crafting command makes; it is free.\n"
    "craft 1 OUT using 2 A, 1 B: one of the crafting commands below, from what you have.\n\n"
)
make = TextCraft
SEEDS = {"lessons": (101, 1000), "check": (102, 64), "truth": (103, 64), "train": (104, 400), "test": (105, 100)}


@cache
def _tasks(part: str) -> tuple[Task, ...]:
    goals, _ = split_goals(140, seed=0)
    fits: dict[str, Any] = {"most_commands": 6, "most_distractors": 3, "fits": lambda task: len(task.text) < 600}
    seed, count = SEEDS[part]
    return generate(count, seed=seed, goals=goals, **fits)


def task(part: str, number: int) -> Task:
    """A task of three to six commands with a short prompt; all parts have the same goals, and lines of their own."""
    return _tasks(part)[number]


def expert(task: Task) -> list[str]:
    env, commands = TextCraft(task), []
    while not env.done:
        commands.append(plan(env))
        env.step(commands[-1])
    return commands
