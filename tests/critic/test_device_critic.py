"""Values and GAE(λ) where the tensors are, against the reference."""

import itertools

import numpy as np
import pytest
import torch
from marks import slow, slow_case_interpreted, slow_interpreted
from ragged import ragged, sentinels, stage, unaligned
from sized import Sized, records_of

from bipace_kernels.backends.reference import critic as reference_backend
from bipace_kernels.backends.schema import state_keys
from bipace_kernels.estimators.landmarks import choose_landmarks

critic, reference_critic = stage("critic"), Sized(reference_backend)

FEW_LANDMARKS = 16  # the interpreter is slow in finding the directions of many
KERNEL = {"share": "group", "width": 0.3, "horizon": 4.0, "noise": 2.0, "same": 0.3}
SHARED = {**KERNEL, "share": "batch"}
LUCK = {**KERNEL, "luck": 0.3, "gamma": 0.9}
SECOND = {**SHARED, "luck": 0.3, "gamma": 0.9, "inside": 0.8, "directions": 64}


def moved(device, tensors):
    return [None if x is None else unaligned(x.to(device)) for x in tensors]


def close(got, want, atol=2e-5):
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, rtol=2e-6, atol=atol)


class Case:
    """A ragged layout with random returns, masks and rows."""

    def __init__(self, seed, dim=24, dtype=torch.float32, groups=5):
        rng = np.random.default_rng(seed)
        self.lay = lay = ragged(seed, groups=groups)
        m = lay.n_records
        self.returns = torch.from_numpy(rng.normal(size=m).astype(np.float32))
        self.rewards = torch.from_numpy(rng.normal(size=m))
        self.labels = torch.from_numpy(rng.integers(0, 4, m)) + 4 * lay.group_of_record()
        self.usable = torch.from_numpy(rng.random(m) < 0.9)
        self.cut = torch.from_numpy(rng.random(m) < 0.5)
        kept = torch.from_numpy(rng.random(lay.n_trajectories) < 0.8)
        self.taken = kept[lay.trajectory_of_record()]
        states = rng.normal(size=(7, dim)) + 2.0
        rows = states[rng.integers(0, 7, m)] + 0.2 * rng.normal(size=(m, dim)) * (rng.random(m) < 0.7)[:, None]
        self.fingerprint = torch.from_numpy(rows.astype(np.float32)).to(dtype)
        self.order = torch.arange(m)
        self.time = lay.step
        self.groups = {"n_groups": lay.n_groups, "longest_group": lay.longest_group}

    def landmarks(self, fingerprint, masked):
        inside = self.usable & self.taken if masked else None
        return choose_landmarks(state_keys(fingerprint, self.order), self.time, inside)[:FEW_LANDMARKS]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("masked", [False, True])
def test_cluster_values(device, seed, masked):
    case = Case(seed)
    taken = case.taken if masked else None
    labels = torch.where(case.taken, case.labels, -1) if masked else case.labels
    for some in (labels, None):
        given = (case.returns, some, case.lay.group_offsets)
        want = reference_critic.cluster_values(*given, **case.groups, taken=taken, shrinkage=3.0)
        with sentinels():
            there = moved(device, (*given, taken))
            got = critic.cluster_values(*there[:3], **case.groups, taken=there[3], shrinkage=3.0)
        close(got, want, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "masked"),
    [slow_case_interpreted(torch.float32, False), (torch.bfloat16, True),
     *(slow(torch.float16, masked) for masked in (False, True)), slow(torch.float32, True),
     slow(torch.bfloat16, False)],
    ids=str,
)  # fmt: skip
def test_kernel_values(device, dtype, masked):
    for seed, kernel in enumerate((KERNEL, {**KERNEL, "horizon": 0.0, "noise": 0.1}, SHARED, LUCK, SECOND)):
        case = Case(seed, dtype=dtype, groups=4)
        taken, usable = (case.taken, case.usable) if masked else (None, None)
        fingerprint = case.fingerprint.clone()
        if masked:
            fingerprint[torch.nonzero(~case.usable)[:, 0]] = float("nan")
        chosen = case.landmarks(fingerprint, masked) if kernel["share"] == "batch" else None
        given = (fingerprint, case.order, case.returns, case.lay.step, case.lay.group_offsets, usable, chosen)
        sizes = case.groups | {"trajectory_offsets": case.lay.trajectory_offsets}
        want = reference_critic.kernel_values(*given, **sizes, taken=taken, **kernel)
        there = moved(device, (*given[1:], taken))
        with sentinels():
            got = critic.kernel_values(fingerprint.to(device), *there[:6], **sizes, taken=there[6], **kernel)
        close(got, want)


@slow_interpreted
@pytest.mark.parametrize("kernel", [{**KERNEL, "longest": 24}, slow({**SHARED, "longest": 24})], ids=["group", "batch"])
def test_kernel_values_of_long_groups(device, monkeypatch, kernel):
    """With small limits, so that the interpreter ends: some groups are cut into blocks, the others are one."""
    for module in (critic, reference_critic):
        monkeypatch.setattr(module, "BLOCK", 12)
        monkeypatch.setattr(module, "LANDMARKS", 16)
    monkeypatch.setattr(critic, "ROOM", 3 * 128 * 128)
    case = Case(4, groups=6)
    assert case.lay.longest_group > 24 > int(case.lay.group_offsets.diff().min())
    for usable, taken in ((None, None), (case.usable, case.taken)):
        chosen = None if taken is None or kernel["share"] == "group" else case.landmarks(case.fingerprint, True)
        given = (case.fingerprint, case.order, case.returns, case.lay.step, case.lay.group_offsets, usable, chosen)
        want = reference_critic.kernel_values(*given, **case.groups, taken=taken, **kernel)
        there = moved(device, (*given[1:], taken))
        got = critic.kernel_values(given[0].to(device), *there[:6], **case.groups, taken=there[6], **kernel)
        close(got, want)


NUMBERS = [(0.95, 0.5), (1.0, 1.0), (0.0, 0.5), (0.9, 0.0)]
FEW = [(NUMBERS[0], True, "none"), (NUMBERS[0], True, "batch"), (NUMBERS[0], False, "group"),
       (NUMBERS[1], True, "group"), (NUMBERS[2], True, "none"), (NUMBERS[3], False, "none")]  # fmt: skip
EVERY = list(itertools.product(NUMBERS, (False, True), ("none", "batch", "group")))


@pytest.mark.parametrize(("numbers", "masked", "norm"), [c if c in FEW else slow(*c) for c in EVERY], ids=str)
def test_gae_and_normed_advantage(device, numbers, masked, norm):
    case = Case(2)
    lay, time = case.lay, case.lay.step
    value, returns = case.returns.double() * 0.5, case.returns.clone()
    returns[: int(lay.group_offsets[1])] = 0.0  # a group is divided also if its returns say nothing of its size
    for step in (None, time, 3 * time, time // 2):  # the last: copies of a step
        cut, taken = (case.cut, case.taken) if masked else (None, None)
        rewards = torch.where(case.taken, case.rewards, float("nan")) if masked else case.rewards
        given = (rewards, value, step, lay.trajectory_offsets, cut)
        size = {"n_trajectories": lay.n_trajectories}
        raw = reference_critic.gae_advantage(*given, *numbers, **size, taken=taken)
        want = reference_critic.normed_advantage(
            raw, returns, lay.group_offsets, **case.groups, taken=taken, step_norm=norm
        )
        with sentinels():
            *there, kept, moved_returns, offsets = moved(device, (*given, taken, returns, lay.group_offsets))
            found = critic.gae_advantage(*there, *numbers, **size, taken=kept)
            got = critic.normed_advantage(found, moved_returns, offsets, **case.groups, taken=kept, step_norm=norm)
        close(found, raw, 2e-6)
        close(got, want, 2e-6)
        assert bool(got.isfinite().all())


@pytest.mark.parametrize(
    ("dtype", "masked"),
    [slow_case_interpreted(torch.float32, False), (torch.bfloat16, True), slow(torch.float16, True)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("longest", [None, slow(20)])
def test_same_action_advantage(device, dtype, masked, longest, monkeypatch):
    if longest is not None:  # some groups are cut into blocks
        for module in (critic, reference_critic):
            monkeypatch.setattr(module, "BLOCK", longest // 2)
    case = Case(3, dtype=dtype, groups=5)
    assert longest is None or case.lay.longest_group > longest
    taken, usable = (case.taken, case.usable) if masked else (None, None)
    fingerprint = case.fingerprint.clone()
    if masked:
        fingerprint[torch.nonzero(~case.usable)[:, 0]] = float("nan")
    keys = torch.randint(0, 3, (case.lay.n_records,), generator=torch.Generator().manual_seed(0)) - 2**62
    a = case.rewards if taken is None else torch.where(taken, case.rewards, float("nan"))
    parsed = torch.arange(case.lay.n_records) % 5 != 2 if masked else None
    given = (case.order, a, case.lay.step, keys, case.lay.group_offsets, usable, parsed)
    *there, kept = moved(device, (*given, taken))
    chosen = case.landmarks(fingerprint, masked)
    for more in ({}, {"directions": 64, "share": "batch", "landmarks": chosen}):
        kernel = {"width": 0.3, "horizon": 4.0, "noise": 0.3, "longest": longest or 2048, **more}
        want = reference_critic.same_action_advantage(fingerprint, *given, **case.groups, taken=taken, **kernel)
        if more:
            kernel["landmarks"] = chosen.to(device)
        got = critic.same_action_advantage(fingerprint.to(device), *there, **case.groups, taken=kept, **kernel)
        close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_landmarks_are_the_same_records_on_every_device(device, dtype):
    """By keys that the kernel of unit rows makes; −0 is 0, and NaN has some key."""
    case = Case(3, dtype=dtype, groups=9)
    x = case.fingerprint
    x[::3, ::2], x[torch.nonzero(~case.usable)] = -0.0, float("nan")
    want, keys = case.landmarks(x, True), torch.empty_like(case.order, device=device)
    order, there = unaligned(case.order, device), x.to(device).T.contiguous().T
    records = records_of(n_records=len(order), device=order.device, order=order)
    found = critic.unit_rows(records, there, 16, keys)
    assert torch.equal(found.nan_to_num(9), critic.unit_rows(records, x.to(device), 16).nan_to_num(9))
    assert torch.equal(keys.cpu()[case.usable], state_keys(x, case.order)[case.usable])
    got = choose_landmarks(keys, case.time.to(device), (case.usable & case.taken).to(device))
    assert torch.equal(got.cpu()[:FEW_LANDMARKS], want)
