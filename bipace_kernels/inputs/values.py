"""Checks of values: masks of bad values, on any device, and the errors that name them, on the host.

On the CPU chain() reads the masks before anything is clustered.  On a GPU they are not read, since that would synchronize:
they stay with the result, and `AdvantageResult.check()` and `metrics()` raise the same errors.
"""

from __future__ import annotations

import torch

from ..backends.records import out_of_range
from . import checks
from .layout import Layout

Tensor = torch.Tensor

SPOILT_CURE = "correct the rows, or set Config(on_invalid='singleton') to set their trajectories aside."
FINGERPRINT_CURE = (
    "correct it, mask it by valid=False, or set Config(on_invalid='singleton') to give each such row a cluster of its "
    "own."
)


def unlike_first(values: Tensor, first: Tensor) -> Tensor:
    """[M] bool: finite values that differ from the finite value of the record they should equal.

    values   [M]   of each record
    first    [M]   of the record it is compared with
    """
    return (values != first) & values.isfinite() & first.isfinite()


def raise_duplicates(lay: Layout) -> None:
    """Raises the ValueError that names the first row which repeats a step."""
    assert lay.first is not None
    at = int(torch.nonzero(lay.first != torch.arange(lay.n_records))[0])
    row, other = int(lay.order[at]), int(lay.order[lay.first[at]])
    raise ValueError(
        f"step must be unique inside a trajectory, but rows {other} and {row} share group, trajectory and step "
        f"({lay.n_duplicates} such rows); set Config(duplicates='once') to count copies once, or 'count' to count each."
    )


def check_copies(lay: Layout, reward: Tensor) -> None:
    """Raises ValueError if rows of one step hold different finite rewards, since it is not clear which counts.

    reward   [N] float64
    """
    if lay.first is None:
        return
    ordered = reward.index_select(0, lay.order)
    differ = unlike_first(ordered, ordered[lay.first])
    if bool(differ.any()):
        raise_copies(lay, reward, differ)


def raise_copies(lay: Layout, reward: Tensor, differ: Tensor) -> None:
    """Raises ValueError for the first record of a mask [M] whose reward is not that of the step it copies."""
    assert lay.first is not None
    at = int(torch.nonzero(differ)[0])
    row, other = int(lay.order[at]), int(lay.order[lay.first[at]])
    raise ValueError(
        f"rewards of one step must agree, but rows {other} and {row} record the same step with "
        f"{float(reward[other]):g} and {float(reward[row]):g}; copies must be exact; give different steps different numbers."
    )


def raise_episode_return(lay: Layout, episode_return: Tensor, differ: Tensor) -> None:
    """Raises ValueError for the first record of a mask [M] whose episode return is not that of its trajectory's first."""
    at = int(torch.nonzero(differ)[0])
    trajectory = int(lay.trajectory_of_record()[at])
    row, first = int(lay.order[at]), int(lay.order[lay.trajectory_offsets[trajectory]])
    raise ValueError(
        f"episode_return must be one value per trajectory, but rows {first} and {row} of one "
        f"trajectory hold {float(episode_return[first]):g} and {float(episode_return[row]):g}; repeat R(τ) on each of "
        "its rows."
    )


def raise_spoilt(
    lay: Layout, spoilt: Tensor, rewards: Tensor | None, returns: Tensor | None, episode_return: Tensor | None
) -> None:
    """Raises the ValueError that names the argument and the bad rows.

    spoilt                             [T] bool
    rewards, returns, episode_return   [N] float64, as given, if they are used
    """
    inside = torch.zeros(lay.n_rows, dtype=torch.bool)
    inside.index_fill_(0, lay.order, True)
    used = {
        "rewards": rewards,
        "returns": returns,
        "episode_return": episode_return,
    }
    for name, values in used.items():
        if values is None:
            continue
        bad = inside & out_of_range(values)
        if bool(bad.any()):
            worst = float(values[int(torch.nonzero(bad)[0])])
            raise ValueError(
                f"{name} must be finite (and within ±1e37), got {worst:g} at row {checks.indices_text(bad)}; "
                f"{SPOILT_CURE}"
            )
    rows = torch.zeros(lay.n_rows, dtype=torch.bool)
    rows[lay.order[spoilt[lay.trajectory_of_record()]]] = True
    raise ValueError(
        f"rewards must sum to finite returns within ±1e37, rows {checks.indices_text(rows)} do not; {SPOILT_CURE}"
    )


def check_fingerprint(lay: Layout, state: Tensor, cure: str = FINGERPRINT_CURE, name: str = "fingerprint") -> None:
    """Raises ValueError for fingerprint rows without a direction.

    state   [M] uint8   0 fine, 1 not finite, 2 zero
    """
    for code, fact in (
        (1, "holds a non-finite value (beyond ±3.4e38 counts as one)"),
        (2, "is zero, so it has no direction"),
    ):
        rows = torch.zeros(lay.n_rows, dtype=torch.bool)
        rows[lay.order[state == code]] = True
        if bool(rows.any()):
            raise ValueError(
                f"{name} must have finite, non-zero rows, but row {checks.indices_text(rows)} {fact}; {cure}"
            )
