"""Layouts of ids on a GPU, and of host ids for tensors on a GPU."""

import pytest
import torch
from batches import make_batch
from ragged import nothing_waits

import bipace_kernels as bk

BATCH = make_batch(3, groups=5)
TENSORS = ("order", "group_offsets", "trajectory_offsets", "group_trajectories", "step")


def test_ids_on_the_device_give_the_layout_of_the_same_ids_on_the_host(device):
    want = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    group, trajectory, step = (torch.from_numpy(v).to(device) for v in (BATCH.group, BATCH.trajectory, BATCH.step))
    mask = torch.ones(BATCH.n, dtype=torch.bool, device=device)
    for got in (bk.layout(group, trajectory, step), bk.layout(group.int(), trajectory, step, mask)):
        for name in TENSORS:
            assert torch.equal(getattr(got, name), getattr(want, name)) and getattr(got, name).device.type == "cpu"
    there = want.on(device)
    assert there is want.on(group.device)
    for name in (*TENSORS, "trajectory_of_record", "source"):
        assert getattr(there, name).device.type == device.type
        assert torch.equal(getattr(there, name).cpu(), getattr(want.on("cpu"), name))
        assert getattr(there, name).data_ptr() % 16 == 0


def test_trajectory_ids_come_back_where_the_ids_are(device):
    group, rollout = torch.tensor([1, 0, 1, 0], device=device), torch.tensor([7, 7, 3, 7], device=device)
    ids = bk.trajectory_ids(group, rollout)
    assert ids.device == group.device and ids.tolist() == [2, 0, 1, 0]


@pytest.mark.gpu
def test_a_layout_on_two_streams():
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        torch.cuda._sleep(20_000_000)
        lay.on("cuda")
    with torch.cuda.stream(other):
        order = lay.on("cuda").order.clone()
    other.synchronize()
    assert torch.equal(order.cpu(), lay.order)


@pytest.mark.gpu
def test_moving_a_layout_waits_for_nothing():
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    with nothing_waits(torch.zeros(1, device="cuda").device):
        lay.on("cuda")


@pytest.mark.gpu
def test_a_layout_moves_before_a_capture_not_in_it():
    lay = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
    words = r"layout must be on cuda:\d before a CUDA graph is captured.*call \.on"
    with pytest.raises(ValueError, match=words), torch.cuda.graph(torch.cuda.CUDAGraph()):
        lay.on("cuda")
