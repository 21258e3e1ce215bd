"""Generated TextCraft tasks: solvable, different, reproducible, and none in both halves of a split."""

import pytest
from environment import TextCraft, all_recipes, published
from generate import all_goals, depths, generate, recipe_lines, split_goals
from planner import plan


def needed(task):
    env = TextCraft(task)
    for n in range(1, 101):
        if env.step(plan(env))[2]:
            return n
    return 101


def test_goals_are_those_of_the_recipes_with_the_published_depths():
    depth = depths()
    assert depth.keys() == all_recipes().printed.keys() and len(depth) == 473
    assert len(all_goals()) == 366 == sum(d in (2, 3) for d in depth.values())
    # "painting" is published with another depth: its wool may be dyed, which goes deeper than the flattest.
    assert [task.goal for task in published() if depth[task.goal] != task.depth] == ["painting"]
    assert sum(map(len, recipe_lines().values())) == 533


def test_tasks_are_solved_from_their_lines_and_all_different():
    tasks = generate(200, seed=3)
    assert len({(task.goal, frozenset(task.commands)) for task in tasks}) == 200
    assert len({task.task_id for task in tasks}) == 200
    lines = {line for found in recipe_lines().values() for line in found}
    for task in tasks:
        assert 1 < needed(task) <= 10
        assert set(task.commands) <= lines and len(set(task.commands)) == len(task.commands)
    assert len({task.goal for task in tasks}) > 150  # goals take turns
    assert len({task.goal for task in tasks} - {task.goal for task in published()}) > 50


def test_equal_arguments_give_equal_tasks_and_other_seeds_others():
    tasks = generate(20, seed=5)
    assert tasks == generate(20, seed=5) == generate(40, seed=5)[:20]
    assert not {task.commands for task in tasks} & {task.commands for task in generate(20, seed=6)}


def test_a_split_shares_no_goal_and_loses_none():
    train, test = split_goals(100, seed=1)
    assert len(test) == 100 and sorted([*train, *test]) == list(all_goals())
    assert split_goals(100, seed=1) == (train, test) and split_goals(100, seed=2) != (train, test)
    assert {task.goal for task in generate(50, seed=0, goals=test)} <= set(test)
    assert split_goals(1, seed=0, goals=["book", "ladder"])[1][0] in ("book", "ladder")


def test_what_else_a_task_must_satisfy():
    tasks = generate(20, seed=0, most_commands=5, most_distractors=2, fits=lambda task: len(task.commands) <= 8)
    assert all(needed(task) <= 5 and len(task.commands) <= 8 for task in tasks)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="test must be in"):
        split_goals(366, seed=0)
    with pytest.raises(ValueError, match="unicorn"):
        generate(1, seed=0, goals=["unicorn"])
    with pytest.raises(ValueError, match="count must be"):
        generate(-1, seed=0)
    with pytest.raises(ValueError, match="give 0 different tasks"):
        generate(1, seed=0, goals=["ladder"], fits=lambda task: False)
