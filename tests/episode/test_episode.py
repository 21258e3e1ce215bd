"""The CPU's episode term against the reference, also for trajectories that have no records."""

import torch
from hypothesis import given, strategies as st
from sized import Sized

from bipace_kernels.backends.cpu import episode as cpu
from bipace_kernels.backends.reference import episode as reference


@given(
    groups=st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=5), max_size=5),
    scope=st.sampled_from(["trajectory", "step"]), norm=st.sampled_from(["std", "none"]),
    lone=st.sampled_from(["zero", "raw"]),
)  # fmt: skip
def test_equals_the_reference(groups, scope, norm, lone):
    pairs = [one for group in groups for one in group]
    lengths, spoilt = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    returns = torch.randn(len(lengths), generator=torch.Generator().manual_seed(len(lengths)))
    counts = torch.tensor([*map(len, groups)], dtype=torch.int64)
    offsets = [torch.cat([x.new_zeros(1), x.cumsum(0)]) for x in (lengths, counts)]
    arguments = {
        "n_groups": len(groups), "n_records": int(lengths.sum()), "scope": scope, "norm": norm, "lone": lone,
        "delta": 1e-6, "spoilt": spoilt.bool() if spoilt.any() else None,
    }  # fmt: skip
    found, wanted = (Sized(module).episode_advantage(returns, *offsets, **arguments) for module in (cpu, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
