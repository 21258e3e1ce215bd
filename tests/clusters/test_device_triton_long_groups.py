"""Long groups by blocks: against the float64 rule, against themselves bit by bit, and their vectors against float64.

Here a group is long from a hundred records on; a block has 128, so 200 records are two blocks.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from certificate import Centroids, margins, replay, unit_rows
from clustering import TOLERANCE, mixture
from marks import slow

from bipace_kernels.triton_kernels import long_groups, rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

UNTOUCHED = -7


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Scratch comes poisoned: what nobody wrote spoils every result.  The tensors, in the order they were asked for."""
    made: list[torch.Tensor] = []

    def poisoned(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made.append(torch.full(shape, float("nan") if dtype.is_floating_point else 5, dtype=dtype, device=device))
        return made[-1]

    monkeypatch.setattr(long_groups, "_scratch", poisoned)
    return made


PRODUCTS, RECIPROCAL, CENTROIDS, LENGTHS, MEMBERS, STATE = range(6)  # places in `scratch`


def run(
    x: torch.Tensor,
    sizes: list[int],
    epsilon: float,
    device: torch.device,
    *,
    shortest: int = 100,
    order: torch.Tensor | None = None,
    usable: torch.Tensor | None = None,
    taken: torch.Tensor | None = None,
    cut: long_groups.Cut = long_groups.CUT,
) -> torch.Tensor:
    """`first` of every record; the longer tensor that it is part of keeps its ends."""
    n = sum(sizes)
    order = (torch.arange(n) if order is None else order).to(device)
    usable, taken = (None if mask is None else mask.to(device) for mask in (usable, taken))
    offsets = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int64, device=device)
    kind = torch.empty(n, dtype=torch.uint8, device=device)
    scale = torch.empty(n, dtype=torch.float32, device=device)
    rows.look(x.to(device), order, kind=kind, scale=scale, usable=usable, taken=taken)
    room = torch.full((n + 64,), UNTOUCHED, dtype=torch.int64, device=device)
    long_groups.cluster_long(
        x.to(device), order, offsets, kind, scale, [epsilon], n_groups=len(sizes), longest_group=max(sizes, default=0),
        first=room[None, 32 : n + 32], shortest=shortest, cut=cut,
    )  # fmt: skip
    assert bool((room[:32] == UNTOUCHED).all()) and bool((room[n + 32 :] == UNTOUCHED).all())
    return room[32 : n + 32].cpu()


def local(first: np.ndarray) -> np.ndarray:
    """Cluster numbers by first appearance."""
    _, inverse = np.unique(first, return_inverse=True)  # a cluster's number orders as its first record does
    return inverse.astype(np.int64)


def check(
    x: torch.Tensor,
    sizes: list[int],
    epsilon: float,
    first: torch.Tensor,
    *,
    shortest: int = 100,
    usable: torch.Tensor | None = None,
    taken: torch.Tensor | None = None,
) -> list[int]:
    """Equal to the float64 rule where its margins allow, else certified; the number of clusters of each long group."""
    counts, begin = [], 0
    for size in sizes:
        group = slice(begin, begin + size)
        own, values = first[group].numpy(), x[group].to(torch.float64).numpy()
        record = np.arange(begin, begin + size)
        begin += size
        if size < shortest:
            assert (own == UNTOUCHED).all()
            continue
        takes_part = np.ones(size, bool) if taken is None else taken[group].numpy()
        good = takes_part if usable is None else takes_part & usable[group].numpy()
        assert (own[~takes_part] == -1).all()
        assert (own[takes_part & ~good] == record[takes_part & ~good]).all()
        assert (own[good] <= record[good]).all() and (first.numpy()[own[good]] == own[good]).all()
        labels = local(own[good])
        expected, margin = margins(values[good], epsilon)
        if margin > TOLERANCE:
            np.testing.assert_array_equal(labels, expected, err_msg=f"margin {margin:.2e}, {size}, epsilon {epsilon}")
        else:
            worst = replay(values[good], labels, epsilon)
            assert worst.excess <= TOLERANCE, (worst, margin, size, epsilon)
        counts.append(int(labels.max(initial=-1)) + 1)
    return counts


# ---- against the rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "dim"), [slow(torch.float32, 37), (torch.bfloat16, 130), slow(torch.float16, 64)], ids=str
)
def test_long_groups_among_short_ones(dtype: torch.dtype, dim: int, device: torch.device):
    sizes = [40, 150, 0, 99, 100, 3]
    x = mixture(1, sum(sizes), dim, 9).to(dtype)
    assert min(check(x, sizes, 0.1, run(x, sizes, 0.1, device))) > 4


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16, slow(torch.float16)], ids=str)
def test_many_clusters(dtype: torch.dtype, device: torch.device):
    """More clusters and elements than any kernel takes at a time; clusters are joined again in later blocks."""
    cut = long_groups.CUT
    cut = long_groups.Cut(scan={**cut.scan, "CLUSTERS": 32}, move={**cut.move, "PIECE": 32})
    x = mixture(2, 260, 40, 90, common=0.5).to(dtype)
    (count,) = check(x, [260], 0.2, run(x, [260], 0.2, device, cut=cut))
    assert 64 < count < 150


def test_all_alone_and_all_together(device: torch.device):
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((140, 64)).astype(np.float32)).to(torch.bfloat16)
    assert run(x, [140], 0.01, device).tolist() == list(range(140))
    near = mixture(4, 140, 19, 1, noise=0.02)
    assert run(near, [140], 0.1, device).tolist() == [0] * 140


@pytest.mark.parametrize("dim", [slow(1), 3, slow(65)])
def test_odd_dimensions(dim: int, device: torch.device):
    for dtype in (torch.bfloat16, torch.float32):
        x = mixture(5, 140, dim, 6).to(dtype)
        check(x, [140], 0.1, run(x, [140], 0.1, device))


def test_ties_join_the_oldest(device: torch.device):
    """Count vectors: cosines meet ε and each other exactly, over the border of a block too."""
    rng = np.random.default_rng(6)
    x = torch.from_numpy((rng.random((200, 12)) < 0.5).astype(np.float32) + np.eye(12, dtype=np.float32)[0])
    check(x, [200], 0.25, run(x, [200], 0.25, device))


def test_records_set_aside(device: torch.device):
    """Records that are not usable are alone, those not taken have no cluster; NaN and zeros in them reach nobody."""
    rng = np.random.default_rng(7)
    x = mixture(7, 310, 40, 8)
    usable, taken = torch.from_numpy(rng.random(310) < 0.8), torch.from_numpy(rng.random(310) < 0.8)
    taken[128:160] = False  # a whole panel
    x[~usable] = float("nan")
    x[~taken] = float("inf")
    x[5] = 0.0  # no direction, whatever the mask says
    sizes = [10, 180, 120]
    first = run(x, sizes, 0.1, device, usable=usable, taken=taken)
    usable[5] = False
    assert max(check(x, sizes, 0.1, first, usable=usable, taken=taken)) > 3


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_huge_and_tiny_rows(dtype: torch.dtype, device: torch.device):
    """Powers of two scale rows without a rounding, so the labels are those of the ordinary rows."""
    x = mixture(8, 150, 33, 6).to(dtype)
    x /= x.abs().amax(1, keepdim=True)
    plain = run(x, [150], 0.1, device)
    far = x.clone()
    far[::3] *= 2.0**120
    far[1::3] *= 2.0**-100
    assert bool((run(far, [150], 0.1, device) == plain).all())
    if dtype == torch.float32:
        far[::3] *= 2.0**7  # the largest floats; the smallest are denormal and have lost digits, so the rule decides
        far[1::3] *= 2.0**-30
        check(far, [150], 0.1, run(far, [150], 0.1, device))


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16], ids=str)
def test_group_alone_equals_group_in_a_batch(dtype: torch.dtype, device: torch.device, scratch: list[torch.Tensor]):
    sizes = [101, 20, 160, 100]
    x = mixture(12, sum(sizes), 50, 12).to(dtype)
    alone = run(x[121:281], [160], 0.1, device)
    one = [t.clone() for t in scratch]
    scratch.clear()
    batch = run(x, sizes, 0.1, device)
    assert bool((batch[121:281] == alone + 121).all())
    count = len(set(alone[:128].tolist()))
    assert torch.equal(scratch[CENTROIDS][101 : 101 + count], one[CENTROIDS][:count])
    assert torch.equal(scratch[LENGTHS][101 : 101 + count], one[LENGTHS][:count])
    assert torch.equal(scratch[STATE][1, :count, :32], one[STATE][0, :count, :32])


def test_any_strides_and_order(device: torch.device):
    """Rows are read where they are; what lies between them is never touched."""
    values = mixture(13, 140, 21, 6).to(torch.bfloat16)
    order = torch.from_numpy(np.random.default_rng(13).permutation(170)[:140])
    room = torch.full((170, 3, 50), float("nan"), dtype=torch.bfloat16)
    room[order, 1, 4:46:2] = values
    strided = room[:, 1, 4:46:2]
    assert bool((run(strided, [140], 0.1, device, order=order) == run(values, [140], 0.1, device)).all())


def test_groups_take_turns(device: torch.device):
    sizes = [101, 30, 130]
    x = mixture(14, sum(sizes), 24, 7).to(torch.float16)
    together = run(x, sizes, 0.1, device)
    one_by_one = long_groups.Cut(scratch=1, grams=1)
    assert bool((run(x, sizes, 0.1, device, cut=one_by_one) == together).all())


def test_nothing_to_do(device: torch.device, scratch: list[torch.Tensor]):
    x = mixture(15, 60, 8, 3)
    for sizes in ([60], [20, 40], [0, 0], []):
        assert bool((run(x, sizes, 0.1, device) == UNTOUCHED).all())
    assert scratch == []


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no device to wait for")
def test_never_waits_for_the_device():
    device = torch.device("cuda")
    x = mixture(16, 300, 64, 9).to(device, torch.bfloat16)
    order, offsets = torch.arange(300, device=device), torch.tensor([0, 20, 300], device=device)
    kind, scale = torch.zeros(300, dtype=torch.uint8, device=device), torch.ones(300, device=device)
    first = torch.empty((2, 300), dtype=torch.int64, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        long_groups.cluster_long(
            x, order, offsets, kind, scale, [0.1, 0.2], n_groups=2, longest_group=280, first=first, shortest=100
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- drift -----------------------------------------------------------------------------------------------------------


def worst_angle(x: torch.Tensor, first: torch.Tensor, upto: int, centroids: torch.Tensor) -> float:
    """Largest angle between a centroid and float64's, both following the given clusters of the first `upto` records."""
    truth = Centroids(x.shape[1])
    values = unit_rows(x[:upto].to(torch.float64).numpy())
    for label, row in zip(local(first.numpy())[:upto], values, strict=True):
        if label == len(truth.members):
            truth.seed(row)
        else:
            truth.join(label, row)
    found = centroids[: len(truth.members)].to(torch.float64).cpu().numpy()
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    return float(np.linalg.norm(found - truth.room[: len(truth.members)], axis=1).max())


@pytest.mark.parametrize("n", [300, slow(8192)])
def test_centroids_do_not_drift(n: int, device: torch.device, scratch: list[torch.Tensor]):
    """Cosines of 0.97 and more in a few clusters with many members: the vectors stay with float64's."""
    x = mixture(17, n, 64, 3, noise=0.35).to(torch.bfloat16)
    first = run(x, [n], 0.05, device)
    (count,) = check(x, [n], 0.05, first)
    assert count < 12
    before_the_last_block = (n - 1) // long_groups.BLOCK * long_groups.BLOCK  # whose centroids nobody needs
    assert worst_angle(x, first, before_the_last_block, scratch[CENTROIDS]) < 1e-6
