"""The CUDA scan in machine code: decisions are short and wait for no memory, workers keep up, nothing is spilled."""

import benchmarks
import pytest
from nvrtc import NO_NVCC, NVCC, Nvrtc
from refusals import refused

from bipace_kernels.backends.cuda import _cupy, _launch

sass = benchmarks.module("sass")
MOST = 90  # instructions of a decision that joins one of at most 128 clusters


def line(at, text, *, stall=1, sets=7, waits=0):
    """An instruction as cuobjdump prints it, with its two words; a scoreboard of 7 is none."""
    second = stall << 41 | sets << 46 | 7 << 49 | waits << 52
    return f"        /*{at:04x}*/  {text} ;  /* 0x{0:016x} */\n        /* 0x{second:016x} */\n"


def kernel(*loop):
    """A loop at 0x10 between two instructions; the loop ends with its branch."""
    text = "".join([line(0, "MOV R1, R2"), *loop, line(16 * len(loop) + 16, "EXIT")])
    return sass.parse(f"\t\tFunction : planted\n{text}")["planted"]


WAITED = [
    line(0x10, "@!P1 LDG.E R2, desc[UR4][R8.64]", sets=3),
    line(0x20, "MUFU.RSQ R3, R4", sets=0),
    line(0x30, "FADD R5, R3, R3", stall=5, waits=0b1),
    line(0x40, "MOV R6, R2", waits=0b1000),
    line(0x50, "@P0 BRA 0x10", stall=5),
]


def test_a_prefetch_that_is_waited_for_is_named_and_words_that_are_not_machine_code():
    loop, turn = sass.decision_loop(kernel(*WAITED))
    assert loop.head == 0x10 and len(turn.instructions) == 5
    assert turn.waited == ["0010 @!P1 LDG.E R2, desc[UR4][R8.64], waited for 3 instructions later by 0040 MOV R6, R2"]
    # The load of one turn is issued a cycle before the square root, and waited for.
    assert turn.cycles == sass.LATENCY["LDG"] + 1 + 5 and turn.no_memory == 1 + 1 + 5 + 1 + 5
    free = [text for text in WAITED if "MOV R6" not in text]
    free[-1] = line(0x40, "@P0 BRA 0x10", stall=5)
    _, turn = sass.decision_loop(kernel(*free))
    assert turn.waited == [] and turn.cycles == 1 + sass.LATENCY["MUFU"] + 5 + 5
    refused("no machine code", sass.parse, "cuobjdump fatal")
    refused("no loop of this kernel", sass.decision_loop, kernel(line(0x10, "MUFU.RSQ R3, R4")))
    refused("for each of 32 decisions", sass.Scan.of, kernel(*WAITED))


def test_ways_through_a_loop():
    """The slowest takes the branch's long side, the quickest jumps over it, and a way may pass the loop's end."""
    code = sass.Code.of(
        kernel(
            line(0x10, "@P1 BRA 0x40", stall=5),
            line(0x20, "LDG.E R2, [R8.64]", stall=2),
            line(0x30, "FFMA R2, R2, R2, R2", stall=4),
            line(0x40, "BAR.SYNC 0x0"),
            line(0x50, "@P0 BRA 0x10", stall=5),
        )
    )
    (loop,) = code.loops()

    def way(start, end, cost):
        return [one.at for one in code.way(start, end, cost, loop.body)]

    assert way(0x10, 0x10, sass.slow) == [0x10, 0x20, 0x30, 0x40, 0x50]
    assert way(0x10, 0x10, sass.quick) == [0x10, 0x40, 0x50]
    assert way(0x10, 0x10, sass.through("LDG")) == way(0x10, 0x10, sass.slow)
    assert way(0x40, 0x40, sass.through(but="FFMA")) == [0x40, 0x50, 0x10]
    refused("no way leads", code.way, 0x20, 0x30, sass.quick, loop.body, {0x20})


@pytest.fixture(scope="module", params=["nvcc", "NVRTC"])
def scan(request, tmp_path_factory):
    """The scan's instructions for sm_90a."""
    if request.param == "nvcc" and NVCC is None:
        pytest.skip(NO_NVCC)
    cubin = None
    if request.param == "NVRTC":
        cubin = tmp_path_factory.mktemp("sass") / "nvrtc.cubin"
        cubin.write_bytes(_cupy.compile_source(Nvrtc(), _launch.SOURCES / "cuda/clusters.cu", _cupy.target((9, 0))))
    try:
        return sass.read(cubin)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_a_decision_is_short_and_waits_for_no_memory(scan):
    _, turn = sass.decision_loop(scan)
    assert len(turn.instructions) <= MOST, [str(one) for one in turn.instructions]
    assert turn.waited == []
    assert not [str(one) for one in turn.instructions if one.kind in (*sass.GLOBAL, "ST", "STG")]
    assert not [str(one) for one in scan if one.kind in ("LDL", "STL")], "registers are spilled"
    parts = sass.Scan.of(scan)
    assert parts.join == turn.cycles < parts.seed and parts.several < parts.mixed
    assert parts.helper < sum(parts.own), "warp 0 waits for clusters to be assigned"
    # The workers have time until the chain is done with a panel, in a group of 400 where no cluster is large.
    chain, workers = parts.panel(32, 368, 16, 0)
    assert workers < chain < 32 * parts.record(400, 16, 0) < 32 * 150 * sass.CLOCK_GHZ
