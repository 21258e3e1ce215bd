"""Fresh TextCraft tasks, as many as wanted: any goal of the 533 published recipes, with drawn distractors.

A task prints what the published ones print: all recipes of the goal's tree and, shuffled among them, some that only
distract, drawn from those that share an ingredient with the tree.  Two things differ, so that thousands of tasks can be
drawn from few goals and prompts stay short: the number of distractors is drawn too, and a class slot ("2 planks") is
served by a drawn part of its members instead of all of them.  Every task given is one that the planner solves from the
lines printed.

    train, test = split_goals(120, seed=0)            # no goal is in both
    tasks = generate(2000, seed=1, goals=train)       # equal arguments, equal tasks
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from environment import _LINE, Task, TextCraft, _ingredients, all_recipes, published
from planner import plan

MOST_DISTRACTORS = 10  # of the published tasks
TRIES = 50  # draws for one task before its goals are said to be impossible


@cache
def recipe_lines() -> dict[str, tuple[str, ...]]:
    """{item: the printed lines of its recipes}, all 533 in the order of the published tasks."""
    found: dict[str, dict[str, None]] = {}
    for task in published():
        for line in task.commands:
            found.setdefault(_output(line), {})[line] = None
    return {item: tuple(lines) for item, lines in found.items()}


@cache
def depths() -> dict[str, int]:
    """{item: crafting steps on top of each other}: one more than the deepest ingredient of its flattest recipe.

    What no recipe makes has depth 0, and a class slot is as deep as its flattest member.
    """
    recipes = all_recipes()
    depth: dict[str, int] = {}
    changed = True
    while changed:  # recipes may close a cycle, so rounds instead of recursion: depths only fall
        changed = False
        for item, found in recipes.printed.items():
            for inputs, _ in found:
                parts = [_slot_depth(name, depth) for name, _ in inputs]
                if None in parts:
                    continue
                new = 1 + max(part for part in parts if part is not None)
                if new < depth.get(item, new + 1):
                    depth[item], changed = new, True
    return depth


def _slot_depth(name: str, depth: dict[str, int]) -> int | None:
    """None where nothing is known yet."""
    recipes = all_recipes()
    if name in recipes.gettable:
        return 0
    known = [depth[item] for item in recipes.members.get(name, [name]) if item in depth]
    return min(known) if known else None


@cache
def all_goals(least_depth: int = 2, most_depth: int = 3) -> tuple[str, ...]:
    """Items of such a depth, sorted by name."""
    return tuple(sorted(item for item, depth in depths().items() if least_depth <= depth <= most_depth))


def split_goals(test: int, *, seed: int, goals: Sequence[str] | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(train, test) goals: a drawn part of `goals` (all_goals() if None) of `test` items, and the rest; each sorted.

    Tasks generated from the two come from one distribution, and no goal, hence no task, is in both.
    ValueError where one of the two would be empty.
    """
    goals = all_goals() if goals is None else tuple(goals)
    if not 0 < test < len(goals):
        raise ValueError(f"test must be in [1, {len(goals) - 1}] for {len(goals)} goals, got {test}.")
    held = set(random.Random(f"split {seed}").sample(sorted(goals), test))
    return tuple(sorted(set(goals) - held)), tuple(sorted(held))


def generate(
    count: int, *, seed: int, goals: Sequence[str] | None = None, most_commands: int = 10,
    most_distractors: int = MOST_DISTRACTORS, fits: Callable[[Task], bool] | None = None,
) -> tuple[Task, ...]:  # fmt: skip
    """`count` different tasks, goals taking turns in a drawn order, so that no goal comes twice before all came once.

    goals            items to draw from; None: all_goals()
    most_commands    of the planner for one task
    most_distractors the number of distractors is uniform in [0, most_distractors], or all there are
    fits             what else a task must satisfy, as a length of its prompt in tokens
    Two tasks differ in their goal or in the set of their lines; another order of the lines makes no new task.
    Goals that give no task at all in TRIES draws are left out for good; ValueError where none is left.
    """
    pool = sorted(set(all_goals() if goals is None else goals))
    unknown = [goal for goal in pool if goal not in recipe_lines()]
    if unknown:
        raise ValueError(f"goals must be items that recipes make, got {unknown[0]!r}.")
    if count < 0:
        raise ValueError(f"count must be at least 0, got {count}.")
    rng = random.Random(f"tasks {seed}")
    seen: set[tuple[str, frozenset[str]]] = set()
    found: list[Task] = []
    turn: list[str] = []
    while len(found) < count:
        if not pool:
            raise ValueError(
                f"the goals give {len(found)} different tasks of at most {most_commands} commands that fit, not "
                f"{count}."
            )
        if not turn:
            turn = rng.sample(pool, len(pool))
        goal = turn.pop()
        for _ in range(TRIES):
            lines = _draw(goal, rng, most_distractors)
            key = (goal, frozenset(lines))
            task = Task(f"new_{seed}_{len(found)}", goal, depths()[goal], tuple(lines))
            if key not in seen and _solved(task, most_commands) and (fits is None or fits(task)):
                seen.add(key)
                found.append(task)
                break
        else:
            pool.remove(goal)
    return tuple(found)


def _draw(goal: str, rng: random.Random, most_distractors: int) -> list[str]:
    """The lines of one task, shuffled."""
    tree: dict[str, None] = {}
    waiting, opened, used = [goal], set(), {goal}
    members = all_recipes().members
    while waiting:
        item = waiting.pop()
        if item in opened:
            continue
        opened.add(item)
        if item in members:
            waiting += rng.sample(members[item], rng.randint(1, len(members[item])))
        for line in recipe_lines().get(item, ()):
            tree[line] = None
            parts = _inputs(line)
            used |= parts
            waiting += sorted(parts)
    near = [
        line
        for lines in recipe_lines().values()
        for line in lines
        if line not in tree and not used.isdisjoint(_inputs(line))
    ]
    lines = [*tree, *rng.sample(near, min(len(near), rng.randint(0, most_distractors)))]
    rng.shuffle(lines)
    return lines


def _solved(task: Task, most_commands: int) -> bool:
    """Whether the planner gets there: a distractor may print a member of a class whose own ingredients are not
    printed."""
    env = TextCraft(task)
    for _ in range(most_commands):
        try:
            command = plan(env)
        except KeyError:
            return False
        if env.step(command)[2]:
            return True
    return False


@cache
def _inputs(line: str) -> frozenset[str]:
    match = _LINE.match(line)
    return frozenset(name for name, _ in (_ingredients(match[3]) if match else None) or ())


def _output(line: str) -> str:
    match = _LINE.match(line)
    if match is None:
        raise ValueError(f"a recipe must read 'craft n OUT using n1 A, n2 B', got {line!r}.")
    return match[2]
