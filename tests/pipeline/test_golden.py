"""A table worked by hand: one prompt group, two rollouts, γ = 0.5.

record   rollout  step  observation  action  reward   R      cluster (exact)
0        0        0     a            x       0        0.25   a
1        0        1     b            y       0        0.5    b
2        0        2     c            x       1        1      c
3        1        0     a            x       0        0      a
4        1        1     b            z       0        0      b
"""

import math

import pytest
import torch

import bipace_kernels as bk

GROUP = ["p"] * 5
TRAJECTORY = ["t0", "t0", "t0", "t1", "t1"]
REWARDS = [0.0, 0.0, 1.0, 0.0, 0.0]
OBSERVATION = ["a", "b", "c", "a", "b"]
KEYS = [7, 8, 7, 7, 9]
EPISODE = 0.5 / (math.sqrt(0.5) + 1e-6)  # (1 − 0.5) / (σ + δ), σ² = (0.25 + 0.25) / 1
S, P, L = bk.Branch.SINGLETON, bk.Branch.PACE, bk.Branch.LEAVE_ONE_OUT


def run(config, backend, **more):
    arguments = {"observation": OBSERVATION, "action_key": KEYS, **more}
    return bk.advantage(GROUP, TRAJECTORY, REWARDS, config=config, backend=backend, **arguments)


def close(tensor, values):
    torch.testing.assert_close(tensor, torch.tensor(values, dtype=torch.float32), atol=1e-7, rtol=1e-6)


def test_returns_and_episode(backend):
    result = run(bk.Config.grpo(gamma=0.5), backend)
    close(result.returns, [0.25, 0.5, 1.0, 0.0, 0.0])
    close(result.episode_advantage, [EPISODE] * 3 + [-EPISODE] * 2)
    close(result.advantage, [EPISODE] * 3 + [-EPISODE] * 2)
    assert result.cluster.tolist() == [0, 1, 2, 3, 4] and result.branch.tolist() == [S] * 5
    assert not any("cluster" in name or "pairs" in name for name in result.metrics())


def test_gigpo_plain_and_as_verl_agent_normalises(backend):
    result = run(bk.Config.gigpo(gamma=0.5, step_weight=2.0), backend)
    assert result.cluster.tolist() == [0, 1, 2, 0, 1]
    close(result.step_advantage, [0.125, 0.25, 0.0, -0.125, -0.25])
    close(result.advantage, [EPISODE + 0.25, EPISODE + 0.5, EPISODE, -EPISODE - 0.25, -EPISODE - 0.5])
    assert result.branch.tolist() == [P, P, S, P, P]
    # Population of step records: returns 1, 1, 1, 0, 0: mean 0.6, σ² = 1.2/4; in clusters σ = |difference|/√2.
    sigma = math.sqrt(0.3) + 1e-6
    result = run(bk.Config.gigpo("mean_std_norm", gamma=0.5), backend)
    close(result.episode_advantage, [0.4 / sigma] * 3 + [-0.6 / sigma] * 2)
    a, b = 0.125 / (0.25 / math.sqrt(2) + 1e-6), 0.25 / (0.5 / math.sqrt(2) + 1e-6)
    close(result.step_advantage, [a, b, 0.0, -a, -b])
    result = run(bk.Config.gigpo("mean_norm", gamma=0.5), backend)
    close(result.advantage, [0.4 + 0.125, 0.4 + 0.25, 0.4, -0.6 - 0.125, -0.6 - 0.25])


def test_q_style_and_diff_peer(backend):
    """Cluster a: one action, Q̂ = V̂. Cluster b: every action once, so leave-one-out."""
    result = run(bk.Config.bipace(partition="exact", gamma=0.5), backend)
    close(result.step_advantage, [0.0, 0.5, 0.0, 0.0, -0.5])
    assert result.branch.tolist() == [P, L, S, P, L]
    # Cluster a: no other action, so leave-one-out. Cluster b: each compares with the other.
    result = run(bk.Config.bipace(partition="exact", estimator="diff_peer", gamma=0.5), backend)
    close(result.step_advantage, [0.25, 0.5, 0.0, -0.25, -0.5])
    assert result.branch.tolist() == [L, P, S, L, P]
    # R = 1, 0.5, 0 with actions x, x, y: V̂ = 0.5, Q̂(x) = 0.75; y alone: 0 − 0.75. 0.5 + 2/3 · (−0.75) = 0.
    r = [1.0, 0.5, 0.0]
    result = bk.advantage(
        [0] * 3, [0, 1, 2], r, returns=r, episode_return=r, observation=["s"] * 3, action_key=[1, 1, 2],
        config=bk.Config.bipace(partition="exact"), backend=backend,
    )  # fmt: skip
    close(result.step_advantage, [0.25, 0.25, -0.75])
    assert result.branch.tolist() == [P, P, L]


def test_hgpo(backend):
    """Depth 1: clusters a, b, c. Depth 2: (a, b) twice, (b, c) once. L = k + 1."""
    result = run(bk.Config.hgpo(1, gamma=0.5), backend)
    w1, w2 = 2 / (5 + 1e-6), 3 / (5 + 1e-6)
    one, both = 0.125 * 2 / (2 + 1e-6), 0.25 * w1 + 0.25 * w2
    close(result.advantage, [one, both, 0.0, -one, -both])
    assert torch.equal(result.advantage, result.step_advantage)
    close(result.episode_advantage, [EPISODE] * 3 + [-EPISODE] * 2)
    # Records 1 and 4 have company at depth 2, 0 and 3 at depth 1 only, 2 nowhere.
    assert result.branch.tolist() == [P, P, S, P, P] and result.cluster.tolist() == [0, 1, 2, 0, 1]
    result = run(bk.Config.hgpo(1, gamma=0.5, base_group=True), backend)
    first = (1 * EPISODE + 2 * 0.125) / (3 + 1e-6)
    second = (1 * EPISODE + 2 * 0.25 + 3 * 0.25) / (6 + 1e-6)
    close(result.advantage, [first, second, EPISODE / (1 + 1e-6), -first, -second])


def test_history(backend):
    """The last two observations: (a), (a, b), (b, c), (a), (a, b)."""
    config = bk.Config(partition="history", estimator="mean", history_length=1)
    assert run(config, backend).cluster.tolist() == [0, 1, 2, 0, 1]
    result = run(config, backend, observation=list("abbbb"))
    assert result.cluster.tolist() == [0, 1, 2, 3, 2]  # (a), (a, b), (b, b), (b), (b, b)


def test_greedy_clusters_in_the_plane_and_ties_to_the_oldest(backend):
    """Unit vectors at 0°, 20°, 40° and ε for 21°: 20° joins 0° (centroid 10°), 40° is 30° away and seeds."""
    angle = torch.deg2rad(torch.tensor([0.0, 20.0, 40.0]))
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    epsilon = 1 - math.cos(math.radians(21))
    assert bk.cluster(x, [0] * 3, epsilon, backend=backend).tolist() == [0, 0, 1]
    # 20° first: 0° joins (centroid 10°), 40° is 30° away again; with 40° second it joins, then 0° is 30° away.
    assert bk.cluster(x[[1, 0, 2]], [0] * 3, epsilon, backend=backend).tolist() == [0, 0, 1]
    assert bk.cluster(x[[1, 2, 0]], [0] * 3, epsilon, backend=backend).tolist() == [0, 0, 1]
    # The length of a row says nothing.
    lengths = torch.tensor([[1.0], [1e-20], [3e20]])
    assert bk.cluster(x * lengths, [0] * 3, epsilon, backend=backend).tolist() == [0, 0, 1]
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0 + 1e-6]])
    assert bk.cluster(x, [0] * 3, 0.5, backend=backend).tolist() == [0, 1, 0]


def test_a_lone_trajectory_returns_by_step_numbers_and_tokens(backend):
    def episode(config):
        return bk.advantage([0, 0], [0, 0], [1.0, 2.0], config=config, backend=backend).episode_advantage.tolist()

    assert episode(bk.Config.grpo()) == [0.0, 0.0]
    assert episode(bk.Config.grpo(lone_trajectory="raw")) == pytest.approx([3 / (1 + 1e-6)] * 2)
    assert episode(bk.Config.grpo(lone_trajectory="raw", episode_norm="none")) == [3.0, 3.0]
    # Over step records the population is two, and equal: zero.
    assert episode(bk.Config.grpo(lone_trajectory="raw", episode_scope="step")) == [0.0, 0.0]
    # Steps 0, 3, 4: γ³ lies between the first two.
    out = bk.discounted_returns([1.0, 1.0, 1.0], ["t"] * 3, 0.5, step=[0, 3, 4], backend=backend)
    assert out.tolist() == [1 + 0.125 * 1.5, 1.5, 1.0]
    assert bk.discounted_returns([1.0, 1.0, 1.0], [5] * 3, 0.5, backend=backend).tolist() == [1.75, 1.5, 1.0]
    assert bk.discounted_returns([1.0, 2.0], [5] * 2, 0.0, backend=backend).tolist() == [1.0, 2.0]
    shuffled = bk.discounted_returns([1.0, 1.0, 1.0], [5] * 3, 0.5, step=[4, 0, 3], backend=backend)
    assert shuffled.tolist() == [1.0, 1 + 0.125 * 1.5, 1.5]
    out = bk.to_tokens([1.5, -2.0], [[1, 1, 0], [0, 1, 0]])
    assert out.tolist() == [[1.5, 1.5, 0.0], [0.0, -2.0, 0.0]] and out.dtype == torch.float32
