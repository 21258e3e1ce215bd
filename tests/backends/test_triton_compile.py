"""Every Triton kernel compiles for each architecture, spills nothing and fits into shared memory; without a GPU."""

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from compiled_triton import LAUNCHES, name_of, resources, tl, triton
from marks import slow
from torch.utils._python_dispatch import TorchDispatchMode

import bipace_kernels as bk
from bipace_kernels.backends import dispatch
from bipace_kernels.backends.cuda import _launch as cuda_launch
from bipace_kernels.backends.triton import critic, gram, scan
from bipace_kernels.estimators import table

CASES = [
    (launch, arch) if arch == 90 else slow(launch, arch)
    for launch in LAUNCHES for arch in (90, 80, 100) if launch.runs_on(arch)
]  # fmt: skip


@triton.jit
def _sorted_copy(x, y, n, BLOCK):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.sort(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


def _launch(**options):
    signature = {"x": "*fp32", "y": "*fp32", "n": "i64"}
    return resources.Launch("own", _sorted_copy, signature, {"BLOCK": 512}, {"enable_fp_fusion": False, **options})


@pytest.mark.parametrize("kernel", [gram._gram, scan._scan_groups])
def test_the_longest_group_compiles_nothing_anew(kernel):
    """Triton recompiles for a size of 1 or a multiple of 16 unless this is disabled: seconds in the middle of a run."""
    assert {p.do_not_specialize for p in kernel.params if p.name in ("units", "first_group")} == {True}


@pytest.mark.parametrize(("launch", "arch"), CASES, ids=name_of)
def test_compiles(launch, arch):
    # A fused multiply-add where none is written gives other bits; the interpreter never fuses.
    assert launch.options.get("enable_fp_fusion") is (launch.name == "_gram"), launch.name
    found = resources.compile_ahead(launch, arch)
    where = f"{found.kernel} on sm_{arch} with {found.variant}"
    assert not found.spills, f"{where} spills: {found.stack} bytes of stack, {found.local} of local memory per thread"
    assert found.shared <= found.limit, f"{where} needs {found.shared} bytes of shared memory, there are {found.limit}"
    assert 0 < found.registers <= 255, where


@pytest.mark.parametrize("launch", [x for x in LAUNCHES if x.name in ("_gram", "_covariance")], ids=name_of)
def test_products_are_no_tf32(launch):
    """TF32 is Triton's default for float32, and the interpreter does not round to it."""
    dots = re.findall(r"tt\.dot .*", resources.build(launch, launch.archs[0]).asm["ttir"])
    assert dots and not [dot for dot in dots if "tf32" in dot]


@pytest.mark.parametrize("launch", [x for x in LAUNCHES if x.name == "_scan_groups"], ids=name_of)
def test_a_column_stays_with_its_thread(launch):
    """apply_panel reads what it wrote, with no barrier between: one layout, in which every column has one thread."""
    text, columns = resources.build(launch, 90).asm["ttgir"], launch.constexprs["COLUMNS"]
    layouts = set(re.findall(rf"tt\.(?:load|store) .*tensor<{columns}x!tt\.ptr<f32>, (#\w+)>", text))
    (layout,) = [dict(re.findall(r"(\w+) = \[(\d+)\]", line)) for line in text.splitlines()
                 if line.split(" = ")[0] in layouts]  # fmt: skip
    threads = int(layout["threadsPerWarp"]) * int(layout["warpsPerCTA"])
    assert columns % (threads * int(layout["sizePerThread"])) == 0


def test_resources_are_read_and_spills_seen_and_counted():
    """The numbers come from the compiled code: sorting needs registers, and shared memory between warps."""
    found = resources.compile_ahead(_launch(num_warps=4), 90)
    assert (found.kernel, found.arch, found.warps, found.variant) == ("_sorted_copy", 90, 4, "BLOCK=512, *fp32")
    assert found.registers > 8 and 0 < found.shared <= found.limit
    assert not found.spills
    found = resources.compile_ahead(_launch(num_warps=1, maxnreg=16), 90)
    assert found.spills and found.stack > 0
    rows = [resources.compile_ahead(_launch(num_warps=1, **o), 90) for o in ({}, {"maxnreg": 16})]
    text = resources.as_markdown(rows, f"Triton {triton.__version__}")
    assert f"Triton {triton.__version__}" in text and text.count("`_sorted_copy`") == 2
    assert "2 compiled configurations, 1 with spills" in text


def test_many_groups_fit_into_the_grids(monkeypatch):
    """A grid has 65,535 programs at most on y and z, and 2³¹ − 1 on x, where groups are counted."""
    grids = {}
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run",
                        lambda self, *_, grid, **__: grids.update({self.__name__: grid}))  # fmt: skip
    n = 70_000
    rows, ones = torch.arange(n), torch.ones(n)
    lay = bk.layout(rows, rows, torch.zeros_like(rows)).on(torch.device("cpu"))
    critic.cluster_values(lay, ones, rows, 0.0)
    critic.centred_rows(lay, torch.ones(n, 8), "group")
    critic.normed_advantage(lay, ones.double(), ones, "group")
    assert {"_cluster_values", "_centre", "_scaled"} <= grids.keys()
    for name, grid in grids.items():
        assert max(grid[1:], default=1) <= 65_535 and grid[0] < 2**31, (name, grid)


@pytest.mark.parametrize("pitch", [63, 66, 72, 80, 128])
def test_rows_are_promised_no_alignment_that_they_lack(monkeypatch, pitch):
    """Wide loads would fail on a GPU; the interpreter makes none."""
    said, one = [], torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda *_, ALIGNED, **__: said.append(ALIGNED))
    out = torch.empty(1, 128, 128), torch.empty(1, 128)
    gram.multiply_groups(torch.zeros(2, pitch)[:, :8], one, one, torch.ones(2), *out, first_group=0)
    assert len(said) == 2 and not any(pitch % aligned for aligned in said)


@pytest.mark.parametrize(("backend", "launches"), [("cuda", {"Triton": 5, "CUDA": 3}), ("triton", {"Triton": 9})])
def test_launches_of_a_call(monkeypatch, backend, launches):
    """The host's part of a call on a GPU grows with each; counted on CPU tensors, and none is made."""
    made = Counter()
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda *_, **__: made.update(["Triton"]))
    kernels = SimpleNamespace(
        built="sm_90a", launch=lambda *_: made.update(["CUDA"]), shared_memory=lambda _: 227 << 10
    )
    monkeypatch.setattr(cuda_launch, "stand_in", kernels)
    for name in ("_why_not", "_why_not_on"):
        monkeypatch.setattr(dispatch, name, lambda *_: "")
    rows = torch.arange(16)
    given = {"layout": bk.layout(rows // 16, rows // 4, rows % 4), "action_key": rows, "rewards": torch.zeros(16)}
    given["fingerprint"] = torch.ones(16, 64, dtype=torch.bfloat16)
    bk.advantage(**given, config=bk.Config.bipace(), backend=backend)
    assert made == launches


@pytest.mark.parametrize(("share", "most"), [("group", 40), ("batch", 70)])
def test_dispatches_of_the_critic(monkeypatch, share, most):
    """All that the host issues for it, at any size: operators of torch, but no views or allocations, and launches."""
    made = []
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *_, **__: made.append(self.__name__))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            made.extend(
                [] if func.is_view or name in ("empty", "empty_like", "_unsafe_view", "scalar_tensor") else [name]
            )
            return func(*args, **(kwargs or {}))

    rows, cfg, states = torch.arange(640), bk.Config.gae(share=share), torch.ones(640, 600)
    true, numbers = torch.ones_like(rows, dtype=torch.bool), rows.double()
    lay = replace(bk.layout(rows // 40, rows // 5, rows % 5).on(rows.device), usable=true, taken=true)
    monkeypatch.setattr(table, "choose_landmarks", lambda *_: rows[:128])
    with Operators():
        landmarks, (x, inside, averaged) = table.kernel_rows(critic, cfg, lay, states, true)
        value = critic.kernel_values(lay, x, inside, numbers.float(), landmarks, table.kernel_of(cfg, 1.0))
        raw = critic.gae_advantage(lay, numbers, value, true, 0.95, 0.3)
        raw = critic.same_action_advantage(lay, averaged, raw, rows, true, table.kernel_of(cfg, 0.4))
        critic.normed_advantage(lay, raw, numbers.float(), "batch")
    assert len(made) <= most, made
