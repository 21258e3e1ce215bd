"""A planner that solves every task, and stray commands that make it a noisy one: what the model imitates before it is
trained.

It decides from only the printed lines and the inventory, one command at a time, so it can continue from any state.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

from environment import Printed, Recipes, Task, TextCraft


@lru_cache(maxsize=1 << 12)
def _plan(task: Task) -> tuple[Recipes, dict[str, float], dict[str, tuple[Printed, int]]]:
    """The task's own recipes; how many commands each item costs; its cheapest recipe, class slots filled."""
    recipes = Recipes(task.commands)
    cost: dict[str, float] = {}
    best: dict[str, tuple[Printed, int]] = {}

    def price(recipe: Printed) -> float:
        # What recipes make costs by the piece, an upper bound: one application may yield several.
        return 1 + sum(n * cost.get(item, math.inf) if item in recipes.printed else 1.0 for item, n in recipe)

    changed = True
    while changed:  # prices only fall, and a recipe that closes a cycle is never the cheapest
        changed = False
        for output, found in recipes.printed.items():
            for recipe, made in found:
                for filled in recipes.filled(recipe):
                    new = price(filled) / made
                    if new < cost.get(output, math.inf):
                        cost[output], best[output], changed = new, (filled, made), True
    return recipes, cost, best


def plan(env: TextCraft) -> str:
    """The next command towards the goal: what the cheapest recipe still lacks, first ingredient first, then the
    craft."""
    _, _, best = _plan(env.task)
    item = env.task.goal
    while True:
        recipe, made = best[item]
        lacking = next(((name, n) for name, n in recipe if env.inventory.get(name, 0) < n), None)
        if lacking is None:
            return craft(item, recipe, made)
        item, n = lacking
        if item not in best:
            return f"get {n - env.inventory.get(item, 0)} {item}"


def craft(item: str, recipe: Printed, made: int) -> str:
    return f"craft {made} {item} using " + ", ".join(f"{n} {name}" for name, n in recipe)


def stray(env: TextCraft, rng: random.Random) -> str:
    """A command that reads well: a printed recipe, or one to three of something that is printed."""
    recipes, _, _ = _plan(env.task)
    output = rng.choice(sorted(recipes.printed))
    recipe, made = rng.choice(recipes.printed[output])
    if rng.random() < 0.5:
        return craft(output, rng.choice(list(recipes.filled(recipe)) or [recipe]), made)
    return f"get {rng.randint(1, 3)} {rng.choice([*recipe, (output, 1)])[0]}"
