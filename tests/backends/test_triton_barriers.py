"""Barriers of the Triton kernels: what one thread writes to memory, another reads after a barrier and not before.

The interpreter runs a program's threads as one, so a barrier that is missing changes none of its results.  Here
Triton's own intermediate code is walked: accesses to one argument, of which one writes, must have a barrier between
them unless each thread meets its own elements, which is so where both are tensors of one shape.
"""

import re
from dataclasses import dataclass, field

import pytest
from compiled_triton import FOR_SM_90, name_of, resources

WITH_BARRIERS = ("_scan_groups", "key_kernel")
ALIASES = {"%state": "%gram"}  # of the scan: one tensor, where there is one ε

OP = re.compile(r"(?:(%\w+)(?::\d+)? = )?([\w.]+)\b(.*)")
SAME_BASE = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.bitcast", "tt.expand_dims")
BARRIERS = ("ttg.barrier", "gpu.barrier")
Access = tuple[str, str, bool, int]  # argument, shape ("": a scalar), whether it writes, line


@dataclass
class Walk:
    """Walks a kernel's code in order, loops twice, and keeps the accesses since the last barrier."""

    lines: list[str]
    bases: dict[str, str] = field(default_factory=dict)  # of a pointer: the kernel's argument
    races: set[tuple[str, str]] = field(default_factory=set)

    def base(self, name):
        return self.bases.get(name.partition("#")[0], "")

    def block(self, i, since):
        """From line i to the brace that closes its block: that line, and the accesses since the last barrier."""
        while not (line := self.lines[i].strip()).startswith("}"):
            i, since = self.operation(i, line.partition(" loc(")[0], since)
            i += 1
        return i, since

    def operation(self, i, line, since):
        match = OP.match(line)
        result, op, rest = match.groups() if match else (None, "", "")
        for name, value in re.findall(r"(%\w+) = (%[\w#]+)", rest):  # what a loop carries
            self.bases[name] = self.base(value)
        first = re.search(r"%[\w#]+", rest)
        if op in SAME_BASE and first:
            self.bases[result] = self.base(first[0])
        elif op in ("tt.load", "tt.store") and self.base(first[0]):
            shape = re.search(r": (?:tensor<([\dx]+)x)?!tt\.ptr", rest)[1] or ""
            since = self.access((self.base(first[0]), shape, op == "tt.store", i), since)
        elif op in BARRIERS:
            since = set()
        elif op == "scf.if":
            i, taken = self.block(i + 1, since)
            other = since
            if self.lines[i].strip().startswith("} else"):
                i, other = self.block(i + 1, since)
            since = taken | other
        elif op in ("scf.for", "scf.while"):
            for begin in (i, i):
                i, since = self.block(begin + 1, since)
                if self.lines[i].strip().startswith("} do"):
                    i, since = self.block(i + 1, since)
        elif line.endswith("{"):  # of a reduction
            i, since = self.block(i + 1, since)
        return i, since

    def access(self, now, since):
        argument, shape, writes, line = now
        for other, other_shape, other_writes, at in since:
            # A scalar is loaded by every thread and stored by one.
            own = shape == other_shape and (shape != "" or (writes and other_writes))
            if argument == other and (writes or other_writes) and not own:
                self.races.add((self.lines[at].strip(), self.lines[line].strip()))
        return since | {now}


def races(lines):
    """Accesses with no barrier between them that need one."""
    begin = next(i for i, line in enumerate(lines) if "tt.func" in line)
    walk = Walk(lines)
    for name in re.findall(r"(%\w+): !tt\.ptr", lines[begin]):
        walk.bases[name] = ALIASES.get(name, name)
    walk.block(begin + 1, set())
    return walk.races


@pytest.mark.parametrize("launch", FOR_SM_90, ids=name_of)
def test_every_exchange_has_its_barrier_and_every_barrier_its_exchange(launch):
    lines = resources.build(launch, 90).asm["ttir"].splitlines()
    assert races(lines) == set()
    barriers = [i for i, line in enumerate(lines) if any(name in line for name in BARRIERS)]
    assert barriers or launch.name not in WITH_BARRIERS
    if launch.name == "_jacobi":  # which rows meet there depends on the round, which races() does not follow
        order = re.findall(r"tt\.load|tt\.store|barrier", "\n".join(line.partition(" loc(")[0] for line in lines))
        assert order == [*["tt.load"] * 2, "barrier", *["tt.store"] * 2, "barrier", *["tt.load"] * 2, "tt.store"]
    else:
        assert [lines[i] for i in barriers if not races(lines[:i] + lines[i + 1 :])] == []
