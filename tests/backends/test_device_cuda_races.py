"""Barriers of the CUDA kernels: with all of them no two accesses race, and without any one of them something is found.

The emulator looks at every access to memory here (tests/native/emulator/races.h), and leaves out the barrier or the
wait that stands in a line of the sources.  So what a test of results under some orders of the threads would miss is
found: that warps of a GPU go in step by luck is no promise.
"""

import platform
import re

import numpy as np
import pytest
import torch
from clustering import mixture
from cuda_emulator import EmulatorError, of_checkout
from marks import slow
from ragged import ON_CPU

from bipace_kernels.backends.cuda import _launch, action_keys, clusters, gram, values
from bipace_kernels.backends.records import Records
from bipace_kernels.backends.schema import Tokens

pytestmark = [
    pytest.mark.skipif(not ON_CPU, reason="the emulator is looked at here, which BIPACE_EMULATOR=1 asks for"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulator switches its fibres on x86-64 only"),
]

CUDA = _launch.SOURCES / "cuda"
BARRIERS = re.compile(r"gpu::(sync_block|sync_warp|copy_wait|show_tensor_cores|products_wait)\b")


@pytest.fixture(scope="module")
def library():
    return of_checkout(races=True)


@pytest.fixture
def emulator(library, monkeypatch):
    library.seed, library.groups = 3, True
    monkeypatch.setattr(_launch, "stand_in", library)
    yield library
    library.groups = True


def rows(n, dim, count, dtype=torch.bfloat16):
    return mixture(n + dim, n, dim, count, noise=0.5).to(dtype)


def labels(x, **limits):
    n = len(x)
    batch = Records(
        x.device, n_records=n, n_groups=1, longest_group=n, order=torch.arange(n), group_offsets=torch.tensor([0, n])
    )
    return clusters.cluster_sweep(batch, x, [0.05], clusters.Limits(**limits))


# What launches each kernel along each of its ways, as small as it may be.
def few(emulator):
    return labels(rows(66, 8, 6))


def far(emulator):
    return labels(rows(40, 8, 6), shared=50_000)  # S has no room there


def queue(emulator):
    x = torch.ones(290, 8, dtype=torch.bfloat16)
    x[3:8] = 0
    return labels(x)  # one worker's decisions fill its queue and begin it anew


def many(emulator):
    return labels(torch.eye(130)[torch.cat([torch.arange(130), torch.arange(110, 130)])])


def products(x, scale=None):
    n = len(x)
    out, reciprocal = torch.zeros(1, 128, 128), torch.empty(n)
    groups = gram.Groups(torch.tensor([0]), torch.tensor([n]), n + 1)
    gram.multiply(x, torch.arange(n), groups, torch.ones(n) if scale is None else scale, out, reciprocal)
    return torch.cat([out[0, :n, :n].triu().flatten(), reciprocal])


def tall(emulator):
    return products(rows(9, 704, 3))  # the ring of stages wraps


def half(emulator):
    emulator.groups = False
    return products(rows(9, 304, 3))


def single(emulator):
    return products(rows(9, 40, 3, torch.float32))


def extreme(emulator):
    x, scale = rows(9, 24, 3, torch.float32), torch.ones(9)
    x[::3] *= 2.0**100
    scale[::3] = 2.0**-100
    return products(x, scale)


def pairs(emulator):
    rng = np.random.default_rng(1)
    n, found = 150, []
    returns = torch.from_numpy(rng.standard_normal(n).astype(np.float32))
    clustered = torch.from_numpy(np.concatenate([rng.integers(0, 3, 140), rng.integers(3, 5, 10)]))
    keys = torch.from_numpy(rng.integers(0, 3, n))
    for longest in (140, values.SORT_FROM + 1):
        batch = Records(
            returns.device, n_records=n, n_groups=2, longest_group=longest, group_offsets=torch.tensor([0, 140, 150])
        )
        found += values.step_advantage(batch, returns, clustered, keys, "q_style", "none", 1e-6)
    return torch.stack([one.double() for one in found])


def keys(emulator):
    """Tokens are bytes; 256 is one of 62, so that a round fills the ring."""
    long = bytes(range(65, 91)) * 2 + b"0123456789"
    texts = [b"<think>so so</think><action> Go East </action>", b"nothing"]
    ids = [*map(list, texts), [*b"<action>", *[256] * 100, *b"</action>"]]
    offsets, flat = torch.tensor([0, *np.cumsum([len(row) for row in ids])]), [token for row in ids for token in row]
    table = torch.tensor([*range(257), 256 + len(long)]), torch.tensor([*range(256), *long], dtype=torch.uint8)
    tokens = Tokens(torch.tensor(flat), offsets, None, *table, max(map(len, ids)))
    found = action_keys.hash_token_ids(tokens, "action_tag", 40)
    return torch.stack([found[0], found[1].long()])


WAYS = {
    "clusters.cu": [few, far, queue, many],
    "gram.cu": [tall, half, single, extreme],
    "values.cu": [pairs],
    "action_keys.cu": [keys],
}
SLOW = (queue, many)
WANTED = {}  # what comes of each with all barriers
ALL = dict.fromkeys(way for ways in WAYS.values() for way in ways)


@pytest.mark.parametrize("way", [slow(way) if way in SLOW else way for way in ALL])
def test_nothing_races(emulator, way):
    way(emulator)


def outcome(emulator, way):
    try:
        return way(emulator)
    except EmulatorError as error:
        return str(error)
    finally:
        emulator.groups = True


def caught(emulator, file, line):
    """What one of the ways through a file says without a line's barrier; nothing where all do as if it stood there."""
    for way in WAYS[file]:
        if way not in WANTED:
            WANTED[way] = outcome(emulator, way)
        want = WANTED[way]
        assert isinstance(want, torch.Tensor), want
        with emulator.without(file, line):
            found = outcome(emulator, way)
        if isinstance(found, str):
            return found
        if not torch.equal(found, want):
            return "another result"
    return ""


@pytest.mark.parametrize(("file", "function", "text", "which", "said"), [
    pytest.param("clusters.cu", "join_few", "sync_warp", 0, "a race", id="before S is written"),
    pytest.param("clusters.cu", "join_few", "sync_warp", 1, "a race", id="before S is read"),
    pytest.param("clusters.cu", "each_panel", "sync_block", 1, "a race", id="before decisions are looked at"),
    pytest.param("clusters.cu", "decide_group", "copy_wait", 0, "a race|another", id="before rows of G are there"),
    pytest.param("gram.cu", "multiply_by_groups", "sync_block", 0, "a race|before it", id="a stage loaded anew"),
])  # fmt: skip
def test_a_planted_fault_is_caught(emulator, file, function, text, which, said):
    lines = (CUDA / file).read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if re.match(rf".*\b{function}\(", line) and "BIPACE_DEVICE" in line)
    end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith("}"))
    line = [i + 1 for i in range(begin, end) if text in lines[i]][which]
    assert re.search(said, caught(emulator, file, line))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line"),
    [
        (file, i)
        for file in WAYS
        for i, text in enumerate((CUDA / file).read_text().splitlines(), 1)
        if BARRIERS.search(text)
    ],
)
def test_every_barrier_is_needed(emulator, file, line):
    assert caught(emulator, file, line), (CUDA / file).read_text().splitlines()[line - 1]
