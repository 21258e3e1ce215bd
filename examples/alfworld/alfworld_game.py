"""An ALFWorld game as a graph that grows on demand: states as facts, commands as edges, with the game's texts.

TextWorld runs these games at tens of steps per second, since it renders every command at every step, and it cannot
return to a state. The games themselves are planning problems that Fast Downward's translator (part of TextWorld)
grounds into a finite list of operators. This module applies the operators and writes the texts of the games' own
grammar, a thousand times as fast; `compare()` compares it with TextWorld. Intended differences: no "You arrive at loc
4. " (as in ReAct), objects listed by name instead of in the order of a set.

Needs textworld[pddl] (1.7.0), of which it only uses the translator.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Operator:
    """One grounded action: what must hold, what it changes, and how the player calls it."""

    name: str
    arguments: tuple[str, ...]
    conditions: tuple[tuple[int, int], ...]  # (variable, value)
    effects: tuple[tuple[tuple[tuple[int, int], ...], int, int], ...]  # (conditions, variable, value)
    command: str


@dataclass
class Node:
    """One state. `key` are the values of all variables, so equal keys are equal states."""

    key: bytes
    won: bool
    operators: dict[str, Operator]  # by command
    commands: tuple[str, ...]  # admissible, sorted
    after: dict[str, tuple[Node, str]] = field(default_factory=dict)


def grounded(path: Path) -> dict[str, Any]:
    """The data of a Game, JSON-able: the translator's output for a game.tw-pddl.  Needs textworld[pddl]."""
    import fast_downward

    data = json.loads(path.read_text(encoding="utf-8"))
    task, sas = fast_downward.pddl2sas(data["pddl_domain"], data["pddl_problem"], verbose=False)
    facts = [atom for atom in task.init if type(atom).__name__ == "Atom" and atom.predicate != "="]
    return {
        "task": re.search(r"Your task is to: ([^\"]+?)\"", data["grammar"])[1].strip(),  # type: ignore[index]
        "objects": [o.name.lower() for o in task.objects],
        "facts": [[atom.predicate.lower(), *(a.lower() for a in atom.args)] for atom in facts],
        "sas": sas,
    }


class Game:
    """`start` and `intro`; `step(node, command)` gives (node, observation). The node says whether the game is won.

    Made from a game.tw-pddl, or from the result of `grounded()`.
    """

    def __init__(self, source: Path | dict[str, Any]) -> None:
        data = grounded(source) if isinstance(source, Path) else source
        self.task: str = data["task"]
        self.names = _names(data["objects"])
        lines = data["sas"].split("\n")
        self._variables(lines)
        self.static: dict[str, list[tuple[str, ...]]] = defaultdict(list)
        for predicate, *arguments in data["facts"]:
            if (predicate, tuple(arguments)) not in self.place:
                self.static[predicate].append(tuple(arguments))
        self.receptacle_at = dict(self._all_static("receptacleatlocation"))
        self.openable = {a[0] for a in self._all_static("openable")}
        self.toggleable = {a[0] for a in self._all_static("toggleable")}
        self.holders = {a[0] for a in self._all_static("isreceptacleobject")}
        self._operators(lines)
        self.nodes: dict[bytes, Node] = {}
        self.start = self.node(bytes(self.initial))
        seen = sorted(self.receptacle_at, key=self._order)
        look = "You are in the middle of a room. Looking quickly around you, you see " + self._listed(seen) + "."
        self.intro = f"{look}\n\nYour task is to: {self.task}"

    # ---- the translator's output

    def _variables(self, lines: list[str]) -> None:
        self.place: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}  # fact: (variable, value)
        layer: list[int] = []  # of derived variables, by which rules are ordered
        for at in (i for i, line in enumerate(lines) if line == "begin_variable"):
            number = len(layer)
            layer.append(int(lines[at + 2]))
            for value in range(int(lines[at + 3])):
                match = re.match(r"Atom (.+?)\((.*)\)", lines[at + 4 + value])
                if match:
                    self.place[match[1], tuple(a for a in match[2].split(", ") if a)] = (number, value)
        self.facts = {where: fact for fact, where in self.place.items()}
        begin = lines.index("begin_state") + 1
        self.initial = [int(line) for line in lines[begin : lines.index("end_state")]]
        begin = lines.index("begin_goal")
        self.goal = [_pair(line) for line in lines[begin + 2 : lines.index("end_goal")]]
        self.rules: list[tuple[tuple[tuple[int, int], ...], int, int, int]] = []  # conditions, variable, from, to
        for at in (i for i, line in enumerate(lines) if line == "begin_rule"):
            n = int(lines[at + 1])
            variable, old, new = map(int, lines[at + 2 + n].split())
            self.rules.append((tuple(_pair(line) for line in lines[at + 2 : at + 2 + n]), variable, old, new))
        self.rules.sort(key=lambda rule: layer[rule[1]])
        self.derived = list({variable: old for _, variable, old, _ in self.rules}.items())  # what rules start from
        self.by_predicate: dict[str, list[tuple[tuple[str, ...], int, int]]] = defaultdict(list)
        self.by_holder: dict[tuple[str, str], list[tuple[str, int, int]]] = defaultdict(list)
        for (predicate, arguments), (variable, value) in self.place.items():
            self.by_predicate[predicate].append((arguments, variable, value))
            if len(arguments) == 2:
                self.by_holder[predicate, arguments[1]].append((arguments[0], variable, value))

    def _operators(self, lines: list[str]) -> None:
        at_location = {where for (name, _), where in self.place.items() if name == "atlocation"}
        self.everywhere: list[Operator] = []
        self.somewhere: dict[tuple[int, int], list[Operator]] = defaultdict(list)
        for at in (i for i, line in enumerate(lines) if line == "begin_operator"):
            name, *arguments = lines[at + 1].split()
            n = int(lines[at + 2])
            conditions = [_pair(line) for line in lines[at + 3 : at + 3 + n]]
            effects = []
            for line in lines[at + 4 + n : at + 4 + n + int(lines[at + 3 + n])]:
                numbers = [int(x) for x in line.split()]
                m = numbers[0]
                when = tuple(zip(numbers[1 : 1 + 2 * m : 2], numbers[2 : 2 + 2 * m : 2], strict=True))
                variable, old, new = numbers[1 + 2 * m :]
                if old >= 0:
                    conditions.append((variable, old))
                effects.append((when, variable, new))
            operator = Operator(
                name, tuple(arguments), tuple(conditions), tuple(effects), self._command(name, arguments)
            )
            where = next((c for c in conditions if c in at_location), None)
            (self.everywhere if where is None else self.somewhere[where]).append(operator)

    def _command(self, name: str, arguments: list[str]) -> str:
        """As the grammar's templates have it; arguments in the order of the domain's parameters."""
        names = [self.names.get(a, a) for a in arguments]
        if name == "gotolocation":
            return f"go to {names[3]}"
        if name in ("openobject", "closeobject"):
            return f"{name[:-6]} {names[2]}"
        if name == "pickupobject":
            return f"take {names[2]} from {names[3]}"
        if name == "putobject":
            return f"put {names[2]} in/on {names[3]}"
        if name in ("heatobject", "coolobject", "cleanobject"):
            return f"{name[:-6]} {names[3]} with {names[2]}"
        if name == "sliceobject":
            return f"slice {names[2]} with {names[3]}"
        if name in ("examinereceptacle", "examineobject", "toggleobject"):
            verb = "use" if name == "toggleobject" else "examine"
            return f"{verb} {names[EXAMINED[name]]}"
        if name in ("look", "inventory"):
            return name
        raise ValueError(f"the game has an action {name!r} that is not written here.")

    # ---- states

    def node(self, key: bytes) -> Node:
        found = self.nodes.get(key)
        if found is None:
            operators: dict[str, Operator] = {}
            buckets = [self.everywhere]
            buckets += [ops for (variable, value), ops in self.somewhere.items() if key[variable] == value]
            for operator in (operator for bucket in buckets for operator in bucket):
                for variable, value in operator.conditions:
                    if key[variable] != value:
                        break
                else:
                    operators.setdefault(operator.command, operator)
            won = all(key[variable] == value for variable, value in self.goal)
            found = self.nodes[key] = Node(key, won, operators, tuple(sorted(operators)))
        return found

    def step(self, node: Node, command: str) -> tuple[Node, str]:
        found = node.after.get(command)
        if found is None:
            operator = node.operators.get(command)
            if operator is None:
                return node, "Nothing happens."
            state = bytearray(node.key)
            for when, variable, value in operator.effects:
                if all(node.key[v] == x for v, x in when):
                    state[variable] = value
            for variable, value in self.derived:
                state[variable] = value
            changed = True
            while changed:
                changed = False
                for conditions, variable, old, new in self.rules:
                    if state[variable] == old and all(state[v] == x for v, x in conditions):
                        state[variable], changed = new, True
            after = self.node(bytes(state))
            found = node.after[command] = (after, self._feedback(operator, after.key))
        return found

    # ---- texts

    def holds(self, key: bytes, predicate: str, *arguments: str) -> bool:
        where = self.place.get((predicate, arguments))
        return arguments in self.static[predicate] if where is None else key[where[0]] == where[1]

    def _inside(self, key: bytes, predicate: str, holder: str) -> list[str]:
        found = [item for item, variable, value in self.by_holder[predicate, holder] if key[variable] == value]
        return sorted(found + [a[0] for a in self.static[predicate] if a[1] == holder], key=self._order)

    def _all_static(self, predicate: str) -> list[tuple[str, ...]]:
        """Facts that hold at the beginning, of predicates that nothing changes."""
        moving = [a for a, variable, value in self.by_predicate[predicate] if self.initial[variable] == value]
        return [*self.static[predicate], *moving]

    def _order(self, item: str) -> tuple[str, int]:
        name, _, number = self.names[item].rpartition(" ")
        return name, int(number)

    def _listed(self, items: list[str]) -> str:
        names = ["a " + self.names[item] for item in items]
        if not names:
            return "nothing"
        return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]

    def _seen(self, key: bytes, receptacle: str) -> str:
        name, inside = self.names[receptacle], self._listed(self._inside(key, "inreceptacle", receptacle))
        if receptacle not in self.openable:
            return f"On the {name}, you see {inside}."
        if self.holds(key, "opened", receptacle):
            return f"The {name} is open. In it, you see {inside}."
        return f"The {name} is closed."

    def _feedback(self, operator: Operator, key: bytes) -> str:
        a, name = operator.arguments, operator.name
        names = [self.names.get(x, x) for x in a]
        if name == "gotolocation":
            return self._seen(key, a[3])
        if name == "examinereceptacle":
            return self._seen(key, a[EXAMINED[name]])
        if name == "openobject":
            return f"You open the {names[2]}. {self._seen(key, a[2])}"
        if name == "closeobject":
            return f"You close the {names[2]}."
        if name == "pickupobject":
            return f"You pick up the {names[2]} from the {names[3]}."
        if name == "putobject":
            return f"You put the {names[2]} in/on the {names[3]}."
        if name in ("heatobject", "coolobject", "cleanobject"):
            return f"You {name[:-6]} the {names[3]} using the {names[2]}."
        if name == "sliceobject":
            return f"You sliced the {names[2]} with the {names[3]}."
        if name == "toggleobject":
            item = a[EXAMINED[name]]
            if item not in self.toggleable:
                return f"You don't see any switch on the {self.names[item]}."
            return f"You turn {'on' if self.holds(key, 'istoggled', item) else 'off'} the {self.names[item]}."
        if name == "inventory":
            held = [x[1] for x, variable, value in self.by_predicate["holds"] if key[variable] == value]
            return f"You are carrying: {self._listed(held)}." if held else "You are not carrying anything."
        if name == "look":
            return self._look(key)
        return self._examined(key, a[EXAMINED[name]])

    def _look(self, key: bytes) -> str:
        at = next(x[1] for x, variable, value in self.by_predicate["atlocation"] if key[variable] == value)
        here = sorted((r for r, place in self.receptacle_at.items() if place == at), key=self._order)
        if not here:
            seen = sorted(self.receptacle_at, key=self._order)
            return f"You are in the middle of a room. Looking quickly around you, you see {self._listed(seen)}."
        facing = [self.names[r] for r in here]
        text = facing[0] if len(facing) == 1 else ", ".join(facing[:-1]) + ", and " + facing[-1]
        floor = [
            x[0] for x, variable, value in self.by_predicate["objectatlocation"]
            if x[1] == at and key[variable] == value
        ] + [x[0] for x in self.static["objectatlocation"] if x[1] == at]  # fmt: skip
        floor = [o for o in floor if any(not self.holds(key, "inreceptacle", o, r) for r in here)]
        return f"You are facing the {text}. Next to it, you see {self._listed(sorted(floor, key=self._order))}."

    def _examined(self, key: bytes, item: str) -> str:
        name = self.names[item]
        if item in self.holders:
            inside = self._listed(self._inside(key, "inreceptacleobject", item))
            return f"This is a normal {name}. In it, you see {inside}."
        clean, hot, cool, sliced = (self.holds(key, p, item) for p in ("isclean", "ishot", "iscool", "issliced"))
        words = {(1, 1, 0): "hot and clean", (1, 0, 1): "cool and clean", (1, 1, 1): "hot and clean",
                 (1, 0, 0): "clean",
                 (0, 1, 0): "hot", (0, 1, 1): "hot", (0, 0, 1): "cool"}  # fmt: skip
        state = words.get((clean, hot, cool), "")
        if sliced:
            return f"This is a {state + ' ' if state else ''}sliced {name}."
        if state:
            return f"This is a {'cold' if state == 'cool' else state} {name}."
        if item in self.toggleable:
            return f"This {name} is {'on' if self.holds(key, 'istoggled', item) else 'off'}."
        return f"There's nothing special about {name}."


EXAMINED = {"examinereceptacle": 1, "examineobject": 1, "toggleobject": 2}  # where the operator names its thing


def _pair(line: str) -> tuple[int, int]:
    variable, value = line.split()
    return int(variable), int(value)


def _names(items: Iterable[str]) -> dict[str, str]:
    """ "apple_bar__minus_00_dot_59..." is "apple 1": numbered by the order of the ids, kind by kind; basins by their
    own kind."""
    count: dict[str, int] = defaultdict(int)
    out = {}
    for item in sorted(items):
        if "_bar_" not in item or item.startswith("loc_"):
            continue
        kind = item.split("_bar_", 1)[0]
        tail = item.rsplit("_bar_", 1)[-1]
        if tail.isalpha() and tail.endswith("basin"):
            kind = tail
        count[kind] += 1
        out[item] = f"{kind} {count[kind]}"
    return out


def compare(path: Path, steps: int, seed: int) -> list[str]:
    """Differences between this module and TextWorld's own engine over a noisy episode; empty where there are none.

    The scripted searcher plays it, with 30 % random commands, so that goals are reached too.  Observations are compared
    as sorted words, for TextWorld lists objects in the order of a set.
    """
    import textworld
    from searcher import Memory, Searcher
    from textworld.envs.pddl.pddl import PddlEnv

    game, rng = Game(path), random.Random(seed)
    env = PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True))
    env.load(str(path))
    for info in env._entity_infos.values():
        info.name = game.names.get(info.id.lower(), info.name)
    state, node, out = env.reset(), game.start, []
    policy, memory = Searcher(game.task, 0.3), Memory()
    words = _words(state.feedback)
    if words != _words("-= Welcome to TextWorld, ALFRED! =- " + game.intro):
        out.append(f"intro: {state.feedback!r} {game.intro!r}")
    for number in range(steps):
        if list(node.commands) != list(state["admissible_commands"]):
            out.append(f"{number}: commands {set(node.commands) ^ set(state['admissible_commands'])}")
            break
        command = policy.act(memory, node.commands, rng)
        state, _, done = env.step(command)
        node, text = game.step(node, command)
        memory = policy.remember(memory, command, text)
        theirs = re.sub(r"You arrive at loc\S+ ", "", state.feedback)
        if _words(theirs) != _words(text) or bool(state["won"]) != node.won:
            out.append(f"{number}: {command!r}: {theirs!r} {text!r} {state['won']} {node.won}")
        if done:
            break
    return out


def _words(text: str) -> list[str]:
    return sorted(re.sub(r"[^\w ]", " ", text).replace(" and ", " ").split())


def goal_of(task: str) -> dict[str, Any]:
    """{object, place, change: None | "clean" | "heat" | "cool" | "light", count} of a task's sentence."""
    text = task.rstrip(".").lower()
    patterns = (
        (r"(?:look at|examine) (?:the|some|a|an)? ?(\w+) (?:under|with) the (\w+)", "light", 1),
        (r"(clean|heat|cool) (?:some|a|an) (\w+) and put it (?:in|on|in/on) (\w+)", "verb", 1),
        (r"put (?:some|a|an) (clean|hot|cool) (\w+) (?:in|on|in/on) (\w+)", "state", 1),
        (r"(?:find two|put two) (\w+)(?: and put them)? (?:in|on|in/on) (\w+)", None, 2),
        (r"put (?:some|a|an) (\w+) (?:in|on|in/on) (\w+)", None, 1),
    )
    for pattern, change, count in patterns:
        match = re.fullmatch(pattern, text)
        if match and change in ("verb", "state"):
            return {
                "object": match[2],
                "place": match[3],
                "change": {"hot": "heat"}.get(match[1], match[1]),
                "count": count,
            }
        if match:
            return {"object": match[1], "place": match[2], "change": change, "count": count}
    raise ValueError(f"no pattern fits the task {task!r}.")
