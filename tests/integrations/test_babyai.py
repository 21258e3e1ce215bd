"""The BabyAI example: rooms as text, the expert's lessons, and a run by the common trainer.  Needs minigrid."""

import dataclasses
import json
import random

import campaign
import comparison
import pytest
from babyai import COMMANDS, LEVELS, BabyAI, Task, demonstration, expert, lesson, tasks
from model import make_model, save, tokens_of, train_tokenizer
from refusals import refused
from rollout import CLOSE, OPEN
from tokenizers import Regex
from train_babyai import COMPARISON, DEFAULTS, LESSONS, PIECES, TEST, TRAIN, VALIDATION, world

pytest.importorskip("minigrid", reason="minigrid is not installed: pip install minigrid==3.2.0")


def test_the_experts_commands_solve_the_room_as_text():
    needed = []
    for task in tasks(40, 0):
        commands = expert(task, 60)
        assert commands is not None and set(commands) <= set(COMMANDS)
        room = BabyAI(task)
        results = [room.step(command)[1:] for command in commands]
        assert results == [(0.0, False)] * (len(commands) - 1) + [(1.0, True)]
        needed.append(len(commands))
        refused("over", room.step, "forward", error=RuntimeError)
    assert max(needed) - min(needed) >= 10  # a step's number says little of how far it is to the end
    assert sum(n <= DEFAULTS.horizon for n in needed) >= 38


def test_the_text_is_what_stands_in_the_view():
    room = BabyAI(Task("PutNextLocal", 0))
    assert room.opening.splitlines() == [
        "Goal: put the green ball next to the green key",
        "free 2; grey ball 1 ahead 1 right, yellow key 1 ahead 1 left, green ball 3 ahead, green key 2 ahead 1 right, "
        "red box 2 ahead 2 right, purple box 3 ahead 2 right, purple key 4 ahead 2 right, yellow box 5 ahead 1 right",
    ]
    assert room.step("dance") == ("Nothing happens.", 0.0, False)
    assert room.step("forward")[0].startswith("free 1; grey ball 1 right, yellow key 1 left, green ball 2 ahead, ")
    room.step("forward")
    assert room.step("pick up")[0].startswith("holding green ball; free 3; green key 1 right, ")


def test_equal_tasks_are_equal_rooms_and_parts_share_none():
    first, again = list(tasks(30, 5)), list(tasks(30, 5))
    assert first == again and len({BabyAI(task).opening for task in first}) == 30
    assert {task.level for task in first} == set(LEVELS)
    assert BabyAI(first[0]).step("turn left") == BabyAI(again[0]).step("turn left")
    small = DEFAULTS.changed(train_tasks=20, test_tasks=10)
    of_rooms, parts = world(settings=small)
    seeds = [{task.seed for task in part} for part in (of_rooms.train, parts["validation"], parts["test"])]
    assert [min(part) // 1_000_000 for part in seeds] == [first // 1_000_000 for first in (TRAIN, VALIDATION, TEST)]
    assert all(seed not in LESSONS for part in seeds for seed in part)


def test_lessons_are_the_experts_and_are_learned_by_their_commands():
    parts = demonstration(Task("UnlockLocal", 1), 60)
    assert parts is not None and parts[0][1] == 0
    assert [text for text, own in parts if own] == [OPEN + c + CLOSE for c in expert(Task("UnlockLocal", 1), 60)]
    assert demonstration(Task("UnlockLocal", 1), 3) is None  # too long
    assert len([1 for _, own in lesson(random.Random(0), 12, LESSONS) if own]) <= 12


def test_a_final_run_by_the_common_trainer(tmp_path, monkeypatch):
    small = DEFAULTS.changed(
        vocabulary=400, width=32, blocks=2, heads=2, train_tasks=4, test_tasks=2, horizon=3, updates=1, batch=4,
        group=2, micro_batch=2, layer=-1,
    )  # fmt: skip
    rng = random.Random(0)
    shown = [lesson(rng, 20, LESSONS) for _ in range(20)]
    texts = ["".join(text for text, _ in parts) for parts in shown]
    tokenizer = train_tokenizer(texts, Regex(PIECES), small.vocabulary)
    for parts, text in zip(shown, texts, strict=True):
        assert tokenizer.decode(tokens_of(parts, tokenizer)[0]) == text
    save(tmp_path / "start", make_model(tokenizer, width=32, blocks=2, heads=2, seed=0), tokenizer, {})
    of = dataclasses.replace(COMPARISON, world=lambda start: world(start, small), weights=tmp_path / "weights")
    comparison.run(of, campaign.Run("gae", 0, small, tmp_path), tmp_path / "start", final=True)
    found = json.loads((tmp_path / "gae-g2-seed0.json").read_text())
    assert {row["tasks"] for row in found["measured"]} == {"validation", "test"}
    assert (tmp_path / "weights" / "gae-g2-seed0.safetensors").exists()
