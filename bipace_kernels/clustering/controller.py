"""EpsilonController: an ε that follows the policy during training."""

import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import threads
from ..backends.schema import LIMIT
from ..diagnostics.value_r2 import value_r2
from ..inputs import checks
from ..inputs.fingerprints import Fingerprints, take_fingerprints
from ..inputs.layout import Layout
from ..settings import RADII
from .epsilon import Sizes, measure_sizes, pair

OBJECTIVES = ("median", "value_r2")


@dataclass(frozen=True)
class _Point:
    """A radius within reach and the resulting clusters of the batch."""

    epsilon: float
    sizes: Sizes
    r2: float | None = None


class EpsilonController:
    """ε for each training step, chosen from a sweep around the last one.

    Each `update()` clusters the step's batch under a geometric grid around the current ε,

        ε_j = clip(ε · max_step^(j/h), bounds),   j = −h … h,   h = (points − 1)/2,

    all from one Gram matrix per group, and takes one of these points by the median cluster size there, or by value R²:
    docs/epsilon.md has the rules.

    epsilon     first ε, inside the bounds; `choose_epsilon()` on the first batch is a good one
    objective   "median" | "value_r2"
    band        (a, b) of the median cluster size, ≥ 1; the paper's [4, 8]
    bounds      of ε, inside [1e-4, 1]; the paper's [0.02, 0.40]
    max_step    > 1, at most 2   the largest factor of one update
    points      odd, 3 to 63   of the grid
    slack       [0, 1]   how much wider the band is once settled: the hysteresis
    gain        ≥ 0   least improvement of value R² for a move

    epsilon, reason   the current ε, and what the last update did and why
    Deterministic: same settings, state and batches, same ε.  Every rank must see the same rows or receive the ε of one
    rank.  The paper leaves an ε that follows the policy open.
    """

    def __init__(
        self,
        epsilon: float = 0.10,
        *,
        objective: str = "median",
        band: tuple[float, float] = (4, 8),
        bounds: tuple[float, float] = (0.02, 0.40),
        max_step: float = 1.25,
        points: int = 9,
        slack: float = 0.25,
        gain: float = 0.01,
    ) -> None:
        if objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}.")
        self.objective = objective
        self.band = pair(band, "band", 1.0, float("inf"))
        self.bounds = pair(bounds, "bounds", *RADII)
        self.max_step = checks.check_number_in(max_step, "max_step", 1.0, 2.0)
        self.points = checks.integer_at_least(points, "points", 3)
        if self.points % 2 == 0 or self.points > 63:
            raise ValueError(f"points must be odd and at most 63, got {points}: ε and as many on either side.")
        if self.max_step == 1.0:
            raise ValueError("max_step must be above 1, got 1; for a fixed ε use no controller.")
        self.slack = checks.check_number_in(slack, "slack", 0.0, 1.0)
        self.gain = checks.check_number_in(gain, "gain", 0.0, sys.float_info.max)
        self.epsilon = checks.check_number_in(epsilon, "epsilon", *self.bounds)
        self.reason = "no update yet"
        self._settled = False
        self._updates = 0
        self._moves = 0
        self._sizes = Sizes(0.0, 0.0, 0)
        self._r2: float | None = None

    @threads.using()
    def update(
        self,
        fingerprint: Any,
        group: Any = None,
        *,
        trajectory: Any = None,
        step: Any = None,
        layout: Layout | None = None,
        returns: Any = None,
        backend: str = "auto",
        num_threads: int | None = None,
    ) -> float:
        """The ε to use for this step's batch.

        fingerprint, group, trajectory, step, layout   as in `cluster()`
        returns   [N] real   discounted return-to-go, for objective "value_r2", which also needs trajectories; elsewhere
                  ignored

        Rows without a direction (zero, or not finite) and padding count in no size and no R²; rows whose return is not
        finite count in no R².  A batch without usable rows leaves ε unchanged and says so in `reason`.  Other bad
        input is an error as in `cluster()`.  With a layout it synchronizes with a GPU once, to copy the labels of the
        grid to the host, and once more for the returns under "value_r2".
        """
        rows = take_fingerprints(group, trajectory, step, layout, backend, num_threads, fingerprint=fingerprint)
        reward = self._check_returns(returns, rows.layout, trajectory, layout)
        half, (low, high) = (self.points - 1) // 2, self.bounds
        around = [self.epsilon * self.max_step ** (j / half) for j in range(-half, half + 1) if j]
        grid = sorted({self.epsilon, *(min(max(epsilon, low), high) for epsilon in around)})
        here = grid.index(self.epsilon)
        points = self._sweep(rows, grid, reward)
        self._updates += 1  # not by a call that fails
        if points[here].sizes.clusters == 0:
            self.reason = f"kept {self.epsilon:.4g}: no row of the batch has a usable fingerprint"
            return self.epsilon
        best = None if self.objective == "median" else self._best_r2(points, here)
        chosen, self.reason = best or self._by_median(points, here)
        if best is None and self.objective == "value_r2":
            self.reason += "; no ε within one step has its median in the band and a value R²"
        point = points[chosen]
        self._settled = self._inside(point.sizes.median) or self._holds(point.sizes.median)
        self._moves += point.epsilon != self.epsilon
        self.epsilon, self._sizes, self._r2 = point.epsilon, point.sizes, point.r2
        return self.epsilon

    def _check_returns(self, returns: Any, lay: Layout, trajectory: Any, layout: Layout | None) -> Tensor | None:
        """[M] float32 returns of the records on the host, where the objective needs them."""
        if self.objective != "value_r2":
            if returns is not None:
                checks.check_length(returns, "returns", lay.n_rows)
            return None
        if returns is None:
            raise ValueError(
                "returns is missing; objective='value_r2' needs it. Pass discounted_returns(...), or use 'median'."
            )
        if trajectory is None and layout is None:
            raise ValueError("trajectory is missing; objective='value_r2' needs it. Pass one id per row, or a layout.")
        values = checks.real_vector(returns, "returns", lay.n_rows).cpu()
        return values.index_select(0, lay.order).to(torch.float32)

    def _sweep(self, rows: Fingerprints, grid: list[float], reward: Tensor | None) -> list[_Point]:
        usable = rows.row_states() == 0
        labels = rows.sweep(grid, usable).masked_fill_(~usable, -1).cpu()
        lay = rows.layout
        group, trajectory = lay.group_of_record(), lay.trajectory_of_record()
        points = []
        for epsilon, row, sizes in zip(grid, labels, measure_sizes(labels), strict=True):
            r2 = None
            if reward is not None:
                at = torch.nonzero((row >= 0) & (reward.abs() <= LIMIT)).flatten()
                r2 = value_r2(reward[at], row[at], trajectory[at], group[at], lay.n_groups).r2
            points.append(_Point(epsilon, sizes, r2))
        return points

    def _by_median(self, points: list[_Point], here: int) -> tuple[int, str]:
        low, high = self.band
        size = points[here].sizes.median
        below = size < low
        fact = f"median cluster size {size:g} is {{}} the band [{low:g}, {high:g}]"

        def take(best: int, fact: str) -> tuple[int, str]:
            verb = "kept" if best == here else f"moved {points[here].epsilon:.4g} to"
            return best, f"{verb} {points[best].epsilon:.4g}: {fact}"

        if self._inside(size):
            return take(here, fact.format("inside"))
        if self._holds(size):
            return take(here, f"{fact.format('outside')} by less than the slack")
        fact = fact.format("below" if below else "above")
        ahead = range(here + 1, len(points)) if below else range(here - 1, -1, -1)
        if not ahead:
            return take(here, f"{fact}, and ε is at its bound")
        inside = [i for i in ahead if self._inside(points[i].sizes.median)]
        if inside:

            def off_centre(i: int) -> float:  # logarithms of equal distances would differ in the last bit
                squared = points[i].sizes.median ** 2
                return max(squared / (low * high), low * high / squared)

            best = min(inside, key=lambda i: (off_centre(i), abs(i - here)))
            return take(best, f"{fact}, there it is {points[best].sizes.median:g}")
        if not any((points[i].sizes.median > high) == below for i in ahead):
            return take(ahead[-1], f"{fact} at every ε within one step")
        best = min([here, *ahead], key=lambda i: (self._outside(points[i].sizes.median), abs(i - here)))
        return take(best, f"{fact}, no ε within one step hits it, and here it is nearest")

    def _best_r2(self, points: list[_Point], here: int) -> tuple[int, str] | None:
        """The point of the best value R² among those with a median in the band; None where there is none."""
        low, high = self.band
        known = {i: point.r2 for i, point in enumerate(points) if point.r2 is not None}
        inside = [i for i in known if self._inside(points[i].sizes.median)]
        now = points[here]
        stays = here in known and (here in inside or self._holds(now.sizes.median))
        if not inside and not stays:
            return None
        best = min(inside or [here], key=lambda i: (-known[i], abs(i - here), i))
        if stays and known[best] <= known[here] + self.gain:
            near = f"value R² {known[here]:.4g} is within {self.gain:g} of the best in the band"
            return here, f"kept {now.epsilon:.4g}: {near}"
        return best, (
            f"moved {now.epsilon:.4g} to {points[best].epsilon:.4g}: value R² {known[best]:.4g} there is the best in "
            f"the band [{low:g}, {high:g}], with median cluster size {points[best].sizes.median:g}"
        )

    def _inside(self, size: float) -> bool:
        return self.band[0] <= size <= self.band[1]

    def _holds(self, size: float) -> bool:
        """Whether a settled ε stays at this median."""
        low, high = self.band
        return self._settled and low * (1 - self.slack) <= size <= high * (1 + self.slack)

    def _outside(self, size: float) -> float:
        """How far a median is outside the band, on a logarithmic scale."""
        low, high = self.band
        return max(math.log(low / size), math.log(size / high), 0.0)

    def metrics(self) -> dict[str, float]:
        """Plain floats for a trainer's logger, from the last update that had rows.

        "bipace/epsilon", "bipace/epsilon_moves" (how many so far), "bipace/median_cluster_size",
        "bipace/singleton_cluster_fraction"; under objective "value_r2" also "bipace/value_r2" (0 where undefined).
        """
        values = {
            "epsilon": self.epsilon,
            "epsilon_moves": float(self._moves),
            "median_cluster_size": self._sizes.median,
            "singleton_cluster_fraction": self._sizes.singletons,
        }
        if self.objective == "value_r2":
            values["value_r2"] = 0.0 if self._r2 is None else self._r2
        return {f"bipace/{name}": value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that updates change, as plain JSON values; settings are given to the constructor."""
        return {
            "epsilon": self.epsilon,
            "settled": self._settled,
            "updates": self._updates,
            "moves": self._moves,
            **asdict(self._sizes),
            "r2": self._r2,
            "reason": self.reason,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from the state of another controller.  ValueError for anything else."""
        wanted = self.state_dict().keys()
        if not isinstance(state, dict) or state.keys() != wanted:
            got = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"state must come from state_dict(), with the keys {', '.join(wanted)}, got {got}.")
        for name, kind in (("settled", bool), ("reason", str)):
            if not isinstance(state[name], kind):
                raise ValueError(f"state[{name!r}] must be {kind.__name__}, got {checks.shown(state[name])}.")
        # Everything is checked before anything is set: a refused state changes nothing.
        epsilon = checks.check_number_in(state["epsilon"], "state['epsilon']", *self.bounds)
        counts = [checks.integer_at_least(state[n], f"state['{n}']", 0) for n in ("updates", "moves", "clusters")]
        median = checks.check_number_in(state["median"], "state['median']", 0.0, sys.float_info.max)
        singletons = checks.check_number_in(state["singletons"], "state['singletons']", 0.0, 1.0)
        r2 = state["r2"]
        r2 = None if r2 is None else checks.check_number_in(r2, "state['r2']", -sys.float_info.max, 1.0)
        self.epsilon, self._settled, self.reason, self._r2 = epsilon, state["settled"], state["reason"], r2
        self._updates, self._moves = counts[0], counts[1]
        self._sizes = Sizes(median, singletons, counts[2])
