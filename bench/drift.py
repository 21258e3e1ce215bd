"""`python -m bench drift [--out DIR]`: does an ε that follows the policy hold the clusters where a fixed one lets go?

ABOUT says what is compared and on which data.  A simulation: seeded, and nothing in it is timed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import bipace_kernels as bk
from bipace_kernels.diagnostics.value_r2 import value_r2
from bipace_kernels.support import optional, png

from .measure import threads
from .report import SAMPLE, about, page, parser, publish, table

Floats = NDArray[np.float64]

SEED = 20260
BAND = (4.0, 8.0)
BOUNDS = (0.02, 0.40)
POLICIES = ("static", "controller", "controller R²", "search")
ABOUT = """\
Four policies see the same batches, one per training step. `static` keeps the ε that the paper's search finds on the
first batch. `controller` starts there and follows with `bk.EpsilonController()`; `controller R²` is the same with
`objective="value_r2"`. `search` runs the search anew on every batch. Singletons are counted as a share of clusters.

- **synthetic**: a state of a prompt group is a unit vector √(1−s)·shared + √(s(1−v))·own + √(s·vᵢ)·noise. `shared` is
  one strong direction of the batch; `own` is half a room's direction and half the state's, six states to a room; vᵢ is
  a record's own share of noise, v on the median. So two visits of a state are s·v apart, and two states of different
  rooms s. Over the training the cone s narrows to a third, opens to one and a half of what it was and comes back, while
  v grows from 0.25 to 0.40. Returns are the state's value plus noise, so that value R² has something to find.
- **recorded**: n-gram fingerprints x of recorded rollouts (ALFWorld, scripted policy), sixteen prompt groups drawn per
  step, each row turned towards a random unit vector: √(1−n)·x + √n·noise. The share n grows from 0 to 0.3 and falls
  to 0 again."""
_STYLES: dict[str, dict[str, Any]] = {  # in drawing order; the controller by value R² is in the table only
    "search": {"color": "#999999", "linewidth": 1.0, "label": "search on every batch"},
    "static": {"color": "#D55E00", "linewidth": 2.0, "linestyle": "--", "label": "fixed ε"},
    "controller": {"color": "#0072B2", "linewidth": 2.0, "label": "controller"},
}


class Batch(NamedTuple):
    """One training step."""

    fingerprint: torch.Tensor  # [N, D] float32
    layout: bk.Layout
    returns: Floats  # [N]
    drift: float  # the drifting quantity, for the picture


@dataclass(frozen=True)
class Simulation:
    """Size of the synthetic drift, as written into drift.json."""

    steps: int = 200
    groups: int = 8
    rollouts: int = 8
    horizon: int = 20  # steps of a rollout
    dim: int = 256
    states: int = 24  # of a group
    seed: int = SEED
    cone: tuple[tuple[float, float], ...] = ((0.0, 0.30), (0.4, 0.10), (0.7, 0.45), (1.0, 0.30))  # (share of steps, s)
    noise: tuple[tuple[float, float], ...] = ((0.0, 0.25), (1.0, 0.40))  # (share of steps, v)
    recorded_groups: int = 16
    recorded_noise: tuple[tuple[float, float], ...] = ((0.0, 0.0), (0.5, 0.3), (1.0, 0.0))  # (share of steps, n)


@dataclass
class Line:
    """What one policy did, a value per training step."""

    epsilon: list[float] = field(default_factory=list)
    median: list[float] = field(default_factory=list)
    singletons: list[float] = field(default_factory=list)  # share of clusters
    r2: list[float | None] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        median, single = np.array(self.median), np.array(self.singletons)
        defined = [value for value in self.r2 if value is not None]
        return {
            "steps_in_band": float(((median >= BAND[0]) & (median <= BAND[1])).mean()),
            "median_lowest": float(median.min()),
            "median_highest": float(median.max()),
            "singletons_mean": float(single.mean()),
            "singletons_lowest": float(single.min()),
            "singletons_highest": float(single.max()),
            "singletons_std": float(single.std()),
            "epsilon_lowest": min(self.epsilon),
            "epsilon_highest": max(self.epsilon),
            "moves": float(np.count_nonzero(np.diff(self.epsilon))),
            "value_r2_mean": float(np.mean(defined)) if defined else 0.0,
        }


def _between(knots: Sequence[tuple[float, float]], at: float) -> float:
    return float(np.interp(at, *zip(*knots, strict=True)))


def _unit(x: Floats) -> Floats:
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def synthetic(settings: Simulation) -> Iterator[Batch]:
    """One batch per training step, on the fly; every step has a seed of its own."""
    per_group = settings.rollouts * settings.horizon
    group = np.repeat(np.arange(settings.groups), per_group)
    trajectory = np.repeat(np.arange(settings.groups * settings.rollouts), settings.horizon)
    layout = bk.layout(group, trajectory)
    visits = 1.0 / np.arange(1, settings.states + 1)
    for t in range(settings.steps):
        rng = np.random.default_rng([settings.seed, t])
        at = t / max(settings.steps - 1, 1)
        s, v = _between(settings.cone, at), _between(settings.noise, at)
        shared = _unit(rng.standard_normal(settings.dim))
        rooms = _unit(rng.standard_normal((settings.groups, -(-settings.states // 6), settings.dim)))
        own = _unit(rng.standard_normal((settings.groups, settings.states, settings.dim)))
        own = _unit(rooms[:, np.arange(settings.states) // 6] + own)
        state = rng.choice(settings.states, len(group), p=visits / visits.sum())
        share = np.minimum(v * np.exp(0.5 * rng.standard_normal((len(group), 1))), 1.0)
        noise = _unit(rng.standard_normal((len(group), settings.dim)))
        x = np.sqrt(1 - s) * shared + np.sqrt(s * (1 - v)) * own[group, state] + np.sqrt(s * share) * noise
        value = rng.standard_normal((settings.groups, settings.states))
        returns = value[group, state] + rng.standard_normal(len(group))
        yield Batch(torch.from_numpy(x.astype(np.float32)), layout, returns, s * v)


def recorded(settings: Simulation, path: Path) -> Iterator[Batch]:
    """Batches of recorded rollouts, turned towards noise."""
    from bipace_kernels.cli import rollouts, states

    records = rollouts.read([str(path)])
    everyone = bk.embedders.Ngram().embed(states.texts(records, states.State())).numpy()
    group, trajectory, step = (np.asarray(part) for part in (records.group, records.trajectory, records.step))
    returns = bk.discounted_returns(np.array(records.reward), trajectory, step=step).double().numpy()
    groups = int(group.max()) + 1
    for t in range(settings.steps):
        rng = np.random.default_rng([settings.seed, 1, t])
        share = _between(settings.recorded_noise, t / max(settings.steps - 1, 1))
        drawn = rng.choice(groups, min(settings.recorded_groups, groups), replace=False)
        rows = np.flatnonzero(np.isin(group, drawn))
        noise = _unit(rng.standard_normal((len(rows), everyone.shape[1]), dtype=np.float32))
        x = np.sqrt(1 - share) * everyone[rows] + np.sqrt(share) * noise
        layout = bk.layout(group[rows], trajectory[rows], step[rows])
        yield Batch(torch.from_numpy(x.astype(np.float32)), layout, returns[rows], share)


def follow(batches: Iterable[Batch]) -> tuple[dict[str, Line], list[float]]:
    """What each policy did on the same batches, and the drift."""
    lines = {name: Line() for name in POLICIES}
    drift: list[float] = []
    first = 0.0
    followers: list[bk.EpsilonController] = []
    for batch in batches:
        x, lay = batch.fingerprint, batch.layout
        search = bk.choose_epsilon(x, layout=lay, band=BAND, bounds=BOUNDS).epsilon
        if not followers:
            first = search
            followers = [
                bk.EpsilonController(first, objective=objective, band=BAND, bounds=BOUNDS)
                for objective in ("median", "value_r2")
            ]
        chosen = (first, *(follower.update(x, layout=lay, returns=batch.returns) for follower in followers), search)
        for name, epsilon, labels in zip(POLICIES, chosen, bk.cluster(x, epsilon=chosen, layout=lay), strict=True):
            sizes = np.bincount(labels.numpy())
            line = lines[name]
            line.epsilon.append(epsilon)
            line.median.append(float(np.median(sizes)))
            line.singletons.append(float((sizes == 1).mean()))
            line.r2.append(_value_r2(batch, labels))
        drift.append(batch.drift)
    return lines, drift


def _value_r2(batch: Batch, labels: torch.Tensor) -> float | None:
    lay = batch.layout
    returns = torch.from_numpy(batch.returns.astype(np.float32))[lay.order]
    return value_r2(returns, labels[lay.order], lay.trajectory_of_record(), lay.group_of_record(), lay.n_groups).r2


_COLUMNS = {
    "drift": "{drift}", "policy": "{policy}", "steps with a median in [4, 8]": "{steps_in_band:.1%}",
    "median size": "{median_lowest:g} to {median_highest:g}", "singleton share, mean": "{singletons_mean:.1%}",
    "lowest to highest": "{singletons_lowest:.1%} to {singletons_highest:.1%}", "std": "{singletons_std:.1%}",
    "ε": "{epsilon_lowest:.3f} to {epsilon_highest:.3f}", "moves": "{moves:.0f}",
    "value R², mean": "{value_r2_mean:.3f}",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both drifts, shows the table, writes drift.json, drift.md and drift.png."""
    optional.need("rich", "bench drift")
    optional.need("matplotlib", "bench drift")
    from rich.console import Console
    from rich.progress import track

    title = "An ε that follows the policy, against a fixed one"
    options = parser("drift", f"{title}.", writes="drift.json, drift.md and drift.png")
    options.add_argument("--steps", type=int, default=Simulation.steps, metavar="N", help="(%(default)s)")
    options.add_argument("--threads", type=int, default=2, metavar="N", help="(%(default)s); no figure depends on it")
    options.add_argument("--rollouts", type=Path, default=SAMPLE, metavar="FILE", help="for the recorded drift")
    arguments = options.parse_args(argv)
    if not arguments.rollouts.is_file():
        options.error(f"--rollouts: there is no {arguments.rollouts}; pass a file that `bipace report` reads")
    settings = Simulation(steps=arguments.steps)
    drifts: dict[str, Any] = {}
    with threads(arguments.threads) as on:
        for name, batches in (("synthetic", synthetic(settings)), ("recorded", recorded(settings, arguments.rollouts))):
            shown = track(batches, name, settings.steps, transient=True, console=Console(stderr=True))
            drifts[name] = follow(shown)
    document = {"schema": 1, "machine": on, "settings": asdict(settings), "drifts": {
        name: {"drift": drift, "lines": {policy: asdict(line) for policy, line in lines.items()},
               "summary": {policy: line.summary() for policy, line in lines.items()}}
        for name, (lines, drift) in drifts.items()
    }}  # fmt: skip
    rows = [
        {"drift": name, "policy": policy, **line.summary()}
        for name, (lines, _) in drifts.items()
        for policy, line in lines.items()
    ]
    text = page(
        title,
        f"{settings.steps} training steps, seed {settings.seed}. Simulation and every step: drift.json. {about(on)}",
        ABOUT, table(_COLUMNS, rows), "![ε and median cluster size over the training steps](drift.png)",
    )  # fmt: skip
    publish("drift", document, text, arguments.out)
    if arguments.out is not None:
        draw(arguments.out / "drift.png", {name: lines for name, (lines, _) in drifts.items()})
    return 0


def draw(path: Path, found: dict[str, dict[str, Line]]) -> None:
    """ε and median size over the training steps, a column per drift."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    made, axes = png.figure(9, 5.2, 2, len(found), sharex="col", sharey="row")
    for column, (name, lines) in enumerate(found.items()):
        epsilon, median = axes[:, column]
        for policy, style in _STYLES.items():
            epsilon.plot(lines[policy].epsilon, **style)
            median.plot(lines[policy].median, **style)
        epsilon.set_title(f"{name} drift", loc="left", fontsize=10)
        median.axhspan(*BAND, color="#DDDDDD", zorder=0)
        median.set_yscale("log", base=2)
        median.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        median.yaxis.set_minor_formatter(NullFormatter())
        median.set_xlabel("training step")
    axes[0, 0].set_ylim(0, None)
    axes[0, 0].set_ylabel("ε")
    axes[1, 0].set_ylabel("median cluster size (records)")
    made.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    png.set_title(made, "An ε that follows the policy against a fixed one; grey: sizes 4 to 8")
    png.save(made, path)
