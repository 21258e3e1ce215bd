"""What the CUDA scan costs, read off its machine code (`python -m bench sass`); no GPU takes part.

One decision waits for the one before, so a group takes its records times one turn of the decision loop of
csrc/cuda/clusters.cu, what lies between two panels, and more where the workers that prepare the next panel are slower.
The loops are found in what nvcc makes for sm_90a: the decision loop is the smallest with a reciprocal square root,
which a join needs; the workers' is the smallest that loads a product for each of 32 decisions.  In each instruction the
compiler has written how long the next one waits, which of six scoreboards it sets, and which it waits for: a model of
cycles follows, of one warp by itself, with the latencies below.  They are published measurements of an H100 by others;
the model has not been calibrated on a GPU and is good for comparing one version with another.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bipace_kernels.backends.cuda._launch import SOURCES

from .cuda_resources import to_cubin
from .resources import cuobjdump

CLOCK_GHZ = 1.98  # of an H100's multiprocessors at most
# Cycles until a result that a scoreboard watches is there.
LATENCY = {
    "LDG": 270,  # from the L2 cache, where the Gram matrix has just been written
    "LD": 33, "LDC": 40, "LDS": 29, "SHFL": 24, "REDUX": 28, "MUFU": 22, "FLO": 14, "POPC": 14, "BREV": 14, "I2F": 14,
    "F2I": 14, "I2FP": 8, "R2UR": 12, "S2R": 24,
}  # fmt: skip
OTHER = 16  # of any other instruction with a scoreboard: until operands are read, moves between kinds of registers
GLOBAL = ("LDG", "LD")  # LD: the address may be anywhere; the workers' S is in shared memory
Cost = Callable[["Instruction"], int]  # of ways through the code

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
    sets: dict[int, int]  # cycles until it frees each scoreboard: of its result, and of its operands
    waits: tuple[int, ...]

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]

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
            sets = {read: OTHER, wrote: LATENCY.get(instruction.split(".")[0], OTHER)}
            sets, waited = {b: sets[b] for b in sets if b < 6}, tuple(b for b in range(6) if waits >> b & 1)
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

    def way(
        self, start: int, end: int, cost: Cost, within: Iterable[int], avoid: Iterable[int] = ()
    ) -> list[Instruction]:
        """The cheapest way from one instruction to another; inner loops once.  ValueError: there is none."""
        best: dict[int, tuple[int, int]] = {}  # by place: the cost from there on, and where to go
        order = {place: (place < start, place) for place in set(within).difference(avoid)}
        for place in sorted(order, key=order.__getitem__, reverse=True):
            ahead = [(0, then) if then == end else (best[then][0], then) for then in self.after[place]
                     if then == end or (then in best and order[then] > order[place])]  # fmt: skip
            if ahead:
                rest, then = min(ahead)
                best[place] = rest + cost(self.instructions[place]), then
        if start not in best:
            raise ValueError(f"no way leads from {start:04x} to {end:04x}")
        way = [start]
        while best[way[-1]][1] != end:
            way.append(best[way[-1]][1])
        return [self.instructions[place] for place in way]


def quick(one: Instruction) -> int:
    """Cycles until the next instruction, without what it waits for."""
    return max(one.stall, 1)


def slow(one: Instruction) -> int:
    return -quick(one)


def through(*kinds: str, but: str = "") -> Cost:
    """The cost of a quick way through as many instructions of some kinds as possible, and as few of another."""
    return lambda one: quick(one) - 10_000 * (one.kind in kinds) + 1_000_000 * (one.kind == but)


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
            for b, after in one.sets.items():
                ready[b] = max(ready[b], now + (after if latency else 0))
            now += max(one.stall, 1)
    return starts[-1] - starts[-2]


def waited_loads(way: Sequence[Instruction]) -> list[str]:
    """Loads from global memory whose scoreboard something waits for before a turn is over."""
    found = []
    for i, one in enumerate(way):
        if one.kind not in GLOBAL:
            continue
        for n, other in enumerate([*way[i + 1 :], *way[:i]], 1):
            if set(one.sets) & set(other.waits):
                found.append(f"{one}, waited for {n} instructions later by {other}")
                break
    return found


def decision_loop(instructions: Sequence[Instruction]) -> tuple[Loop, Turn]:
    """The loop and its slowest turn with a join, but for calls and loops inside.  ValueError where there is none."""
    code = Code.of(instructions)
    loops = code.loops()

    def joins(places: Iterable[int]) -> bool:
        return any(code.instructions[place].name.startswith("MUFU.RSQ") for place in places)

    found = [loop for loop in loops if joins(loop.body)]
    if not found:
        raise ValueError("no loop of this kernel has a reciprocal square root")
    loop = found[0]
    inside = [other.body for other in loops if other.body < loop.body and not joins(other.body)]
    calls = {place for place in loop.body if code.instructions[place].kind == "CALL"}
    way = code.way(loop.head, loop.head, slow, loop.body, frozenset().union(*inside, calls))
    if not joins(one.at for one in way):
        raise ValueError("no turn of the decision loop joins")
    return loop, Turn(way, cycles(way), cycles(way, latency=False), waited_loads(way))


# Of csrc/cuda/clusters.cu; BUSY: workers of a scheduler; OWN: a panel's own decisions that a worker applies together.
PANEL, WORKERS, BUSY, AT_ONCE, OWN = 32, 12, 4, 4, 4


@dataclass(frozen=True)
class Scan:
    """Cycles of the scan's parts, and instructions where others want the same scheduler."""

    join: int  # of a record that joins
    seed: int  # of one that begins a cluster
    around: int  # of the warp that decides, between two panels
    own: tuple[int, int]  # meanwhile, of a worker that applies up to four of the panel's own decisions, and four more
    start: tuple[int, int]  # of a worker until it looks at decisions: at its own clusters', and in a team
    helper: int  # and of the helper that keeps the sizes of up to 128 clusters, by which it assigns them
    look: tuple[int, int]  # of a worker that looks at 128 decisions, and the instructions
    single: tuple[int, int]  # that applies 32 of its only cluster
    several: tuple[int, int]  # that sorts 32 before, and finds one cluster
    mixed: tuple[int, int]  # and finds 32 clusters

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> Scan:
        """ValueError where the machine code has no such parts."""
        code, (loop, turn) = Code.of(instructions), decision_loop(instructions)
        loops = code.loops()

        def kinds(places: Iterable[int]) -> Counter[str]:
            return Counter(code.instructions[place].kind for place in places)

        def panel_of(inner: Loop | None) -> frozenset[int]:
            """The loop over panels around a loop."""
            around = (one.body for one in loops if inner and inner.body < one.body and kinds(one.body)["BAR"] == 2)
            return next(around, frozenset())

        def time(start: int, end: int, of: Cost, within: Iterable[int], avoid: Iterable[int] = ()) -> int:
            return cycles(code.way(start, end, of, within, avoid))

        def cost(place: int, of: Cost, within: Iterable[int]) -> tuple[int, int]:
            return time(place, place, of, within), len(code.way(place, place, of, within))

        work = next((one for one in loops if kinds(one.body)["LDG"] >= PANEL and "MUFU" not in kinds(one.body)), None)
        outer = next((one for one in loops if work and work.body < one.body), None)
        again = next((one for one in loops if loop.body < one.body), None)
        decides, works = panel_of(loop), panel_of(work)
        helps = panel_of(next((one for one in loops if kinds(one.body)["LDGSTS"]), None))
        own = next((one for one in loops if one.body < works and kinds(one.body)["FFMA"] == OWN), None)
        if not (work and outer and again and own and decides and works and helps):
            raise ValueError("no loop of this kernel loads a product for each of 32 decisions")
        joins = {place for place in loop.body if code.instructions[place].name.startswith("MUFU.RSQ")}
        barriers = {place for place in code.instructions if code.instructions[place].kind == "BAR"}
        (begin, end), (before, after), (free, done) = (sorted(body & barriers) for body in (decides, works, helps))
        looks = works - outer.body
        return cls(
            join=turn.cycles,
            seed=time(again.head, again.head, slow, again.body, joins),
            around=time(begin, loop.head, quick, decides) + time(loop.head, end, quick, decides, joins),
            own=(time(after, before, through("FFMA"), works), time(own.head, own.head, quick, own.body)),
            start=(time(before, outer.head, quick, looks), time(before, outer.head, through("LDS"), looks)),
            helper=time(done, free, through("STS", but="SHFL"), helps),
            look=cost(outer.head, through("LDG", but="SHFL"), outer.body),
            single=cost(work.head, through("LDG", "FFMA", "STS", but="ST"), work.body),
            several=cost(work.head, through("LDG", "FFMA", "STS", "SHFL", but="ST"), work.body),
            mixed=cost(work.head, slow, work.body),
        )

    def panel(self, n: int, before: int, clusters: int, largest: float) -> tuple[float, float]:
        """Cycles of the chain and of the slowest workers in a panel of n records; one cluster has a share of all."""
        team = max(int(largest * WORKERS), 1)  # of the large one, each with a panel of its own to look ahead to
        workers = WORKERS - team * (largest > 0)
        others, one = (1 - largest) * before / workers / PANEL, (before / team + PANEL * (1 - 1 / team)) / PANEL
        begins = min(clusters / workers / PANEL, 1)  # of a batch: where another cluster's decisions begin

        def spent(i: int) -> float:
            batch = self.several[i] + begins * (self.mixed[i] - self.several[i])
            for_large = one * (self.look[i] / AT_ONCE + largest * self.single[i])
            return max(before / PANEL / AT_ONCE * self.look[i] + others * batch, for_large)

        return n * self.join, self.start[largest > 0] + max(spent(0), BUSY * spent(1))

    def record(self, n: int, clusters: int, largest: float) -> float:
        """Cycles of a record in a group of n."""
        panels = [self.panel(min(PANEL, n - before), before, clusters, largest) for before in range(0, n, PANEL)]
        slowest = sum(max(panel) for panel in panels[:-1]) + panels[-1][0]
        own = self.own[0] + self.own[1] * (math.ceil(PANEL * max(largest, 1 / 4) / OWN) - 1)  # one worker has so many
        between = self.around + max(own, self.helper)
        return (slowest + (len(panels) - 1) * between + clusters * (self.seed - self.join)) / n


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
        description="Instructions and modelled cycles of the CUDA scan and of its workers; needs nvcc, no GPU.",
    )
    parser.add_argument("--cubin", type=Path, metavar="FILE", help="read this one instead of compiling")
    parser.add_argument("--kernel", default="scan_groups", help="default: scan_groups")
    parser.add_argument("--list", action="store_true", help="print the turn's instructions")
    arguments = parser.parse_args(argv)
    instructions = read(arguments.cubin, arguments.kernel)
    scan, (loop, turn) = Scan.of(instructions), decision_loop(instructions)
    for one in turn.instructions if arguments.list else ():
        sets, waits = ("".join(map(str, some)) for some in (one.sets, one.waits))
        sys.stdout.write(f"stall {one.stall:2d}  sets {sets:2s} waits {waits:4s} {one}\n")
    spilled = [str(one) for one in instructions if one.kind in ("LDL", "STL")]
    sys.stdout.write(
        f"decision loop of {arguments.kernel} at {loop.head:04x}: {len(turn.instructions)} instructions for a join,\n"
        f"{turn.cycles} cycles by the model ({turn.cycles / CLOCK_GHZ:.0f} ns at {CLOCK_GHZ} GHz), "
        f"{turn.no_memory} if loads and special functions took none\n"
        f"loads from global memory that are waited for: {turn.waited or 'none'}\n"
        f"spills: {spilled or 'none'}\n{scan}\n"
    )
    for n, clusters, largest in itertools.product((400, 2048), (16, 100), (0, 0.6)):
        ns = scan.record(n, clusters, largest) / CLOCK_GHZ
        sys.stdout.write(f"{n} records, {clusters} clusters, {largest:.0%} in one of them: {ns:.0f} ns a record\n")
    return int(bool(turn.waited or spilled))
