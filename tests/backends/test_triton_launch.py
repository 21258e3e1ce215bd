"""What a GPU would be asked to run: every launch of the public calls, compiled just as the launch itself would have it.

A driver that stands in for an sm_90 takes the launches; nothing is computed. So a size, a stride or an option that the
host code chooses at run time is compiled as it is chosen.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch
from compiled_triton import resources

import bipace_kernels as bk
from bipace_kernels.backends import triton_loader

ARCH = 90
NAMED = {launch.name for launch in resources.launches()}


@pytest.fixture
def launched(monkeypatch):
    """(name, compiled kernel, options) of each launch from here on; CPU tensors pass for a GPU's."""
    jit = importlib.import_module("triton.runtime.jit")
    driver = importlib.import_module("triton.runtime.driver").driver
    found, run = [], jit.JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        found.append((self.__name__, run(self, *args, grid=grid, warmup=True, **kwargs), kwargs))
        return found[-1][1]

    monkeypatch.setattr(jit.JITFunction, "run", record)
    monkeypatch.setattr(triton_loader, "reason", lambda: "")
    monkeypatch.setattr(triton_loader, "interpreted", lambda: True)
    monkeypatch.setattr(driver, "_active", resources.StandIn())
    return found


def _batch(groups=2, rollouts=4, steps=100, dim=3584, dtype=torch.bfloat16):
    """Ids of a batch, and tensors whose values are never read."""
    n = groups * rollouts * steps
    rows = torch.arange(n)
    layout = bk.layout(rows // (rollouts * steps), rows // steps, rows % steps)
    fingerprint = torch.empty(n, dim, dtype=dtype)
    return SimpleNamespace(n=n, layout=layout, fingerprint=fingerprint, key=torch.zeros(n, dtype=torch.int64),
                           rewards=torch.zeros(n), codes=torch.zeros(n, dtype=torch.int64))  # fmt: skip


def _check(launched):
    assert launched, "nothing was launched"
    for name, kernel, options in launched:
        assert name in NAMED, f"{name} is launched here, but not by resources.launches()"
        assert isinstance(options.get("enable_fp_fusion"), bool), name
        sizes = resources.read(kernel.asm["cubin"])
        assert (sizes["STACK"], sizes["LOCAL"]) == (0, 0), f"{name} spills: {sizes}"
        assert kernel.metadata.shared <= resources.SHARED_LIMIT[ARCH], name


def test_stages_without_fingerprints(launched):
    """Called as the pipeline calls them; the stages need nothing of each other's values."""
    x = _batch()
    lay = x.layout.on(torch.device("cpu"))
    returns, values = (
        importlib.import_module(f"bipace_kernels.backends.triton.{name}") for name in ("returns", "values")
    )
    returns.all_returns(lay, x.rewards.double(), None, 0.95)
    returns.discounted_returns(lay, x.rewards.double(), 0.95)
    returns.trajectory_returns(lay, x.rewards.double())
    values.step_advantage(lay, x.rewards, x.codes, x.key, "q_style", "none", 1e-6)
    assert [name for name, *_ in launched] == ["_returns"] * 3 + ["_step"]
    _check(launched)


def test_keys_of_text(launched):
    """One row each, for which the interpreter takes as many rows a program as a GPU does."""
    table = bk.TokenBytes(torch.arange(257), torch.arange(256, dtype=torch.uint8))
    ids = torch.full((1, 200), 65)
    wide = torch.full((400, 3), 65, dtype=torch.int32).t()[:1, ::2]
    for responses, mask in ((ids, None), (wide, ids > 0), ([ids[0]], None), ([ids[0]], [ids[0] > 0])):
        bk.action_keys(responses, mask=mask, token_bytes=table, backend="triton")
    bk.action_keys(ids.to(torch.int32), mode="first_n", backend="triton")
    assert [name for name, *_ in launched] == ["key_kernel"] * 5
    _check(launched)
