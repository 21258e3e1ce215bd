"""The ALFWorld example: real games' format in small, the split by task, the searcher's lessons, and a run by the common
trainer."""

import json
import random
import shutil

import alfworld_world
import pytest
import typer
from alfworld_world import DEFAULTS, PIECES, ALFWorld, demonstration, prepare, tasks_of, texts, world
from model import make_model, save, tokens_of, train_tokenizer
from refusals import refused
from rollout import CLOSE, OPEN, play
from tokenizers import Regex
from train_alfworld import again, run
from trainer import train

SMALL = DEFAULTS.changed(
    vocabulary=400, width=32, blocks=2, heads=2, horizon=4, command_tokens=8, test_tasks=5, updates=1, batch=4, group=2,
    micro_batch=2, layer=-1, check_every=1,
)  # fmt: skip


def a_game(thing, holder, more=0, wish="put a {} in {}."):
    """Two places; whoever goes to the holder and takes the thing has won.  The translator's format, written by hand.

    `more` receptacles are named in the opening and cannot be reached.
    """
    variable = "begin_variable\nvar{}\n-1\n2\n{}\n{}\nend_variable\n"
    operator = "begin_operator\n{}\n{}\n1\n{}\n1\nend_operator\n"
    places = [f"Atom atlocation(agent1, loc_{i})" for i in (0, 1)]
    holds = [f"Atom holds(agent1, {thing}_bar_1)", f"NegatedAtom holds(agent1, {thing}_bar_1)"]
    sas = (
        variable.format(0, *places) + variable.format(1, *holds)
        + "begin_state\n0\n1\nend_state\nbegin_goal\n1\n1 0\nend_goal\n"
        + operator.format(f"gotolocation agent1 loc_0 loc_1 {holder}_bar_1", 0, "0 0 0 1")
        + operator.format(f"pickupobject agent1 loc_1 {thing}_bar_1 {holder}_bar_1", "1\n0 1", "0 1 1 0")
        + operator.format("look agent1 loc_0", 0, "0 0 0 0")
    )  # fmt: skip
    holders = [f"{holder}_bar_{i}" for i in range(1, 2 + more)]
    facts = [["receptacleatlocation", each, "loc_1"] for each in holders]
    facts.append(["inreceptacle", f"{thing}_bar_1", holders[0]])
    return {"task": wish.format(thing, holder), "objects": [f"{thing}_bar_1", *holders], "facts": facts, "sas": sas}


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """Ten games as `prepare` leaves them: two open with another's text, one has too many receptacles, one wants two."""
    folder = tmp_path_factory.mktemp("games")
    kinds = [(thing, holder) for thing in ("apple", "mug") for holder in ("shelf", "desk", "bed")]
    two = ("apple", "drawer", 0, "find two {} and put them in {}.")
    for thing, holder, *rest in [*kinds, ("mug", "drawer", alfworld_world.MOST_PLACES), two]:
        for trial in ("a", "b") if holder == "bed" else "a":
            path = folder / "raw" / f"put-{thing}-{holder}" / trial / "game.tw-pddl"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(a_game(thing, holder, *rest)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alfworld_world, "grounded", lambda path: json.loads(path.read_text()))
        assert prepare(folder / "raw", folder / "prepared", print, None) == []
    return folder / "prepared"


def test_games_are_split_by_task_and_open_with_different_texts_in_rooms_that_can_be_searched(games):
    sides = {side: tasks_of(games, side) for side in ("train", "test")}
    assert {side: len(tasks) for side, tasks in sides.items()} == {"train": 4, "test": 2}
    assert not any("drawer" in task.intro for tasks in sides.values() for task in tasks)
    names = {side: {task.name.split(".")[0] for task in tasks} for side, tasks in sides.items()}
    assert not names["train"] & names["test"]
    intros = [task.intro for tasks in sides.values() for task in tasks]
    assert len(set(intros)) == len(intros)
    five = alfworld_world.measured(sides["test"], 5)
    assert [task.name for task in five] == [sides["test"][i % 2].name for i in range(5)]


def test_a_broken_game_is_skipped_and_named_and_a_list_of_games_decides_the_split(games, tmp_path, monkeypatch):
    monkeypatch.setattr(alfworld_world, "grounded", lambda path: json.loads(path.read_text()))
    raw = games.parent / "raw"
    bad = tmp_path / "raw" / "put-knife-shelf" / "a" / "game.tw-pddl"
    bad.parent.mkdir(parents=True)
    bad.write_text("no JSON")
    for name in ("put-apple-shelf", "put-mug-desk", "put-mug-shelf"):
        shutil.copytree(raw / name, tmp_path / "raw" / name)
    (broken,) = prepare(tmp_path / "raw", tmp_path / "own", print, None)
    assert broken.startswith("put-knife-shelf/a: JSONDecodeError")
    assert sum(len(tasks_of(tmp_path / "own", side)) for side in ("train", "test")) == 3
    assert not list((tmp_path / "own").glob("put-knife*"))
    named = tmp_path / "games.json"
    sides = {"train": ["put-apple-shelf/a", "put-knife-shelf/a"], "test": ["put-mug-desk/a"], "not used": []}
    sides["not used"].append("put-mug-bed/a")
    named.write_text(json.dumps(sides))
    assert prepare(tmp_path / "raw", tmp_path / "named", print, named) == [broken]
    for side, name in (("train", "put-apple-shelf.a.json.gz"), ("test", "put-mug-desk.a.json.gz")):
        assert [task.name for task in tasks_of(tmp_path / "named", side)] == [name]
    named.write_text(json.dumps(sides | {"test": ["put-mug-desk/z"]}))
    with pytest.raises(ValueError, match=r"lacks 1 of the 3 games of games\.json, as put-mug-desk/z"):
        prepare(tmp_path / "raw", tmp_path / "lacking", print, named)


def test_the_committed_list_has_474_games_and_no_task_on_both_sides():
    sides = json.loads(alfworld_world.NAMED.read_text())
    assert {side: len(names) for side, names in sides.items()} == {"train": 102, "test": 34, "not used": 338}
    assert len({name for names in sides.values() for name in names}) == 474
    tasks = [{name.split("/")[0] for name in sides[side]} for side in ("train", "test")]
    assert not tasks[0] & tasks[1]


def test_an_episode_wins_by_the_games_own_commands(games):
    task = tasks_of(games, "train")[0]
    thing, holder = (name.rstrip(".") for name in task.intro.rsplit("put a ", 1)[1].split(" in "))
    env = ALFWorld(task)
    assert env.step("dance") == ("Nothing happens.", 0.0, False)
    assert env.step(f"go to {holder} 1") == (f"On the {holder} 1, you see a {thing} 1.", 0.0, False)
    assert env.step(f"take {thing} 1 from {holder} 1")[1:] == (1.0, True) and env.done
    refused("over", env.step, "look", error=RuntimeError)


def test_lessons_show_the_searcher_and_mark_what_is_to_be_learned(games):
    task, rng = tasks_of(games, "train")[0], random.Random(0)
    own = demonstration(task, 0.0, 5, False, rng)
    assert [learn for _, learn in own] == [0, 1, 0, 1] and own[-1][0].startswith(OPEN + "take ")
    noisy = [demonstration(task, 1.0, 5, strays, rng) for strays in (False, True)]
    assert sum(learn for _, learn in noisy[0]) == 0 and sum(learn for _, learn in noisy[1]) > 0


def test_lessons_have_other_names_for_the_same_episode(games):
    """In half of the episodes places and things change their kinds by one permutation; appliances keep their names."""
    tasks, rng = tasks_of(games, "train"), random.Random(1)
    shown = [part for task in tasks for part in demonstration(task, 0.0, 5, False, rng)]
    kinds = alfworld_world.kinds_of(tasks)
    assert set(kinds[0]) <= {"shelf", "desk", "bed"} and set(kinds[1]) <= {"apple", "mug"}
    found = [alfworld_world.renamed([*shown, ("go to fridge 1", 1)], kinds, rng) for _ in range(20)]
    others = [other for other in found if other[:-1] != shown]
    assert 5 <= len(others) < 20
    for other in others:
        assert other[-1] == ("go to fridge 1", 1) and [own for _, own in other[:-1]] == [own for _, own in shown]
        texts_of = (" ".join(text for text, _ in parts) for parts in (shown, other[:-1]))
        pairs = list(zip(*(text.split() for text in texts_of), strict=True))
        names = {old.rstrip(".") for old, new in pairs if old != new}
        assert names and names <= set(kinds[0]) | set(kinds[1])
        assert len(set(pairs)) == len({old for old, _ in pairs}) == len({new for _, new in pairs})


def test_a_run_is_the_same_from_its_json_and_after_a_stop(games, tmp_path, monkeypatch):
    """Bit for bit, also after a stop in the second round over the train games, whatever was played before."""
    monkeypatch.setattr("trainer.SAVE_EVERY", 2)
    short = SMALL.changed(updates=3, check_every=3)
    of_games, start = world(games, short), tmp_path / "start"
    tokenizer = train_tokenizer(texts(of_games.train, short), Regex(PIECES), short.vocabulary)
    ids, _ = tokens_of([(text, 0) for text in texts(of_games.train, short)], tokenizer)
    assert tokenizer.decode(ids) == "".join(texts(of_games.train, short))
    assert tokenizer.decode(tokenizer(f"{OPEN}go to shelf 1{CLOSE}").input_ids) == f"{OPEN}go to shelf 1{CLOSE}"
    model = make_model(tokenizer, width=32, blocks=2, heads=2, seed=0)
    save(start, model, tokenizer, {"test": 0.0})
    episodes = play(model, tokenizer, [ALFWorld(task) for task in of_games.test], horizon=4, seed=0, command_tokens=8)
    assert all(len(episode.commands) == 4 for episode in episodes if not episode.solved)
    run("gigpo", 1, tmp_path, start, games, [f"{name}={value}" for name, value in short.as_json().items()])
    path = tmp_path / "gigpo-g2-seed1.json"
    with pytest.raises(typer.Exit) as ended:
        again(path, tmp_path / "again", start, games)
    assert ended.value.exit_code == 0

    def stop(update, model):
        if update == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("gigpo", 1, short, of_games, start, tmp_path / "work", after_update=stop)
    seen = []
    found = train("gigpo", 1, short, of_games, start, tmp_path / "work", after_update=lambda n, _: seen.append(n))
    before = json.loads(path.read_text())
    assert [check["update"] for check in before["checks"]] == [3] and before["settings"] == short.as_json()
    assert seen == [3] and found["updates"] == before["updates"] and found["checks"] == before["checks"]
