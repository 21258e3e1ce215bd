"""discounted_returns(): the return-to-go of each step."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends import dispatch, threads
from ..backends.records import out_of_range
from ..config import Config
from ..inputs import checks, interop
from ..inputs.layout import Layout, check_layout, layout as make_layout
from ..inputs.transfer import to_device, to_host
from ..inputs.values import raise_copies, unlike_first


@threads.using()
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
    check        "auto" | "now": bad values raise on the CPU and, with "now", on a GPU, which synchronizes; with "auto"
                 the trajectories that hold them get 0 there
    Returns [N] float32 on the rewards' device: computed in float64, rounded once.  Rows that repeat a step get its
    return, and its reward counts once.  ValueError for non-finite rewards, returns beyond ±1e37, and copies of a step
    that disagree.
    """
    Config(gamma=gamma)  # checks the range and names the field
    dispatch.check_name(backend)
    checks.check_check(check)
    device, rewards, trajectory, step = interop.tensors(rewards=rewards, trajectory=trajectory, step=step)
    chosen = dispatch.choose(backend, device)
    if layout is not None:
        lay = check_layout(layout, trajectory=trajectory, step=step)
    elif trajectory is None:
        raise ValueError("trajectory is missing; pass one id per row, or a layout from bipace_kernels.layout().")
    else:
        lay = make_layout(np.zeros(checks.length(trajectory, "trajectory"), np.int64), trajectory, step)
    if rewards is None:
        raise ValueError("rewards is missing; pass one per row.")
    by_row = to_device(checks.real_vector(rewards, "rewards", lay.n_rows), device, "rewards")
    on = lay.on(device)
    reward = by_row.index_select(0, on.order)
    with threads.using(num_threads):
        of_records = chosen.returns.discounted_returns(on, reward, float(gamma))
    returns = torch.zeros(lay.n_rows, dtype=torch.float32, device=device).index_copy_(0, on.order, of_records)
    if check == "now" or not chosen.deferred:
        rewards_here, returns_here = to_host([by_row, returns])
        of_steps = rewards_here.index_select(0, lay.order)
        if lay.first is not None and bool((differ := unlike_first(of_steps, of_steps[lay.first])).any()):
            raise_copies(lay, rewards_here, differ)
        checks.check_finite(of_steps, "rewards", lay.order)
        checks.check_finite(returns_here, "returns (sums of rewards)", None)
        return returns
    bad = out_of_range(reward)
    if on.first is not None:
        bad |= unlike_first(reward, reward[on.first])
    own = torch.zeros(on.n_trajectories, dtype=torch.float32, device=device)
    spoilt = chosen.returns.spoilt_trajectories(on, of_records, own, bad)
    spoilt_rows = torch.zeros(lay.n_rows, dtype=torch.bool, device=device)
    spoilt_rows.index_copy_(0, on.order, spoilt.index_select(0, on.trajectory_of_record))
    return returns.masked_fill(spoilt_rows, 0.0)
