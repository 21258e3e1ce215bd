"""advantage() with its kernels where the tensors are, against the reference; on a GPU graphs, streams and waiting."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import CONFIGS, OUTPUTS, make_batch
from marks import slow, slow_case_interpreted, slow_interpreted
from op_cases import OPS, op_cases
from paths import ROOT
from ragged import BACKEND, assert_close, nothing_waits, same_bits, stage
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends import dispatch

BATCH = make_batch(0)
N = BATCH.n
FLOATS = OUTPUTS[:4]
# Partitions, estimators and norms that differ; the other configurations go the ways of these.
DIFFERENT = {"bipace", "bipace_diff", "bipace_history", "gigpo_mean_std_norm", "hgpo_all"}
KEPT = [name for name in CONFIGS if name != "bipace_similar"]  # of texts the clusters come from the host
# Names, and whether the batch holds copies of a step: without them the CUDA kernels run all stages in one launch.
WITH_AND_WITHOUT = [(name, True) for name in KEPT] + [(name, False) for name in ("bigpo", "bipace", "bipace_diff")]


def on(device, arguments):
    """The arguments as tensors on a device; texts and ids as they are."""
    ids = ("group", "trajectory", "step", "observation", "layout")
    return {
        name: value if name in ids or value is None else torch.as_tensor(np.asarray(value)).clone().to(device)
        for name, value in arguments.items()
    }


def both(device, config, arguments, **options):
    """The reference's result on the CPU, and that of the kernels on the device."""
    want = bk.advantage(config=config, backend="reference", **arguments)
    got = bk.advantage(config=config, backend=BACKEND, **on(device, arguments), **options)
    return want, got


def assert_agree(want, got):
    for name in OUTPUTS:
        one, other = getattr(want, name), getattr(got, name)
        assert other.dtype == one.dtype, name
        if one.is_floating_point():
            assert bool(other.isfinite().all())
            assert_close(other, one)
        else:
            assert torch.equal(other.cpu(), one), name
    assert got.metrics() == pytest.approx(want.metrics(), rel=1e-5, abs=1e-5)
    r2, expected = got.value_r2(), want.value_r2()
    assert (r2.r2 is None) == (expected.r2 is None) and r2.coverage == expected.coverage
    got.check()


def bad_values(kind):
    rewards, fingerprint = BATCH.rewards.copy(), BATCH.fingerprint.copy()
    if kind == "spoilt":
        rewards[[2, N - 1]] = np.nan, np.inf
        rewards[12] = 1e300
        fingerprint[[3, N - 2]] = np.inf
    elif kind == "rows":
        fingerprint[[2, 9, N - 1]] = np.nan
        fingerprint[[5, 6]] = 0.0
    elif kind == "all":
        rewards[:] = np.nan
    return {"rewards": rewards, "fingerprint": fingerprint, "action_parsed": np.arange(N) % 3 > 0}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) if kind == "all" or (name, kind) == ("gae", "spoilt") else slow(name, kind)
     for kind in ("fine", "spoilt", "rows", "all") for name in CONFIGS],
)  # fmt: skip
def test_agrees_with_the_reference(name, kind, device):
    config = replace(CONFIGS[name], on_invalid="singleton")
    assert_agree(*both(device, config, BATCH.arguments(**bad_values(kind))))


FAST = {(name, "count" if name == "bipace" else "once") for name in DIFFERENT}
COPIES = [c if c in FAST else slow(*c) for c in itertools.product(CONFIGS, ("once", "count"))]


@pytest.mark.parametrize(("name", "duplicates"), COPIES)
def test_any_row_order_padding_and_copies(name, duplicates, device):
    rng = np.random.default_rng(1)
    doubled = BATCH.take(np.concatenate((np.arange(N), [0, 5, 5, N - 1])))
    batch = doubled.take(rng.permutation(doubled.n))
    valid = rng.random(batch.n) < 0.8
    batch.rewards[~valid] = np.nan
    batch.fingerprint[~valid] = np.nan
    config = replace(CONFIGS[name], duplicates=duplicates)
    assert_agree(*both(device, config, batch.arguments(valid=valid)))


@pytest.mark.parametrize("name", [name if name == "bipace" else slow(name) for name in KEPT])
def test_given_returns_and_nothing_to_do(name, device):
    returns, episode = np.linspace(-1, 1, N), BATCH.trajectory.astype(float)
    rewards = BATCH.rewards if CONFIGS[name].estimator == "gae" else None  # which reads them in any case
    for changes in ({"returns": returns, "episode_return": episode, "rewards": rewards}, {"valid": np.zeros(N, bool)}):
        assert_agree(*both(device, CONFIGS[name], BATCH.arguments(**changes)))
    empty = BATCH.take([])
    given = {**empty.arguments(), "fingerprint": np.zeros((0, 4), np.float32), "rewards": torch.zeros(0)}
    assert bk.advantage(config=CONFIGS[name], backend=BACKEND, **on(device, given)).advantage.shape == (0,)


VIEWS = {
    "columns first": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "part of wider rows": lambda x: torch.cat([x, x, x], dim=1)[:, 1 : 1 + x.shape[1]],
    "one row for all": lambda x: x[:1].expand_as(x),
}
SOME = list(VIEWS)


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16, slow(torch.float16), torch.float64], ids=str)
def test_every_dtype(dtype, device):
    fingerprint = torch.from_numpy(BATCH.fingerprint).to(dtype)
    given = BATCH.arguments(fingerprint=fingerprint)
    want = bk.advantage(config=CONFIGS["bipace"], backend="reference", **given)
    got = bk.advantage(config=CONFIGS["bipace"], backend=BACKEND, **{**given, "fingerprint": fingerprint.to(device)})
    assert_agree(want, got)


@slow_interpreted
@pytest.mark.parametrize("view", [SOME[0], slow_case_interpreted(SOME[3]), *map(slow, SOME[1:3])])
@pytest.mark.parametrize("epsilon", [0.2, slow(0.0)])
def test_every_layout(view, epsilon, device):
    fingerprint = VIEWS[view](torch.from_numpy(BATCH.fingerprint).bfloat16().to(device))
    config = bk.Config.bipace(epsilon)
    given = {**on(device, BATCH.arguments()), "fingerprint": fingerprint}
    got = bk.advantage(config=config, backend=BACKEND, **given)
    same = bk.advantage(config=config, backend=BACKEND, **{**given, "fingerprint": fingerprint.contiguous()})
    host = BATCH.arguments(fingerprint=fingerprint.cpu())
    assert_agree(bk.advantage(config=config, backend="reference", **host), got)
    assert_same(got, same)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, slow(torch.float32), slow(torch.bool)], ids=str)
@pytest.mark.parametrize("keys", [torch.uint8, torch.uint64], ids=str)
def test_rewards_keys_and_observations_of_other_dtypes(dtype, keys, device):
    codes = torch.arange(N, dtype=torch.int16) % 4
    given = BATCH.arguments(
        rewards=torch.from_numpy(BATCH.rewards).to(dtype), action_key=(torch.arange(N) % 3).to(keys), observation=codes,
        action_parsed=torch.ones(N, dtype=keys),
    )  # fmt: skip
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    for name in ("bipace_exact", "hgpo"):
        want = bk.advantage(config=CONFIGS[name], backend="reference", **given)
        assert_agree(want, bk.advantage(config=CONFIGS[name], backend=BACKEND, **moved))


def test_epsilon_zero_with_one_fingerprint_per_observation_is_gigpo(device):
    number = {text: i for i, text in enumerate(dict.fromkeys(BATCH.observation))}
    one_hot = torch.eye(len(number))[[number[text] for text in BATCH.observation]]
    given = on(device, BATCH.arguments(fingerprint=one_hot))
    gigpo = bk.advantage(config=bk.Config.gigpo(), backend=BACKEND, **given)
    zero = bk.advantage(config=bk.Config.bigpo(0.0), backend=BACKEND, **given)
    assert_same(zero, gigpo)


@pytest.mark.parametrize("name", ["bipace", "gigpo_mean_std_norm", "hgpo_all"])
def test_a_group_alone_has_the_bits_of_the_batch(name, device):
    whole = bk.advantage(config=CONFIGS[name], backend=BACKEND, **on(device, BATCH.arguments()))
    for group in range(int(BATCH.group.max()) + 1):
        rows = np.flatnonzero(BATCH.group == group)
        alone = bk.advantage(config=CONFIGS[name], backend=BACKEND, **on(device, BATCH.take(rows).arguments()))
        for field in FLOATS:
            assert same_bits(getattr(alone, field), getattr(whole, field)[torch.from_numpy(rows).to(device)]), field


@pytest.fixture
def scratch_of_nan(monkeypatch):
    """Turns on what fills memory with NaN, or the largest integer, where nothing has been written."""

    def turn_on():
        torch.use_deterministic_algorithms(True)
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        assert torch.empty(1).isnan().all()

    yield turn_on
    torch.use_deterministic_algorithms(False)


@slow_interpreted
@pytest.mark.parametrize("name", ["bipace", slow("hgpo")])
def test_what_scratch_memory_held_before_changes_no_bit(name, device, scratch_of_nan):
    """Loads may be wider than what was written: what they bring of it must not count."""
    given = on(device, BATCH.arguments(**bad_values("rows")))
    config = replace(CONFIGS[name], on_invalid="singleton")
    want = bk.advantage(config=config, backend=BACKEND, **given)
    scratch_of_nan()
    assert_same(bk.advantage(config=config, backend=BACKEND, **given), want)


@slow_interpreted
def test_what_scratch_memory_held_before_changes_no_cluster(device, scratch_of_nan):
    clusters = stage("clusters")
    fingerprint = on(device, BATCH.arguments(**bad_values("rows")))["fingerprint"]
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)

    def labels():
        there = lay.order.to(device), lay.group_offsets.to(device)
        return clusters.cluster_sweep(fingerprint, *there, None, [0.0, 0.1, 1.0])

    want = labels()
    scratch_of_nan()
    assert torch.equal(labels(), want)


def test_errors_come_when_asked_and_arguments_stay(device):
    given = on(device, BATCH.arguments(**bad_values("spoilt")))
    before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    result = bk.advantage(config=CONFIGS["bipace"], backend=BACKEND, **given)
    later = refused(r"rewards must be finite .* at rows 2, 12 and 37", result.check)
    assert refused("", bk.advantage, config=CONFIGS["bipace"], backend=BACKEND, check="now", **given) == later
    for name, value in before.items():
        assert same_bits(given[name], value), name


def test_discounted_returns(device):
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step, np.arange(N) % 7 > 0)
    rewards = torch.from_numpy(BATCH.rewards.copy())
    rewards[0] = torch.nan  # padding
    want = bk.discounted_returns(rewards, gamma=0.9, layout=lay, backend="reference")
    got = bk.discounted_returns(rewards.to(device), gamma=0.9, layout=lay, backend=BACKEND)
    assert got.device.type == device.type
    assert_close(got, want)
    rewards[12] = torch.inf
    rewards[30] = 1e300
    got = bk.discounted_returns(rewards.to(device), gamma=0.9, layout=lay, backend=BACKEND)
    spoilt = np.isin(BATCH.trajectory, BATCH.trajectory[[12, 30]])
    assert_close(got, torch.where(torch.from_numpy(spoilt), 0.0, want))
    for backend, tensor in (("reference", rewards), (BACKEND, rewards.to(device))):
        with pytest.raises(ValueError, match=r"rewards must be finite .* got inf at row 12"):
            bk.discounted_returns(tensor, gamma=0.9, layout=lay, backend=backend, check="now")
    copies = torch.tensor([2.0, 2.0, 3.0], device=device)
    given = {"trajectory": [0] * 3, "gamma": 0.5, "step": [0, 0, 1], "backend": BACKEND}
    assert bk.discounted_returns(copies, **given).tolist() == [3.5, 3.5, 3.0]
    copies[1] = 1.0
    assert bk.discounted_returns(copies, **given).tolist() == [0.0] * 3
    refused("rewards of one step must agree", bk.discounted_returns, copies, check="now", **given)
    huge = torch.full((3,), 9e36, device=device)
    with pytest.raises(ValueError, match=r"returns \(sums of rewards\) must be finite"):
        bk.discounted_returns(huge, [0] * 3, 1.0, backend=BACKEND, check="now")
    assert bk.discounted_returns(huge, [0] * 3, 1.0, backend=BACKEND).tolist() == [0.0] * 3


@pytest.fixture
def ops_by_device(device, monkeypatch):
    """Ops on the device's tensors run the kernels, under the interpreter too."""
    monkeypatch.setenv("BIPACE_BACKEND", BACKEND)
    assert dispatch.choose("auto", device).deferred


@pytest.mark.parametrize("name", OPS)
def test_ops_mean_the_same_on_every_device(name, device, ops_by_device, monkeypatch):
    op = getattr(torch.ops.bipace, name)
    for (args, kwargs), (there, others) in zip(op_cases(name, "cpu"), op_cases(name, device), strict=True):
        got = op(*there, **others)
        with monkeypatch.context() as patch:
            patch.setenv("BIPACE_BACKEND", "cpu")
            want = op(*args, **kwargs)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            assert one.dtype == other.dtype
            if one.is_floating_point():
                assert_close(one, other)
            else:
                assert torch.equal(one.cpu(), other)


@slow_interpreted
@pytest.mark.parametrize("name", ["bipace", slow("hgpo")])
def test_compiled_gives_the_same_bits(name, device, ops_by_device):
    torch.compiler.reset()
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    given = tensors(device)

    def whole(given, lay, config):
        return bk.advantage(layout=lay, config=config, **given)

    got = torch.compile(whole, fullgraph=True, backend="aot_eager")(given, lay, CONFIGS[name])
    assert_same(got, whole(given, lay, CONFIGS[name]))
    assert got.metrics() == whole(given, lay, CONFIGS[name]).metrics()


def tensors(device, batch=BATCH):
    """The arguments of advantage() other than the layout, all on the device."""
    codes = torch.tensor([hash(text) for text in batch.observation])
    given = {"rewards": batch.rewards, "fingerprint": batch.fingerprint, "action_key": batch.action_key}
    return {**on(device, {**given, "action_parsed": np.ones(batch.n, bool)}), "observation": codes.to(device)}


def assert_same(got, want):
    for name in OUTPUTS:
        assert same_bits(getattr(got, name), getattr(want, name)), name


def other_values(given):
    """The same tensors with other values in them, some of them bad."""
    other = {name: value.clone() for name, value in given.items()}
    other["rewards"] = torch.roll(other["rewards"], 3)
    other["rewards"][4] = torch.nan
    other["fingerprint"] = other["fingerprint"].flip(0) * 0.7
    other["fingerprint"][9] = 0.0
    other["action_key"] = other["action_key"] % 3
    other["observation"] = other["observation"].flip(0)
    return other


def on_gpu(name, *, copies=True, real=False):
    """(tensors, call) on the GPU, its kernels compiled.  A batch with copies of a step goes stage by stage."""
    config = replace(CONFIGS[name], duplicates="once")
    batch = BATCH.take(np.concatenate((np.arange(N), [0, 5]))) if copies else BATCH
    if real:  # about 16 × 400 × 3,584
        batch = make_batch(1, groups=16, trajectories=20, longest=66, dim=3584, states=40)
    lay = bk.layout(batch.group, batch.trajectory, batch.step)
    given = tensors(torch.device("cuda"), batch)

    def call(given):
        return bk.advantage(layout=lay, config=config, backend=BACKEND, **given)

    call(given)
    torch.cuda.synchronize()
    return given, call


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "copies"), WITH_AND_WITHOUT)
def test_never_waits_and_copies_nothing_to_the_host(name, copies):
    given, call = on_gpu(name, copies=copies)
    with torch.profiler.profile() as seen, nothing_waits(torch.device("cuda")):
        call(given)
    assert not [event.name for event in seen.events() if "DtoH" in event.name]


@pytest.mark.gpu
def test_the_functions_beside_it_never_wait():
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    given = tensors(torch.device("cuda"))
    mask = torch.ones(N, 3, dtype=torch.int32, device="cuda")

    def run():
        bk.ngram_fingerprint(["a", "bc"], device="cuda", backend=BACKEND)
        returns = bk.discounted_returns(given["rewards"], layout=lay, backend=BACKEND)
        labels = bk.cluster(given["fingerprint"], epsilon=[0.1, 0.2], layout=lay, backend=BACKEND)
        return labels, bk.to_tokens(returns, mask)

    run()
    torch.cuda.synchronize()
    with nothing_waits(mask.device):
        run()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "copies", "real"), [
    *((*each, False) for each in WITH_AND_WITHOUT), ("gae", False, True), ("gae_plain", False, True),
])  # fmt: skip
def test_a_captured_graph_replays_on_other_values(name, copies, real):
    given, call = on_gpu(name, copies=copies, real=real)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(given)
    good = {key: value.clone() for key, value in given.items()}
    for values in (good, other_values(good)):
        for key, value in values.items():
            given[key].copy_(value)
        graph.replay()
        assert_same(captured, call(values))
        if values is good:
            assert captured.metrics() == call(values).metrics()
    refused(r"must be finite|must agree", captured.check)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "copies"), [("bipace", True), ("bipace", False), ("hgpo", True)])
def test_runs_on_the_current_stream(name, copies):
    """Values that arrive late on a stream of the caller's are seen; nothing runs on another stream before them."""
    given, call = on_gpu(name, copies=copies)
    want = call(other_values(given))
    stream = torch.cuda.Stream()
    late = {key: torch.zeros_like(value) for key, value in given.items()}
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for key, value in other_values(given).items():
            late[key].copy_(value)
        got = call(late)
    torch.cuda.current_stream().wait_stream(stream)
    assert_same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bipace", "gigpo", "hgpo"])
def test_several_gpus_in_one_process(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    results = []
    for index in (1, 0, 1):
        with torch.cuda.device(0):
            given = tensors(torch.device("cuda", index))
            results.append(bk.advantage(layout=lay, config=CONFIGS[name], backend=BACKEND, **given))
        assert results[-1].advantage.device.index == index
    for got in results[1:]:
        assert_same(got, results[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", KEPT)
def test_compiled_on_a_gpu(name):
    """By the compiler itself, with arithmetic before and after; captured into a graph it gives the same bits."""
    torch.compiler.reset()
    given, call = on_gpu(name)

    def whole(given):
        return call({**given, "rewards": given["rewards"] * 0.5}).advantage + 1

    compiled = torch.compile(whole, fullgraph=True)
    assert same_bits(compiled(given), whole(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(given)
    want = whole(other_values(given))
    for key, value in other_values(given).items():
        given[key].copy_(value)
    graph.replay()
    assert same_bits(captured, want)


def test_the_example_of_the_docs_gets_tensors_of_the_device(device):
    """docs/estimator.md, 4.1."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/estimator.md").read_text(), re.DOTALL)
    page = {"__name__": "page"}
    exec(compile(code, "docs/estimator.md", "exec"), page)

    def estimator(records):
        devices.update(field.device.type for field in vars(records).values() if isinstance(field, torch.Tensor))
        return page["against_median"](records)

    devices, config = set(), replace(page["config"], estimator=estimator, on_invalid="singleton")
    given = BATCH.arguments(rewards=bad_values("spoilt")["rewards"], observation=np.arange(N) % 4, fingerprint=None)
    want = bk.advantage(config=replace(config, estimator=page["against_median"]), backend="cpu", **given)
    there = {name: torch.as_tensor(value).to(device) for name, value in given.items() if value is not None}
    got = bk.advantage(config=config, backend=BACKEND, **there)
    assert devices == {got.advantage.device.type} == {device.type}
    assert torch.allclose(got.step_advantage.cpu(), want.step_advantage, atol=2e-6)
    assert torch.equal(got.cluster.cpu(), want.cluster) and torch.equal(got.branch.cpu(), want.branch)
