"""Critic-free GAE: the theorems of docs/gae.md, every backend of the CPU against the formulas, edges and errors."""

import itertools
import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import make_batch
from hypothesis import given, settings, strategies as st
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.backends.cpu import critic as cpu_critic
from bipace_kernels.backends.records import Records
from bipace_kernels.backends.reference import combine, critic as reference_critic
from bipace_kernels.backends.reference.critic import kernel_matrix
from bipace_kernels.backends.schema import Kernel, state_keys
from bipace_kernels.estimators import table
from bipace_kernels.estimators.landmarks import choose_landmarks
from bipace_kernels.features.embedders import EMBEDDERS
from bipace_kernels.settings import KERNELS

Config = bk.Config
BATCH = make_batch(7, groups=4, trajectories=5, longest=8)
N = BATCH.n
PLAIN = {"step_norm": "none", "action_noise": None}
#: The first form of value="kernel": independent noise, the fingerprints as they are, one kernel.
FIRST = {
    "luck_noise": 0.0, "kernel_directions": None, "kernel_inside": 0.0, "kernel_width": 0.5, "kernel_time": 8.0,
    "kernel_noise": 2.0, "kernel_same": 0.3, "gae_lambda": 0.5,
}  # fmt: skip
VALUES = {
    "group": Config.gae("group", **PLAIN),
    "step": Config.gae("step", **PLAIN),
    "cluster": Config.gae("cluster", **PLAIN),
    "cosine": Config.gae("cluster", partition="cosine", epsilon=0.2, **PLAIN),
    "kernel": Config.gae("kernel", share="group", **PLAIN),
    "shared": Config.gae("kernel", share="batch", **PLAIN),
    "kernel, first form": Config.gae("kernel", share="group", **PLAIN, **FIRST),
    "shared, first form": Config.gae("kernel", share="batch", **PLAIN, **FIRST),
}
#: Also with A_S averaged over near states with the same action.
EVERY = {
    **VALUES,
    "averaged": Config.gae(share="group", step_norm="none"),
    "averaged, shared": Config.gae(step_norm="none"),
    "averaged, shared, first form": Config.gae(step_norm="none", **FIRST),
}
OF_A_GROUP = [name for name in EVERY if "shared" not in name]  # whose values are read inside the prompt group
BACKENDS = ("cpu", "reference")


def run(config, batch=BATCH, **changes):
    return bk.advantage(config=config, **batch.arguments(**changes))


@pytest.mark.parametrize("share", ["group", "batch"])
@pytest.mark.parametrize("dim", [16, 700])
def test_the_first_form_keeps_its_numbers(dim, share):
    """V̂ and the advantages that commit b565db3 gave: the reference's bits, the CPU's to 2e-5."""
    rng, n = np.random.default_rng(31), 120
    state = rng.integers(0, 12, n)
    x = (rng.normal(size=(12, dim))[state] + 0.3 * rng.normal(size=(n, dim)) + 2).astype(np.float32)
    x[7], x[50] = x[8], 0
    rows = {"rewards": rng.normal(size=n).round(3), "fingerprint": x, "action_key": rng.integers(0, 3, n)}
    rows |= {"group": np.repeat(np.arange(4), 30), "trajectory": np.repeat(np.arange(20), 6)}
    config = Config.gae(share=share, on_invalid="singleton", action_noise=0.3, **FIRST)
    want = torch.from_numpy(np.load(Path(__file__).with_name("first_form_0.npz"))[f"{dim}_of_{share}"])
    for backend, atol in (("reference", 0.0), ("cpu", 2e-5)):
        got = bk.advantage(**rows, config=config, backend=backend)
        close(torch.stack([got.value, got.advantage]), want, atol)


def close(one, other, atol=2e-6):
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def means(batch=BATCH):
    """[N] μ_p of each row."""
    returns = run(Config.grpo(), batch).returns.double().numpy()
    total, size = np.bincount(batch.group, returns), np.bincount(batch.group)
    return (total / size)[batch.group]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), backend=st.sampled_from(BACKENDS))
def test_no_shrinkage_and_whole_returns_is_bigpo_and_gigpo(seed, backend):
    batch = make_batch(seed)
    for partition, preset in (("cosine", Config.bigpo(0.2)), ("exact", Config.gigpo())):
        config = Config.gae("cluster", partition=partition, epsilon=0.2, shrinkage=0.0, gae_lambda=1.0, **PLAIN)
        got, want = run(config, batch, backend=backend), run(preset, batch, backend=backend)
        close(got.step_advantage, want.step_advantage)
        assert torch.equal(got.cluster, want.cluster)


def test_boundless_shrinkage_is_the_group(backend):
    want = run(VALUES["group"], backend=backend)
    got = run(replace(VALUES["cluster"], shrinkage=1e30), backend=backend)
    close(got.advantage, want.advantage)
    close(want.value, torch.from_numpy(means()).float())


@pytest.mark.parametrize("apart", [1, 2**40])
def test_means_by_step_are_those_of_clusters_of_equal_steps(backend, apart):
    steps = {"step": BATCH.step * apart, "observation": BATCH.step}
    got, want = (run(VALUES[name], **steps, fingerprint=None, backend=backend) for name in ("step", "cluster"))
    assert torch.equal(got.value, want.value) and torch.equal(got.advantage, want.advantage)
    assert not torch.equal(got.value, run(VALUES["group"], **steps, backend=backend).value)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(list(VALUES)), backend=st.sampled_from(BACKENDS))
def test_whole_returns_less_the_value(seed, name, backend):
    batch = make_batch(seed)
    result = run(replace(VALUES[name], gae_lambda=1.0), batch, backend=backend)
    close(result.step_advantage, result.returns - result.value)


@pytest.mark.parametrize("name", list(EVERY))
@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_order_of_rows_and_rollouts_changes_nothing(name, norm):
    config = replace(EVERY[name], step_norm=norm)
    rng = np.random.default_rng(3)
    whole, rows = run(config), rng.permutation(N)
    for field in ("advantage", "value"):
        assert torch.equal(getattr(run(config, BATCH.take(rows)), field), getattr(whole, field)[rows])
    if name != "cosine":  # greedy clusters do depend on the order of rollouts
        renamed = rng.permutation(int(BATCH.trajectory.max()) + 1)[BATCH.trajectory]
        close(run(config, trajectory=renamed).advantage, whole.advantage)


@pytest.mark.parametrize("made", [np.asarray, np.sign], ids=["states", "signs"])
def test_a_shared_value_does_not_depend_on_any_order(made):
    """More records than landmarks, ids numbered by first appearance: rows, rollouts and groups in another order."""
    batch = make_batch(6, groups=12, trajectories=9, longest=14, dim=20)
    batch.fingerprint, config = made(batch.fingerprint), EVERY["averaged, shared"]
    assert batch.n > 400 and len(set(batch.step[landmarks_of(batch)])) > 9
    whole, rng = run(config, batch), np.random.default_rng(0)
    for backend in BACKENDS:
        shuffled = batch.take(rows := rng.permutation(batch.n))
        ids = {"group": [f"g{g}" for g in shuffled.group], "trajectory": [f"t{t}" for t in shuffled.trajectory]}
        got = run(config, shuffled, backend=backend, **ids)
        close(got.value, whole.value[rows], 2e-5)
        close(got.advantage, whole.advantage[rows], 2e-5)


@pytest.mark.parametrize("name", list(EVERY))
@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_returns_of_zero_give_zero(name, norm):
    rewards = BATCH.rewards.copy()
    rewards[BATCH.group == 1] = 0.0
    everything, of_group = (np.zeros(N), np.ones(N, bool)), (rewards, BATCH.group == 1)
    for given_rewards, rows in (everything, of_group) if name in OF_A_GROUP else (everything,):
        result = run(replace(EVERY[name], step_norm=norm), rewards=given_rewards)
        assert not bool(result.advantage[torch.from_numpy(rows)].any())


@pytest.mark.parametrize("share", ["group", "batch"])
def test_boundless_luck_leaves_the_prior(share, backend):
    """β → ∞: returns say nothing of values, so V̂ is μ_p inside the group, 0 over the batch."""
    result = run(Config.gae(share=share, luck_noise=1000.0, kernel_noise=1000.0, **PLAIN), backend=backend)
    prior = torch.from_numpy(means()).float() if share == "group" else torch.zeros(N)
    close(result.value, prior, 0.02)


def test_one_distinct_state_has_no_directions(backend):
    """All rows are at the mean: c = 1, and the value is read from the steps."""
    states = np.ones((N, 3), np.float32)
    got = run(VALUES["shared"], fingerprint=states, backend=backend)
    config = replace(VALUES["shared"], kernel_directions=None)
    close(got.value, run(config, fingerprint=states, backend=backend).value)


def test_long_rows_are_folded_by_a_fixed_projection():
    """Products of rows longer than 512 keep their value to a few hundredths, and shorter rows are as they are."""
    batch = make_batch(3, dim=4000)
    for critic in (cpu_critic, reference_critic):
        layout = bk.layout(batch.group, batch.trajectory, batch.step).on(torch.device("cpu"))
        rows = torch.from_numpy(batch.fingerprint)
        whole, folded = (critic.unit_rows(layout, rows, width).double() for width in (0, 512))
        assert whole.shape == (batch.n, 4000) and folded.shape == (batch.n, 512)
        torch.testing.assert_close(folded @ folded.T, whole @ whole.T, rtol=0, atol=0.2)
        torch.testing.assert_close(*(critic.unit_rows(layout, rows[:, :300], width) for width in (512, 0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_keys_of_landmarks_are_those_of_every_backend(dtype):
    """Whatever the strides; −0 is 0."""
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    rows = torch.randn(N, 610, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[::3, ::2] = -0.0
    want = state_keys(rows + 0.0, lay.order)
    for x in (rows, rows.T.contiguous().T):
        for critic in (cpu_critic, reference_critic):
            keys = torch.empty_like(want)
            critic.unit_rows(lay.on(x.device), x, 512, keys)
            assert torch.equal(keys, want)


def test_lambda_zero_is_the_temporal_difference():
    result = run(replace(VALUES["kernel"], gae_lambda=0.0))
    last = np.append(np.diff(BATCH.trajectory) != 0, True)
    behind = np.where(last, 0.0, np.append(result.value.numpy()[1:], 0.0))
    close(result.advantage, torch.from_numpy(BATCH.rewards + 0.95 * behind - result.value.numpy()).float())


def unit(fingerprint):
    x = fingerprint.astype(np.float64)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def kernel_of_rows(z, t, config):
    """K of centred rows, none of which is at the mean unless it is alone."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True).clip(1e-12)
    cosine = z @ z.T
    np.fill_diagonal(cosine, 1.0)
    exponent = (cosine - 1) / config.kernel_width
    if config.kernel_time is not None:
        exponent -= (t[:, None] - t) ** 2 / (2 * config.kernel_time**2)
    return np.exp(exponent)


def noise_of(t, trajectory, config):
    """β L Lᵀ + ρ I as a sum over steps: each adds γ^Δt of its luck to the returns of its trajectory up to it."""
    out = config.kernel_noise * np.eye(len(t))
    for k in range(len(t)):
        before = (trajectory == trajectory[k]) & (t <= t[k])
        share = np.where(before, config.gamma ** (t[k] - t).clip(0).astype(float), 0.0)
        out += config.luck_noise * np.outer(share, share)
    return out


def landmarks_of(batch):
    """Rows that the package chooses as landmarks."""
    lay = bk.layout(batch.group, batch.trajectory, batch.step)
    chosen = choose_landmarks(state_keys(torch.from_numpy(batch.fingerprint), lay.order), lay.time(), None)
    return lay.order[chosen[chosen >= 0]].numpy()


def coordinates(batch, config):
    """[N, d] rows of share="batch", minus their mean."""
    x = unit(batch.fingerprint)
    if config.kernel_directions is None:
        return x - x.mean(axis=0)
    y = x[landmarks_of(batch)]
    values, vectors = np.linalg.eigh(np.cov(y.T, bias=True))
    values, vectors = values[::-1][: config.kernel_directions], vectors[:, ::-1][:, : config.kernel_directions]
    kept = values > 1e-6 * values[0]
    return (x - x.mean(axis=0)) @ (vectors[:, kept] * values[kept] ** -0.25)


def by_group(z, group):
    """z minus the mean of its group."""
    return z - np.stack([z[group == g].mean(axis=0) for g in group])


def kernel_formula(batch, config, keep=None):
    """V̂ of share="group" written once more, over the rows `keep` of each group."""
    returns = run(Config.grpo(), batch).returns.double().numpy()
    value = means(batch)
    for group in np.unique(batch.group):
        rows = np.flatnonzero((batch.group == group) & (np.ones(batch.n, bool) if keep is None else keep))
        if len(np.unique(batch.trajectory[batch.group == group])) == 1 or not len(rows):
            continue
        x = unit(batch.fingerprint[rows])
        k = kernel_of_rows(x - x.mean(axis=0), batch.step[rows], config)
        noise = noise_of(batch.step[rows], batch.trajectory[rows], config)
        value[rows] += k @ np.linalg.solve(k + noise, returns[rows] - value[rows])
    return torch.from_numpy(value).float()


@pytest.mark.parametrize("changes", [{}, FIRST, {"kernel_time": None, "luck_noise": 1.0}, {"kernel_noise": 0.1}])
def test_the_kernel_is_the_posterior_mean(changes, backend):
    config = replace(VALUES["kernel"], **changes)
    for seed in range(4):
        batch = make_batch(seed, dim=30)
        close(run(config, batch, backend=backend).value, kernel_formula(batch, config), 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 3, 500, 1000])
def test_the_cpu_against_the_reference(dtype, dim):
    batch = make_batch(dim, dim=dim, longest=40)
    fingerprint = torch.from_numpy(batch.fingerprint).to(dtype)
    for view in (fingerprint, fingerprint.t().contiguous().t(), fingerprint * 2.0**-10):
        for form, share in itertools.product(({}, FIRST), ("group", "batch")):
            config = Config.gae(share=share, **form)
            got, want = (run(config, batch, fingerprint=view, backend=b) for b in BACKENDS)
            close(got.advantage, want.advantage, 2e-5)
            close(got.value, want.value, 2e-5)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_root_mean_squares_of_one(norm):
    result = run(replace(VALUES["kernel"], step_norm=norm))
    square = result.advantage.double().square()
    sizes = [square] if norm == "batch" else [square[torch.from_numpy(BATCH.group == g)] for g in range(4)]
    assert [float(s.mean()) for s in sizes] == pytest.approx([1.0] * len(sizes), abs=1e-5)


def test_a_prompt_without_rewards_keeps_what_other_prompts_say(backend):
    """Its returns are all 0, and its shared values are not: they are divided like those of any other group."""
    rewards, of_group = np.where(BATCH.group == 1, 0.0, BATCH.rewards), torch.from_numpy(BATCH.group == 1)
    config = VALUES["shared"]
    raw = run(config, rewards=rewards, backend=backend).advantage[of_group]
    by_group = run(replace(config, step_norm="group"), rewards=rewards, backend=backend).advantage[of_group]
    close(by_group, raw / raw.double().square().mean().sqrt(), 2e-5)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6), width=st.floats(0.05, 1e3), time=st.one_of(st.none(), st.floats(0.05, 1e308)),
    noise=st.floats(0.1, 1e3), scale=st.sampled_from([1e-30, 1.0, 1e30]),
)  # fmt: skip
def test_values_stay_inside_the_returns_spread(seed, width, time, noise, scale):
    """K (K + ρ I)⁻¹ has norm below 1, so V̂ − μ_p is no longer than R − μ_p; and nothing of it is NaN."""
    batch = make_batch(seed)
    config = replace(VALUES["kernel"], kernel_width=width, kernel_time=time, kernel_noise=noise)
    for backend in BACKENDS:
        result = run(config, batch, rewards=batch.rewards * scale, backend=backend)
        centred = result.returns.double() - torch.from_numpy(means(batch)) * scale
        gain = result.value.double() - torch.from_numpy(means(batch)) * scale
        assert bool(result.advantage.isfinite().all())
        assert float(gain.norm()) <= float(centred.norm()) * (1 + 1e-5) + 1e-5 * scale


def test_equal_rows_and_rows_at_the_mean(backend):
    config = replace(VALUES["kernel, first form"], kernel_time=None)
    one = np.ones((N, 6), np.float32) * np.arange(1, N + 1)[:, None]  # one direction: all at the mean, c = 1
    result = run(config, fingerprint=one, backend=backend)
    returns = result.returns.double().numpy()
    for group in range(4):
        rows = BATCH.group == group
        if len(np.unique(BATCH.trajectory[rows])) > 1:
            assert result.value[rows].numpy() == pytest.approx(np.full(rows.sum(), returns[rows].mean()), abs=2e-6)
    two = np.where(np.arange(N)[:, None] % 2, [[1.0, 0.0]], [[0.0, 1.0]]).astype(np.float32)
    result = run(replace(config, kernel_width=0.05), fingerprint=two, backend=backend)  # only equal rows are near
    for group in range(4):
        rows = np.flatnonzero(BATCH.group == group)
        for part in (rows[rows % 2 == 0], rows[rows % 2 == 1]) if len(np.unique(BATCH.trajectory[rows])) > 1 else ():
            y = returns[part] - returns[rows].mean()
            want = returns[rows].mean() + y.sum() / (len(part) + 2.0)
            assert result.value[part].numpy() == pytest.approx(np.full(len(part), want), abs=2e-6)


def shared_formula(batch, config):
    """V̂ of share="batch" with the whole kernel."""
    returns = run(Config.grpo(), batch).returns.double().numpy()
    z, same = coordinates(batch, config), batch.group[:, None] == batch.group
    c = kernel_of_rows(z, batch.step, config) + config.kernel_same * same
    if config.kernel_inside:
        c += config.kernel_inside * same * kernel_of_rows(by_group(z, batch.group), batch.step, config)
    noise = noise_of(batch.step, batch.trajectory, config)
    return torch.from_numpy(c @ np.linalg.solve(c + noise, returns)).float()


@pytest.mark.parametrize("changes", [{}, FIRST, {"kernel_directions": 5, "luck_noise": 0.3, "kernel_same": 0.2}])
def test_a_shared_value_is_the_posterior_mean_over_the_batch(backend, changes):
    config = replace(VALUES["shared"], **changes)
    for seed in range(4):
        batch = make_batch(seed, groups=6, dim=30)
        assert batch.n <= 128  # so each record is a landmark
        got = run(config, batch, backend=backend)
        close(got.value, shared_formula(batch, config), 2e-3)  # 10⁻³ on the landmarks' diagonal
        alone = batch.take(np.flatnonzero(batch.group == batch.group[0]))  # a batch of one group has no landmarks
        close(run(config, alone, backend=backend).value, shared_formula(alone, config), 2e-5)


def test_many_records_share_a_value_through_128_landmarks():
    batch = make_batch(11, groups=12, trajectories=9, longest=14, dim=20)
    assert batch.n > 500
    got, want = (run(VALUES["shared"], batch, backend=backend) for backend in BACKENDS)
    close(got.value, want.value, 2e-5)
    exact = shared_formula(batch, VALUES["shared"]).double() - got.returns.double().mean()
    assert float((got.value.double() - got.returns.double().mean() - exact).norm()) < 0.2 * float(exact.norm())


def long_group(dim):
    """2,100 records of one group in six distinct states, and a short group after it."""
    n, rng = 2100, np.random.default_rng(0)
    state = rng.integers(0, 6, n + 60)
    fingerprint = rng.normal(size=(6, dim)).astype(np.float32)[state]
    rewards = (rng.random(n + 60) < 0.1).astype(np.float64)
    ids = {"group": (np.arange(n + 60) >= n).astype(np.int64), "trajectory": np.arange(n + 60) // 30}
    return ids | {"rewards": rewards, "fingerprint": fingerprint}, n


def test_beyond_2048_records_blocks_know_of_each_other_through_landmarks():
    """Where the rows take few distinct states, the landmarks hold all of them: the whole kernel's value, to n/m ·
    10⁻⁴."""
    given_rows, n = long_group(8)
    config = replace(VALUES["kernel, first form"], kernel_time=None)
    result = bk.advantage(**given_rows, config=config, backend="cpu")
    apart = given_rows | {"group": (np.arange(n + 60) >= 690) + given_rows["group"]}
    returns = result.returns.double().numpy()[:n]
    x, y = unit(given_rows["fingerprint"][:n]), returns - returns.mean()
    k = kernel_of_rows(x - x.mean(axis=0), np.zeros(n), config)
    want = returns.mean() + k @ np.linalg.solve(k + 2.0 * np.eye(n), y)
    assert result.value.numpy()[:n] == pytest.approx(want, abs=2e-3)
    alone = bk.advantage(**apart, config=config, backend="cpu").value.numpy()[:690]
    assert np.abs(alone - want[:690]).max() > 1e-2  # what a part of it would have by itself


@pytest.mark.parametrize("name", ["kernel", "shared"])
def test_long_groups_against_the_reference(name):
    given_rows, _ = long_group(5)
    x = given_rows["fingerprint"]
    given_rows["fingerprint"] = x + np.random.default_rng(1).normal(size=x.shape).astype("f4")
    got, want = (bk.advantage(**given_rows, config=VALUES[name], backend=backend) for backend in BACKENDS)
    close(got.value, want.value, 2e-5)


def averaged_formula(batch, config, a, keep=None, known=None):
    """K_a (K_a + η I)⁻¹ A_S written once more, over the rows `keep` of each group; A_S / (1 + η) for the others.

    Actions that are not `known` differ from all others; with values of the group, so do those of a single trajectory.
    """
    noise, whitened = config.action_noise, config.share == "batch" and config.kernel_directions is not None
    out = a / (1 + noise)
    z = coordinates(batch, config) if whitened else unit(batch.fingerprint)
    for group in np.unique(batch.group):
        rows = np.flatnonzero((batch.group == group) & (np.ones(batch.n, bool) if keep is None else keep))
        if config.share == "group" and len(np.unique(batch.trajectory[rows])) == 1:
            continue
        x = z[rows] if whitened else z[rows] - z[rows].mean(axis=0)
        k = kernel_matrix(x, x, batch.step[rows], batch.step[rows], config.kernel_width, config.kernel_time or 0.0)
        k = k * (batch.action_key[rows][:, None] == batch.action_key[rows])
        if known is not None:
            k = np.where(np.eye(len(rows), dtype=bool) | known[rows][:, None] & known[rows], k, 0.0)
        out[rows] = k @ np.linalg.solve(k + noise * np.eye(len(rows)), a[rows])
    return torch.from_numpy(out).float()


@pytest.mark.parametrize("name", ["averaged", "averaged, shared", "averaged, shared, first form"])
@pytest.mark.parametrize(
    "changes", [{}, {"kernel_time": None, "action_noise": 0.1}, {"kernel_width": 5.0, "action_noise": 3.0}]
)
def test_advantages_are_averaged_over_near_states_with_the_same_action(name, changes, backend):
    config = replace(EVERY[name], **changes)
    for seed in range(4):
        batch = make_batch(seed, dim=30, trajectories=6)
        a = run(replace(config, action_noise=None), batch, backend=backend)
        got = run(config, batch, backend=backend)
        close(got.step_advantage, averaged_formula(batch, config, a.step_advantage.double().numpy()), 2e-5)
        assert torch.equal(got.value, a.value)


def test_only_which_actions_are_equal_matters(backend):
    """Other keys for the same actions: the same bits. No two equal: A_S / (1 + η). No keys: A_S."""
    config = EVERY["averaged"]
    whole, plain = run(config, backend=backend), run(VALUES["kernel"], backend=backend)
    assert not torch.allclose(whole.advantage, plain.advantage, atol=1e-3)
    _, number = np.unique(BATCH.action_key, return_inverse=True)
    other = 10**17 - np.random.default_rng(0).permutation(number.max() + 1)[number]
    assert torch.equal(run(config, action_key=other, backend=backend).advantage, whole.advantage)
    close(run(config, action_key=np.arange(N), backend=backend).advantage, plain.advantage / 1.4)
    for without in (config, VALUES["kernel"]):
        assert torch.equal(run(without, action_key=None, backend=backend).advantage, plain.advantage)


def test_copies_of_a_state_and_action_share_their_mean(backend):
    """n equal states with one action: all get n / (n + η) of their mean A_S."""
    config = replace(EVERY["averaged"], kernel_time=None, kernel_width=5.0)
    ids = {"group": np.zeros(6, np.int64), "trajectory": np.arange(6), "rewards": np.array([1.0, 0, 0, 1, 1, 0])}
    rows = np.eye(2, dtype=np.float32)[[0, 0, 0, 0, 1, 1]]
    keys = np.array([4, 4, 4, 9, 9, 9])
    plain = bk.advantage(**ids, fingerprint=rows, config=replace(config, action_noise=None), backend=backend)
    got = bk.advantage(**ids, fingerprint=rows, action_key=keys, config=config, backend=backend).advantage
    a = plain.advantage
    close(got[:3], (a[:3].mean() * 3 / 3.4).expand(3))
    assert float(got[3]) != pytest.approx(float(a[3]) / 1.4, abs=1e-2)  # its action also occurs in the other state


def test_unrecognized_actions_are_not_averaged(backend):
    """Two actions from one state, not recognized in responses that begin alike: one key, and the credit must not
    vanish."""
    ids = {"group": np.zeros(8, np.int64), "trajectory": np.arange(8), "rewards": np.repeat([1.0, 0.0], 4)}
    rows, keys, parsed = np.ones((8, 2), np.float32), np.zeros(8, np.int64), np.zeros(8, bool)
    config = EVERY["averaged"]
    plain = bk.advantage(**ids, fingerprint=rows, config=config, backend=backend)
    one_key = bk.advantage(**ids, fingerprint=rows, action_key=keys, config=config, backend=backend)
    got = bk.advantage(**ids, fingerprint=rows, action_key=keys, action_parsed=parsed, config=config, backend=backend)
    assert float(plain.advantage.abs().min()) > 0.3 and float(one_key.advantage.abs().max()) < 1e-6
    close(got.advantage, plain.advantage / 1.4)
    mixed = run(config, backend=backend, action_parsed=np.arange(N) % 3 > 0)
    a = run(VALUES["kernel"], backend=backend).advantage.double().numpy()
    close(mixed.advantage, averaged_formula(BATCH, config, a, known=np.arange(N) % 3 > 0), 2e-5)


@pytest.mark.parametrize("spread", [0.01, 0.004])
def test_rows_nearer_to_the_batch_s_mean_than_their_group_s_mean_is(spread):
    """Moved from one mean to the other in float32, their lengths would be rounding."""
    groups, generator = 100, torch.Generator().manual_seed(1)
    rows = torch.zeros(2 * groups, 64)
    rows[:, 0] = 1
    rows[:, 1:] += spread / 8 * torch.randn(2 * groups, 63, generator=generator)
    rows[1] = 0.3 * torch.randn(64, generator=generator) - rows[2]  # far, and so is the mean of its group
    m = len(rows)
    records = Records(
        device=rows.device, n_records=m, n_groups=groups, n_trajectories=m, order=torch.arange(m),
        step=torch.zeros(m, dtype=torch.int64), group_offsets=torch.arange(0, m + 1, 2),
        trajectory_offsets=torch.arange(m + 1),
    )  # fmt: skip
    returns, kernel = torch.randn(m, generator=generator), Kernel(0.05, 0.0, 0.1, share="batch")
    found = []
    for critic in (cpu_critic, reference_critic):
        centred = critic.centred_rows(records, critic.unit_rows(records, rows, 0), "batch")
        found.append(critic.kernel_values(records, centred, None, returns, None, kernel))
    close(*found, 5e-6)


def test_averages_of_long_groups_against_the_reference():
    """Blocks of a group with more than 2,048 records know nothing of each other."""
    given_rows, n = long_group(5)
    given_rows["action_key"] = np.random.default_rng(2).integers(0, 3, len(given_rows["group"]))
    config = EVERY["averaged"]
    got, want = (bk.advantage(**given_rows, config=config, backend=backend) for backend in BACKENDS)
    close(got.advantage, want.advantage, 2e-5)
    a = bk.advantage(**given_rows, config=replace(config, action_noise=None)).advantage.double().numpy()
    x = unit(given_rows["fingerprint"][:n])
    x = (x - x.mean(axis=0))[: n // 3]
    t, key = np.arange(n // 3) % 30, given_rows["action_key"][: n // 3]
    k = kernel_matrix(x, x, t, t, config.kernel_width, config.kernel_time) * (key[:, None] == key)
    first = k @ np.linalg.solve(k + config.action_noise * np.eye(n // 3), a[: n // 3])
    assert got.advantage.numpy()[: n // 3] == pytest.approx(first, abs=2e-5)


def parts(count=3):
    """Batches of their own groups, and all of them as one."""
    whole = make_batch(21, groups=3 * count, trajectories=5, longest=8)
    return [whole.take(np.flatnonzero(whole.group // 3 == k)) for k in range(count)], whole


def test_a_memory_is_a_larger_batch(backend):
    """With the batches before it a batch has the values that it has as the last part of one batch, bit by bit."""
    config, memory = replace(VALUES["shared"], share="memory"), bk.ValueMemory(10_000)
    batches, whole = parts()
    for k, batch in enumerate(batches):
        result = run(config, batch, memory=memory, backend=backend)
        so_far = np.flatnonzero(whole.group // 3 <= k)
        want = run(VALUES["shared"], whole.take(so_far), backend=backend).value[-batch.n :]
        assert torch.equal(result.value, want) and len(memory) == len(so_far)
    assert torch.equal(run(config, whole, backend=backend).value, run(VALUES["shared"], whole, backend=backend).value)


def test_a_memory_is_bounded_and_resumes_with_the_same_bits():
    config, memory, again = replace(VALUES["shared"], share="memory"), bk.ValueMemory(40), bk.ValueMemory(40)
    batches, whole = parts()
    for batch in batches[:2]:
        run(config, batch, memory=memory)
        assert len(memory) == 40 if batch is batches[1] else len(memory) <= 40
    again.load_state_dict(memory.state_dict())
    result = run(config, batches[2], memory=memory)
    assert torch.equal(run(config, batches[2], memory=again).value, result.value)
    kept = np.flatnonzero(whole.group // 3 <= 1)[-40:]  # the last rows before
    rows = np.concatenate([kept, np.flatnonzero(whole.group // 3 == 2)])
    returns = run(Config.grpo(), whole).returns.numpy()[rows]
    want = run(VALUES["shared"], whole.take(rows), returns=returns, step=whole.step[rows])
    assert torch.equal(want.value[40:], result.value)
    smaller = bk.ValueMemory(7)
    for state, size in ((memory.state_dict(), 7), ({}, 0)):
        smaller.load_state_dict(state)
        assert len(smaller) == size


def test_a_memory_of_the_first_form_loads_as_trajectories_of_one_record():
    """It did not keep where trajectories end: only the luck that records share is lost."""
    config, (first, second, _) = replace(VALUES["shared"], share="memory", luck_noise=0.0), parts()[0]
    memory, old = bk.ValueMemory(1000), bk.ValueMemory(1000)
    run(config, first, memory=memory)
    state = memory.state_dict()
    del state["trajectories"]
    old.load_state_dict(state)
    assert old.state_dict()["trajectories"] == [1] * first.n
    assert torch.equal(run(config, second, memory=old).value, run(config, second, memory=memory).value)
    for wrong in ([1, 2], [first.n]):  # the last is one that spans groups
        with pytest.raises(ValueError, match=r"trajectories must divide the \d+ records of groups"):
            old.load_state_dict(state | {"trajectories": wrong})


def test_a_memory_holds_no_bad_rows(backend):
    config = replace(VALUES["shared"], share="memory", on_invalid="singleton")
    memory, clean = bk.ValueMemory(1000), bk.ValueMemory(1000)
    (first, second, _), _ = parts()
    fingerprint, rewards = first.fingerprint.copy(), first.rewards.copy()
    fingerprint[1], rewards[9] = np.nan, np.inf
    run(config, first, fingerprint=fingerprint, rewards=rewards, memory=memory, backend=backend)
    good = (np.arange(first.n) != 1) & (first.trajectory != first.trajectory[9])
    returns = run(Config.grpo(), first).returns.numpy()[good]
    run(config, first.take(np.flatnonzero(good)), returns=returns, memory=clean, backend=backend)
    results = [run(config, second, memory=each, backend=backend) for each in (memory, clean)]
    close(results[0].value, results[1].value)
    assert bool(results[0].value.isfinite().all())


def test_a_memory_owns_its_steps():
    config = replace(VALUES["shared"], share="memory")
    first = parts()[0][0]
    memories = [bk.ValueMemory(1000) for _ in range(2)]
    steps = [first.step.copy() for _ in memories]
    lay = bk.layout(first.group, first.trajectory, steps[1])
    run(config, first, step=steps[0], memory=memories[0])
    run(config, first, group=None, trajectory=None, step=None, layout=lay, memory=memories[1])
    steps[0][:] = steps[1][:] = 0
    lay.step[:] = 0
    assert all(torch.equal(memory.state_dict()["time"], torch.tensor(first.step)) for memory in memories)


def test_a_memory_keeps_the_batches_of_calls_at_the_same_time(monkeypatch):
    """A thread's call may end while that of another, which has read the memory already, still computes."""
    config, memory = replace(VALUES["shared"], share="memory"), bk.ValueMemory(1000)

    def meanwhile(*args):
        monkeypatch.setattr(table, "choose_landmarks", choose_landmarks)
        run(config, memory=memory)
        return choose_landmarks(*args)

    monkeypatch.setattr(table, "choose_landmarks", meanwhile)
    run(config, memory=memory)
    assert len(memory) == 2 * N
    monkeypatch.setattr(combine, "combine", None)
    refused("not callable", run, config, error=TypeError, memory=memory)
    assert len(memory) == 2 * N  # a call that ends early adds nothing


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_memory_refuses_states_that_would_spoil_later_values():
    memory = bk.ValueMemory(100)
    run(replace(VALUES["shared"], share="memory"), memory=memory)
    state, rows = memory.state_dict(), len(memory)

    def with_first(name, value):
        column = state[name].clone()
        column[0] = value
        return {name: column}

    for change in (
        with_first("returns", math.nan), with_first("returns", math.inf), with_first("returns", 2e37),
        with_first("fingerprint", math.nan), with_first("fingerprint", 0.0), with_first("time", -1),
        with_first("time", 1 << 53), with_first("time", (1 << 53) - 1),
        {"returns": state["returns"].to("meta")}, {"returns": state["returns"].to_sparse()},
        {"fingerprint": torch.nested.nested_tensor([torch.ones(3)] * rows)}, {"groups": [10**400]},
        {"groups": [10**5000]},
    ):  # fmt: skip
        refused(r"^state must come from ValueMemory.state_dict\(\): ", memory.load_state_dict, {**state, **change})
    for name, column in memory.state_dict().items():  # a refused state changes nothing
        assert torch.equal(torch.as_tensor(column), torch.as_tensor(state[name]))
    usable = with_first("usable", False)
    memory.load_state_dict({**state, **usable, **with_first("fingerprint", math.nan)})  # which nothing reads


def test_wrong_memories():
    config, memory = replace(VALUES["shared"], share="memory"), bk.ValueMemory(100)
    refused("max_rows must be an int of at least 1, got 0", bk.ValueMemory, 0)
    refused(r"memory must be a bipace_kernels.ValueMemory, got dict", run, config, error=TypeError, memory={})
    run(config, memory=memory)
    with pytest.raises(ValueError, match=r"fingerprint must have D = \d+ like the batches in memory, got 2; begin"):
        run(config, memory=memory, fingerprint=np.ones((N, 2), np.float32))
    refused(r"from ValueMemory.state_dict\(\): fingerprint must be a tensor", memory.load_state_dict, {"groups": [1]})
    refused(r"come from ValueMemory.state_dict\(\): it must be a dict, got list", memory.load_state_dict, [1])
    refused("groups must be a list of sizes", memory.load_state_dict, memory.state_dict() | {"groups": [N + 6, -6]})


def test_a_bad_fingerprint_keeps_its_place_with_the_mean_and_is_near_nothing(backend):
    fingerprint, keep = BATCH.fingerprint.copy(), ~np.isin(np.arange(N), [1, 9])
    fingerprint[1], fingerprint[9] = np.nan, 0.0
    config = replace(EVERY["averaged"], on_invalid="singleton")
    result = run(replace(config, action_noise=None), fingerprint=fingerprint, backend=backend)
    got = run(config, fingerprint=fingerprint, backend=backend)
    close(got.advantage, averaged_formula(BATCH, config, result.advantage.double().numpy(), keep), 2e-5)
    close(result.value, kernel_formula(BATCH, config, keep), 2e-5)
    close(result.value[~keep], torch.from_numpy(means()[~keep]).float())
    assert result.metrics()["bipace/invalid_row_fraction"] == pytest.approx(2 / N)
    with pytest.raises(ValueError, match=r"fingerprint must have finite, non-zero rows, got non-finite .* at row 1;"):
        run(VALUES["kernel"], fingerprint=fingerprint, backend=backend)


@pytest.mark.parametrize("returns", [{}, {"returns": np.ones(N), "episode_return": np.ones(N)}])
def test_a_bad_reward_spoils_its_trajectory_also_where_returns_are_given(returns):
    rewards = np.where(np.arange(N) == 5, np.inf, BATCH.rewards)
    refused(r"rewards must be finite .* row 5", run, VALUES["group"], rewards=rewards, **returns)


@pytest.mark.parametrize("name", list(VALUES))
def test_what_was_cut_off_goes_on_with_its_value(name, backend):
    last = np.append(np.diff(BATCH.trajectory) != 0, True)
    cut = last & (BATCH.trajectory % 2 == 0)
    config = replace(VALUES[name], gae_lambda=1.0)
    plain, got = run(config, backend=backend), run(config, truncated=cut, backend=backend)
    close(got.value, plain.value)
    remaining = np.array([(BATCH.trajectory[i:] == BATCH.trajectory[i]).sum() for i in range(N)])
    ends = np.flatnonzero(last)[np.searchsorted(np.flatnonzero(last), np.arange(N))]
    extra = np.where(cut[ends], 0.95**remaining * got.value.numpy()[ends], 0.0)
    close(got.step_advantage, plain.step_advantage + torch.from_numpy(extra).float())
    everywhere = run(config, truncated=cut[ends], backend=backend)  # only a trajectory's last step is read
    assert torch.equal(everywhere.advantage, got.advantage)


def test_truncated_before_a_last_step_is_answered_with_its_rows():
    last = np.append(np.diff(BATCH.trajectory) != 0, True)
    early = np.flatnonzero(~last)[3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(VALUES["group"], truncated=last, fingerprint=None, backend="cpu")
        with pytest.raises(RuntimeWarning, match=f"truncated is True at 1 rows before .*, such as {early}: it"):
            run(VALUES["group"], truncated=last | (np.arange(N) == early), fingerprint=None, backend="cpu")


def test_copies_of_a_step_are_one_step_of_the_recursion(backend):
    """Two records of step 1: what comes before takes the mean of their values and advantages."""
    ids = {"group": [0] * 6, "trajectory": [0, 0, 0, 0, 1, 1], "step": [0, 1, 1, 3, 0, 1]}
    ids |= {"rewards": [0.0, 0.5, 0.5, 1.0, 0.0, 0.0], "observation": ["a", "b", "c", "d", "a", "b"]}
    config = replace(VALUES["cluster"], duplicates="count", shrinkage=0.0, gae_lambda=0.5, gamma=0.9)
    result = bk.advantage(**ids, config=config, backend=backend)
    v, g, d = result.value.double().numpy(), 0.9, 0.45
    a3 = 1.0 - v[3]
    a1, a2 = (0.5 + g**2 * v[3] - v[i] + d**2 * a3 for i in (1, 2))
    a0 = 0.0 + g * (v[1] + v[2]) / 2 - v[0] + d * (a1 + a2) / 2
    assert result.step_advantage.tolist()[:4] == pytest.approx([a0, a1, a2, a3], abs=2e-6)
    cut = bk.advantage(**ids, config=config, backend=backend, truncated=[k == 3 for k in range(6)])
    assert float(cut.step_advantage[3]) == pytest.approx(a3 + g * v[3], abs=2e-6)


def test_equal_returns_give_their_value_exactly_and_their_rounding_is_not_blown_up(backend):
    returns = np.full(N, 0.1, np.float32)
    for name in OF_A_GROUP:
        result = run(EVERY[name], returns=returns, episode_return=np.ones(N), backend=backend)
        assert torch.equal(result.value, torch.full((N,), 0.1)), name
    # γ = λ = 1 and equal returns 1: R − V̂ is 0 but for rounding, and must not be blown up.
    batch = BATCH.take(np.flatnonzero(np.append(np.diff(BATCH.trajectory) != 0, True)))
    for norm in ("batch", "group"):
        config = Config.gae("group", gae_lambda=1.0, gamma=1.0, step_norm=norm)
        rewards = np.full(batch.n, 1.0) + 1e-9 * np.arange(batch.n)
        assert not bool(run(config, batch, rewards=rewards, backend=backend).advantage.any())


def test_huge_rewards_saturate(backend):
    result = run(VALUES["kernel"], rewards=np.where(np.arange(N) % 2, 9e36, -9e36), backend=backend)
    assert bool((result.advantage.isfinite() & result.value.isfinite()).all())


def test_episode_weight(backend):
    for config in (Config.gae(), Config.bipace(0.2), Config.gigpo()):
        for episode_weight, w in ((0.0, 1.0), (0.5, 2.0), (1.0, 0.0), (0.0, 0.0)):
            result = run(replace(config, episode_weight=episode_weight, step_weight=w), backend=backend)
            total = episode_weight * result.episode_advantage.double() + w * result.step_advantage.double()
            assert torch.equal(result.advantage, total.float())


def test_other_estimators_have_no_value_and_ignore_truncated():
    plain, given_mask = run(Config.gigpo()), run(Config.gigpo(), truncated=np.ones(N, bool))
    assert plain.value is None and torch.equal(plain.advantage, given_mask.advantage)
    refused("truncated", run, Config.gigpo(), truncated=np.ones(N + 1, bool))


def test_arguments_that_are_missing():
    whole = {"returns": np.zeros(N), "episode_return": np.zeros(N)}
    with pytest.raises(ValueError, match=r"rewards is missing; estimator='gae' reads the reward of each step"):
        run(VALUES["group"], rewards=None, **whole)
    refused(r"fingerprint is missing; estimator='gae' with value='kernel'", run, VALUES["kernel"], fingerprint=None)
    refused(r"observation is missing", run, VALUES["cluster"], observation=None)
    refused("truncated", run, VALUES["group"], error=TypeError, truncated=["no"] * N)
    run(VALUES["group"], fingerprint=None, observation=None, action_key=None)
    run(Config.gae(), action_key=None)
    refused("action_key", run, Config.gae(), error=TypeError, action_key=["go"] * N)
    run(Config.gae(action_noise=None), action_key=["go"] * N)


def test_steps_that_float64_rounds_are_refused():
    """The kernel compares steps as float64, for which 2^53 and 2^53 + 1 are the same."""
    late = BATCH.step + (1 << 53)
    for config in (Config.gae(), Config.gae(share="group"), Config.gae(share="memory")):
        memory = bk.ValueMemory(9) if config.needs_memory else None
        with pytest.raises(ValueError, match=r"^step must be below 2\^53 for value='kernel'.*, got \d+ at row \d+; co"):
            run(config, step=late, memory=memory)
        assert not memory
    run(Config.gae("group"), step=late)


@pytest.mark.parametrize(
    "changes",
    [
        {"value": "mean"}, {"share": "all"}, {"kernel_same": -0.1}, {"kernel_same": 1e4}, {"kernel_width": 0.01},
        {"shrinkage": -1.0}, {"shrinkage": math.inf}, {"kernel_width": 0.0}, {"kernel_width": math.nan},
        {"kernel_time": 0.0}, {"kernel_time": 1e-200}, {"kernel_noise": 0.0}, {"kernel_noise": 0.09},
        {"action_noise": math.inf}, {"gae_lambda": 1.1}, {"gae_lambda": True}, {"episode_weight": -1.0},
        {"step_norm": "std"}, {"partition": "exact"}, {"action_noise": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_fields_out_of_range(changes):
    refused(next(iter(changes)) if "partition" not in changes else "value='kernel'", Config.gae, **changes)


def test_pairs_of_fields():
    refused("value='cluster' of estimator='gae' needs a partition", Config.gae, "cluster", partition="none")
    refused("step_norm='batch' goes with estimator 'gae'", Config.gigpo, step_norm="batch")


def test_an_embedder_has_its_own_numbers_of_the_kernel_unless_they_are_given():
    assert KERNELS.keys() == EMBEDDERS.keys() and Config.gae() == Config.gae(embedder="actor_hidden")
    plain = Config.gae(embedder="sentence")
    for name, numbers in KERNELS.items():
        config = Config.gae(embedder=name)
        assert config == replace(plain, **numbers)
        assert Config.gae(embedder=name, **{field: getattr(plain, field) for field in numbers}) == plain
        assert Config.gae("group", name) == Config.gae("group") and config.gae_lambda == numbers.get("gae_lambda", 0.5)
    refused("embedder must be one of actor_hidden, ngram, identity, sentence, got 'mine'", Config.gae, embedder="mine")


def left_out_by_hand(batch, config):
    """[N] R̂: each trajectory's records predicted from all others by the definition, every matrix written out."""
    whole = config.share == "batch"
    r = run(Config.grpo(), batch).returns.double().numpy()
    out, part_of = np.zeros(batch.n), np.zeros(batch.n, int) if whole else batch.group
    for part in np.unique(part_of):
        rows = np.flatnonzero(part_of == part)
        x, t = unit(batch.fingerprint[rows]), batch.step[rows]
        z = coordinates(batch, config) if whole else x - x.mean(axis=0)
        k = kernel_matrix(z, z, t, t, config.kernel_width, config.kernel_time)
        c, noise = k, noise_of(t, batch.trajectory[rows], config)
        if whole:
            at = landmarks_of(batch)
            c = k[:, at] @ np.linalg.solve(k[np.ix_(at, at)] + 1e-3 * np.eye(len(at)), k[at])
            inside = by_group(z, batch.group)
            k = k + config.kernel_inside * kernel_matrix(inside, inside, t, t, config.kernel_width, config.kernel_time)
            c = np.where(batch.group[rows][:, None] == batch.group[rows], k + config.kernel_same, c)
        for trajectory in np.unique(batch.trajectory[rows]):
            own = batch.trajectory[rows] == trajectory
            prior = 0.0 if whole else r[rows][~own].mean() if (~own).any() else np.nan
            weights = np.linalg.solve(c[~own][:, ~own] + noise[~own][:, ~own], r[rows][~own] - prior)
            out[rows[own]] = prior + c[own][:, ~own] @ weights
    return r, out


@pytest.mark.parametrize("name", ["kernel", "shared", "shared, first form"])
def test_held_out_value_r2_is_that_of_each_trajectory_left_out(name):
    for seed in range(3):
        batch = make_batch(seed, groups=7, trajectories=6, longest=9, dim=12)
        result = run(VALUES["group"], batch)
        got = bk.kernel_value_r2(result, batch.fingerprint, VALUES[name])
        r, prediction = left_out_by_hand(batch, VALUES[name])
        error = spread = 0.0
        for group in np.unique(batch.group):
            rows = np.flatnonzero(batch.group == group)
            for i in rows if len(np.unique(batch.trajectory[rows])) > 1 else ():
                base = r[rows][batch.trajectory[rows] != batch.trajectory[i]].mean()
                error, spread = error + (r[i] - prediction[i]) ** 2, spread + (r[i] - base) ** 2
        assert got.r2 == pytest.approx(1 - error / spread, abs=1e-9) and got.coverage == 1.0


def test_value_r2_of_states_that_say_everything_and_nothing():
    """A return that the state decides is foreseen; noise is not."""
    n, rng = 600, np.random.default_rng(0)
    ids = (np.repeat(np.arange(6), 100), np.repeat(np.arange(60), 10))
    state = rng.integers(0, 5, n)
    states = np.eye(5, dtype=np.float32)[state]
    for returns, low, high in ((state / 4.0, 0.9, 1.0), (rng.random(n), -0.3, 0.1)):
        whole = {"returns": returns, "episode_return": np.zeros(n), "fingerprint": states}
        result = bk.advantage(*ids, np.zeros(n), config=VALUES["kernel"], **whole)
        for share in ("group", "batch"):
            config = Config.gae(share=share, kernel_time=None, kernel_noise=0.1)
            assert low < bk.kernel_value_r2(result, states, config).r2 <= high
    bad = states.copy()
    bad[:60] = np.nan
    assert bk.kernel_value_r2(result, bad, VALUES["kernel"]).coverage == pytest.approx(0.9)
    refused(r"config must be a Config.gae\(\) with value='kernel'", bk.kernel_value_r2, result, states, Config.bipace())


def test_kernels_of_far_steps_may_underflow_whatever_numpy_raises():
    config, states = Config.gae(), np.random.default_rng(0).normal(size=(600, 8)).astype(np.float32)
    rows = {"step": np.arange(600), "fingerprint": states, "action_key": np.zeros(600, np.int64), "config": config}
    with np.errstate(all="raise"):
        result = bk.advantage([0] * 600, np.arange(600) % 2, states[:, 0], **rows, backend="reference")
        assert np.isfinite(bk.kernel_value_r2(result, states, config).r2)
