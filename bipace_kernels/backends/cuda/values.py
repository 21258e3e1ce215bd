"""The step term: Q̂(s, a) − V̂(s) and its relatives, over all pairs inside a cluster.

A thread is a record; it walks over the records of its group and sums returns in float64 and in processing order, so
each sum equals that of the reference.  The host code is Triton's: blocks have as many records.
"""

from typing import Any

from torch import Tensor

from ..triton.values import LANES, SORT_FROM, Values
from ._launch import launch

__all__ = ["SORT_FROM", "hgpo_advantage", "step_advantage"]

# As in csrc/cuda/values.cu.
_THREADS = LANES
_SHARED = 2 * _THREADS * (8 + 8 + 4)  # bytes: two records a thread


def _launch_step(grid: int, estimator: str, *, returns: Tensor, **rest: Any) -> None:
    launch(f"step_{estimator}", grid, _THREADS, device=returns.device, shared=_SHARED, returns=returns, **rest)


def _launch_aggregate(*, term: Tensor, m: int, **rest: Any) -> None:
    launch("aggregate_depths", -(-m // _THREADS), _THREADS, device=term.device, term=term, m=m, **rest)


_stage = Values(_launch_step, _launch_aggregate)
step_advantage, hgpo_advantage = _stage.step_advantage, _stage.hgpo_advantage
