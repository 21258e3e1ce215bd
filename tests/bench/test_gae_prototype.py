"""Theorems of critic-free GAE, on the prototype that the truth sets are measured with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import bipace_kernels as bk
from bench import _gae_prototype as gp
from bench._gae_prototype import Gae, Rows


def batch(seed=0, groups=3, rollouts=4, gamma=0.95):
    rng = np.random.default_rng(seed)
    group, trajectory, step = [], [], []
    for g in range(groups):
        for r in range(rollouts):
            n = rng.integers(2, 7)
            group += [g] * n
            trajectory += [g * rollouts + r] * n
            step += list(range(n))
    group, trajectory, step = (np.array(x, np.int64) for x in (group, trajectory, step))
    reward = np.where(rng.random(len(group)) < 0.3, 1.0, 0.0)
    x = rng.normal(size=(len(group), 5))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    returns = gp.discounted(reward, trajectory, step, gamma)
    cluster = rng.integers(0, 4, len(group)) + 4 * group
    return Rows(group, trajectory, step, reward, returns, gamma, x @ x.T, cluster, rng.integers(0, 3, len(group)))


CONFIGS = [
    Gae(value="group"), Gae(value="cluster"), Gae(), Gae(prior="zero"), Gae(share="batch"), Gae(kernel="auto"),
    Gae(leave_out=True), Gae(share="batch", leave_out=True), Gae(kernel_time=None),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_at_lambda_1_the_sum_telescopes_to_return_minus_value(config):
    rows = batch()
    value = gp.value_of(rows, config)
    a = gp.unnormed(rows, value, replace(config, gae_lambda=1.0))
    np.testing.assert_allclose(a, rows.returns - value, atol=1e-12)


def test_clusters_without_shrinkage_are_gigpo_and_with_much_the_group():
    rows = batch(1)
    value = gp.value_of(rows, Gae(value="cluster", shrinkage=0.0))
    a = gp.unnormed(rows, value, Gae(gae_lambda=1.0))
    result = bk.advantage(rows.group, rows.trajectory, rows.reward, step=rows.step, observation=rows.cluster.tolist(),
                          config=bk.Config.gigpo())  # fmt: skip
    np.testing.assert_allclose(a, result.step_advantage.numpy(), atol=2e-6)
    much = gp.value_of(rows, Gae(value="cluster", shrinkage=1e12))
    np.testing.assert_allclose(much, gp.value_of(rows, Gae(value="group")), atol=1e-9)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_reward_gives_no_advantage(config):
    rows = batch(2)
    zero = replace(rows, reward=np.zeros(len(rows.group)), returns=np.zeros(len(rows.group)))
    assert not gp.advantage(zero, config).any()


@pytest.mark.parametrize("share", ["group", "batch"])
def test_leaving_the_own_trajectory_out_is_solving_without_it(share):
    rows = batch(3)
    config = Gae(share=share, leave_out=True)
    value = gp.value_of(rows, config)
    for t in np.unique(rows.trajectory):
        own = rows.trajectory == t
        inside = rows.group == rows.group[own][0] if share == "group" else np.ones(len(own), bool)
        kernel = gp.kernel_of(gp.cosines(rows.gram[np.ix_(inside, inside)]), rows.step[inside], 0.3, 4.0)
        if share == "batch":
            kernel += 0.3 * (rows.group[:, None] == rows.group[None])
        own, returns = own[inside], rows.returns[inside]
        mean = returns[~own].mean() if share == "group" else 0.0
        solved = np.linalg.solve(kernel[np.ix_(~own, ~own)] + 2.0 * np.eye((~own).sum()), returns[~own] - mean)
        np.testing.assert_allclose(value[rows.trajectory == t], mean + kernel[np.ix_(own, ~own)] @ solved, atol=1e-10)


@pytest.mark.parametrize("stride", [False, True])
def test_as_many_landmarks_as_rows_are_the_whole_kernel(stride):
    rows = batch(4)
    config = Gae(share="batch")
    many = gp.value_of(rows, replace(config, landmarks=len(rows.group), stride=stride))
    np.testing.assert_allclose(many, gp.value_of(rows, config), atol=1e-7)


def test_cosines_about_the_mean_are_those_of_centred_rows():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(7, 4)) + 3.0
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x[3] = x[1]
    centred = x - x.mean(axis=0)
    centred /= np.linalg.norm(centred, axis=1, keepdims=True)
    found = gp.cosines(x @ x.T)
    np.testing.assert_allclose(found, centred @ centred.T, atol=1e-12)
    assert found[1, 3] == pytest.approx(1.0, abs=1e-12)
    assert (gp.cosines(np.ones((3, 3))) == 1.0).all()  # equal rows are the mean, and equal among themselves


def test_the_likelihood_is_that_of_the_normal_distribution():
    rows = batch(6, groups=1)
    y = rows.returns - rows.returns.mean()
    kernel = gp.kernel_of(gp.cosines(rows.gram), rows.step, 0.3, 4.0)
    quadratic, logdet = gp.likelihoods(kernel, y, (0.5, 2.0))
    for noise, q, d in zip((0.5, 2.0), quadratic, logdet, strict=True):
        c = kernel + noise * np.eye(len(y))
        assert q == pytest.approx(y @ np.linalg.solve(c, y), rel=1e-9) and d == pytest.approx(
            np.linalg.slogdet(c)[1], rel=1e-9
        )


def test_step_norms():
    rows = batch(7)
    a = gp.advantage(rows, Gae(step_norm="batch"))
    assert np.sqrt((a**2).mean()) == pytest.approx(1.0)
    a = gp.advantage(rows, Gae(step_norm="group"))
    for block in gp.segments(rows.group):
        assert np.sqrt((a[block] ** 2).mean()) == pytest.approx(1.0)
