"""Checks of values: masks of bad values, on any device, and the errors that name them, on the host.

On the CPU chain() reads the masks before anything is clustered.  On a GPU they are not read, since that would
synchronize: they stay with the result, and `AdvantageResult.check()` and `metrics()` raise the same errors.
"""

import torch
from torch import Tensor

from ..backends.records import out_of_range
from ..support.errors import InputError, Named, Rows
from .layout import Layout

SET_ASIDE = Named("on_invalid", ("singleton",), in_config=True)
EXACT = 1 << 53  # integers below it are exact as float64
SPOILT_CURE = "correct the rows, or set {} to set their trajectories aside."
FINGERPRINT_CURE = "correct them, mask them by valid=False, or set {} to give each such row a cluster of its own."


def unlike_first(values: Tensor, first: Tensor) -> Tensor:
    """[M] bool: finite values that differ from the finite value of the record they should equal.

    values   [M]   of each record
    first    [M]   of the record it is compared with
    """
    return (values != first) & values.isfinite() & first.isfinite()


def raise_duplicates(lay: Layout) -> None:
    """Raises the ValueError that names the first row which repeats a step."""
    assert lay.first is not None
    rows = _copy(lay, lay.first.ne(torch.arange(lay.n_records)))
    once = Named("duplicates", ("once",), in_config=True)
    text = (
        "{} must be unique inside a trajectory, but {} share group, trajectory and step ({} such rows); set {} to "
        "count copies once, or 'count' to count each."
    )
    raise InputError(text, Named("step"), Rows(rows), lay.n_duplicates, once)


def _copy(lay: Layout, differ: Tensor) -> list[int]:
    """The rows of the first record in a mask [M] and of the step that it copies, which is first."""
    assert lay.first is not None
    at = int(torch.nonzero(differ)[0])
    return [int(lay.order[lay.first[at]]), int(lay.order[at])]


def raise_copies(lay: Layout, reward: Tensor, differ: Tensor) -> None:
    """Raises ValueError for the first record of a mask [M] whose reward is not that of the step it copies."""
    rows = _copy(lay, differ)
    text = "{} of one step must agree, but {} record one step with {:g} and {:g}; number different steps differently."
    raise InputError(text, Named("rewards"), Rows(rows), *reward[rows].tolist())


def raise_episode_return(lay: Layout, episode_return: Tensor, differ: Tensor) -> None:
    """Raises ValueError for the first record of a mask [M]: its episode return is not that of its trajectory."""
    at = int(torch.nonzero(differ)[0])
    trajectory = int(lay.trajectory_of_record()[at])
    rows = [int(lay.order[lay.trajectory_offsets[trajectory]]), int(lay.order[at])]
    text = "{} must be one value per trajectory, but {} of one hold {:g} and {:g}; repeat R(τ) on each of its rows."
    raise InputError(text, Named("episode_return"), Rows(rows), *episode_return[rows].tolist())


def raise_spoilt(
    lay: Layout, spoilt: Tensor, rewards: Tensor | None, returns: Tensor | None, episode_return: Tensor | None
) -> None:
    """Raises the ValueError that names the argument and the bad rows.

    spoilt                             [T] bool
    rewards, returns, episode_return   [N] float64, as given, if they are used
    """
    inside = torch.zeros(lay.n_rows, dtype=torch.bool).index_fill_(0, lay.order, True)
    for name, values in (("rewards", rewards), ("returns", returns), ("episode_return", episode_return)):
        if values is not None and bool((bad := inside & out_of_range(values)).any()):
            worst = float(values[int(torch.nonzero(bad)[0])])
            text = f"{{}} must be finite (and within ±1e37), got {worst:g} at {{}}; {SPOILT_CURE}"
            raise InputError(text, Named(name), Rows(torch.nonzero(bad).flatten().tolist()), SET_ASIDE)
    rows = lay.order[spoilt[lay.trajectory_of_record()]]
    text = f"{{}} must sum to finite returns within ±1e37, got other sums at {{}}; {SPOILT_CURE}"
    raise InputError(text, Named("rewards"), Rows(sorted(rows.tolist())), SET_ASIDE)


def check_kernel_steps(lay: Layout) -> None:
    """Raises InputError for steps that differ less than their float64, by which kernels compare them."""
    if lay.step is not None and lay.n_records and int(lay.step.numpy().max()) >= EXACT:
        row, step = int(lay.order[at := int(lay.step.argmax())]), int(lay.step[at])
        text = "{} must be below 2^53 for {}, whose kernel compares steps as float64, got {} at {}; count steps from 0."
        raise InputError(text, Named("step"), Named("value", ("kernel",)), step, Rows([row]))


def check_fingerprint(lay: Layout, state: Tensor, cure: str = FINGERPRINT_CURE, name: str = "fingerprint") -> None:
    """Raises ValueError for fingerprint rows without a direction.

    state   [M] uint8   0 fine, 1 not finite, 2 zero
    cure    of the message, with {} for Config(on_invalid='singleton')
    """
    for code, fact in ((1, "non-finite values (beyond ±3.4e38 counts as one)"), (2, "zeros, which have no direction,")):
        if rows := sorted(lay.order[state == code].tolist()):
            text = f"{{}} must have finite, non-zero rows, got {fact} at {{}}; {cure}"
            raise InputError(text, Named(name), Rows(rows), SET_ASIDE)
