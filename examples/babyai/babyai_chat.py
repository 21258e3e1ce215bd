"""BabyAI for a language model that answers in turns of a conversation: rules, rooms and the expert's commands."""

from __future__ import annotations

import babyai
from babyai import COMMANDS, BabyAI, Task

HORIZON = 12
RULES = (
    "You stand in a room and see what is ahead of you. Answer each message with one command and nothing else: "
    f"{', '.join(COMMANDS)}. To open a locked door, pick up its key first, from the cell next to it.\n\n"
)
LEVELS = ("GoToObj", "UnlockLocal")  # whose observations are short
SHORTEST, LONGEST = 4, 9  # commands of the expert
SEEDS = {"lessons": 5_000_000, "check": 6_000_000, "truth": 7_000_000}
make = BabyAI


def task(part: str, number: int) -> Task:
    """The levels taking turns, in rooms that no other part and number has."""
    seed = SEEDS[part] + 100 * number
    while not len(expert(found := Task(LEVELS[number % len(LEVELS)], seed))) >= SHORTEST:
        seed += 1
    return found


def expert(task: Task) -> list[str]:
    """Empty where it needs more than LONGEST commands."""
    return babyai.expert(task, LONGEST) or []
