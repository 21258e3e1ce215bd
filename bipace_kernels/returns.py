"""discounted_returns(): the return-to-go of each step."""

from __future__ import annotations

from typing import Any

import torch

from . import _checks, _dispatch
from .config import Config
from .layout import Layout
from .layout import layout as make_layout
from .value_checks import check_copies

Tensor = torch.Tensor


def discounted_returns(
    rewards: Any,
    trajectory: Any = None,
    gamma: float = 0.95,
    *,
    step: Any = None,
    layout: Layout | None = None,
    backend: str = "auto",
    num_threads: int | None = None,
) -> Tensor:
    """R_t = Σ_{u≥t} γ^{u−t} r_u inside each trajectory, u − t by step numbers where they are given.

    rewards      [N] real
    trajectory   [N] trajectory id
    gamma        γ in [0, 1]
    step         [N] int or None; None: the row order is the time order
    layout       instead of trajectory and step
    Returns [N] float32: computed in float64, rounded once.  Rows that repeat a step get its return, and its reward
    counts once.  ValueError for non-finite rewards, returns beyond ±1e37, and copies of a step that disagree.
    """
    Config(gamma=gamma)  # checks the range and names the field
    _dispatch.check_name(backend)
    device = _checks.one_device({"rewards": rewards, "trajectory": trajectory, "step": step})
    kernels = _dispatch.choose(backend, device)
    if layout is None:
        if trajectory is None:
            raise ValueError("trajectory is missing; pass one id per row, or a layout made by bipace_kernels.layout().")
        lay = make_layout([0] * _checks.length(trajectory, "trajectory"), trajectory, step)
    elif not isinstance(layout, Layout):
        raise TypeError(f"layout must come from bipace_kernels.layout(), got {_checks.type_name(layout)}.")
    elif trajectory is not None or step is not None:
        raise ValueError("trajectory and step must be None where a layout is given; the layout holds the ids.")
    else:
        lay = layout
    if rewards is None:
        raise ValueError("rewards is missing; pass one per row.")
    by_row = _checks.real_vector(rewards, "rewards", lay.n_rows)
    check_copies(lay, by_row)
    reward = by_row[lay.order]
    _checks.check_finite(reward, "rewards", lay.order)
    out = torch.zeros(lay.n_rows, dtype=torch.float32)
    out[lay.order] = kernels.returns.discounted_returns(
        reward, lay.step, lay.trajectory_offsets, float(gamma), num_threads=_dispatch.threads(num_threads)
    )
    _checks.check_finite(out, "returns (sums of rewards)", None)
    return out
