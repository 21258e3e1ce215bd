"""ALFWorld's games as tasks: train and test tasks, their episodes, and the searcher's demonstrations.

Game files are not included.  `prepare()` reads a folder of them once, with TextWorld's translator, and saves the data
of each Game. games.json names the 474 games that the committed runs were drawn from and says on which side of their
split each stands.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from alfworld_game import Game, Node, goal_of, grounded
from searcher import APPLIANCES, Memory, Searcher

TEXTCRAFT = Path(__file__).resolve().parent.parent / "textcraft"
if str(TEXTCRAFT) not in sys.path:  # the trainer and its settings; its modules import each other by their bare names
    sys.path.insert(0, str(TEXTCRAFT))

from settings import Settings  # noqa: E402

INDEX = "index.json"
NAMED = Path(__file__).resolve().parent / "games.json"  # {"train" | "test" | "not used": ["task/trial", ...]}
TEST_SHARE = 0.25  # of the tasks
MOST_PLACES = 20  # games in larger rooms are left out: their searches are longer than the horizon
# Differences from TextCraft: 30 commands, another warm start, and 48 rollouts of an update.
DEFAULTS = Settings(
    vocabulary=1024, horizon=30, command_tokens=12, noise=0.1, lesson_check=200, lesson_updates=1600, noisy_updates=400,
    test_tasks=400, updates=40, batch=48,
)  # fmt: skip
METHODS = ("grpo", "bipace", "gae", "gigpo", "gae-group")
SEEDS = range(3)


@dataclass(frozen=True)
class Task:
    """One game."""

    name: str
    intro: str
    file: Path


class ALFWorld:
    """One episode.  A command that is not admissible changes nothing; reward 1 where the game is won, which ends it."""

    def __init__(self, task: Task) -> None:
        self.task, self.done = task, False
        self._node: Node | None = None

    @property
    def opening(self) -> str:
        return self.task.intro

    @property
    def prompt(self) -> str:
        return self.task.intro + "\n"

    def step(self, command: str) -> tuple[str, float, bool]:
        if self.done:
            raise RuntimeError("the game is won and the episode over; make a new ALFWorld.")
        game = _game(self.task.file)
        self._node, observed = game.step(self._node or game.start, command)
        self.done = self._node.won
        return observed, float(self.done), self.done


@lru_cache(maxsize=512)  # about a megabyte each; a game's graph grows with what is played in it
def _game(file: Path) -> Game:
    return Game(json.loads(gzip.decompress(file.read_bytes())))


def prepare(games: Path, out: Path, say: Callable[[str], None], named: Path | None = NAMED) -> list[str]:
    """A file for each game below the folder, and an index of train and test games; existing files are kept.

    Games of one task, a kind with its object, place and room, are on one side together.  Left out are games with more
    than MOST_PLACES receptacles, those that want two things placed, and those that open with the same text as another
    one.

    named    only the games of this file are read, split as it says, and ValueError names how many of its train and test
             games the folder lacks; None: all games of the folder, a quarter of their tasks drawn for testing
    Gives "task/trial: why" of the games that the translator or this module cannot read; they are skipped.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = {f"{path.parent.parent.name}/{path.parent.name}": path for path in sorted(games.glob("**/game.tw-pddl"))}
    if not files:
        raise ValueError(f"--games {games} must hold folders with a game.tw-pddl each, but holds none.")
    side_of: dict[str, str] = {}
    if named is not None:
        sides = json.loads(named.read_text(encoding="utf-8"))
        side_of = {name: side for side in ("train", "test") for name in sides[side]}
        if missing := sorted(set(side_of) - set(files)):
            raise ValueError(
                f"--games {games} lacks {len(missing)} of the {len(side_of)} games of {named.name}, as {missing[0]}; "
                "take ExpeL's folder data/alfworld/json_2.1.1, or split the games you have by --own-split."
            )
        files = {name: path for name, path in files.items() if name in side_of}
    kept: dict[str, dict[str, str]] = {}
    broken: list[str] = []
    for number, (name, path) in enumerate(files.items()):
        file = out / f"{name.replace('/', '.')}.json.gz"
        try:
            if not file.exists():
                _write_game(file, grounded(path))
            game = _game(file)
            fits = len(game.receptacle_at) <= MOST_PLACES and goal_of(game.task)["count"] == 1
        except ImportError as error:
            raise ImportError(
                f"games are read by TextWorld's translator: pip install 'textworld[pddl]==1.7.0' ({error})"
            ) from error
        except Exception as error:  # of any type: whatever the translator's parser stumbles over
            broken.append(f"{name}: {type(error).__name__}: {error}")
            file.unlink(missing_ok=True)
            continue
        if fits and all(game.intro != other["intro"] for other in kept.values()):
            kept[file.name] = {"name": name, "task": path.parent.parent.name, "intro": game.intro}
        if number % 50 == 49:
            say(f"{number + 1} of {len(files)} games")
    if named is None:
        tasks = sorted({row["task"] for row in kept.values()})
        test = set(random.Random("alfworld").sample(tasks, round(TEST_SHARE * len(tasks))))
        side_of = {row["name"]: "test" if row["task"] in test else "train" for row in kept.values()}
    index = {
        side: {file: row["intro"] for file, row in kept.items() if side_of[row["name"]] == side}
        for side in ("train", "test")
    }
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return broken


def _write_game(file: Path, data: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))
    part.replace(file)


def tasks_of(folder: Path, side: str) -> list[Task]:
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} holds no games: make them with `train_alfworld.py games --games FOLDER`.")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return [Task(name, intro, folder / name) for name, intro in index[side].items()]


def measured(tasks: Sequence[Task], episodes: int) -> list[Task]:
    """The tasks repeatedly, up to the given number of episodes."""
    return [tasks[i % len(tasks)] for i in range(episodes)]


def demonstration(task: Task, noise: float, horizon: int, strays: bool, rng: random.Random) -> list[tuple[str, int]]:
    """The texts of one episode of the noisy searcher, each with whether it is to be learned."""
    from rollout import CLOSE, OPEN, answer_text

    game, memory = _game(task.file), Memory()
    policy, node = Searcher(game.task, 0.0), game.start
    parts = [(task.intro + "\n", 0)]
    for _ in range(horizon):
        own = rng.random() >= noise
        command = policy.act(memory, node.commands, rng) if own else rng.choice(node.commands)
        node, observed = game.step(node, command)
        memory = policy.remember(memory, command, observed)
        parts.append((OPEN + command + CLOSE, int(own or strays)))
        if node.won:
            break
        parts.append((answer_text(observed), 0))
    return parts


# A kind of thing is a token of its own wherever it stands, so that the "mug" of a goal is the "mug" of a list and of a
# command. Its number in a list includes the text up to the next kind.
PIECES = (
    r"</action>|<action>(?:go to|open|close|take|put|clean|heat|cool|use|examine|slice)? ?|You are in [^,]+, you see a "
    r"|Your task is to: |You [a-z ]+ the | (?:from|in/on|with|using)(?: the)? | \d+(?:,(?: and)? a )?|On the |, you "
    r"see(?: a )?"
    r"|The | is (?:open|closed)\.| In it, you see(?: a )?|Nothing happens|[a-z]+|\.?\n+"
)


def kinds_of(tasks: Sequence[Task]) -> tuple[list[str], list[str]]:
    """The kinds of places and of other things in the games, without the appliances, whose names say what they do."""
    places, things = set(), set()
    for game in (_game(task.file) for task in tasks):
        for item, name in game.names.items():
            (places if item in game.receptacle_at else things).add(name.rpartition(" ")[0])
    kept = set(APPLIANCES.values())
    return sorted(places - kept), sorted(things - places - kept)


def renamed(
    parts: Sequence[tuple[str, int]], kinds: tuple[list[str], list[str]], rng: random.Random
) -> list[tuple[str, int]]:
    """The texts; in half of the episodes with the kinds of places permuted, and those of things.

    So where a thing was in an episode cannot be known by heart, but what kinds of places things are usually in can be
    learned.
    """
    if rng.random() < 0.5:
        return list(parts)
    names = {old: new for group in kinds for old, new in zip(group, rng.sample(group, len(group)), strict=True)}
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    return [(pattern.sub(lambda found: names[found[0]], text), own) for text, own in parts]


def texts(tasks: Sequence[Task], settings: Settings) -> list[str]:
    """The tokenizer's training data: an episode of each task, as it is and with other names."""
    rng, kinds = random.Random("tokenizer"), kinds_of(tasks)
    shown = [demonstration(task, settings.noise, settings.horizon, True, rng) for task in tasks]
    shown += [renamed(parts, kinds, rng) for parts in shown]
    return ["".join(text for text, _ in parts) for parts in shown]


def world(games: Path, settings: Settings) -> Any:
    from trainer import World

    return World(tasks_of(games, "train"), measured(tasks_of(games, "test"), settings.test_tasks), ALFWorld)
