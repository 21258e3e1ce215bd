"""Greedy cosine clusters: the compiled kernels against the float64 reference, and against themselves bit by bit.

A sweep of ε clusters by other kernels, from one Gram matrix: what holds of a clustering holds of it too (EITHER).
"""

import os

import clustering
import numpy as np
import pytest
import torch
from certificate import BAND, direction, replay
from clustering import DTYPES, EPSILONS, ODD_DIMS, bit_case, check_partition, cosine, mixture, offsets_of, sample, sweep
from hypothesis import given, settings, strategies as st
from marks import slow
from paths import python
from sized import Sized

from bipace_kernels.backends import native_loader, threads as _threads
from bipace_kernels.backends.cpu import clusters as cpu_clusters
from bipace_kernels.backends.reference import clusters as reference_clusters

cpu = Sized(cpu_clusters)
reference = Sized(reference_clusters)


def swept(x, sizes=None, epsilon=0.10, **others):
    """The clustering of one ε among others by the kernels of a sweep."""
    return sweep(x, sizes, [epsilon, 0.42, 0.0, 0.38], **others)[0]


EITHER = pytest.mark.parametrize("labels_of", [pytest.param(cosine, id="one"), pytest.param(swept, id="sweep")])


@EITHER
def test_threshold_is_banded(labels_of):
    """cos = 0.6 and 0.8 exactly: at ε = 1 − cos the record joins, whatever the rounding."""
    x = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    y = torch.tensor([[1.0, 0.0], [4.0, 3.0]])
    for rows, distance in ((x, 0.4), (y, 0.2)):
        assert labels_of(rows, epsilon=distance).tolist() == [0, 0]
        assert labels_of(rows, epsilon=distance - 0.9e-5).tolist() == [0, 0]
        assert labels_of(rows, epsilon=distance - 1.1e-5).tolist() == [0, 1]


@EITHER
def test_ties_go_to_the_oldest(labels_of):
    for nearer, joined in ((1e-5, 0), (4e-5, 1)):
        x = torch.tensor([[1, 0], [0, 1], [1, 1 + nearer]])
        assert labels_of(x, epsilon=0.3).tolist() == [0, 1, joined]


@pytest.mark.parametrize("dim", [dim if dim in (3, 17, 257) else slow(dim) for dim in ODD_DIMS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference(dim, dtype, isa):
    sizes = [60, 0, 1, 133, 2, 0]
    x = mixture(dim, sum(sizes), dim, 7).to(dtype)
    for epsilon, among_others in zip(EPSILONS, sweep(x, sizes), strict=True):
        wanted = reference.cluster_cosine(x, torch.arange(len(x)), offsets_of(sizes), None, epsilon)
        for labels in (among_others, cosine(x, sizes, epsilon)):
            if check_partition(x, sizes, epsilon, labels):
                assert torch.equal(labels, wanted)


@EITHER
def test_shapes_of_partitions(labels_of, isa):
    x = mixture(1, 300, 64, 1, noise=0.01)
    assert labels_of(x, [300]).max() == 0 and labels_of(torch.eye(200)).tolist() == list(range(200))
    assert labels_of(torch.eye(200), epsilon=1.0).max() == 0 and labels_of(torch.empty(0, 5), [0, 0]).tolist() == []
    assert labels_of(torch.empty(0, 5), []).tolist() == [] and sweep(torch.eye(7), epsilons=[]).shape == (0, 7)
    assert cpu.scan_rows(torch.empty(0, 5), torch.empty(0, dtype=torch.int64)).tolist() == []


@EITHER
def test_many_clusters_and_blocks(labels_of, isa):
    for clusters, n in ((5, 260), (60, 400), (400, 600)):
        x = mixture(clusters, n, 96, clusters, noise=0.4, common=0.3)
        sizes = [n // 2, n - n // 2]
        check_partition(x, sizes, 0.1, labels_of(x, sizes, 0.1))


@EITHER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_clusters_do_not_drift(labels_of, dtype):
    x = mixture(3, 4096, 64, 12, noise=0.25, common=1.0).to(dtype)
    check_partition(x, [4096], 0.03, labels_of(x, epsilon=0.03))


@pytest.mark.parametrize(
    ("labels_of", "isa"),
    [(cosine, "avx512"), (cosine, "avx2"), (cosine, "baseline"), (swept, "avx512")],
    indirect=["isa"],
)
@pytest.mark.parametrize("kind", ["noise", "drift", "constant"])
def test_similarities_within_three_millionths(labels_of, kind, isa):
    """After a cluster of 4,000 members (1,500 in a sweep), kernels see on which side a probe 3e-6 off it is."""
    rng = np.random.default_rng(17)
    n, dim, epsilon = 4000 if labels_of is cosine else 1500, 700, 0.1
    base = np.where(np.arange(dim) < 300, 1.0, 0.7) * (1.0 if kind == "constant" else rng.uniform(0.5, 1.5, dim))
    noise = {"noise": 0.1, "drift": 1e-6, "constant": 0.0}[kind] * rng.standard_normal((n, dim))
    drift = 0.05 * (kind == "drift") * np.linspace(0, 1, n)[:, None] * rng.standard_normal(dim)
    x = ((base + drift) * rng.uniform(0.5, 2, (n, 1)) + noise).astype(np.float32)
    c = direction(x)
    wrong = 0
    for probe in range(40 if labels_of is cosine else 12):
        side = rng.standard_normal(dim)
        side -= (side @ c) * c
        above = probe % 2 == 0
        cos = 1 - epsilon - BAND + (3e-6 if above else -3e-6)
        row = cos * c + np.sqrt(1 - cos**2) * side / np.linalg.norm(side)
        labels = labels_of(torch.from_numpy(np.concatenate([x, row[None].astype(np.float32)])), epsilon=epsilon)
        wrong += int(labels[-1] == 0) != above
        assert not labels[:n].any()
    assert wrong == 0


def test_a_centroid_that_moves_by_less_than_a_rounding():
    """One member, then 3,000 copies of another: steps below float32's grid that together decide."""
    rng = np.random.default_rng(2)
    dim, epsilon = 64, 0.1
    b, side = np.linalg.qr(rng.standard_normal((dim, 2)))[0].T
    a = 0.92 * b + np.sqrt(1 - 0.92**2) * side
    x = np.concatenate([a[None], np.repeat(b[None], 3000, 0)]).astype(np.float32)
    c = direction(x)
    towards = side - (side @ c) * c
    for sign in (1, -1):
        for offset in (3e-6, -3e-6):
            cos = 1 - epsilon - BAND + offset
            probe = cos * c + sign * np.sqrt(1 - cos**2) * towards / np.linalg.norm(towards)
            labels = sweep(torch.from_numpy(np.concatenate([x, probe[None].astype(np.float32)])), epsilons=[epsilon])[0]
            assert int(labels[-1]) == (0 if offset > 0 else 1) and not labels[:-1].any()


@pytest.mark.parametrize("windows", [False, True])
def test_products_that_end_early(windows, isa):
    """D and clusters enough for products to be given up halfway; joins then lift some of them to where they decide.

    `windows`: rows whose weight lies in one part of D, so that what is left of a norm differs from row to row.
    """
    rng = np.random.default_rng(29)
    dim, poles, n = 1900, 48, 160
    pole = np.linalg.qr(rng.standard_normal((dim, poles)))[0].T
    rows = list(pole)
    for _ in range(n):
        k, l = rng.integers(0, poles, 2)
        side = rng.standard_normal(dim) / np.sqrt(dim)
        near = pole[k] + 0.9 * side  # joins pole k at ε = 0.3 and pulls its centroid towards `side`
        rows += [near, 0.55 * pole[k] + 0.85 * side + 0.2 * pole[l]]
        rows.append(pole[k] + 0.3 * rng.standard_normal(dim) / np.sqrt(dim))
    x = np.array(rows)
    if windows:
        start = rng.integers(0, dim, len(x))
        x *= 0.02 + (np.abs(np.arange(dim) - start[:, None]) < rng.integers(200, 2000, len(x))[:, None])
    for epsilon in (0.1, 0.3, 0.5):
        for dtype in (torch.float32, torch.bfloat16):
            batch = torch.from_numpy(x.astype(np.float32)).to(dtype)
            labels = cosine(batch, epsilon=epsilon)
            check_partition(batch, [len(x)], epsilon, labels)
            assert torch.equal(cosine(batch, epsilon=epsilon, num_threads=1), labels)
    batch = mixture(31, 500, dim, 90, noise=0.8, common=1.0)
    for epsilon in (0.05, 0.15, 0.25):
        check_partition(batch, [300, 200], epsilon, cosine(batch, [300, 200], epsilon))


def test_groups_and_batches_too_long_for_gram_matrices():
    longest = native_loader.load().longest_sweep
    sizes, epsilons = [30, longest + 1, 0, longest, 17], [0.05, 0.0, 0.2]
    x = mixture(5, sum(sizes), 9, 6)
    for usable in (None, torch.arange(len(x)) % 5 > 0):
        for epsilon, labels in zip(epsilons, sweep(x, sizes, epsilons, usable=usable), strict=True):
            assert torch.equal(labels, cosine(x, sizes, epsilon, usable=usable))
    sizes = [2500, 3000, 40, 3900, 1]
    x = mixture(6, sum(sizes), 8, 5)
    assert torch.equal(sweep(x, sizes, [0.1])[0], cosine(x, sizes, 0.1))


@EITHER
@pytest.mark.parametrize("scale", [1e30, 3e38, 1e-25, 1e-30, 1e-38, 3e-43], ids=str)
def test_huge_and_tiny_rows(labels_of, scale, isa):
    x = mixture(2, 120, 70, 5).numpy().astype(np.float64)
    x /= np.abs(x).max(axis=1, keepdims=True)
    x[::3] *= scale
    rows = torch.from_numpy(x.astype(np.float32))
    assert bool((cpu.scan_rows(rows, torch.arange(120)) == 0).all())
    check_partition(rows, [120], 0.1, labels_of(rows, epsilon=0.1))
    if scale < 1e-3:
        wide = rows.to(torch.bfloat16)
        if bool((reference.scan_rows(wide, torch.arange(120)) == 0).all()):
            check_partition(wide, [120], 0.1, labels_of(wide, epsilon=0.1))


@EITHER
def test_flush_to_zero_changes_nothing(labels_of):
    x = mixture(2, 120, 70, 5) * 1e-40
    expected = labels_of(x, epsilon=0.1)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this machine cannot flush denormals")
        for threads in (1, 2):
            assert torch.equal(labels_of(x, epsilon=0.1, num_threads=threads), expected)
            with _threads.using(threads):
                assert not bool(cpu.scan_rows(x, torch.arange(120)).any())
    finally:
        torch.set_flush_denormal(False)


def test_more_than_two_to_the_31_elements():
    dim, n = 64, 40
    step = (2**31 + 2**27) // (n * dim) * dim
    x = mixture(3, n, dim, 4).to(torch.bfloat16)
    try:
        far = torch.empty(step * n, dtype=torch.bfloat16).as_strided((n, dim), (step, 1))
    except RuntimeError:
        pytest.skip("this machine does not lend 4.3 GB of addresses")
    far[:] = x
    assert far.stride(0) * (n - 1) > 2**31
    for epsilon in (0.0, 0.1):
        assert torch.equal(cosine(far, epsilon=epsilon), cosine(x, epsilon=epsilon))
    assert torch.equal(cpu.scan_rows(far, torch.arange(n)), torch.zeros(n, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scan_rows(dtype, isa):
    for dim in (1, 7, 16, 33, 600):
        x = torch.ones(9, dim).to(dtype)
        x[1] = 0
        x[2] = -0.0
        x[3, dim - 1] = torch.inf
        x[4, dim // 2] = torch.nan
        x[5, 0] = -torch.inf
        x[6] = 0
        x[6, dim - 1] = torch.finfo(dtype).tiny / 4
        x[7] = 0
        x[7, 0] = -torch.nan
        order = torch.tensor([8, 7, 6, 5, 4, 3, 2, 1, 0, 0])
        for rows in (x, x.T.contiguous().T, torch.cat([x, x], 1)[:, ::2] if dim == 1 else x):
            state = cpu.scan_rows(rows, order)
            assert state.tolist() == [0, 1, 0, 1, 1, 1, 2, 2, 0, 0]
            assert torch.equal(state, reference.scan_rows(rows, order))


@EITHER
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_unusable_rows_are_alone(labels_of, epsilon):
    x = mixture(8, 90, 20, 3)
    x[::4] = x[0].clone()
    usable = torch.from_numpy(np.random.default_rng(1).random(90) < 0.6)
    sizes = [30, 1, 59]
    order = torch.arange(90)
    expected = reference.cluster_cosine(x, order, offsets_of(sizes), usable, epsilon)
    wild = x.clone()
    wild[~usable] = torch.nan  # their values affect no other record
    for rows in (x, wild):
        labels = labels_of(rows, sizes, epsilon, usable=usable)
        assert torch.equal(labels, expected)
    counts = torch.bincount(labels)
    assert bool((counts[labels[~usable]] == 1).all())
    nobody = torch.zeros(90, dtype=torch.bool)
    assert labels_of(x, sizes, epsilon, usable=nobody).tolist() == list(range(90))


@EITHER
def test_rows_without_direction_are_alone_even_unannounced(labels_of):
    x = mixture(8, 90, 20, 3)
    usable = torch.ones(90, dtype=torch.bool)
    for row, value in ((0, 0.0), (5, torch.nan), (6, torch.inf), (7, 0.0), (60, -torch.inf), (89, 0.0)):
        x[row] = value
        usable[row] = False
    assert torch.equal(labels_of(x), labels_of(x, usable=usable))
    assert labels_of(torch.zeros(5, 3)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_epsilon_is_equality(dtype, isa):
    rng = np.random.default_rng(4)
    for dim in (1, 3, 17, 300):
        base = torch.from_numpy(rng.standard_normal((12, dim)).astype(np.float32)).to(dtype)
        base[1] = base[0] * 2  # the same direction, another row
        base[2, dim - 1] = 0.0
        codes = torch.from_numpy(rng.integers(0, 12, 150))
        x = base[codes]
        x[::2] = torch.where(x[::2] == 0, torch.full_like(x[::2], -0.0), x[::2])
        base[7] = base[8].clone()
        x[codes == 7] = base[8]
        x[2::3] = torch.where(x[2::3] == 0, torch.full_like(x[2::3], -0.0), x[2::3])
        codes[codes == 7] = 8
        sizes = [70, 0, 1, 79]
        first = {}
        keys = zip(np.repeat(range(4), sizes).tolist(), codes.tolist(), strict=True)
        expected = [first.setdefault(key, len(first)) for key in keys]
        for rows in (x, x.T.contiguous().T):
            labels = cosine(rows, sizes, 0.0)
            assert labels.tolist() == expected
            assert torch.equal(labels, reference.cluster_cosine(rows, torch.arange(150), offsets_of(sizes), None, 0.0))


def test_zero_epsilon_sees_signs_and_last_bits():
    x = torch.ones(6, 64)
    x[1, 5] = -1
    x[2, [5, 21]] = -1  # two signs in one of the hash's lanes
    x[3, 40] = 1 + 2**-23
    x[4, 0], x[4, 1] = 2, 3
    x[5, 0], x[5, 1] = 3, 2
    assert cosine(x, epsilon=0.0).tolist() == list(range(6))


def test_zero_epsilon_compares_what_hashes_alike():
    """Rows made to collide in the hash of csrc/cpu/dot_kernels.h: element 16 undoes in its lane what element 0 did."""

    def lane_after(word):
        x = 0x9E3779B1 ^ word
        return (((x << 13) | (x >> 19)) & 0xFFFFFFFF) * 0x85EBCA77 & 0xFFFFFFFF

    words = np.random.default_rng(2).integers(0x3F000000, 0x40000000, (200, 32), dtype=np.uint32)
    emulator = words.copy()
    emulator[:, 0] ^= 0x5A5A
    for row, other in zip(words, emulator, strict=True):
        other[16] ^= lane_after(int(row[0])) ^ lane_after(int(other[0]))
    fine = np.isfinite(emulator.view(np.float32)).all(axis=1) & (emulator[:, 16] & 0x7FFFFFFF != 0)
    rows = torch.from_numpy(np.concatenate([words[fine], emulator[fine]]).view(np.float32))
    assert len(rows) > 300 and cosine(rows, epsilon=0.0).tolist() == list(range(len(rows)))


@EITHER
def test_threads_and_repetitions(labels_of):
    x, sizes = bit_case()
    expected = labels_of(x, sizes, 0.40, num_threads=1)
    assert 20 < int(expected.max()) < 600
    for threads in range(1, 9):
        assert torch.equal(labels_of(x, sizes, 0.40, num_threads=threads), expected)
    for _ in range(50):
        assert torch.equal(labels_of(x, sizes, 0.40), expected)


def test_threads_inside_one_group():
    """One long group: the block's products and sums are split over threads, not the groups."""
    for dtype in DTYPES:
        x = mixture(6, 500, 2000, 150, noise=0.5, common=0.5).to(dtype)
        expected = cosine(x, [480, 20], 0.12, num_threads=1)
        for threads in (2, 3, 8):
            assert torch.equal(cosine(x, [480, 20], 0.12, num_threads=threads), expected)


@EITHER
def test_alone_as_in_a_batch(labels_of):
    x, sizes = bit_case()
    labels = labels_of(x, sizes, 0.40)
    begin = before = 0
    for size in sizes:
        alone = labels_of(x[begin : begin + size], [size], 0.40)
        assert torch.equal(alone + before, labels[begin : begin + size])
        before += int(alone.max()) + 1 if size else 0
        begin += size


def test_alone_as_among_other_epsilons():
    (x, sizes), near = bit_case(), [0.36, 0.38, 0.4, 0.42, 0.0]
    for epsilon, labels in zip(near, sweep(x, sizes, near), strict=True):
        assert torch.equal(sweep(x, sizes, [epsilon])[0], labels)


@EITHER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_and_alignments(labels_of, dtype, isa):
    """The same values at any address and stride give the same labels, and nothing outside them is read into them."""
    for dim in (37, 300):
        x, sizes = bit_case(dim)
        x, n = x.to(dtype), len(x)
        expected = labels_of(x, sizes, 0.40)
        views = [x.T.contiguous().T]
        for step in (2, 3):
            wide = torch.full((2 * n, step * dim + 5), torch.nan, dtype=dtype)
            views.append(wide[::2, 5::step].copy_(x))
        for offset in range(16):
            flat = torch.full((offset + n * dim + 16,), torch.nan, dtype=dtype)
            views.append(flat[offset : offset + n * dim].view(n, dim).copy_(x))
        for view in views:
            assert torch.equal(labels_of(view, sizes, 0.40), expected)
        shuffled = torch.from_numpy(np.random.default_rng(0).permutation(n))
        assert torch.equal(labels_of(x[shuffled], sizes, 0.40, order=shuffled.argsort()), expected)
    assert labels_of(x[:1].expand(20, -1)).max() == 0


@EITHER
def test_powers_of_two_change_nothing(labels_of):
    x, sizes = bit_case(64)
    factor = torch.from_numpy(np.ldexp(1.0, np.random.default_rng(0).integers(-100, 100, (len(x), 1)))).float()
    assert torch.equal(labels_of(x * factor, sizes, 0.40), labels_of(x, sizes, 0.40))


@EITHER
def test_avx2_equals_avx512(labels_of):
    native = native_loader.load()
    if native.isa() != "avx512":
        pytest.skip("this machine has no avx512")
    x, sizes = bit_case()
    for dim in (*range(30, 50), 255, 256, 300):
        found = []
        for name in ("avx2", "avx512"):
            native.set_isa(name)
            found.append(labels_of(x[:, :dim].contiguous(), sizes, 0.40))
        assert torch.equal(*found)


def test_dot_products(isa):
    """Error, tile independence and symmetry of the kernel itself; AVX2 and AVX-512 to the bit."""
    native = native_loader.load()
    rng = np.random.default_rng(0)
    for dim in (1, 15, 16, 17, 100, 256, 257, 1000, 3584):
        for kind in range(3):
            x = rng.standard_normal((11, dim)) if kind == 0 else rng.uniform(0.1, 1, (11, 1)) * np.ones((11, dim))
            if kind == 2:
                x = x + rng.integers(0, 2, x.shape)
            x = x.astype(np.float32)
            out = native.dot_products(x.ctypes.data, 11, dim)
            out = np.array(out).reshape(11, 11)
            exact = x.astype(np.float64) @ x.astype(np.float64).T
            scale = np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
            assert np.abs((out - exact) / scale).max() < 1e-6
            np.testing.assert_array_equal(out, out.T)
            assert native.dot_products(x[3:5].ctypes.data, 2, dim) == out[3:5, 3:5].reshape(-1).tolist()
            if isa == "avx2":
                native.set_isa("avx512")
                if native.isa() == "avx512":
                    assert native.dot_products(x.ctypes.data, 11, dim) == out.reshape(-1).tolist()
                native.set_isa("avx2")


@pytest.mark.slow
@pytest.mark.parametrize(("function", "dim"), [("cosine", 8192), ("sweep", 64)])
def test_out_of_memory_is_an_error(function, dim):
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer needs more addresses than the limit leaves")
    code = f"""
import resource, sys, torch
from clustering import {function}
torch.set_num_threads(1)
x = torch.randn(3000, {dim})
x[1::2] = x[::2]
{function}(x[:64])
with open("/proc/self/statm") as f:
    used = int(f.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (12 << 20), resource.RLIM_INFINITY))
for sizes in ([3000], [1500, 1500]):
    try:
        {function}(x, sizes)
    except MemoryError:
        continue
    sys.exit("no MemoryError")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
print("ok", {function}(x[:64]).shape[-1])
"""
    assert python(code) == "ok 64"


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    dim=st.integers(1, 40),
    kind=st.sampled_from(["normal", "counts", "few", "mixture"]),
    epsilons=st.lists(st.sampled_from([0.0, 1e-4, 0.02, 0.1, 0.25, 0.5, 0.9, 1.0]), max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_ragged_batch(sizes, dim, kind, epsilons, dtype, seed):
    x = sample(kind, sum(sizes), dim, seed).to(dtype)
    found = sweep(x, sizes, epsilons)
    assert found.shape == (len(epsilons), sum(sizes))
    assert torch.equal(sweep(x, sizes, epsilons, num_threads=1), found)
    for epsilon, labels in zip(epsilons, found, strict=True):
        alone = cosine(x, sizes, epsilon)
        assert torch.equal(cosine(x, sizes, epsilon, num_threads=1), alone)
        if epsilon:
            check_partition(x, sizes, epsilon, labels)
            check_partition(x, sizes, epsilon, alone)
        else:
            assert torch.equal(labels, alone)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_million_decisions(dtype):
    """Every decision within 1e-5 of the banded rule on 10⁶ records over the three dtypes."""
    rng = np.random.default_rng(99)
    decided = 0
    while decided < 335_000:
        kind = int(rng.integers(0, 4))
        n, dim = int(rng.integers(200, 1500)), int(rng.choice([16, 64, 200, 512]))
        if kind == 0:
            x = mixture(int(rng.integers(1 << 30)), n, dim, int(rng.integers(1, 120)), noise=float(rng.uniform(0.1, 1)))
            epsilon = float(rng.choice([0.02, 0.1, 0.3]))
        elif kind == 1:  # character n-grams: sparse signed counts of shared pieces
            pieces = rng.integers(-1, 2, (30, dim)) * (rng.random((30, dim)) < 0.1)
            x = rng.integers(0, 3, (n, 30)) @ pieces + (np.arange(dim) == 0)
            epsilon = float(rng.choice([0.2, 0.25]))
        elif kind == 2:  # integer counts that meet ε exactly
            x = rng.integers(-1, 3, (n, 16))
            x[:, 0] = 1
            epsilon = float(rng.choice([0.25, 0.5]))
        else:  # at the threshold: cos to one of five poles within 3e-5 of 1 − ε
            epsilon = 0.1
            poles = np.linalg.qr(rng.standard_normal((dim, 5)))[0].T
            side = rng.standard_normal((n, dim))
            side -= (side @ poles.T) @ poles
            side /= np.linalg.norm(side, axis=1, keepdims=True)
            cos = 1 - epsilon - 1e-5 + rng.uniform(-3e-5, 3e-5, (n, 1))
            x = cos * poles[rng.integers(0, 5, n)] + np.sqrt(1 - cos**2) * side
            x[:5] = poles
        rows = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(dtype)
        labels = cosine(rows, [n], epsilon).numpy()
        worst = replay(rows.to(torch.float64).numpy(), labels, epsilon)
        assert worst.excess <= clustering.TOLERANCE, (worst, kind, n, dim, epsilon)
        decided += n
