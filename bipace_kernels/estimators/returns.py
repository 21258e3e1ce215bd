"""discounted_returns(): the return-to-go of each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..backends import dispatch, threads
from ..backends.dispatch import Backend
from ..backends.records import out_of_range
from ..config import Config
from ..inputs import checks, interop
from ..inputs.columns import check_check
from ..inputs.layout import Layout, check_layout
from ..inputs.layout import layout as make_layout
from ..inputs.transfer import to_device, to_host
from ..inputs.values import check_copies, unlike_first

Tensor = torch.Tensor


def discounted_returns(
    rewards: Any,
    trajectory: Any = None,
    gamma: float = 0.95,
    *,
    step: Any = None,
    layout: Layout | None = None,
    backend: str = "auto",
    check: str = "auto",
    num_threads: int | None = None,
) -> Tensor:
    """R_t = Σ_{u≥t} γ^{u−t} r_u inside each trajectory, with u − t taken from the step numbers where given.

    rewards      [N] real
    trajectory   [N] trajectory id
    gamma        γ in [0, 1]
    step         [N] int or None; None: the row order is the time order
    layout       instead of trajectory and step; with it nothing synchronizes with a GPU
    check        "auto" | "now": bad values raise on the CPU and, with "now", on a GPU, which synchronizes; with "auto" the
                 trajectories that hold them get 0 there
    Returns [N] float32 on the rewards' device: computed in float64, rounded once.  Rows that repeat a step get its return,
    and its reward counts once.  ValueError for non-finite rewards, returns beyond ±1e37, and copies of a step that
    disagree.
    """
    Config(gamma=gamma)  # checks the range and names the field
    dispatch.check_name(backend)
    check_check(check)
    device, rewards, trajectory, step = interop.tensors(rewards=rewards, trajectory=trajectory, step=step)
    chosen = dispatch.choose(backend, device)
    if layout is not None:
        lay = check_layout(layout, trajectory=trajectory, step=step)
    elif trajectory is None:
        raise ValueError("trajectory is missing; pass one id per row, or a layout made by bipace_kernels.layout().")
    else:
        lay = make_layout(np.zeros(checks.length(trajectory, "trajectory"), np.int64), trajectory, step)
    if rewards is None:
        raise ValueError("rewards is missing; pass one per row.")
    by_row = to_device(checks.real_vector(rewards, "rewards", lay.n_rows), device, "rewards")
    with threads.using(num_threads):
        found, spoilt = _returns(chosen, by_row, lay, float(gamma))
    if check == "now" or not chosen.deferred:
        rewards_here, found_here = to_host([by_row, found])
        _check_rewards(lay, rewards_here)
        checks.check_finite(found_here, "returns (sums of rewards)", None)
        return found
    rows = torch.zeros(lay.n_rows, dtype=torch.bool, device=device)
    on = lay.on(device)
    rows.index_copy_(0, on.order, spoilt.index_select(0, on.trajectory_of_record))
    return found.masked_fill(rows, 0.0)


def _check_rewards(lay: Layout, by_row: Tensor) -> None:
    """ValueError for rewards [N] float64 on the CPU that are not finite, or not one per step."""
    check_copies(lay, by_row)
    checks.check_finite(by_row.index_select(0, lay.order), "rewards", lay.order)


def _returns(backend: Backend, by_row: Tensor, lay: Layout, gamma: float) -> tuple[Tensor, Tensor]:
    """Returns [N] float32 of rewards [N] float64, and which trajectories [T] bool are invalid; not used on the CPU."""
    on = lay.on(by_row.device)
    reward = by_row.index_select(0, on.order)
    found = backend.returns.discounted_returns(on, reward, gamma)
    spoilt = torch.zeros(on.n_trajectories, dtype=torch.bool, device=reward.device)
    if backend.deferred:
        bad = out_of_range(reward)
        if on.first is not None:
            bad |= unlike_first(reward, reward[on.first])
        own = torch.zeros(on.n_trajectories, dtype=torch.float32, device=reward.device)
        spoilt = backend.returns.spoilt_trajectories(on, found, own, bad)
    rows = torch.zeros(lay.n_rows, dtype=torch.float32, device=reward.device)
    rows.index_copy_(0, on.order, found)
    return rows, spoilt
