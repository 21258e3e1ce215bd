"""Layouts: processing order, offsets, identity."""

import pickle
import uuid
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from refusals import refused

import bipace_kernels as bk


def test_processing_order_and_offsets():
    lay = bk.layout(group=[1, 0, 0, 1, 0], trajectory=[5, 9, 3, 5, 9], step=[1, 7, 0, 0, 2])
    assert lay.order.tolist() == [2, 4, 1, 3, 0] and lay.group_offsets.tolist() == [0, 3, 5]
    assert lay.trajectory_offsets.tolist() == [0, 1, 3, 5]
    assert lay.group_trajectories.tolist() == [0, 2, 3] and lay.step.tolist() == [0, 2, 7, 0, 1]
    assert (lay.n_rows, lay.n_records, lay.n_groups, lay.n_trajectories, lay.longest_group) == (5, 5, 2, 3, 3)
    assert lay.n_duplicates == 0 and lay.first is None
    assert "n_groups=2" in repr(lay)
    lay = bk.layout([0, 0, 0], [1, 0, 1])
    assert lay.order.tolist() == [1, 0, 2] and lay.time().tolist() == [0, 0, 1]


def test_other_ids_are_numbered_by_first_appearance_and_integers_sorted():
    a, b = uuid.UUID(int=9), uuid.UUID(int=3)
    lay = bk.layout([a, b, a, b], ["z", "y", "z", "x"])
    assert lay.order.tolist() == [0, 2, 1, 3]
    numeric = bk.layout([9, 3, 9, 3], [3, 2, 3, 1])
    assert numeric.order.tolist() == [3, 1, 0, 2]
    # "10" is text: first appearance, not numeric order.
    assert bk.layout(["10", "9"], ["1", "2"]).order.tolist() == [0, 1]
    big = 2**63 - 1
    lay = bk.layout(np.array([big, -big - 1, big]), np.array([0, 1, 2]))
    assert lay.order.tolist() == [1, 0, 2]
    refused("group", bk.layout, [2**63], [0])


def test_trajectory_ids():
    assert bk.trajectory_ids([1, 0, 1, 0], [7, 7, 3, 7]).tolist() == [2, 0, 1, 0]
    ids = bk.trajectory_ids(["a", "a", "b"], [0, 1, 0])
    assert ids.unique().numel() == 3 and bk.trajectory_ids([], []).shape == (0,)
    refused("rollout must have one entry per row", bk.trajectory_ids, [1, 2], [1])


@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_is_a_stable_sort_by_group_trajectory_step_row(rows):
    group = [g for g, _, _ in rows]
    trajectory = [4 * g + t for g, t, _ in rows]
    step = [s for _, _, s in rows]
    lay = bk.layout(group, trajectory, step)
    expected = sorted(range(len(rows)), key=lambda i: (group[i], trajectory[i], step[i], i))
    assert lay.order.tolist() == expected
    for g in range(lay.n_groups):
        members = lay.order[lay.group_offsets[g] : lay.group_offsets[g + 1]]
        assert len({group[i] for i in members}) == 1
    assert int(lay.group_offsets[-1]) == int(lay.trajectory_offsets[-1]) == len(rows)
    keep = torch.tensor([i % 3 > 0 for i in range(len(rows))], dtype=torch.bool)
    part = lay.restrict(keep)
    assert part.order.tolist() == [i for i, k in zip(expected, keep.tolist(), strict=True) if k]


def test_on_a_device_everything_is_there_once_and_nothing_of_it_is_pickled():
    lay = bk.layout([1, 0, 0, 1, 0], [5, 9, 3, 5, 9], step=[1, 7, 0, 0, 2], valid=[True, True, True, False, True])
    there = lay.on("cpu")
    assert lay.on(torch.device("cpu")) is there, "the second call copies nothing"
    for name in ("order", "group_offsets", "trajectory_offsets", "group_trajectories", "step", "valid"):
        assert getattr(there, name) is getattr(lay, name)
    for name in ("n_rows", "n_records", "n_groups", "n_trajectories", "longest_group"):
        assert getattr(there, name) == getattr(lay, name)
    assert there.longest_trajectory == 2 and there.trajectory_of_record.tolist() == [0, 1, 1, 2]
    assert there.source.tolist() == [3, 2, 0, -1, 1] and there.first is None
    lay = bk.layout([0, 0, 0], [0, 0, 0], [0, 0, 1])
    lay.on("cpu")
    lay.once()
    again = pickle.loads(pickle.dumps(lay))
    assert again._kept.keys() <= {"writes"} and again.once().source().tolist() == [0, 0, 1]
    assert pickle.loads(pickle.dumps(lay.once())).on("cpu").source.tolist() == [0, 0, 1]


def test_a_layout_of_once_gives_copies_their_records_results(backend):
    ids = {"group": [0, 0, 0, 0, 0], "trajectory": [0, 1, 1, 2, 2], "step": [0, 0, 1, 0, 0]}
    given = {"rewards": [1.0, 0.0, 2.0, 3.0, 3.0], "fingerprint": torch.eye(2, 4)[[0, 0, 1, 0, 0]],
             "action_key": [0, 1, 0, 0, 0],
             "config": bk.Config.bipace(duplicates="once"), "backend": backend}  # fmt: skip
    want = bk.advantage(**ids, **given)
    got = bk.advantage(layout=bk.layout(**ids).once(), **given)
    assert got.cluster.tolist() == want.cluster.tolist() == [0, 0, 1, 0, 0]
    assert torch.equal(got.advantage, want.advantage) and got.advantage[3] == got.advantage[4] != 0


def test_no_records():
    lay = bk.layout([], [])
    there = lay.on("cpu")
    assert (there.n_records, there.longest_trajectory, there.source.numel()) == (0, 0, 0)
    of_once = bk.layout([0, 0], [0, 0], [0, 0]).once()
    nothing = of_once.restrict(torch.tensor([False])).restrict(torch.zeros(0, dtype=torch.bool))
    assert nothing.source().tolist() == [-1, -1]
    padded = bk.layout([0, 0], [0, 0], valid=[False, False])
    assert padded.on("cpu").source.tolist() == [-1, -1]


def test_copies_point_to_their_first_row():
    lay = bk.layout([0] * 6, [0, 0, 0, 1, 0, 0], step=[0, 1, 1, 1, 0, 9], valid=[True] * 5 + [False])
    once = lay.once()
    assert lay.once() is once and once.once() is once
    assert (once.n_rows, once.n_records, once.n_duplicates) == (6, 3, 0)
    assert once.order.tolist() == [0, 1, 3] and once.source().tolist() == [0, 1, 1, 2, 0, -1]
    assert once.on("cpu").source is once.source()
    assert lay.source().tolist() == [0, 2, 3, 4, 1, -1], "where copies count, each row has its own record"
    lay = bk.layout([0] * 5, [0, 0, 0, 1, 0], step=[0, 1, 1, 1, 0])
    assert lay.order.tolist() == [0, 4, 1, 2, 3] and lay.first.tolist() == [0, 0, 2, 2, 4]
    assert lay.n_duplicates == 2


def test_where_no_backend_computes():
    refused(r"tensors on meta have no backend.*\.cpu\(\)", bk.layout([0], [0]).on, "meta", error=bk.BackendError)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_ids_beside_padding(dtype):
    lay = bk.layout(torch.tensor([1, 1, 0]).to(dtype), torch.tensor([5, 5, 7]).to(dtype), valid=[True, True, False])
    assert lay.n_records == 2 and lay.n_trajectories == 1


class Labelled:
    """A column as pandas has it: series[i] is the entry with the label i, not the one in place i."""

    def __init__(self, values):
        self.values = np.array(values)

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, label):
        return self.values[-1 - label]


def test_labels_of_rows_do_not_matter_beside_padding():
    group, trajectory, valid = [0, 0, 0, 1, 1, 1], [0, 0, 1, 2, 2, 3], [True] * 5 + [False]
    lay = bk.layout(Labelled(group), Labelled(trajectory), valid=valid)
    assert lay.order.tolist() == [0, 1, 2, 3, 4] and lay.trajectory_offsets.tolist() == [0, 2, 3, 5]


@pytest.mark.parametrize("array", [np.asarray, torch.tensor])
def test_a_layout_owns_its_data(array):
    step, valid = array([0, 1, 2, 3]), array([True, True, True, False])
    lay = bk.layout([0] * 4, [0] * 4, step, valid=valid)
    step[:], valid[:] = 9, False
    assert lay.step.tolist() == [0, 1, 2] and lay.valid.tolist() == [True, True, True, False]


@pytest.mark.parametrize("name", ["group_offsets", "trajectory_offsets", "group_trajectories", "order"])
def test_a_layout_that_was_written_to_is_refused(name):
    """Native code would read out of bounds."""
    group, trajectory, x = [0, 0, 1, 1], [0, 1, 2, 3], np.eye(4, dtype=np.float32)
    layouts = [bk.layout(group, trajectory) for _ in range(2)]
    for lay, value in zip(layouts, (-1, 1 << 40), strict=True):
        getattr(lay, name).numpy()[1] = value  # torch does not count this
    fresh = bk.layout(group, trajectory)
    layouts += [replace(fresh, **{name: x}) for x in (getattr(fresh, name)[:-1], getattr(fresh, name).double())]
    if name == "group_offsets":
        layouts.append(replace(fresh, n_groups=1000))
    for lay in layouts:
        for call in (
            lambda lay=lay: bk.advantage(rewards=[0.0] * 4, fingerprint=x, action_key=[0] * 4, layout=lay),
            lambda lay=lay: bk.cluster(x, layout=lay),
            lambda lay=lay: bk.discounted_returns([0.0] * 4, layout=lay),
        ):
            refused(rf"^layout\.{name} must ", call)


@pytest.mark.parametrize("name", [f.name for f in fields(bk.Layout) if f.type.startswith("Tensor") and f.repr])
def test_a_layout_that_would_mean_other_records_is_refused(name):
    lay = bk.layout([0] * 4, [0, 0, 1, 1], [0, 0, 0, 1], [True] * 4)
    getattr(lay, name)[:2] = getattr(lay, name)[:2].flip(0)
    refused(rf"^layout\.{name} must not be written to", bk.discounted_returns, [0.0] * 4, layout=lay)
