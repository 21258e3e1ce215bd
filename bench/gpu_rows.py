"""One measured figure of a GPU run with its floor, and the parts of a run that hold them."""

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from .gpu_measure import Clock, DryClock, GpuCeilings
from .measure import Timing
from .roofline import Work

REPLAY, EAGER, WALL = "graph replay", "eager, wall", "wall"


@dataclass
class GpuRow:
    """One implementation on one workload; the floor is the larger of its two parts."""

    workload: str
    name: str
    kind: str  # "ours" | "competitor" | "not available" | "failed"
    how: str
    median_ms: float | None = None
    iqr_ms: float | None = None
    rounds: int = 0
    bytes: int = 0
    flop: int = 0
    floor_bytes_ms: float | None = None
    floor_flop_ms: float | None = None
    floor_ms: float | None = None
    over_floor: float | None = None
    sm_mhz: int | None = None  # the multiprocessors' clock right after it
    agreement: str = ""
    note: str = ""


@dataclass
class Part:
    """What one process measured: its machine, its ceilings, its rows."""

    name: str
    machine: dict[str, Any]
    gpu: dict[str, Any]
    began: str
    seconds: float = 0.0
    status: str = "running"  # "done" | "failed" | "not available" | "dry run" | still "running" where it was killed
    ceilings: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # Markdown of parts that measure no time
    figures: dict[str, float] = field(default_factory=dict)  # other figures that targets ask for


@dataclass
class Bench:
    """Measures rows one by one and stores each at once; a failing row does not affect the others."""

    part: Part
    clock: Clock | DryClock
    ceilings: GpuCeilings
    seconds: float  # of all rows together
    save: Callable[[], None]
    say: Callable[[str], None]
    failures: int = 0

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds

    def row(
        self,
        workload: str,
        name: str,
        call: Callable[[], Any],
        *,
        kind: str = "ours",
        how: str = REPLAY,
        need: Work | None = None,
        check: Callable[[Any], str] = lambda _: "",
        rounds: int = 100,
        seconds: float = 5.0,
        warm_up: bool = True,
        note: str = "",
    ) -> GpuRow:
        """Times one call; its result goes through `check`, whose text is shown in the table."""
        row = GpuRow(workload, name, kind, how, note=note)
        left = self._deadline - time.monotonic()
        if left <= 0:
            row.kind, row.note = "not available", "the part's time was over"
            return self._keep(row)
        try:
            if how == REPLAY:
                timing, result = self.clock.replay(call, rounds=rounds, seconds=min(seconds, left))
            else:
                timing, result = self.clock.wall(call, rounds=rounds, seconds=min(seconds, left), warm_up=warm_up)
            row.sm_mhz = self.clock.sm_mhz()
            self._fill(row, timing, need or Work())
            row.agreement = check(result)
            wrong = any(word in row.agreement for word in ("DIFFERENT", "beyond"))
            self.failures += wrong and kind == "ours"
        except ImportError as error:
            row.kind, row.note = "not available", str(error)
        except Exception as error:  # one figure less, which the table says; the rest of the run is worth having
            self.failures += 1
            row.kind, row.note = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            self.say(traceback.format_exc(limit=-4))
        return self._keep(row)

    def note(self, text: str) -> None:
        """One more note on the last row."""
        last = self.part.rows[-1]
        last["note"] += f"{'; ' * bool(last['note'])}{text}"
        self.say(f"{last['name']}: {text}")
        self.save()

    def absent(self, workload: str, name: str, why: str) -> None:
        """A row for what was not measured, with the reason."""
        self._keep(GpuRow(workload, name, "not available", "", note=why))

    def median(self, workload: str, name: str) -> float | None:
        """Milliseconds of a row that was measured before."""
        rows = (row["median_ms"] for row in self.part.rows if (row["workload"], row["name"]) == (workload, name))
        return next(rows, None)

    def _fill(self, row: GpuRow, timing: Timing, need: Work) -> None:
        row.median_ms, row.iqr_ms, row.rounds = timing.median, timing.iqr, timing.rounds
        row.bytes, row.flop = need.bytes, need.flop
        row.floor_bytes_ms = need.bytes / self.ceilings.copy_gb_s / 1e6 if need.bytes else None
        row.floor_flop_ms = need.flop / self.ceilings.gemm_tflop_s / 1e9 if need.flop else None
        floors = [x for x in (row.floor_bytes_ms, row.floor_flop_ms) if x is not None]
        if floors:
            row.floor_ms = max(floors)
            row.over_floor = timing.median / row.floor_ms

    def _keep(self, row: GpuRow) -> GpuRow:
        self.part.rows.append(asdict(row))
        took = f"{row.median_ms:.4g} ms" if row.median_ms is not None else row.kind
        self.say(f"{row.workload}: {row.name} ({row.how}): {took} {row.agreement} {row.note}".rstrip())
        self.save()
        return row
