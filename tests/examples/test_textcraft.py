"""The TextCraft example's environment against recorded episodes and its rules; the planner; facts of the data."""

import gzip
import json
import random

import pytest
from environment import Recipes, Task, TextCraft, all_recipes, published
from generate import all_goals, depths, generate, recipe_lines, split_goals
from paths import ROOT
from planner import plan, stray
from refusals import refused

RECORDED = ROOT / "examples/data/textcraft_scripted.jsonl.gz"


def holding(goal, lines, **held):
    env = TextCraft(Task("test", goal, 1, tuple(lines)))
    env.inventory = {name.replace("_", " "): n for name, n in held.items()}
    return env


def test_every_recorded_step_replays():
    tasks = {task.task_id: task for task in published()}
    with gzip.open(RECORDED, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 8270
    env, observation = None, ""
    for row in rows:
        if row["step"] == 0:
            env = TextCraft(tasks[row["task_id"]])
            observation = env.task.text
        assert observation == row["observation"], (row["task_id"], row["rollout"], row["step"])
        observation, reward, done = env.step(row["action"])
        assert (reward, done) == (row["reward"], row["done"]), (row["task_id"], row["rollout"], row["step"])


def test_what_is_published_and_its_goals_and_depths():
    tasks = published()
    recipes = all_recipes()
    assert len(tasks) == 200 == len({task.goal for task in tasks})
    assert sum(map(len, recipes.printed.values())) == 533 and len(recipes.printed) == 473
    assert {depth: sum(task.depth == depth for task in tasks) for depth in (2, 3, 4)} == {2: 77, 3: 112, 4: 11}
    assert len(recipes.members["planks"]) == 8 and len(recipes.members["wool"]) == 16
    depth = depths()
    assert depth.keys() == all_recipes().printed.keys() and len(depth) == 473
    assert len(all_goals()) == 366 == sum(d in (2, 3) for d in depth.values())
    # "painting" is published with another depth: its wool may be dyed, which goes deeper than the flattest.
    assert [task.goal for task in published() if depth[task.goal] != task.depth] == ["painting"]
    assert sum(map(len, recipe_lines().values())) == 533


@pytest.mark.parametrize("task", published(), ids=lambda task: task.task_id)
def test_the_planner_solves_every_task(task):
    """From only the printed lines, without a failing command, and also after stray commands."""
    env = TextCraft(task)
    for _ in range(40):
        observation, reward, done = env.step(plan(env))
        assert not observation.startswith("Could not")
        if done:
            break
    assert done and reward == 1.0
    env, rng = TextCraft(task), random.Random(0)
    for _ in range(5):
        if not env.done:
            env.step(stray(env, rng))
    for _ in range(40):
        if not env.done:
            env.step(plan(env))
    assert env.done


@pytest.mark.parametrize(("command", "observation", "after"), [
    ("get 3 string", "Got 3 string", {"string": 4, "oak planks": 4}),
    ("get 1 unicorn", "Could not find unicorn", None),
    ("get string", "Could not execute get string", None),
    ("look", "Could not execute look", None),
    ("inventory", "Inventory: [oak planks] (4) [string] (1)", None),
    ("craft 9 stick using 2 oak planks", "Crafted 4 minecraft:stick", {"oak planks": 2, "string": 1, "stick": 4}),
    ("craft stick using 2 oak planks", "Crafted 4 minecraft:stick", {"oak planks": 2, "string": 1, "stick": 4}),
    ("craft 4 stick using 2 planks", "Could not find enough items to craft minecraft:stick", None),
    ("craft 4 stick using 3 oak planks", "Could not find a valid recipe for minecraft:stick", None),
    ("craft 4 stick using 2 oak planks, 1 string", "Could not find a valid recipe for minecraft:stick", None),
    ("craft 4 stick using 1 oak planks, 1 birch planks", "Could not find enough items to craft minecraft:stick",
     None),
    ("craft 1 crafting table using 4 oak planks", "Crafted 1 minecraft:crafting_table",
     {"string": 1, "crafting table": 1}),
    ("craft 4 stick using 2 oak planks, 2 oak planks", "Could not find a valid recipe for minecraft:stick", None),
    ("craft 4 stick using oak planks", "Wrong item format", None),
])  # fmt: skip
def test_rules(command, observation, after):
    """Commands that fail change nothing; a count before the output says nothing; what is used up is gone."""
    before = {"oak planks": 4, "string": 1}
    env = holding("beacon", [], oak_planks=4, string=1)
    assert env.step(command) == (observation, 0.0, False) and env.inventory == (before if after is None else after)


def test_class_slots_inventories_and_the_end():
    env = holding("chest", [], oak_planks=4, birch_planks=8)
    said, *_ = env.step("craft 1 chest using 4 oak planks, 4 birch planks")
    assert said == "Could not find a valid recipe for minecraft:chest"
    assert env.step("craft 1 chest using 8 birch planks") == ("Crafted 1 minecraft:chest", 1.0, True)
    env = holding("stick", [])
    assert env.step("inventory")[0] == "Inventory: You are not carrying anything."
    env.inventory["oak planks"] = 4
    assert env.step("craft 4 stick using 2 oak planks") == ("Crafted 4 minecraft:stick", 1.0, True)
    refused("over", env.step, "inventory", error=RuntimeError)


@pytest.mark.parametrize("line", ["craft stick using 2 planks", "get 1 stick", "craft 4 stick using planks"])
def test_a_line_that_is_no_recipe_is_refused(line):
    refused("a recipe must read", Recipes, [line])


def needed(task):
    env = TextCraft(task)
    for n in range(1, 101):
        if env.step(plan(env))[2]:
            return n
    return 101


def test_tasks_are_solved_from_their_lines_all_different_and_those_of_their_arguments():
    tasks = generate(200, seed=3)
    assert len({(task.goal, frozenset(task.commands)) for task in tasks}) == 200
    assert len({task.task_id for task in tasks}) == 200
    lines = {line for found in recipe_lines().values() for line in found}
    for task in tasks:
        assert 1 < needed(task) <= 10
        assert set(task.commands) <= lines and len(set(task.commands)) == len(task.commands)
    assert len({task.goal for task in tasks}) > 150  # goals take turns
    assert len({task.goal for task in tasks} - {task.goal for task in published()}) > 50
    tasks = generate(20, seed=5)
    assert tasks == generate(20, seed=5) == generate(40, seed=5)[:20]
    assert not {task.commands for task in tasks} & {task.commands for task in generate(20, seed=6)}
    tasks = generate(20, seed=0, most_commands=5, most_distractors=2, fits=lambda task: len(task.commands) <= 8)
    assert all(needed(task) <= 5 and len(task.commands) <= 8 for task in tasks)


def test_a_split_shares_no_goal_and_loses_none_and_errors_name_what_is_wrong():
    train, test = split_goals(100, seed=1)
    assert len(test) == 100 and sorted([*train, *test]) == list(all_goals())
    assert split_goals(100, seed=1) == (train, test) and split_goals(100, seed=2) != (train, test)
    assert {task.goal for task in generate(50, seed=0, goals=test)} <= set(test)
    assert split_goals(1, seed=0, goals=["book", "ladder"])[1][0] in ("book", "ladder")
    refused("test must be in", split_goals, 366, seed=0)
    refused("unicorn", generate, 1, seed=0, goals=["unicorn"])
    refused("count must be", generate, -1, seed=0)
    refused("give 0 different tasks", generate, 1, seed=0, goals=["ladder"], fits=lambda task: False)
