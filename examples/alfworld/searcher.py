"""The scripted searcher: it knows the goal's sentence, what it observed and the admissible commands, nothing else.

What it remembers is a function of its own commands and observations.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

from alfworld_game import goal_of

APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}


@dataclass(frozen=True)
class Memory:
    """What the searcher remembers; hashable, so that values can be shared."""

    at: str = ""  # the receptacle it stands at
    closed: bool = False  # and whether that is closed
    held: str = ""
    changed: frozenset[str] = frozenset()  # objects that were cleaned, heated, cooled
    placed: frozenset[str] = frozenset()  # of the goal's objects, those that it put into the goal's place
    visited: frozenset[str] = frozenset()
    seen: frozenset[tuple[str, str]] = frozenset()  # (thing that matters, receptacle)


class Searcher:
    """The policy: `act` draws a command, `remember` processes the observation."""

    def __init__(self, task: str, noise: float) -> None:
        self.goal, self.noise = goal_of(task), noise
        self.lamp = self.goal["place"] if self.goal["change"] == "light" else ""

    def act(self, memory: Memory, commands: tuple[str, ...], rng: random.Random) -> str:
        if rng.random() < self.noise:
            return rng.choice(commands)
        wish = self._wish(memory, commands, rng)
        return wish if wish in commands else rng.choice(commands)

    def _wish(self, memory: Memory, commands: tuple[str, ...], rng: random.Random) -> str:
        goal, held, at = self.goal, memory.held, memory.at
        if held and _kind(held) == goal["object"]:
            if goal["change"] == "light":
                use = next((c for c in commands if c.startswith(f"use {self.lamp}")), None)
                return use or self._look_for(self.lamp, memory, commands, rng)
            if goal["change"] and held not in memory.changed:
                appliance = APPLIANCES[goal["change"]]
                change = next((c for c in commands if c.startswith(f"{goal['change']} {held} with {appliance}")), None)
                return change or self._go(commands, appliance, rng)
            if _kind(at) == goal["place"]:
                return f"open {at}" if memory.closed else f"put {held} in/on {at}"
            return self._go(commands, goal["place"], rng)
        if held:  # picked up by a stray command
            return (
                f"open {at}"
                if memory.closed
                else next((c for c in commands if c.startswith("put ")), "") or self._go(commands, "", rng)
            )
        return self._look_for(goal["object"], memory, commands, rng)

    def _look_for(self, kind: str, memory: Memory, commands: tuple[str, ...], rng: random.Random) -> str:
        known = sorted(place for thing, place in memory.seen if _kind(thing) == kind and thing not in memory.placed)
        if memory.at in known:
            if memory.closed:
                return f"open {memory.at}"
            things = sorted(
                t for t, place in memory.seen if place == memory.at and _kind(t) == kind and t not in memory.placed
            )
            return f"take {things[0]} from {memory.at}"
        if known:
            return f"go to {known[0]}"
        if memory.closed:
            return f"open {memory.at}"
        fresh = [c for c in commands if c.startswith("go to ") and c[6:] not in memory.visited]
        return rng.choice(fresh) if fresh else self._go(commands, "", rng)

    def _go(self, commands: tuple[str, ...], kind: str, rng: random.Random) -> str:
        fitting = [c for c in commands if c.startswith("go to ") and (not kind or _kind(c[6:]) == kind)]
        return rng.choice(fitting) if fitting else rng.choice(commands)

    def remember(self, memory: Memory, command: str, observed: str) -> Memory:
        if observed == "Nothing happens.":
            return memory
        if command.startswith("go to "):
            memory = replace(memory, at=command[6:], visited=memory.visited | {command[6:]})
            return self._see(memory, memory.at, observed)
        if command.startswith("open "):
            return self._see(memory, command[5:], observed)
        if command.startswith("close "):
            return replace(memory, closed=True)
        if match := re.fullmatch(r"take (.+) from (.+)", command):
            return replace(
                memory, held=match[1], placed=memory.placed - {match[1]},
                seen=frozenset(pair for pair in memory.seen if pair[0] != match[1]),
            )  # fmt: skip
        if match := re.fullmatch(r"put (.+) in/on (.+)", command):
            placed, seen = memory.placed, memory.seen
            if _kind(match[1]) == self.goal["object"]:
                seen |= {(match[1], match[2])}
                done = not self.goal["change"] or match[1] in memory.changed
                if _kind(match[2]) == self.goal["place"] and done:
                    placed |= {match[1]}
            return replace(memory, held="", placed=placed, seen=seen)
        if match := re.fullmatch(r"(clean|heat|cool) (.+) with (.+)", command):
            change = self.goal["change"]
            if match[1] == change:
                return replace(memory, changed=memory.changed | {match[2]})
            if {match[1], change} == {"heat", "cool"}:  # one undoes the other
                return replace(memory, changed=memory.changed - {match[2]})
        return memory

    def _see(self, memory: Memory, place: str, observed: str) -> Memory:
        closed = observed.endswith("is closed.")
        listed = observed.rpartition("you see ")[2] if "you see " in observed else ""
        things = re.findall(r"a ([a-z]+ \d+)", listed)
        matter = {t for t in things if _kind(t) in (self.goal["object"], self.lamp)}
        seen = {pair for pair in memory.seen if pair[1] != place} if not closed else set(memory.seen)
        return replace(memory, closed=closed, seen=frozenset(seen | {(t, place) for t in matter}))


def _kind(name: str) -> str:
    return name.rpartition(" ")[0]
