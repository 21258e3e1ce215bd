"""Action keys by clustering action vectors: what they are equal to, and where they may stand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from refusals import refused

import bipace_kernels as bk

SEED = 20261121
ESTIMATORS = ("q_style", "diff_peer")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def batch(n=120, groups=4, actions=6):
    """Ids, rewards, observations and an action number for each of n records."""
    rng = np.random.default_rng(SEED)
    group = np.sort(rng.integers(0, groups, n))
    trajectory = group * 3 + rng.integers(0, 3, n)
    return {
        "group": group, "trajectory": trajectory, "rewards": rng.standard_normal(n),
        "observation": rng.integers(0, 3, n), "action": rng.integers(0, actions, n),
    }  # fmt: skip


def moves(*degrees):
    """[N, 2] unit vectors at these angles."""
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], dim=1).float()


def test_worked_by_hand(backend):
    """Group 0: 3° joins 0°, −120° is another action; group 1 has its own keys; lengths do not matter."""
    vectors = moves(0, 3, -120, 0, 0) * torch.tensor([1.0, 1.0, 1.0, 1.0, 1000.0])[:, None]
    keys = bk.action_clusters(vectors, [0, 0, 0, 1, 0], 0.01, backend=backend)
    assert keys.tolist() == [0, 0, 1, 2, 0] and keys.dtype == torch.int64


@settings(max_examples=25)
@given(st.data())
def test_keys_at_zero_are_the_partition_into_equal_vectors(data):
    n = data.draw(st.integers(0, 24))
    dtype = data.draw(st.sampled_from(DTYPES))
    entries = st.sampled_from([0.0, -0.0, 1.0, 1.001, -3.5])
    rows = data.draw(st.lists(st.tuples(entries, entries, entries), min_size=n, max_size=n))
    group = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    vectors = torch.tensor(rows, dtype=dtype).reshape(n, 3)
    exact = {}
    place = sorted(range(n), key=lambda row: group[row])  # stable: processing order
    for row in place:
        exact.setdefault((group[row], *(vectors[row] + 0.0).tolist()), len(exact))
    want = [exact[(group[row], *(vectors[row] + 0.0).tolist())] for row in range(n)]
    for backend in ("reference", "cpu"):
        assert bk.action_clusters(vectors, group, 0, backend=backend).tolist() == want


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_hot_vectors_at_zero_are_action_ids(backend, estimator):
    """The advantage by vectors equals that by ids, bit for bit, so PACE loses nothing where actions are few."""
    x = batch()
    action = x.pop("action")
    config = bk.Config(partition="exact", estimator=estimator)
    lay = bk.layout(x.pop("group"), x.pop("trajectory"), np.arange(len(action)))
    keys = bk.action_clusters(np.eye(6, dtype=np.float32)[action], epsilon=0, layout=lay, backend=backend)
    by_vector = bk.advantage(**x, layout=lay, action_key=keys, config=config, backend=backend)
    by_id = bk.advantage(**x, layout=lay, action_key=action, config=config, backend=backend)
    assert torch.equal(by_vector.advantage, by_id.advantage)
    assert torch.equal(by_vector.branch, by_id.branch) and by_vector.metrics() == by_id.metrics()
    assert (by_vector.branch == bk.Branch.PACE).any()


@pytest.mark.parametrize("epsilon", [0.0, 0.02, 0.3])
def test_keys_are_the_clusters_of_the_same_vectors(backend, epsilon):
    x, vectors = batch(), np.random.default_rng(SEED).standard_normal((120, 3)).astype(np.float32)
    ids = {"trajectory": x["trajectory"], "step": np.arange(120)[::-1].copy()}
    keys = bk.action_clusters(vectors, x["group"], epsilon, **ids, backend=backend)
    assert torch.equal(keys, bk.cluster(vectors, x["group"], epsilon, **ids, backend=backend))


def test_a_cosine_alone_merges_what_a_constant_keeps_apart(backend):
    """Torques of 0.1 and 1.0 along one axis point the same way; with a constant entry their distance counts."""
    torque = torch.tensor([[0.1], [1.0], [0.12], [-1.0], [0.0]])
    group = [0] * 5
    with pytest.raises(ValueError, match=r"action_fingerprint must have finite, non-zero rows, got zeros.* at row 4;"):
        bk.action_clusters(torque, group, 0.01, backend=backend)
    assert bk.action_clusters(torque[:4], group[:4], 0.01, backend=backend).tolist() == [0, 0, 0, 1]
    c, r = 4.0, 0.15
    lifted = torch.cat([torque, torch.full((5, 1), c)], dim=1)
    keys = bk.action_clusters(lifted, group, r**2 / (2 * c**2), backend=backend)
    assert keys.tolist() == [0, 1, 0, 2, 0]


def test_padding_gets_no_key_and_may_hold_anything(backend):
    x = batch()
    vectors = np.random.default_rng(SEED).standard_normal((120, 4)).astype(np.float32)
    valid = np.arange(120) % 3 > 0
    want = bk.action_clusters(vectors[valid], x["group"][valid], 0.2, backend=backend)
    vectors[~valid] = np.nan
    lay = bk.layout(x["group"], x["group"], valid=valid)
    keys = bk.action_clusters(vectors, epsilon=0.2, layout=lay, backend=backend)
    assert torch.equal(keys[torch.from_numpy(valid)], want) and set(keys[torch.from_numpy(~valid)].tolist()) == {-1}
    config = bk.Config(partition="none", estimator="none")
    bk.advantage(rewards=x["rewards"], layout=lay, action_key=keys, config=config, backend=backend).check()


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_bad_rows(backend, epsilon):
    vectors = moves(0, 0, 0, 90, 90, 0)
    vectors[2], vectors[4] = math.nan, 0
    group = [0] * 6
    with pytest.raises(ValueError, match=r"action_fingerprint must have finite, non-zero rows, got .* at row 2;"):
        bk.action_clusters(vectors, group, epsilon, backend=backend)
    keys = bk.action_clusters(vectors, group, epsilon, on_invalid="singleton", backend=backend)
    assert keys.tolist() == [0, 0, 1, 2, 3, 0]
    vectors[5] = -vectors[4]  # −0.0: at 0 an action like the other row of zeros, else without a direction
    keys = bk.action_clusters(vectors, group, epsilon, on_invalid="singleton", backend=backend)
    assert keys.tolist() == [0, 0, 1, 2, 3, 3 if epsilon == 0 else 4]
    if epsilon == 0:
        vectors[2] = 0
        assert bk.action_clusters(vectors, group, 0, backend=backend).tolist() == [0, 0, 1, 2, 1, 1]


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_on_a_device_nothing_is_read(stand_ins, epsilon):
    x, vectors = batch(), torch.from_numpy(np.random.default_rng(SEED).standard_normal((120, 4)).astype(np.float32))
    vectors[7], vectors[8] = math.nan, 0
    lay = bk.layout(x["group"], x["trajectory"])
    lay.on(vectors.device)
    want = bk.action_clusters(vectors, epsilon=epsilon, layout=lay, on_invalid="singleton", backend="cpu")
    for on_invalid in ("raise", "singleton"):
        with stand_ins.watch():
            keys = bk.action_clusters(vectors, epsilon=epsilon, layout=lay, on_invalid=on_invalid, backend="triton")
        assert torch.equal(keys, want)
    with pytest.raises(ValueError, match=r"got non-finite values \(.*\) at row 7;"):
        bk.action_clusters(vectors, epsilon=epsilon, layout=lay, backend="triton", check="now")
    vectors[7] = 1
    if epsilon == 0:
        bk.action_clusters(vectors, epsilon=epsilon, layout=lay, backend="triton", check="now")
    else:
        with pytest.raises(ValueError, match="got zeros, which have no direction, at row 8;"):
            bk.action_clusters(vectors, epsilon=epsilon, layout=lay, backend="triton", check="now")


def test_errors_name_the_argument():
    for change, error, text in (
        ({"action_fingerprint": None}, ValueError, "action_fingerprint is missing; .* embeddings of the actions"),
        ({"action_fingerprint": torch.ones(4)}, ValueError, r"action_fingerprint must have shape \[N, D\]"),
        ({"action_fingerprint": torch.ones(3, 2)}, ValueError, "action_fingerprint must have shape .* N = 4"),
        ({"action_fingerprint": torch.ones(4, 0)}, ValueError, "action_fingerprint must have at least one feature"),
        ({"action_fingerprint": torch.ones(4, 2).int()}, TypeError, "action_fingerprint must be float32"),
        ({"action_fingerprint": ["go", "on", "and", "on"]}, TypeError, "action_fingerprint must be real numbers"),
        ({"group": None}, ValueError, "group is missing"),
        ({"epsilon": 1e-5}, ValueError, "epsilon"),
        ({"epsilon": [0.1, 0.2]}, ValueError, "epsilon"),
        ({"on_invalid": "drop"}, ValueError, 'on_invalid must be "raise" or "singleton", got \'drop\''),
        ({"check": "later"}, ValueError, "check"),
        ({"backend": "fast"}, ValueError, "backend"),
        ({"step": [0, 1, 2, 3]}, ValueError, "trajectory is missing"),
    ):
        given = {"action_fingerprint": torch.ones(4, 2), "group": [0, 0, 1, 1], **change}
        refused(text, bk.action_clusters, given.pop("action_fingerprint"), error=error, **given)
