"""Config(estimator=function), Config.gae(value=function): what it gets, may return, and that it equals the package's
own."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import CONFIGS, OUTPUTS, assert_same, make_batch
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends.records import Records
from bipace_kernels.backends.reference.values import step_advantage
from bipace_kernels.estimators.rows import ESTIMATORS

BATCH = make_batch(5, groups=4)
N = BATCH.n


def mean(records):
    """R − mean of the cluster, as the package's "mean" has it."""
    nothing = Records(torch.device("cpu"))  # the reference reads labels alone
    found, _ = step_advantage(nothing, records.returns.cpu(), records.cluster.cpu(), None, "mean", "none", 1e-6)
    return found.to(records.returns.device)


def last_step(records):
    """1 for the last record of each trajectory."""
    out = torch.zeros_like(records.returns)
    out[records.trajectory_offsets[1:] - 1] = 1
    return out


def group_means(records):
    """Config.gae("group")'s V̂."""
    parts = records.returns.double().tensor_split(records.group_offsets[1:-1].cpu())
    return torch.cat([part.mean().expand(len(part)) for part in parts])


def own(name, function=mean):
    return replace(CONFIGS[name], estimator=function, step_norm="none")


@pytest.mark.parametrize("name", ["bipace", "bipace_exact", "bipace_similar"])
@pytest.mark.parametrize("duplicates", ["once", "count"])
def test_a_function_equals_the_estimator_that_it_writes_out(name, duplicates, backend):
    rng = np.random.default_rng(3)
    batch = BATCH.take(rng.permutation(np.concatenate((np.arange(N), [0, 5, N - 1]))))
    batch.rewards[7], batch.fingerprint[3] = np.nan, np.nan
    valid = rng.random(batch.n) < 0.8
    given = batch.arguments(valid=valid)
    shared = {"duplicates": duplicates, "on_invalid": "singleton"}
    want = bk.advantage(config=replace(CONFIGS[name], estimator="mean", **shared), backend=backend, **given)
    got = bk.advantage(config=replace(own(name), **shared), backend=backend, **given)
    for output in set(OUTPUTS) - {"branch"}:
        assert torch.equal(getattr(got, output), getattr(want, output)), output
    taken = got.cluster >= 0
    assert bool((got.branch[taken] == bk.Branch.PACE).all()) and bool((got.branch[~taken] == bk.Branch.SINGLETON).all())
    assert got.metrics()["bipace/mean_cluster_size"] == want.metrics()["bipace/mean_cluster_size"]


def test_records_are_in_processing_order_without_those_set_aside():
    seen = []

    def look(records):
        seen.append(records)
        return torch.zeros_like(records.returns)

    order = np.random.default_rng(1).permutation(N)
    batch = BATCH.take(order)
    batch.rewards[batch.trajectory == batch.trajectory[0]] = np.inf
    bk.advantage(config=replace(own("bipace", look), on_invalid="singleton"), **batch.arguments())
    (records,) = seen
    kept = np.flatnonzero(batch.trajectory != batch.trajectory[0])
    kept = kept[np.lexsort((batch.step[kept], batch.trajectory[kept], batch.group[kept]))]
    assert torch.equal(records.rewards, torch.from_numpy(batch.rewards[kept]).double())
    assert torch.equal(records.action_key, torch.from_numpy(batch.action_key[kept]))
    assert torch.equal(records.fingerprint, torch.from_numpy(batch.fingerprint[kept]))
    assert torch.equal(records.step, torch.from_numpy(batch.step[kept]))
    groups = np.unique(batch.group[kept], return_counts=True)[1]
    assert records.group_offsets.diff().tolist() == groups.tolist()
    assert int(records.trajectory_offsets[-1]) == len(kept) == records.returns.shape[0]
    assert records.cluster.unique().tolist() == list(range(int(records.cluster.max()) + 1))


@pytest.mark.parametrize("name", ["bipace", "bipace_exact", "gae"])
def test_a_function_may_write_into_what_it_gets(name):
    """Neither the result nor a layout that other calls use changes."""

    def clean(records):
        return records.returns.double() * 2 if name == "gae" else records.returns * 2

    def writing(records):
        found = clean(records)
        for field in vars(records).values():
            if isinstance(field, torch.Tensor):
                field.fill_(1)
        return found

    def config(function):
        return bk.Config.gae(function) if name == "gae" else own(name, function)

    ids = {key: getattr(BATCH, key) for key in ("group", "trajectory", "step")}
    lay, batch = bk.layout(**ids), BATCH.arguments(**dict.fromkeys(ids))
    want, got = (bk.advantage(config=config(f), layout=lay, **batch) for f in (clean, writing))
    assert_same(got, want)
    assert_same(bk.advantage(layout=lay, **batch), bk.advantage(**BATCH.arguments()))


def test_no_partition_is_needed():
    config = bk.Config(partition="none", estimator=last_step, episode_norm="none", step_weight=2.0)
    result = bk.advantage(config=config, **BATCH.arguments(fingerprint=None, observation=None, action_key=None))
    last = np.array([BATCH.step[i] == BATCH.step[BATCH.trajectory == BATCH.trajectory[i]].max() for i in range(N)])
    assert torch.equal(result.step_advantage, torch.from_numpy(last.astype(np.float32)))
    assert torch.equal(result.advantage, result.episode_advantage + 2 * result.step_advantage)


@pytest.mark.parametrize("change", [{}, {"gae_lambda": 1.0, "step_norm": "none"}, {"on_invalid": "singleton"}])
def test_gae_over_a_function_s_values_is_gae_over_the_same_values(change, backend):
    batch = BATCH.take(np.random.default_rng(2).permutation(N))
    if "on_invalid" in change:
        batch.rewards[batch.trajectory == batch.trajectory[0]] = np.nan
        batch.fingerprint[batch.trajectory != batch.trajectory[0]][0] = np.inf
    last = np.array([batch.step[i] == batch.step[batch.trajectory == batch.trajectory[i]].max() for i in range(N)])
    given = batch.arguments(truncated=last & (batch.trajectory % 2 == 0), action_key=None)
    want = bk.advantage(config=bk.Config.gae("group", **change), backend=backend, **given)
    got = bk.advantage(config=bk.Config.gae(group_means, **change), backend=backend, **given)
    torch.testing.assert_close(got.value, want.value, atol=1e-6, rtol=0)
    torch.testing.assert_close(got.advantage, want.advantage, atol=1e-5, rtol=0)


def test_values_may_be_views():
    """The kernels once read the memory beside them, or none: (a view, the same numbers)."""
    zeros = torch._efficientzerotensor
    for view, numbers in (
        (lambda r: torch.stack([r.rewards, 9 * r.rewards], 1)[:, 0], lambda r: r.rewards),
        (lambda r: torch.tensor(0.5, dtype=torch.float64).expand(len(r.step)), lambda r: 0 * r.rewards + 0.5),
        (lambda r: torch.complex(r.rewards, r.rewards).conj().imag, lambda r: -r.rewards),
        (lambda r: zeros(len(r.step), dtype=torch.float64), lambda r: 0 * r.rewards),
    ):
        got, want = (bk.advantage(config=bk.Config.gae(f), **BATCH.arguments()) for f in (view, numbers))
        assert_same(got, want)


def test_a_value_that_is_a_function_has_averages_over_equal_actions():
    """Those of the kernel's value, given its values."""
    shown = bk.advantage(config=bk.Config.gae(action_noise=None), **BATCH.arguments()).value
    order = np.lexsort((BATCH.step, BATCH.trajectory, BATCH.group))
    config = replace(bk.Config.gae(), value=lambda records: shown[order])
    every = (replace(config, action_noise=None), config, bk.Config.gae())
    plain, averaged, wanted = (bk.advantage(config=c, **BATCH.arguments()).advantage for c in every)
    assert not torch.equal(plain, averaged)
    torch.testing.assert_close(averaged, wanted, atol=1e-5, rtol=0)
    refused(r"share='memory' goes with value='kernel'; use share='batch' or", replace, config, share="memory")
    with pytest.raises(ValueError, match=r"fingerprint is missing.* value='group_means' .*ngram_fingerprint"):
        bk.advantage(config=bk.Config.gae(group_means), **BATCH.arguments(fingerprint=None))
    without = bk.Config.gae(group_means, action_noise=None)  # needs no states, and gets those that are given
    known = bk.advantage(config=without, **BATCH.arguments())
    assert torch.equal(bk.advantage(config=without, **BATCH.arguments(fingerprint=None)).advantage, known.advantage)


def test_a_state_that_is_not_finite_reaches_a_function_as_zeros():
    batch = BATCH.take(np.arange(N))
    batch.fingerprint[3] = np.nan

    def zeros(records):
        assert not records.fingerprint[3].any() and records.fingerprint[2].any()
        return torch.zeros_like(records.returns)

    bk.advantage(config=bk.Config.gae(zeros, on_invalid="singleton"), **batch.arguments())


@pytest.mark.parametrize(("error", "kind"), [(ValueError, ValueError), (KeyError, RuntimeError)])
def test_an_error_of_a_function_names_it_and_the_batch(error, kind):
    def fails(records):
        raise error("no column x")

    for config, argument in ((own("bipace", fails), "estimator"), (bk.Config.gae(fails), "value")):
        words = rf"{argument} .*fails raised {error.__name__} on a batch \(records: {N}, .* groups: 4\): .*no column x"
        refused(words, bk.advantage, error=kind, config=config, **BATCH.arguments())


BAD_RETURNS = [
    (lambda r: r.returns.numpy(), TypeError, r"must return a tensor \[M\] like records.returns, got ndarray"),
    (lambda r: r.returns[1:], ValueError, r"must return float values of shape"),
    (lambda r: r.returns.resize_(0), ValueError, rf"values of shape \[{N}\] .*got torch.float32 \[0\]"),
    (lambda r: r.returns.to_sparse(), ValueError, r"got torch.float32 \[.*\] on cpu, torch.sparse_coo"),
    (lambda r: r.cluster, ValueError, r"must return float values of shape .*got torch.int64"),
    (lambda r: r.returns / 0, ValueError, r"finite in float32, got (nan|inf) for record \d+ and \d+ such values"),
    (lambda r: torch.full_like(r.returns, 1e300, dtype=torch.float64), ValueError, r"finite in float32, got 1e\+300"),
]


@pytest.mark.parametrize(("function", "error", "words"), BAD_RETURNS)
def test_what_it_returns_is_checked(function, error, words):
    refused(words, bk.advantage, error=error, config=own("bipace", function), **BATCH.arguments())


def test_a_function_of_a_module_pickles_and_runs_under_torch_compile():
    config = own("bipace", last_step)
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.estimator is last_step
    result = pickle.loads(pickle.dumps(bk.advantage(config=config, **BATCH.arguments())))
    assert result.metrics()["bipace/pace_row_fraction"] == 1.0
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    rewards, x = torch.from_numpy(BATCH.rewards), torch.from_numpy(BATCH.fingerprint)

    def call(rewards, x):
        return bk.advantage(rewards=rewards, fingerprint=x, layout=lay, config=config).advantage

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(rewards, x), call(rewards, x))


def test_names_and_pairs():
    refused(f"estimator must be one of {', '.join(ESTIMATORS)}, got 'median'", bk.Config, estimator="median")
    with pytest.raises(ValueError, match=r"step_norm='std' goes with estimator 'mean' or 'hgpo', got estimator='mean'"):
        bk.Config(estimator=mean, step_norm="std")
