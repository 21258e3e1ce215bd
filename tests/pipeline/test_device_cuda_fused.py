"""The launch of all stages against those stages one by one: the same bits, however the work is shared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import OUTPUTS, make_batch
from ragged import ON_CPU, same_bits, sentinels, stage

import bipace_kernels as bk
from bipace_kernels.cuda import _provider, clusters, fused

CONFIGS = {
    "q_style": bk.Config.bipace(0.2, estimator="q_style"),
    "diff_peer": bk.Config.bipace(0.2, estimator="diff_peer"),
    "mean": bk.Config.bigpo(0.2),
    "mean_std": bk.Config.bigpo(0.2, step_norm="std", step_weight=0.5),
    "weight_0": bk.Config.bipace(0.2, step_weight=0.0),
}
SIZES = (150, 1, 40, 300, 7, 129)


def mixture(sizes, *, seed=0, dim=72, states=12, noise=0.4):
    """Arguments of advantage() over groups of these sizes, in a random order of rows."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    group = np.repeat(np.arange(len(sizes)), sizes)
    trajectory = np.concatenate([np.arange(m) // 5 + 1000 * g for g, m in enumerate(sizes)])
    step = np.concatenate([np.arange(m) % 5 for m in sizes])
    fingerprint = rng.normal(size=(states, dim))[rng.integers(states, size=n)] + noise * rng.normal(size=(n, dim))
    rows = rng.permutation(n)
    return {
        "group": torch.from_numpy(group[rows]),
        "trajectory": torch.from_numpy(trajectory[rows]),
        "step": torch.from_numpy(step[rows]),
        "rewards": torch.from_numpy(rng.random(n)[rows]),
        "action_key": torch.from_numpy(rng.integers(4, size=n)[rows]),
        "fingerprint": torch.from_numpy(fingerprint[rows].astype(np.float32)),
    }


@pytest.fixture
def launched(device, monkeypatch):
    """Names of the kernels launched so far."""
    if plan(400, device=device) is None:
        pytest.skip("blocks of this GPU have too little shared memory for one launch")
    names, real = [], fused.launch
    for module in (fused, clusters, stage("scan"), stage("values"), stage("combine"), stage("gram"), stage("rows")):
        monkeypatch.setattr(
            module, "launch", lambda name, *args, **options: (names.append(name), real(name, *args, **options))
        )
    return names


def both(given, config, launched):
    """The results of one launch, and of a launch for each stage."""
    launched.clear()
    one = bk.advantage(config=config, backend="cuda", **given)
    assert launched.count("fused_advantage") == 1
    assert not {"scan_groups", "combine"} & set(launched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "plan", lambda *_: None)
        launched.clear()
        several = bk.advantage(config=config, backend="cuda", **given)
    assert "fused_advantage" not in launched
    assert "scan_groups" in launched
    return one, several


def assert_same(one, other):
    for name in OUTPUTS:
        assert same_bits(getattr(one, name), getattr(other, name)), name
    assert one.metrics() == other.metrics()


def on(device, given):
    """Values on the device; ids as arrays of the host, for which no call waits."""
    ids = ("group", "trajectory", "step")
    return {name: np.asarray(value) if name in ids else value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in given.items()}  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_same_bits_as_stage_by_stage(name, dtype, device, launched):
    given = mixture(SIZES)
    given["fingerprint"] = given["fingerprint"].to(dtype)
    one, several = both(on(device, given), CONFIGS[name], launched)
    assert_same(one, several)
    want = bk.advantage(config=CONFIGS[name], backend="reference", **given)
    assert torch.equal(one.cluster.cpu(), want.cluster)
    assert torch.equal(one.branch.cpu(), want.branch)
    torch.testing.assert_close(one.advantage.cpu(), want.advantage, rtol=2e-6, atol=2e-5)


def test_without_groups_of_warps(device, launched, monkeypatch):
    """As on every GPU but those of compute capability 9.0."""
    monkeypatch.setattr(stage("gram"), "WARPGROUPS", False)
    given = mixture(SIZES)
    given["fingerprint"] = given["fingerprint"].bfloat16()
    one, several = both(on(device, given), CONFIGS["q_style"], launched)
    assert_same(one, several)
    assert torch.equal(one.cluster.cpu(), bk.advantage(config=CONFIGS["q_style"], backend="reference", **given).cluster)


def test_padding_bad_rows_and_rows_of_extreme_length(device, launched):
    given = mixture(SIZES, seed=1)
    n = sum(SIZES)
    given["fingerprint"] = given["fingerprint"].bfloat16()
    given["fingerprint"][[3, 90, 200]] *= 2.0**70
    given["fingerprint"][[5, 91, 201]] *= 2.0**-70
    given["fingerprint"][[7, 400]] = float("nan")
    given["fingerprint"][[8, 401]] = 0.0
    given["rewards"][[9, 300]] = float("inf")
    given["valid"] = torch.arange(n) % 11 > 0
    config = bk.Config.bipace(0.2, on_invalid="singleton")
    one, several = both(on(device, given), config, launched)
    assert_same(one, several)
    want = bk.advantage(config=config, backend="reference", **given)
    assert torch.equal(one.cluster.cpu(), want.cluster)
    assert (one.cluster.cpu()[~given["valid"]] == -1).all()


@pytest.mark.parametrize(("states", "noise"), [(1, 0.1), (400, 1.5)], ids=["one cluster", "all singletons"])
def test_few_and_many_clusters(states, noise, device, launched):
    """Among them more than have room in shared memory."""
    given = mixture((390, 260), seed=2, states=states, noise=noise)
    given["fingerprint"] = given["fingerprint"].bfloat16()
    one, several = both(on(device, given), CONFIGS["q_style"], launched)
    assert_same(one, several)
    assert (int(one.cluster.max()) + 1 < 20) == (states == 1)


def test_random_ragged_batches(device, launched):
    for seed in range(4):
        batch = make_batch(seed)
        given = on(device, {k: torch.as_tensor(v) if isinstance(v, np.ndarray) and v.dtype != object else v
                            for k, v in batch.arguments().items()})  # fmt: skip
        assert_same(*both(given, CONFIGS["diff_peer"], launched))


@pytest.mark.skipif(not ON_CPU, reason="the number of blocks is the GPU's own")
@pytest.mark.parametrize("blocks", [1, 2, 7])
@pytest.mark.parametrize("side_by_side", [True, False])
def test_any_number_of_blocks(blocks, side_by_side, device, launched, twin, monkeypatch):
    """Also one after the other, and whatever groups have their tiles taken together."""
    given = mixture((300, 20, 140, 1, 260), seed=3)
    given["fingerprint"] = given["fingerprint"].bfloat16()
    monkeypatch.setattr(twin, "processors", lambda device: blocks)
    monkeypatch.setattr(twin, "together", blocks if side_by_side else 1)
    one, several = both(given, CONFIGS["q_style"], launched)
    assert_same(one, several)


@pytest.mark.skipif(not ON_CPU, reason="the size of shared memory is the GPU's own")
@pytest.mark.parametrize("kib", [135, 163])
def test_other_sizes_of_shared_memory(kib, device, launched, twin, monkeypatch):
    monkeypatch.setattr(twin, "shared", kib << 10)
    monkeypatch.setattr(twin, "groups", False)  # which come with 227 KiB
    given = mixture((390, 260), seed=2, states=400, noise=1.5)
    given["fingerprint"] = given["fingerprint"].bfloat16()
    assert_same(*both(given, CONFIGS["q_style"], launched))


def plan(*sizes, epsilon=0.2, device="cuda"):
    return fused.plan(torch.device(device), len(sizes), sum(sizes), max(sizes), epsilon)


def test_what_does_not_fit_goes_stage_by_stage(device, monkeypatch):
    monkeypatch.setattr(_provider.current(), "processors", lambda device: 132)
    monkeypatch.setattr(_provider.current(), "shared_memory", lambda device: 227 << 10)
    assert plan(400, 300, device=device) is not None
    assert plan(400, epsilon=0.0, device=device) is None
    assert plan(400, epsilon=1.9, device=device) is None
    assert plan(fused.LONGEST + 1, device=device) is None
    assert plan(*[1024] * 240, device=device) is not None
    assert plan(*[1024] * 256, device=device) is None  # a matrix each, and 64 columns of similarities
    assert fused.plan(device, 1, 0, 0, 0.2) is None
    monkeypatch.setattr(_provider.current(), "shared_memory", lambda device: 99 << 10)
    assert plan(400, 300, device=device) is None


def test_sixteen_groups_of_400_take_their_columns_together():
    """First columns of all groups before any second one, on 132 multiprocessors; large groups one or a few at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            _provider,
            "stand_in",
            type(
                "P",
                (),
                {
                    "processors": lambda *_: 132,
                    "shared_memory": lambda *_: 227 << 10,
                    "warpgroups": lambda *_: True,
                },
            )(),
        )
        how = plan(*[400] * 16)
        assert (how.side, how.together, how.parts, how.blocks) == (512, 16, 1, 132)
        assert plan(*[1024] * 64).together == 8
        assert plan(*[20] * 5).blocks == 5


def test_copies_of_a_step_go_stage_by_stage(device, launched):
    given = mixture((30, 20), seed=4)
    twice = {name: torch.cat([value, value[:3]]) for name, value in given.items()}
    config = bk.Config.bipace(0.2, duplicates="once")
    want = bk.advantage(config=config, backend="reference", **twice)
    launched.clear()
    got = bk.advantage(config=config, backend="cuda", **on(device, twice))
    assert {"fused_advantage", "combine"} <= set(launched)  # the clusters alone in one launch
    assert torch.equal(got.cluster.cpu(), want.cluster)
    merged = bk.layout(group=twice["group"], trajectory=twice["trajectory"], step=twice["step"]).once()
    ids = {"group": None, "trajectory": None, "step": None, "layout": merged}
    got = bk.advantage(config=config, backend="cuda", **{**on(device, twice), **ids})
    assert_same(got, bk.advantage(config=config, backend="cuda", **on(device, twice)))
    counted = bk.Config.bipace(0.2, duplicates="count")
    launched.clear()
    got = bk.advantage(config=counted, backend="cuda", **on(device, twice))
    assert "fused_advantage" in launched
    assert torch.equal(got.cluster.cpu(), bk.advantage(config=counted, backend="reference", **twice).cluster)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_clusters_alone(dtype, device, launched):
    """The labels that Gram matrices, decisions and numbers give one after the other; records set aside and bad ones too."""
    sizes = [140, 0, 1, 260, 33]
    n = sum(sizes)
    x = mixture(sizes, seed=7)["fingerprint"].to(dtype)
    x[5] = float("nan")
    x[150] = 0.0
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3)).to(device)
    offsets = torch.tensor([0, *np.cumsum(sizes)], device=device)
    taken = (torch.arange(n) % 9 > 0).to(device)
    usable = (clusters.scan_rows(x.to(device), order) == 0) & (torch.arange(n) % 7 > 0).to(device)

    def labels(usable, taken):
        launched.clear()
        with sentinels():
            return clusters.cluster_cosine(
                x.to(device), order, offsets, usable, 0.1, n_groups=len(sizes), longest_group=260, taken=taken
            ).cpu()

    for marks in ((usable, taken), (None, None)):
        one = labels(*marks)
        assert launched == ["look_at_rows", "fused_advantage"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "plan", lambda *_: None)
            several = labels(*marks)
        assert "scan_groups" in launched
        assert torch.equal(one, several)
        assert bool((one == -1).any()) == (marks[1] is not None)
        assert int(one.max()) > 10


@pytest.mark.skipif(ON_CPU, reason="needs blocks that really run at once, and a GPU's sizes")
@pytest.mark.parametrize(("groups", "length", "dim"), [(16, 400, 3584), (64, 1024, 512)])
def test_again_and_again_at_size(groups, length, dim, device, launched):
    """On two streams at once: what a block sees of others' work must not depend on when it looks."""
    given = on(device, mixture([length] * groups, dim=dim, states=20 * groups, seed=6))
    given["fingerprint"] = given["fingerprint"].bfloat16()
    config = CONFIGS["q_style"]
    _, want = both(given, config, launched)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(bk.advantage(config=config, backend="cuda", **given))
        torch.cuda.synchronize()
        for got in found:
            for name in OUTPUTS:
                assert same_bits(getattr(got, name), getattr(want, name)), name
