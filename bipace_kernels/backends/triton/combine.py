"""The total, and the results in the caller's row order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import Records
from ..schema import HUGE, Branch, Terms
from ._launch import ceil_div, launch

LANES = 256  # rows of a program
# Constants as arguments: Triton compares a kernel's global ones with their values at every launch, which takes longer.
_CONSTANTS = {"LARGEST": torch.finfo(torch.float32).max, "SINGLETON": int(Branch.SINGLETON), "LANES": LANES}
_OPTIONS = {**_CONSTANTS, "num_warps": 4, "enable_fp_fusion": False}


def combine(
    records: Records, returns: Tensor, episode: Tensor, terms: Terms, weights: tuple[float, float] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    source, n_rows = records.source, records.n_rows
    floats = [torch.empty(n_rows, dtype=torch.float32, device=source.device) for _ in range(4)]
    cluster = torch.empty(n_rows, dtype=torch.int64, device=source.device)
    kind = torch.empty(n_rows, dtype=torch.uint8, device=source.device)
    of_episode, of_step = weights or (1.0, 1.0)
    scale = HUGE if max(of_episode, of_step) > HUGE else 1.0
    if n_rows:
        inputs = (episode, terms.step_term, returns, terms.labels, terms.branch, source, records.taken)
        numbers = (of_step / scale, of_episode / scale, scale, n_rows, weights is None)
        launch(_combine, (ceil_div(n_rows, LANES),), *inputs, *floats, cluster, kind, *numbers, **_OPTIONS)
    advantage, step_out, episode_out, returns_out = floats
    return advantage, step_out, episode_out, returns_out, cluster, kind


@triton.jit(do_not_specialize=["n_rows"])
def _combine(
    episode,  # [M] float32
    step_term,  # [M] float32
    returns,  # [M] float32
    labels,  # [M] int64
    branch,  # [M] uint8
    source,  # [N] int64
    taken,  # [M] bool or None
    advantage_out,  # [N] float32
    step_out,  # [N] float32
    episode_out,  # [N] float32
    returns_out,  # [N] float32
    cluster_out,  # [N] int64
    branch_out,  # [N] uint8
    weight: tl.float64,
    episode_weight: tl.float64,
    scale: tl.float64,
    n_rows,
    TOTAL_IS_STEP: tl.constexpr,
    LARGEST: tl.constexpr,  # float32
    SINGLETON: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = row < n_rows
    record = tl.load(source + row, mask=live, other=-1)
    has = record >= 0
    if taken is not None:
        has = has & (tl.load(taken + record, mask=has, other=0) != 0)
    ours = tl.load(episode + record, mask=has, other=0.0)
    step = tl.load(step_term + record, mask=has, other=0.0)
    if TOTAL_IS_STEP:
        advantage = step
    else:
        total = (episode_weight * ours.to(tl.float64) + weight * step.to(tl.float64)) * scale
        total = tl.minimum(tl.maximum(total, -LARGEST), LARGEST)
        # Adding 0 would turn −0.0 into 0.0.
        advantage = tl.where((weight == 0.0) & (episode_weight == 1.0), ours, total.to(tl.float32))
    tl.store(advantage_out + row, advantage, mask=live)
    tl.store(step_out + row, step, mask=live)
    tl.store(episode_out + row, ours, mask=live)
    tl.store(returns_out + row, tl.load(returns + record, mask=has, other=0.0), mask=live)
    tl.store(cluster_out + row, tl.load(labels + record, mask=has, other=-1), mask=live)
    tl.store(branch_out + row, tl.load(branch + record, mask=has, other=SINGLETON), mask=live)
