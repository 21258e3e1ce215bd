"""Greedy cosine clusters on devices: against the float64 rule, the reference, and themselves bit by bit."""

import numpy as np
import pytest
import torch
from certificate import BAND, direction
from clustering import DTYPES, bit_case, check_partition, device_sweep, mixture, offsets_of
from hypothesis import given, settings, strategies as st
from marks import slow, slow_case_interpreted, slow_interpreted
from ragged import BACKEND, ON_CPU, nothing_waits, sentinels, stage
from refusals import refused
from sized import Sized

from bipace_kernels.backends.records import Records
from bipace_kernels.backends.reference import clusters as reference_clusters

reference = Sized(reference_clusters)

clusters, gram, rows = stage("clusters"), stage("gram"), stage("rows")
scan = stage("scan")
equal, numbering = stage("equal"), stage("numbering")
if BACKEND == "triton":
    TILES, SHAPES = ["LARGE", slow("SMALL"), slow("FLOAT32")], ["small tiles"]
else:
    TILES, SHAPES = ["bfloat16", "float32"], ["near", "far"]

OF_TRITON = pytest.mark.skipif(BACKEND != "triton", reason="Triton's, whatever the backend: its own run tests it")
OF_EACH_DTYPE = {torch.float32: 3, torch.bfloat16: 130, torch.float16: 17}


def run(device, x, sizes=None, epsilon=0.1, **others):
    return device_sweep(device, x, sizes, [epsilon], **others)[0]


def test_threshold_and_ties_are_banded(device):
    x = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    assert device_sweep(device, x, epsilons=[0.4, 0.4 - 0.9e-5, 0.4 - 1.1e-5]).tolist() == [[0, 0], [0, 0], [0, 1]]
    tie = torch.tensor([[1, 0], [0, 1], [1, 1 + 1e-5]])
    assert run(device, tie, epsilon=0.3).tolist() == [0, 1, 0]
    tie[2, 1] = 1 + 4e-5
    assert run(device, tie, epsilon=0.3).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        *(case if case[0] == torch.bfloat16 else slow_case_interpreted(*case) for case in OF_EACH_DTYPE.items()),
        *(slow(dtype, dim) for dtype in DTYPES for dim in (1, 3, 17, 64, 130) if dim != OF_EACH_DTYPE[dtype]),
    ],
    ids=str,
)
def test_ragged_groups_follow_the_rule(device, dtype, dim):
    sizes = [40, 0, 1, 33, 2, 0]
    x = mixture(dim, sum(sizes), dim, 7).to(dtype)
    x[3] *= 2.0 ** (3 if dtype == torch.float16 else 90)  # its squares overflow, its products with others need not
    for epsilon in (0.05, 1.0):
        labels = run(device, x, sizes, epsilon)
        if check_partition(x, sizes, epsilon, labels):
            order, offsets = torch.arange(len(x)), offsets_of(sizes)
            assert torch.equal(labels, reference.cluster_cosine(x, order, offsets, None, epsilon))


@slow_interpreted
@pytest.mark.parametrize("tile", TILES)
def test_groups_of_several_tiles_and_long_rows(device, tile):
    how = {"cut": clusters.Cut(tile=getattr(gram, tile))} if BACKEND == "triton" else {}
    sizes = [129, 1, 20]
    x = mixture(2, sum(sizes), 1029, 12).to(torch.float32 if tile.lower() == "float32" else torch.bfloat16)
    check_partition(x, sizes, 0.1, run(device, x, sizes, **how))


@slow_interpreted
def test_shapes_of_partitions(device):
    assert run(device, mixture(1, 70, 40, 1, noise=0.01)).tolist() == [0] * 70
    assert run(device, torch.eye(140)).tolist() == list(range(140))
    assert run(device, torch.eye(30), epsilon=1.0).tolist() == [0] * 30
    assert device_sweep(device, torch.eye(7), epsilons=[]).shape == (0, 7)
    for sizes in ([], [0, 0]):
        assert device_sweep(device, torch.empty(0, 5), sizes, [0.0, 0.1]).shape == (2, 0)


@slow_interpreted
@pytest.mark.parametrize("shape", SHAPES)
def test_many_clusters(device, shape):
    how = {}
    if BACKEND == "triton":
        how["cut"] = clusters.Cut(scan={**scan.TILE, "CLUSTERS": 32, "COLUMNS": 64})
    elif shape == "far":
        how["limits"] = clusters.Limits(shared=61_000)  # room for 87 clusters
    x = mixture(5, 170, 48, 90, common=0.5)
    labels = run(device, x, [150, 20], 0.2, **how)
    check_partition(x, [150, 20], 0.2, labels)
    assert labels[:150].max() > 64


@slow_interpreted
@pytest.mark.parametrize("n", [150, slow(500)])
def test_similarities_within_three_millionths(device, n):
    """After a cluster of many members, probes 3e-6 on either side of the threshold: the kernels see which side."""
    rng = np.random.default_rng(17)
    dim, epsilon = 300, 0.1
    x = rng.uniform(0.5, 1.5, dim) * rng.uniform(0.5, 2, (n, 1)) + 0.1 * rng.standard_normal((n, dim))
    x = x.astype(np.float32)
    c = direction(x)
    probes = []
    for shift in (-3e-6, 3e-6):  # the first begins a cluster and so leaves that of the others as it is
        side = rng.standard_normal(dim)
        side -= (side @ c) * c
        cos = 1 - epsilon - BAND + shift
        probes.append(cos * c + np.sqrt(1 - cos**2) * side / np.linalg.norm(side))
    labels = run(device, torch.from_numpy(np.concatenate([x, np.array(probes, np.float32)])), epsilon=epsilon)
    assert labels.tolist() == [0] * n + [1, 0]


@slow_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_huge_and_tiny_rows(device, dtype):
    """Powers of two scale rows without a rounding, so the labels are those of the ordinary rows."""
    x = mixture(8, 70, 33, 6).to(dtype)
    x /= x.abs().amax(1, keepdim=True)
    plain = run(device, x)
    far = x.clone()
    far[::3] *= 2.0**120
    far[1::3] *= 2.0**-100
    assert torch.equal(run(device, far), plain)
    far[::3] *= 2.0**7  # the largest values; the smallest are subnormal and have lost digits, so the rule decides
    far[1::3] *= 2.0**-30
    if dtype == torch.float32 or not ON_CPU:  # Triton's interpreter misreads subnormal bfloat16
        check_partition(far, [70], 0.1, run(device, far))


def test_tiny_float16_rows(device):
    x = (mixture(9, 90, 40, 5) * 2.0**-20).to(torch.float16)  # mostly denormal
    x[:, 0] = 2.0**-24
    check_partition(x, [90], 0.1, run(device, x))


@slow_interpreted
def test_records_set_aside(device):
    """Unusable records are singletons, those not taken have no cluster; their NaN and zeros affect no other record."""
    rng = np.random.default_rng(7)
    x = mixture(7, 190, 40, 8)
    usable, taken = torch.from_numpy(rng.random(190) < 0.8), torch.from_numpy(rng.random(190) < 0.8)
    taken[64:96] = False  # a whole panel
    sizes = [10, 120, 30, 30]
    usable[130:160], taken[160:] = False, False  # whole groups
    x[~usable], x[~taken] = float("nan"), float("inf")
    x[5], x[100] = 0.0, float("-inf")  # no direction, whatever the masks say
    found = device_sweep(device, x, sizes, [0.0, 0.1], usable=usable, taken=taken)
    one = run(device, x, sizes, 0.1, usable=usable, taken=taken)
    usable[[5, 100]] = False
    check_partition(x, sizes, 0.1, found[1], usable, taken)
    assert torch.equal(found[1], one)
    kept = torch.arange(190)[taken]
    left = [int(taken[a:b].sum()) for a, b in zip([0, 10, 130, 160], [10, 130, 160, 190], strict=True)]
    expected = reference.cluster_cosine(x, kept, offsets_of(left), usable[taken], 0.0)
    assert torch.equal(found[0][taken], expected) and bool((found[0][~taken] == -1).all())


@OF_TRITON
def test_scan_rows(device):
    x = torch.ones(7, 1030)
    x[1, 1029], x[2, 3], x[3], x[4] = float("nan"), float("-inf"), 0.0, -0.0
    x[5, 1:] = 0.0
    x[5, 0] = 1e-45
    order = torch.tensor([6, 5, 4, 3, 2, 1, 0, 0])
    for dtype in DTYPES:
        with sentinels():
            found = clusters.scan_rows(x.to(device, dtype), order.to(device)).cpu()
        assert torch.equal(found, reference.scan_rows(x.to(dtype), order))
        assert clusters.scan_rows(x.to(device, dtype), order[:0].to(device)).shape == (0,)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_the_state_of_the_rows_comes_with_the_clusters(device, epsilon):
    """As scan_rows finds it, also of rows that are not taken; the labels are those with its mask."""
    x = mixture(8, 60, 9, 4)
    x[3], x[20, 1], x[41, 8], x[50] = 0.0, float("nan"), float("-inf"), 0.0
    order, taken = torch.arange(59, -1, -1), torch.arange(60) % 4 > 0
    wanted = reference.scan_rows(x, order)
    found = torch.full((60,), 9, dtype=torch.uint8, device=device)
    labels = run(device, x, [25, 35], epsilon, taken=taken, order=order, state=found)
    assert torch.equal(found.cpu(), wanted)
    assert torch.equal(labels, run(device, x, [25, 35], epsilon, usable=wanted == 0, taken=taken, order=order))


@OF_TRITON
@pytest.mark.parametrize(
    "bits", [pytest.param(64, id="hash"), slow(1, id="collisions"), slow_case_interpreted(0, id="one hash")]
)
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16, slow(torch.float16)], ids=str)
def test_equal_rows(device, dtype, bits):
    """Rows as given: 2x is another row, −0.0 is 0.0; rows whose hashes agree are compared all the same."""
    rng = np.random.default_rng(3)
    pool = torch.from_numpy(rng.integers(-1, 2, (9, 70)).astype(np.float32))
    pool[1] = 2 * pool[0]
    pool[2] = pool[0]
    pool[2, 69] += 1  # differs only in its last element
    x = pool[rng.integers(0, 9, 110)]
    x[rng.random(x.shape) < 0.5] *= -0.0
    x[::2] = x[::2] + 0.0
    x[3], x[50] = 0.0, float("nan")  # a singleton each
    sizes = [1, 70, 0, 39]
    usable = torch.from_numpy(reference.scan_rows(x, torch.arange(110)).numpy() == 0)
    order, offsets = torch.arange(110), offsets_of(sizes)
    expected = reference.cluster_cosine(x.to(dtype), order, offsets, usable, 0.0)
    if bits == 64:
        assert torch.equal(run(device, x.to(dtype), sizes, 0.0, usable=usable), expected)
    there = x.to(device, dtype), order.to(device)
    kind, scale = torch.empty(110, dtype=torch.uint8, device=device), torch.empty(110, device=device)
    row_hash, first = torch.zeros(110, dtype=torch.int64, device=device), torch.empty_like(there[1])
    rows.read(*there, kind=kind, scale=scale, usable=usable.to(device))
    if bits:
        rows.read(*there, row_hash=row_hash, hash_bits=bits)
    records = Records(device, n_groups=4, longest_group=70, order=there[1], group_offsets=offsets.to(device))
    equal.first_equal(records, there[0], kind, row_hash, first)
    assert torch.equal(numbering.dense_labels(first).cpu(), expected)


@slow_interpreted
def test_each_of_a_sweep_is_its_own_clustering(device):
    """Zeros among them, more values than one launch writes."""
    sizes = [9, 0, 20, 1]
    x = mixture(4, sum(sizes), 21, 6).to(torch.bfloat16)
    epsilons = [0.3, 0.0, 0.05, 0.9, 0.0, 0.1, 0.12, 0.14, 0.16, 0.18, 1.0]
    found = device_sweep(device, x, sizes, epsilons)
    for epsilon, labels in zip(epsilons, found, strict=True):
        if epsilon:
            check_partition(x, sizes, epsilon, labels)
    for e in (0, 1, 2, len(epsilons) - 1):
        assert torch.equal(found[e], run(device, x, sizes, epsilons[e])), epsilons[e]


@slow_interpreted
def test_a_batch_in_parts(device):
    """Groups, and ε, take turns where their matrices do not fit at once."""
    sizes = [6, 3, 0, 12, 5]
    x = mixture(6, sum(sizes), 19, 6)
    epsilons = [0.05, 0.3, 0.9]
    together = device_sweep(device, x, sizes, epsilons)
    for matrices in (1, 6):  # of six, CUDA's scratch has room under two ε
        room = matrices * gram.UNIT**2
        how = {"cut": clusters.Cut(room=room)} if BACKEND == "triton" else {"limits": clusters.Limits(room=room)}
        assert torch.equal(device_sweep(device, x, sizes, epsilons, **how), together)
    assert torch.equal(run(device, x, sizes, epsilons[1], **how), together[1])


@OF_TRITON
def test_a_group_too_long_for_a_matrix_is_refused(device, monkeypatch):
    monkeypatch.setattr(clusters, "LONGEST", 20)  # the interpreter looks at 46,081 rows for minutes
    refused("at most 20 records for Triton, got 21", run, device, torch.ones(21, 1))


@slow_interpreted
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16, slow(torch.float16)], ids=str)
def test_one_group_alone_is_the_group_in_any_batch(device, dtype):
    sizes = [8, 33, 66, 1]
    own = slice(8, 41)
    x = bit_case(50)[0][: sum(sizes)].to(dtype)
    if dtype != torch.float16:
        x[12] *= 2.0**90
        x[90] *= 2.0**90
    labels = device_sweep(device, x, sizes, [0.0, 0.36, 0.38, 0.4])[:, own]
    alone = device_sweep(device, x[own], [33], [0.0, 0.36, 0.38, 0.4])
    assert int(alone[0].max()) > int(alone[3].max()) > 1 and torch.equal(labels - labels[:, :1], alone)


@slow_interpreted
@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16, slow(torch.float16)], ids=str)
def test_any_strides_and_order(device, dtype):
    """Rows are read in place; memory between them is never read."""
    values = mixture(13, 45, 21, 6).to(dtype)
    order = torch.from_numpy(np.random.default_rng(13).permutation(130)[:45])
    room = torch.full((130, 3, 50), float("nan"), dtype=dtype)
    room[order, 1, 4:46:2] = values
    turned = torch.full((25, 130), float("nan"), dtype=dtype)
    turned[2:23, order] = values.T
    plain = device_sweep(device, values, [20, 25], [0.0, 0.1])
    for strided in (room.to(device)[:, 1, 4:46:2], turned.to(device)[2:23].T):
        assert torch.equal(device_sweep(device, strided, [20, 25], [0.0, 0.1], order=order), plain)


@pytest.mark.skipif(ON_CPU, reason="a CPU has no device to wait for")
def test_never_waits_for_the_device():
    device = torch.device("cuda")
    x, order = mixture(16, 300, 64, 9).to(device, torch.bfloat16), torch.arange(300, device=device)
    offsets = offsets_of([20, 280]).to(device)
    with nothing_waits(device):
        clusters.cluster_sweep(x, order, offsets, None, [0.0, 0.1, 0.2], n_groups=2, longest_group=280)
        clusters.scan_rows(x, order)


@st.composite
def batches(draw):
    """Sizes, dtype, D, seed and ε of a batch; sometimes with ties, records set aside, or a long group."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 5, 31, 33, 70]), min_size=1, max_size=3))
    dim = draw(st.integers(1, 70))
    counts = draw(st.sampled_from([1, 3, 12, 200]))
    epsilons = draw(st.lists(st.sampled_from([0.0, 1e-4, 0.03, 0.1, 0.25, 0.9, 1.0]), min_size=1, max_size=2))
    return sizes, dim, counts, epsilons, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20)), draw(st.booleans())


@pytest.mark.slow
@settings(max_examples=25)
@given(batch=batches())
def test_any_batch(batch):
    sizes, dim, counts, epsilons, dtype, seed, ties = batch
    device = torch.device("cpu" if ON_CPU else "cuda")
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x = mixture(seed, n, dim, counts)
    if ties:
        x = torch.from_numpy(rng.integers(-1, 3, (n, dim)).astype(np.float32))  # zero rows among them
    x = x.to(dtype)
    usable, taken = torch.from_numpy(rng.random(n) < 0.9), torch.from_numpy(rng.random(n) < 0.9)
    found = device_sweep(device, x, sizes, epsilons, usable=usable, taken=taken)
    usable &= x.any(1)
    for epsilon, labels in zip(epsilons, found, strict=True):
        assert torch.equal(labels, run(device, x, sizes, epsilon, usable=usable, taken=taken))
        if epsilon:
            check_partition(x, sizes, epsilon, labels, usable, taken)
