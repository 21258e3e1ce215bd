"""TextCraft: items are crafted from recipes that the first observation prints, by text commands.

    craft [n] OUT using n1 A, n2 B     one application of a recipe of OUT; the n before OUT says nothing
    get n ITEM                         free and without limit, for what no recipe makes
    inventory                          what is there

Reimplemented from the rules of the TextCraft of ADaPT (Prasad et al. 2023), over the 200 tasks that its authors
published; README.md has the rules in full.  The recipes are those that the tasks print, 533 in all.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

TASKS = Path(__file__).resolve().parent.parent / "data" / "textcraft_tasks.json.gz"
CLASSES = ("planks", "wool")  # the slots of recipes that take any one of several items which recipes make

_LINE = re.compile(r"craft (?:(\d+) )?(.+) using (.+)")
_ITEM = re.compile(r"(\d+) (.+)")

Ingredients = frozenset[tuple[str, int]]
Printed = tuple[tuple[str, int], ...]  # ingredients in the order of the recipe's line


@dataclass(frozen=True)
class Task:
    """One goal and the lines that its first observation prints."""

    task_id: str
    goal: str
    depth: int  # crafting steps on top of each other
    commands: tuple[str, ...]

    @property
    def text(self) -> str:
        """The first observation."""
        return "\n".join(["Crafting commands:", *self.commands, "", f"Goal: craft {self.goal}."])


class Recipes:
    """All recipes: what can be made, and out of what.

    of         {output: {(item, count) pairs: items it yields}}, class slots filled by each of their members
    printed    {output: [(ingredients in the line's order, items it yields), ...]}
    members    {class: the items that fill its slot}
    gettable   items that no recipe makes
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self.printed: dict[str, list[tuple[Printed, int]]] = {}
        for line in dict.fromkeys(lines):
            match = _LINE.match(line)
            inputs = _ingredients(match[3]) if match else None
            if match is None or match[1] is None or inputs is None:
                raise ValueError(f"a recipe must read 'craft n OUT using n1 A, n2 B', got {line!r}.")
            self.printed.setdefault(match[2], []).append((inputs, int(match[1])))
        self.members = {name: [o for o in self.printed if o.endswith(" " + name)] for name in CLASSES}
        self.of: dict[str, dict[Ingredients, int]] = {}
        for output, recipes in self.printed.items():
            self.of[output] = {frozenset(filled): n for recipe, n in recipes for filled in self.filled(recipe)}
        items = {item for recipes in self.printed.values() for recipe, _ in recipes for item, _ in recipe}
        self.gettable = frozenset(items - self.printed.keys() - self.members.keys())

    def filled(self, recipe: Printed) -> Iterator[Printed]:
        """The recipe with each member of a class in its slot."""
        yield from itertools.product(*([(m, n) for m in self.members.get(item, [item])] for item, n in recipe))


@cache
def published() -> tuple[Task, ...]:
    """The 200 tasks, in their own order."""
    with gzip.open(TASKS, "rt", encoding="utf-8") as file:
        rows = json.load(file)
    return tuple(Task(row["task_id"], row["goal"], row["depth"], tuple(row["commands"])) for row in rows)


@cache
def all_recipes() -> Recipes:
    return Recipes([line for task in published() for line in task.commands])


class TextCraft:
    """One episode.  `step(command)` gives (observation, reward, done); commands that fail change nothing.

    The reward is 1 where the goal is crafted, which ends the episode; it never ends otherwise: the caller counts steps.
    """

    def __init__(self, task: Task, recipes: Recipes | None = None) -> None:
        self.task = task
        self.recipes = recipes or all_recipes()
        self.inventory: dict[str, int] = {}
        self.done = False

    @property
    def opening(self) -> str:
        return self.task.text

    @property
    def prompt(self) -> str:
        """What stands before the first command of a model."""
        return self.task.text + "\n"

    def step(self, command: str) -> tuple[str, float, bool]:
        if self.done:
            raise RuntimeError("the goal is crafted and the episode over; make a new TextCraft.")
        verb, count, item, ingredients = _parse(command)
        if verb == "get":
            return self._get(count, item), 0.0, False
        if verb == "craft":
            return self._craft(item, ingredients)
        if verb == "inventory":
            held = " ".join(f"[{name}] ({n})" for name, n in self.inventory.items())
            return f"Inventory: {held or 'You are not carrying anything.'}", 0.0, False
        return f"Could not execute {command}", 0.0, False

    def _get(self, count: int, item: str) -> str:
        if item not in self.recipes.gettable:
            return f"Could not find {item}"
        self.inventory[item] = self.inventory.get(item, 0) + count
        return f"Got {count} {item}"

    def _craft(self, item: str, ingredients: Printed | None) -> tuple[str, float, bool]:
        if ingredients is None:
            return "Wrong item format", 0.0, False
        name = "minecraft:" + item.replace(" ", "_")
        held = self.inventory
        for needed, n in ingredients:
            if held.get(needed, 0) < n:
                return f"Could not find enough items to craft {name}", 0.0, False
        made = self.recipes.of.get(item, {}).get(frozenset(ingredients))
        if made is None or len(set(ingredients)) < len(ingredients):  # an item that is listed twice is in no recipe
            return f"Could not find a valid recipe for {name}", 0.0, False
        for needed, n in ingredients:
            if held[needed] == n:
                del held[needed]
            else:
                held[needed] -= n
        held[item] = held.get(item, 0) + made
        self.done = item == self.task.goal
        return f"Crafted {made} {name}", float(self.done), self.done


class Explained(TextCraft):
    """For a model without imitation learning: the rules precede the task."""

    RULES = (
        "Craft the goal. You have one command a turn, written <action>command</action>:\n"
        "get 2 ITEM: takes what no recipe makes; free.\n"
        "craft 1 OUT using 2 A, 1 B: one of the crafting commands below; the inventory must hold exactly what it "
        "uses.\n"
        "inventory: shows what you have.\n\n"
    )

    @property
    def prompt(self) -> str:
        return self.RULES + super().prompt


@lru_cache(maxsize=1 << 16)
def _parse(command: str) -> tuple[str, int, str, Printed | None]:
    """(verb, count, item, ingredients) of a command; the verb is empty where there is none."""
    if match := _LINE.match(command):
        return "craft", 1, match[2], _ingredients(match[3])
    if match := re.match(r"get (\d+) (.+)", command):
        return "get", int(match[1]), match[2], None
    return ("inventory" if command.startswith("inventory") else ""), 0, "", None


def _ingredients(text: str) -> Printed | None:
    """The pairs of "n1 A, n2 B"; None where a part does not read so."""
    parts = [_ITEM.fullmatch(part.strip()) for part in text.split(",")]
    return tuple((m[2], int(m[1])) for m in parts if m) if all(parts) else None
