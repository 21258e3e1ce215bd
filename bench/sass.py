"""What the chain of the CUDA scan costs, read off its machine code (`python -m bench sass`); no GPU takes part.

One decision waits for the one before, so a group takes its records times one turn of the decision loop of
csrc/cuda/clusters.cu.  The loop is found in what nvcc makes for sm_90a: the smallest one with a reciprocal square root,
which a join needs.
Counted is a turn that joins.  In each instruction the compiler has written how long the next one waits, which of six scoreboards it
sets, and which it waits for: a model of cycles follows, of one warp by itself, with the latencies below.  They are published
measurements of an H100 by others; the model has not been calibrated on a GPU and is good for comparing one version with another.

A load from global memory that is waited for inside the loop would stand in the chain: those are named.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bipace_kernels.backends.cuda._launch import SOURCES

from .cuda_resources import to_cubin
from .resources import cuobjdump

CLOCK_GHZ = 1.98  # of an H100's multiprocessors at most
# Cycles until a result that a scoreboard watches is there.
LATENCY = {
    "LDG": 270,  # from the L2 cache, where the Gram matrix has just been written
    "LD": 270, "LDC": 40, "LDS": 29, "SHFL": 24, "REDUX": 28, "MUFU": 22, "FLO": 14, "POPC": 14, "BREV": 14, "I2F": 14,
    "F2I": 14, "I2FP": 8, "R2UR": 12, "S2R": 24,
}  # fmt: skip
OTHER = 16  # of any other instruction with a scoreboard: stores until their operands are read, moves between kinds of registers
GLOBAL = ("LDG", "LD")  # LD: the address may be anywhere

_LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\d+|@!?U?PT)\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;\s+/\* 0x([0-9a-f]{16}) \*/"
)
_SECOND = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")


@dataclass(frozen=True)
class Instruction:
    """One instruction, with what the compiler decided about time: bits 105 to 121 of its 128."""

    at: int
    guard: str  # its predicate, or nothing
    name: str  # LDG.E.64 …
    rest: str
    stall: int  # cycles until the next one at the earliest
    sets: tuple[int, ...]  # scoreboards
    waits: tuple[int, ...]

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]

    @property
    def latency(self) -> int:
        return LATENCY.get(self.kind, OTHER)

    @property
    def goes_to(self) -> int | None:
        """Where a branch goes."""
        if self.kind != "BRA" or ".DIV" in self.name:  # the second is taken where lanes have parted
            return None
        found = re.findall(r"0x([0-9a-f]+)", self.rest)
        return int(found[-1], 16) if found else None

    @property
    def falls_through(self) -> bool:
        always = not self.guard and ".DIV" not in self.name and not re.match(r"!?U?P\d", self.rest)
        return not (always and self.kind in ("BRA", "EXIT", "RET", "BRX", "JMP"))

    def __str__(self) -> str:
        return f"{self.at:04x} {self.guard} {self.name} {self.rest}".replace("  ", " ")


def parse(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each kernel in what `cuobjdump --dump-sass` says."""
    found: dict[str, list[Instruction]] = {}
    for name, code in re.findall(r"Function : (\w+)\n(.*?)(?=Function : |\Z)", text, re.DOTALL):
        lines = code.splitlines()
        found[name] = []
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            match, second = _LINE.search(line), _SECOND.match(after)
            if match is None or second is None:
                continue
            at, guard, instruction, rest, _ = match.groups()
            high = int(second[1], 16)
            stall, wrote, read, waits = (high >> 41) & 15, (high >> 46) & 7, (high >> 49) & 7, (high >> 52) & 63
            sets, waited = tuple(b for b in (wrote, read) if b < 6), tuple(b for b in range(6) if waits >> b & 1)
            found[name].append(Instruction(int(at, 16), guard or "", instruction, rest, stall, sets, waited))
    if not found:
        raise ValueError(f"no machine code in what cuobjdump says: {text[:300]!r}")
    return found


@dataclass(frozen=True)
class Loop:
    """A loop: where it begins, and the addresses of all its instructions."""

    head: int
    body: frozenset[int]


@dataclass
class Code:
    """A kernel's instructions, and which may follow which."""

    instructions: dict[int, Instruction]
    after: dict[int, list[int]]

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Code:
        at = {instruction.at: instruction for instruction in instructions}
        follows = {one.at: two.at for one, two in itertools.pairwise(instructions)}
        after = {}
        for one in instructions:
            places = [follows[one.at]] if one.falls_through and one.at in follows else []
            after[one.at] = places + [place for place in [one.goes_to] if place in at]
        return cls(at, after)

    def loops(self) -> list[Loop]:
        """Those that jump back by an address, the smallest first: compilers lay code out so."""
        before: dict[int, list[int]] = {}
        for one, places in self.after.items():
            for place in places:
                before.setdefault(place, []).append(one)
        bodies: dict[int, set[int]] = {}
        for one, places in self.after.items():
            for head in places:
                if head > one or one not in (reach := self._from(head)):
                    continue
                body, todo = {head}, [one]
                while todo:
                    place = todo.pop()
                    if place not in body and place in reach:
                        body.add(place)
                        todo += before.get(place, [])
                bodies.setdefault(head, set()).update(body)
        return sorted((Loop(head, frozenset(body)) for head, body in bodies.items()), key=lambda loop: len(loop.body))

    def _from(self, place: int) -> set[int]:
        seen, todo = set(), [place]
        while todo:
            place = todo.pop()
            if place not in seen:
                seen.add(place)
                todo += self.after[place]
        return seen

    def turns(self, loop: Loop, avoid: frozenset[int]) -> Iterator[list[Instruction]]:
        """The ways once round a loop that avoid some places."""
        stack = [(loop.head, [self.instructions[loop.head]])]
        while stack:
            place, way = stack.pop()
            for then in self.after[place]:
                if then == loop.head:
                    yield way
                elif then in loop.body and then not in avoid and all(one.at != then for one in way):
                    stack.append((then, [*way, self.instructions[then]]))


@dataclass(frozen=True)
class Turn:
    """A turn of the decision loop that joins."""

    instructions: list[Instruction]
    cycles: int
    no_memory: int  # cycles where all that scoreboards watch were there at once
    waited: list[str]  # loads from global memory that are waited for within a turn


def cycles(way: Sequence[Instruction], *, latency: bool = True) -> int:
    """Of a turn when it follows itself."""
    ready, now, starts = [0] * 6, 0, []
    for _ in range(8):
        starts.append(now)
        for one in way:
            now = max([now, *(ready[b] for b in one.waits)])
            for b in one.sets:
                ready[b] = max(ready[b], now + (one.latency if latency else 0))
            now += max(one.stall, 1)
    return starts[-1] - starts[-2]


def waited_loads(way: Sequence[Instruction]) -> list[str]:
    """Loads from global memory whose scoreboard something waits for before a turn is over."""
    found = []
    for i, one in enumerate(way):
        if one.kind not in GLOBAL:
            continue
        for n, other in enumerate([*way[i + 1 :], *way[:i]], 1):
            if set(one.sets[:1]) & set(other.waits):
                found.append(f"{one}, waited for {n} instructions later by {other}")
                break
    return found


def decision_loop(instructions: Sequence[Instruction]) -> tuple[Loop, Turn]:
    """The loop and its longest turn with a join, but for calls and loops inside.  ValueError where there is none."""
    code = Code.of(instructions)
    loops = code.loops()

    def joins(places: frozenset[int]) -> bool:
        return any(code.instructions[place].name.startswith("MUFU.RSQ") for place in places)

    found = [loop for loop in loops if joins(loop.body)]
    if not found:
        raise ValueError("no loop of this kernel has a reciprocal square root")
    loop = found[0]
    inside = [other.body for other in loops if other.body < loop.body and not joins(other.body)]
    calls = {place for place in loop.body if code.instructions[place].kind == "CALL"}
    ways = [
        way for way in code.turns(loop, frozenset().union(*inside, calls)) if joins(frozenset(one.at for one in way))
    ]
    if not ways:
        raise ValueError("no turn of the decision loop joins")
    way = max(ways, key=len)
    return loop, Turn(way, cycles(way), cycles(way, latency=False), waited_loads(way))


def read(cubin: Path | None = None, kernel: str = "scan_groups") -> list[Instruction]:
    """A kernel's instructions; without a file csrc/cuda/clusters.cu is compiled for sm_90a."""
    with tempfile.TemporaryDirectory() as folder:
        if cubin is None:
            cubin = Path(folder) / "clusters.cubin"
            to_cubin(SOURCES / "cuda/clusters.cu", (9, 0), cubin)
        done = subprocess.run([cuobjdump(), "--dump-sass", str(cubin)], capture_output=True, text=True, check=True)
    return parse(done.stdout)[kernel]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the count and the model; exit status 1 where a turn waits for global memory."""
    parser = argparse.ArgumentParser(
        prog="bench sass",
        description="Instructions and modelled cycles of one decision of the CUDA scan; needs nvcc, no GPU.",
    )
    parser.add_argument("--cubin", type=Path, metavar="FILE", help="read this one instead of compiling")
    parser.add_argument("--kernel", default="scan_groups", help="default: scan_groups")
    parser.add_argument("--list", action="store_true", help="print the turn's instructions")
    arguments = parser.parse_args(argv)
    instructions = read(arguments.cubin, arguments.kernel)
    loop, turn = decision_loop(instructions)
    for one in turn.instructions if arguments.list else ():
        sets, waits = ("".join(map(str, some)) for some in (one.sets, one.waits))
        sys.stdout.write(f"stall {one.stall:2d}  sets {sets:2s} waits {waits:4s} {one}\n")
    spilled = [str(one) for one in instructions if one.kind in ("LDL", "STL")]
    sys.stdout.write(
        f"decision loop of {arguments.kernel} at {loop.head:04x}: {len(turn.instructions)} instructions for a join,\n"
        f"{turn.cycles} cycles by the model ({turn.cycles / CLOCK_GHZ:.0f} ns at {CLOCK_GHZ} GHz), {turn.no_memory} if loads "
        f"and special functions took none\nloads from global memory that are waited for: {turn.waited or 'none'}\n"
        f"spills: {spilled or 'none'}\n"
    )
    return int(bool(turn.waited or spilled))
