"""Bad inputs, single and combined: the error names argument, expectation, fact and remedy, or the result is finite."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from bad_inputs import BAD, BATCH, KINDS, N, bad_values
from batches import CONFIGS, OUTPUTS, assert_same
from hypothesis import given, strategies as st
from lying import LyingList
from refusals import refused
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import bipace_kernels as bk
from bipace_kernels.backends import dispatch
from bipace_kernels.inputs import checks
from bipace_kernels.support import warnings as _warnings

FLOATS = OUTPUTS[:4]
COLUMNS = set(BAD) - {"config", "backend", "check", "num_threads", "layout"}


def run(config=None, **changes):
    return bk.advantage(config=config or CONFIGS["bipace"], **BATCH.arguments(**changes))


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [pytest.param(name, *case, id=f"{name}{i}") for name, cases in BAD.items() for i, case in enumerate(cases)],
)
def test_bad_argument(name, value, error, words):
    refused(words, run, error=error, **{name: value})


def test_missing_and_unordered_observations():
    for name in ("gigpo", "hgpo", "bipace_similar"):
        refused("observation is missing", run, CONFIGS[name], observation=None)
    with pytest.raises(TypeError, match="observation must hold str for partition='similar', got int at row 0"):
        run(CONFIGS["bipace_similar"], observation=list(range(N)))
    refused("observation", run, CONFIGS["gigpo"], error=TypeError, observation=[["un", "hashable"]] * N)
    for name in ("gigpo", "bipace_similar"):  # the order of a set differs from process to process
        for value in ({str(i) for i in range(N)}, {str(i): i for i in range(N)}):
            refused("observation must be a list or array with", run, CONFIGS[name], error=TypeError, observation=value)


def test_padding_may_hold_anything(backend):
    valid = np.arange(N) % 4 > 0
    group, trajectory = BATCH.group.tolist(), BATCH.trajectory.tolist()
    observation = list(BATCH.observation)
    for i in np.flatnonzero(~valid):
        group[i] = trajectory[i] = None
        observation[i] = {"not": "hashable"}
    rest = BATCH.take(np.flatnonzero(valid))
    for name in ("gigpo", "hgpo", "bipace_similar"):
        ids = {"group": group, "trajectory": trajectory, "observation": observation}
        got = run(CONFIGS[name], **ids, valid=valid, backend=backend)
        want = bk.advantage(config=CONFIGS[name], backend=backend, **rest.arguments())
        assert torch.equal(got.advantage[valid], want.advantage) and torch.equal(got.cluster[valid], want.cluster)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 30.0, 700.0, 1e4, 1e300])
def test_no_weight_of_hgpo_overflows(alpha, backend):
    config = bk.Config.hgpo(3, length_weight_alpha=alpha)
    result = run(config, backend=backend)
    assert torch.isfinite(result.advantage).all()
    torch.testing.assert_close(result.advantage, run(config, backend="reference").advantage, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["hgpo", "bipace_history"])
def test_a_history_longer_than_any_rollout_is_the_longest_one(name, backend):
    longest = int(BATCH.step.max())
    huge, enough = (run(replace(CONFIGS[name], history_length=h), backend=backend) for h in (10**9, longest))
    assert torch.equal(huge.advantage, enough.advantage) and torch.equal(huge.cluster, enough.cluster)


def test_a_bad_copy_of_a_step_spoils_its_trajectory_and_copies_that_disagree_are_refused(backend):
    arguments = {"group": [0] * 5, "trajectory": [0, 0, 0, 1, 1], "step": [0, 0, 1, 0, 1], "observation": list("aabab")}
    for rewards in ([math.nan, 1, 0, 1, 0], [1, math.nan, 0, 1, 0], [math.nan, math.nan, 0, 1, 0]):
        for duplicates in ("once", "count"):
            config = bk.Config.gigpo(duplicates=duplicates)
            with pytest.raises(ValueError, match=r"rewards must be finite.*nan at row"):
                bk.advantage(rewards=rewards, config=config, backend=backend, **arguments)
            aside = replace(config, on_invalid="singleton")
            result = bk.advantage(rewards=rewards, config=aside, backend=backend, **arguments)
            assert result.cluster.tolist() == [-1, -1, -1, 0, 1] and not result.advantage[:3].any()
            assert torch.isfinite(result.advantage).all()
    with pytest.raises(ValueError, match="rewards of one step must agree, but rows 0 and 1"):
        bk.discounted_returns([1.0, 2.0, 3.0], [0] * 3, 0.5, step=[0, 0, 1], backend=backend)
    found = bk.discounted_returns([2.0, 2.0, 3.0], [0] * 3, 0.5, step=[0, 0, 1], backend=backend)
    assert found.tolist() == [3.5, 3.5, 3.0]


def test_weight_zero_keeps_the_sign_of_zero(backend):
    config, given = bk.Config.gigpo("mean_norm", step_weight=0), {"episode_return": [-0.0], "observation": ["a"]}
    result = bk.advantage([0], [0], [0.0], **given, config=config, backend=backend)
    assert math.copysign(1, result.episode_advantage) == math.copysign(1, result.advantage) == -1


def test_to_tokens_refuses():
    for value, words in (([math.nan], "must be finite"), ([1j], "must be real"), ([[1.0]], "shape")):
        refused(words, bk.to_tokens, value, [[1]], error=(ValueError, TypeError))
    refused(r"mask must have shape \[B, T\] with B = 1", bk.to_tokens, [1.0], [1, 1])
    refused("0 and 1 only", bk.to_tokens, [1.0], [[0.5]])
    refused("0 and 1 only", bk.to_tokens, [1.0], torch.tensor([[1 + 0j]]))
    with pytest.raises(TypeError, match="pass its `advantage`"):
        bk.to_tokens(bk.advantage([0, 0], [0, 1], [1.0, 0.0], config=bk.Config.grpo()), torch.ones(2, 3))


def test_lists_of_tensors_and_unsigned_integers_those_of_a_gpu_without_a_look(monkeypatch):
    x = torch.from_numpy(BATCH.fingerprint).requires_grad_(True)
    want = run()
    assert torch.equal(run(fingerprint=list(x)).advantage, want.advantage)
    small = torch.from_numpy(BATCH.step).to(torch.uint16)
    assert torch.equal(run(step=small).advantage, want.advantage)
    assert bk.cluster([[1, 2], [2, 4], [3, -1]], [0, 0, 0], 0.1).tolist() == [0, 0, 1]
    # There the largest is not known without waiting; on the CPU these become int64 before.
    monkeypatch.setattr(checks, "to_tensor", lambda value, *_: value)
    keys = torch.tensor([0, 7, 7, 2**64 - 1], dtype=torch.uint64)
    assert checks.integer_vector(keys, "action_key", 4).tolist() == [0, 7, 7, -1]
    late = []
    assert checks.bool_vector(keys[:2], "valid", 2, late).tolist() == [False, True]
    assert [bool(check.failed) for check in late] == [True]


def test_first_error_wins_in_a_fixed_order_and_unused_arguments_are_checked_for_length_only():
    """Shapes and names before values: a NaN reward does not hide a wrong length."""
    refused("action_key must have one entry per row", run, rewards=np.full(N, np.nan), action_key=[1])
    refused("fingerprint must have shape", run, rewards=np.full(N, np.nan), fingerprint=np.zeros((N, 2, 2)))
    run(CONFIGS["gigpo"], fingerprint=["anything"] * N, action_key=["no key"] * N)
    run(CONFIGS["bigpo"], observation=[object()] * N)
    run(CONFIGS["bigpo"], rewards=["x"] * N, returns=np.ones(N), episode_return=np.ones(N))
    refused("fingerprint must have one entry per row", run, CONFIGS["gigpo"], fingerprint=["anything"])


def test_devices_must_agree_ids_be_on_the_host_and_a_layout_say_what_is_valid():
    with pytest.raises(ValueError, match=r"all tensors must be on one device, got .*\.to\(device\)"):
        run(rewards=torch.zeros(N), fingerprint=torch.zeros(N, 4, device="meta"))
    refused(r"tensors on meta.*\.cpu\(\)", run, error=bk.BackendError, fingerprint=torch.zeros(N, 4, device="meta"))
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    for call in (lambda: bk.layout(ids, ids), lambda: bk.trajectory_ids(ids, ids)):
        refused(r"tensors on meta.*\.cpu\(\)", call, error=bk.BackendError)
    valid = np.arange(N) % 3 > 0
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step, valid)
    ids = {"group": None, "trajectory": None, "step": None}
    run(layout=lay, valid=valid, **ids)
    refused("valid must be None or the mask that the layout was made with", run, layout=lay, valid=~valid, **ids)
    refused("rewards must have one entry per row", run, layout=lay, **{**ids, "rewards": BATCH.rewards[:-1]})


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("kind", KINDS)
def test_singleton_mode_gives_finite_results_and_a_metric(name, kind, backend):
    config = replace(CONFIGS[name], on_invalid="singleton")
    result = run(config, backend=backend, **bad_values(kind, rows=[2]))
    for field in FLOATS:
        assert torch.isfinite(getattr(result, field)).all()
    metrics = result.metrics()
    assert all(math.isfinite(v) for v in metrics.values())
    spoilt = BATCH.trajectory == BATCH.trajectory[2]
    if kind.startswith("reward"):
        assert metrics["bipace/invalid_row_fraction"] == spoilt.sum() / N
        for field in FLOATS:
            assert not getattr(result, field)[spoilt].any()
        # The rest is as if the trajectory had never been there.
        rest = np.flatnonzero(~spoilt)
        without = bk.advantage(config=CONFIGS[name], backend=backend, **BATCH.take(rest).arguments())
        assert torch.equal(result.advantage[rest], without.advantage)
        assert torch.equal(result.cluster[rest], without.cluster)
    elif kind == "all":
        assert metrics["bipace/invalid_row_fraction"] == 1.0 and not result.advantage.any()
    elif config.needs_fingerprint:
        assert metrics["bipace/invalid_row_fraction"] == 1 / N
        assert int((result.cluster == result.cluster[2]).sum()) == 1 and result.branch[2] == bk.Branch.SINGLETON
        if config.estimator != "gae":  # whose row keeps its place in the recursion
            assert result.advantage[2] == result.episode_advantage[2]
        assert torch.equal(result.episode_advantage, run(config).episode_advantage)
    else:
        assert metrics["bipace/invalid_row_fraction"] == 0.0


def test_one_bad_episode_return_spoils_its_trajectory_only(backend):
    episode_return = BATCH.trajectory.astype(float)
    last = np.flatnonzero(BATCH.trajectory == BATCH.trajectory[0])[-1]
    episode_return[last] = np.nan
    config = replace(CONFIGS["grpo"], on_invalid="singleton")
    result = run(config, episode_return=episode_return, backend=backend)
    spoilt = BATCH.trajectory == BATCH.trajectory[0]
    assert result.metrics()["bipace/invalid_row_fraction"] == spoilt.sum() / N
    with pytest.raises(ValueError, match=f"episode_return must be finite.*row {last}"):
        run(CONFIGS["grpo"], episode_return=episode_return, backend=backend)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_no_rows(name, backend):
    nothing = {"fingerprint": [], "observation": [], "action_key": []}
    result = bk.advantage([], [], [], **nothing, config=CONFIGS[name], backend=backend)
    assert result.advantage.shape == (0,) and result.cluster.dtype == torch.int64
    assert all(v == 0.0 for v in result.metrics().values()) and result.value_r2().r2 is None
    padded = run(CONFIGS[name], valid=np.zeros(N, dtype=bool), backend=backend)
    assert not padded.advantage.any() and (padded.cluster == -1).all()


def test_every_container_and_dtype_gives_the_same(backend):
    want = run(backend=backend)
    for convert in (
        lambda a: a,
        lambda a: torch.from_numpy(np.ascontiguousarray(a)),
        lambda a: a.tolist(),
        lambda a: np.repeat(a, 2, axis=0)[::2],
        lambda a: a[::-1].copy()[::-1],  # negative strides
    ):
        columns = {name: convert(value) for name, value in BATCH.arguments().items() if name != "observation"}
        got = run(**columns, backend=backend)
        assert torch.equal(got.advantage, want.advantage) and torch.equal(got.cluster, want.cluster)
    for dtype in (np.float64, np.float32, np.float16):
        rewards = np.round(BATCH.rewards * 4).astype(dtype)
        assert torch.equal(run(rewards=rewards).returns, run(rewards=np.round(BATCH.rewards * 4)).returns)
    objects = np.array(BATCH.rewards.tolist(), dtype=object)  # as verl-agent keeps them
    assert torch.equal(run(rewards=objects).returns, want.returns)
    read_only = BATCH.rewards.copy()
    read_only.setflags(write=False)
    assert torch.equal(run(rewards=read_only).returns, want.returns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fingerprint_strides_and_dtypes(dtype, backend):
    x = torch.from_numpy(BATCH.fingerprint).to(dtype)
    want = run(fingerprint=x, backend=backend)
    padded = torch.full((N, x.shape[1] + 5), float("nan"), dtype=dtype)
    padded[:, 3:-2] = x
    for view in (x.t().contiguous().t(), padded[:, 3:-2], x.repeat_interleave(2, dim=1)[:, ::2], x.repeat(1, 1)[:N]):
        assert torch.equal(run(fingerprint=view, backend=backend).cluster, want.cluster)


def test_lists_count_as_what_they_hold(backend):
    """Whatever their len() says: it would be the size of what native code writes."""
    given = {"group": BATCH.group, "trajectory": BATCH.trajectory, "rewards": BATCH.rewards, "step": BATCH.step}
    given = {name: values.tolist() for name, values in given.items()} | {"observation": list(BATCH.observation)}
    want = bk.advantage(config=CONFIGS["gigpo"], backend=backend, **given)
    lying = {name: LyingList(values, 10 * N) for name, values in given.items()}
    assert torch.equal(bk.advantage(config=CONFIGS["gigpo"], backend=backend, **lying).advantage, want.advantage)


@pytest.mark.parametrize("name", ["group", "trajectory", "observation"])
def test_a_column_that_is_not_as_long_as_its_len_says(name):
    class Column:
        def __len__(self):
            return N

        def __array__(self, *_args, **_options):
            return np.arange(N // 2)

    refused(rf"{name} must have shape \[N\] = \[{N}\]", run, CONFIGS["gigpo"], **{name: Column()})


def test_the_callers_tensors_are_never_changed(backend):
    tensors = {k: torch.from_numpy(v.copy()) for k, v in BATCH.arguments().items() if isinstance(v, np.ndarray)}
    tensors["rewards"].requires_grad_(True)
    tensors["fingerprint"].requires_grad_(True)
    before = {k: v.detach().clone() for k, v in tensors.items()}
    for name, config in CONFIGS.items():
        result = run(replace(config, on_invalid="singleton"), **tensors, backend=backend)
        assert not result.advantage.requires_grad, name
    for k, v in tensors.items():
        assert torch.equal(v, before[k])


def test_results_pickle(stand_ins):
    for config in CONFIGS.values():
        for backend in ("cpu", "triton"):  # the checks of which are still to come
            result = run(config, action_parsed=np.ones(N, dtype=bool), backend=backend)
            again = pickle.loads(pickle.dumps(result))
            assert_same(again, result)
            again.check()
        assert pickle.loads(pickle.dumps(config)) == config
    lay = pickle.loads(pickle.dumps(bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)))
    assert torch.equal(run(layout=lay, group=None, trajectory=None, step=None).advantage, run().advantage)


ENTRY = st.integers() | st.floats() | st.text(max_size=2) | st.none() | st.booleans()
ARRAYS = [np.zeros((3, 3)), np.zeros(4, complex), torch.zeros(3, 2), np.array(["a", None, 1], object), {}]
ANYTHING = st.none() | st.integers(-3, 3) | st.text(max_size=3) | st.lists(ENTRY, max_size=6) | st.sampled_from(ARRAYS)


@given(
    arguments=st.fixed_dictionaries({}, optional=dict.fromkeys(COLUMNS, ANYTHING)),
    name=st.sampled_from(list(CONFIGS)),
    invalid=st.sampled_from(["raise", "singleton"]),
)
def test_anything_gives_a_clear_error_or_a_finite_result(arguments, name, invalid):
    try:
        result = bk.advantage(**arguments, config=replace(CONFIGS[name], on_invalid=invalid), backend="cpu")
    except (ValueError, TypeError) as error:
        assert any(argument in str(error) for argument in (*BAD, "tensors")), error  # noqa: PT017
    else:
        assert torch.isfinite(result.advantage).all()


EYE = np.eye(4, dtype=np.float32)
MISTAKES = [
    ({"fingerprint": list("abcd"), "config": bk.Config.bigpo()}, "bk.ngram_fingerprint"),
    ({"fingerprint": EYE, "action_key": list("abcd")}, "bk.action_keys"),
    ({"fingerprint": EYE, "action_key": bk.action_keys(list("abcd"))}, "give the other as action_parsed"),
]


@pytest.mark.parametrize(("arguments", "cure"), MISTAKES, ids=["texts", "actions", "tuple"])
def test_a_likely_mistake_gets_its_cure(arguments, cure):
    refused(cure, bk.advantage, [0, 0, 0, 0], [0, 0, 1, 1], [0.0, 1.0, 0.0, 0.0], error=TypeError, **arguments)


def test_the_package_lists_its_public_names_only():
    assert dir(bk) == sorted(bk.__all__)


def test_trajectory_ids_that_are_no_integers_are_warned_of_once(monkeypatch, recwarn):
    columns = {"fingerprint": EYE, "rewards": [0.0, 1.0, 0.0, 1.0], "group": [0] * 4, "step": [0] * 4}
    bk.advantage(trajectory=[3, 1, 2, 0], config=bk.Config.bigpo(), **columns)
    bk.advantage([0] * 4, list("dbca"), [0.0, 1.0, 0.0, 1.0], observation=list("wxyz"), config=bk.Config.gigpo())
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match="Integer ids avoid this"):
        bk.advantage(trajectory=list("dbca"), config=bk.Config.bigpo(), **columns)
    bk.advantage(trajectory=list("dbca"), config=bk.Config.bigpo(), **columns)
    bk.cluster(EYE, list("aabb"))  # trajectories are not given: rows stay in their order
    assert not recwarn.list
    bk.cluster(EYE, [0] * 4, trajectory=[3, np.int64(1), torch.tensor(2), 0])
    for ids in ([0, "b", "c", "a"], [3.0, 1.0, 2.0, 0.0], [True, False, 2, 3], np.array(list("dbca"), object)):
        monkeypatch.setattr(_warnings, "_given", set())
        with pytest.warns(RuntimeWarning, match="Integer ids avoid this"):
            bk.cluster(EYE, [0] * 4, trajectory=ids)
    monkeypatch.setattr(_warnings, "_given", set())
    nothing = {"valid": [False, True, True, True], "config": bk.Config.bigpo()}
    bk.advantage(trajectory=[float("nan"), 1, 2, 0], **nothing, **columns)
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match="Integer ids avoid this") as given:
        bk.cluster(EYE, [0] * 4, trajectory=[(letter, 0) for letter in "dbca"])
    assert given[0].filename == __file__


def test_a_fingerprint_or_a_field_that_nothing_reads_is_warned_of_once(recwarn):
    columns = {"fingerprint": EYE, "rewards": [0.0] * 4, "group": [0] * 4, "trajectory": [0, 0, 1, 1]}
    for config in ("bigpo", "gae", bk.Config(partition="none", estimator=lambda records: records.returns)):
        bk.advantage(config=config, **columns)
    assert not recwarn.list
    for config in (bk.Config.gae("group"), "grpo"):
        bk.advantage(config=config, **columns)
    assert bk.Config.gae(epsilon=0.1) == bk.Config.gae(epsilon=0.1)
    bk.Config.grpo(step_weight=1.0, gamma=0.9, duplicates="once")  # a trainer gives its defaults with every method
    assert "no effect with partition='none', estimator='gae', value='group'" in str(recwarn.pop().message)
    assert [(w.filename, str(w.message)[:21]) for w in recwarn] == [(__file__, "epsilon has no effect")]


def test_a_batch_without_a_recognized_action_is_warned_of_at_the_call(recwarn):
    columns = {"fingerprint": EYE, "rewards": [0.0, 1.0, 0.0, 1.0], "group": [0] * 4, "trajectory": [0, 1, 2, 3]}
    keys, parsed = bk.action_keys(["look", "look", "go", "go"])
    bk.advantage(action_key=keys, action_parsed=[True, False, False, False], **columns)
    bk.advantage(action_key=keys, action_parsed=parsed, config=bk.Config.bigpo(), **columns)  # reads no keys
    assert not recwarn.list
    with pytest.warns(RuntimeWarning, match="0% of the responses hold an action"):
        bk.advantage(action_key=keys, action_parsed=parsed, **columns)


def test_unaligned_arrays_are_copied_and_masked_ones_in_lists_refused():
    """As a field of packed records is, or a view into the bytes of a file: native code loads whole numbers."""
    records = np.zeros(4, np.dtype([("kind", "u1"), ("reward", "f8"), ("ids", "i4", 3)]))
    records["reward"], records["ids"] = np.arange(4), np.arange(12).reshape(4, 3)
    view = np.frombuffer(bytearray(b"x" + np.arange(4.0).tobytes()), np.uint8)[1:].view(np.float64)
    for array in (records["reward"], records["ids"], view):
        tensor = checks.to_tensor(array, "rewards", "numbers")
        assert tensor.data_ptr() % tensor.element_size() == 0 and tensor.tolist() == array.tolist()
    assert not checks.to_tensor(torch._neg_view(torch.ones(2)), "rewards", "numbers").is_neg()  # a sign yet to be set
    rows = [np.array([1.0, 2.0]), np.ma.masked_array([1.0, 2.0], mask=[False, True])]
    refused("fingerprint must not be a masked array", bk.cluster, rows, [0, 0], error=TypeError, epsilon=0.1)
    rows[1] = np.ma.masked_array([1.0, 2.0], mask=False)  # nothing is masked
    assert bk.cluster(rows, [0, 0], epsilon=0.1).tolist() == [0, 0]
    images = [np.array([1, 2]), np.ma.masked_array([1, 2], mask=[False, True])]
    with pytest.raises(TypeError, match=r"observation\[1\] must not be a masked array"):
        bk.advantage([0, 0], [0, 1], [0.0, 1.0], observation=images, config=bk.Config.gigpo())
    images[1] = np.ma.masked_array([1, 2], mask=False)  # nothing is masked
    bk.advantage([0, 0], [0, 1], [0.0, 1.0], observation=images, config=bk.Config.gigpo())


def test_tensors_without_memory_are_no_crash_of_native_code():
    """As what torch makes inside FakeTensorMode, or a DTensor that a stage gets: their address is 0."""
    texts = ["go <action>north</action>"] * 3
    with FakeTensorMode():
        refused("must have memory, got a FakeTensor", bk.action_keys, texts, error=TypeError)
        refused("must have memory, got a FakeTensor", bk.ngram_fingerprint, texts, error=TypeError, dim=8)
    rows, clusters = TwoTensor(torch.ones(4, 2), torch.ones(4, 2)), dispatch.choose("cpu").clusters
    records = bk.layout([0] * 4, range(4)).on("cpu")
    refused("must have memory, got a TwoTensor", clusters.scan_rows, records, rows, error=TypeError)


def test_an_unknown_argument_or_field_of_a_preset_suggests_one():
    for make, fields, near in (
        (bk.advantage, {"rewards": [], "fingerprints": EYE}, "fingerprint"),
        (bk.Config.bipace, {"eps": 0.1}, "epsilon"),
        (bk.Config.gae, {"lam": 0.9}, "gae_lambda"),
        (bk.Config.grpo, {"gama": 0.9}, "gamma"),
    ):
        refused(f"did you mean '{near}'", make, error=TypeError, **fields)
    refused("Config has no field 'xyzzy'", bk.Config.gigpo, error=TypeError, xyzzy=1)
    refused("base_group must be True or False, got 'False'.$", bk.Config.hgpo, base_group="False")
    refused(r"call it, Config.gae\(\)", bk.advantage, [0], [0], [1.0], error=TypeError, config=bk.Config.gae)
