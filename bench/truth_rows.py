"""The rows of the truth benchmark: estimators by name, and those of one's own."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import bipace_kernels as bk
from bipace_kernels.support.errors import near
from bipace_kernels.support.optional import named

from .truth_batches import Batch, advantages
from .truth_rivals import gae_over, limit, rivals

Floats = NDArray[np.float64]

SIZES = (2, 4, 8, 16)
LAMBDAS = (0.0, 0.3, 0.5, 0.8, 1.0)
EPSILONS = (0.05, 0.1, 0.2, 0.3)
Q_STYLE = "BiPACE"
BIPACE = f"{Q_STYLE} ε 0.1"
STEP_ONLY = " without GRPO's advantage"
DEFAULT = "Config.gae()"
CONTROL = "GAE with one value per prompt"
STEP_MEANS = "GAE with a mean for each prompt and step"
BASELINES = (DEFAULT, CONTROL, STEP_MEANS, "GRPO", BIPACE)  # measured whatever --only says
KINDS = ("hidden2", "ngram1", "ngram3", "ngram6", "sentence1")
EMBEDDER_OF = {"hidden": "actor_hidden", "ngram": "ngram", "sentence": "sentence"}  # a kind without its number


@dataclass(frozen=True)
class Estimator:
    """One row of the table: [N] advantages of a batch."""

    name: str
    call: Callable[[Batch], Floats]
    sizes: tuple[int, ...] = (8,)  # G that it is measured at
    needs: str = ""  # a fingerprint without which the row is left out
    reads_truth: bool = False  # which may be there for a sample of the records only


def ours(config: Any, kind: str | None = None, *, step_only: bool = False) -> Callable[[Any], Floats]:
    """A preset of the package, on the fingerprints of a kind; "main" is the set's own.

    config   a Config, or a function of `embedder` that makes one
    """

    def call(batch: Batch) -> Floats:
        used = batch.kinds()[0] if kind == "main" else kind
        own = config(embedder=EMBEDDER_OF[str(used).rstrip("0123456789")]) if callable(config) else config
        result = advantages(batch, own, used)
        return (result.step_advantage if step_only else result.advantage).numpy().astype(np.float64)

    return call


def table() -> list[Estimator]:
    """All rows, in the order of the table."""
    gae, kernel = bk.Config.gae, functools.partial(functools.partial, bk.Config.gae)
    rows = [
        Estimator("exact V as baseline of whole returns", lambda b: b.returns - b.exact, SIZES, reads_truth=True),
        Estimator("GAE over the exact V, λ 0.5", lambda b: gae_over(b, b.exact, 0.5), reads_truth=True),
        Estimator("the limit of GRPO and RLOO", limit, reads_truth=True),
        Estimator("GRPO", ours(bk.Config.grpo()), SIZES),
        Estimator("RLOO", ours(bk.Config.grpo(episode_norm="none"))),  # its G / (G - 1) changes no measure
        Estimator("GiGPO", ours(bk.Config.gigpo()), SIZES),
        Estimator("GiGPO" + STEP_ONLY, ours(bk.Config.gigpo(), step_only=True), SIZES),
        Estimator("GiGPO mean_std_norm", ours(bk.Config.gigpo(mode="mean_std_norm"))),
        Estimator("GiGPO mean_std_norm" + STEP_ONLY, ours(bk.Config.gigpo(mode="mean_std_norm"), step_only=True)),
        Estimator("HGPO", ours(bk.Config.hgpo()), SIZES),
        Estimator("HGPO with its episode term as depth 0", ours(bk.Config.hgpo(base_group=True))),
    ]
    for name, make in {"BiGPO": bk.Config.bigpo, Q_STYLE: bk.Config.bipace,
                       "BiPACE diff-peer": lambda e: bk.Config.bipace(e, estimator="diff_peer")}.items():  # fmt: skip
        for epsilon in EPSILONS:
            for only in (False, True):
                sizes = SIZES if epsilon == 0.1 or name == Q_STYLE else (8,)
                label = f"{name} ε {epsilon:g}" + STEP_ONLY * only
                rows.append(Estimator(label, ours(make(epsilon), "main", step_only=only), sizes))
    rows += [
        Estimator(DEFAULT, ours(gae, "main"), SIZES),
        Estimator(DEFAULT + ", with the episode term", ours(kernel(episode_weight=1.0), "main")),
        Estimator("Config.gae(action_noise=None)", ours(kernel(action_noise=None), "main"), SIZES),
        Estimator("Config.gae(share='group')", ours(kernel(share="group"), "main"), SIZES),
        Estimator("Config.gae(share='memory')", ours(kernel(share="memory"), "main"), SIZES),
        Estimator(STEP_MEANS, ours(gae("step")), SIZES),
        *(Estimator(name, call) for name, call in rivals().items()),
    ]
    for lam in LAMBDAS:
        sizes, of = (SIZES, "") if lam == 0.5 else ((8,), f", λ {lam:g}")
        clusters = functools.partial(gae, "cluster", gae_lambda=lam)
        near = ours(clusters(partition="cosine", epsilon=0.1), "main")
        rows += [
            Estimator(CONTROL + of, ours(gae("group", gae_lambda=lam)), sizes),
            Estimator("GAE with a mean for equal observations" + of, ours(clusters()), sizes),
            Estimator("GAE with a mean for clusters of ε 0.1" + of, near),
        ]
        for share in ("group", "batch", "memory"):
            name = f"Config.gae(share='{share}', gae_lambda={lam:g})"
            rows.append(Estimator(name, ours(kernel(share=share, gae_lambda=lam), "main")))
    for kind in KINDS:
        for share in ("group", "batch"):
            rows.append(
                Estimator(f"Config.gae(share='{share}') on {kind}", ours(kernel(share=share), kind), needs=kind)
            )
    return rows


def settings() -> list[Estimator]:
    """Other settings of the kernel (`--settings`)."""
    changes: list[dict[str, Any]] = [
        *({"kernel_width": x} for x in (0.1, 0.2, 0.3, 1.0)), *({"kernel_time": x} for x in (2.0, 4.0, 16.0, None)),
        *({"kernel_noise": x} for x in (0.5, 1.0, 4.0, 8.0)), *({"kernel_same": x} for x in (0.0, 0.1, 1.0, 3.0)),
        *({"action_noise": x} for x in (None, 0.1, 1.0, 3.0)),
        {"step_norm": "group"}, {"step_norm": "none"}, *({"episode_weight": x} for x in (0.1, 0.25, 0.5, 1.0)),
        {"kernel_width": 0.3, "kernel_time": 4.0},
    ]  # fmt: skip
    rows = []
    for change in changes:
        name = ", ".join(f"{key}={value}" for key, value in change.items())
        for share in ("batch",) if "kernel_same" in change else ("batch", "group"):
            config = functools.partial(bk.Config.gae, share=share, **change)
            rows.append(Estimator(f"Config.gae(share='{share}', {name})", ours(config, "main")))
    return rows


def estimators_of(own: Sequence[str], only: str, which: Sequence[str]) -> list[Estimator]:
    """Rows of the table, and those of `own`; ValueError for a name that is none."""
    rows = table() + (settings() if "settings" in which else [])
    rows = [row for row in rows if "sentence" in which or not row.needs.startswith("sentence")]
    chosen = [row.name for row in rows if only.lower() in row.name.lower()]
    if not chosen:
        names = [row.name for row in rows]
        raise ValueError(f"--only {only!r} is in the name of no row (docs/leaderboard.md){near(only, names)}")
    rows = [row for row in rows if row.name in (*chosen, *BASELINES)]
    for text in own:
        if ":" not in text:
            raise ValueError(f"--estimator wants MODULE:NAME or FILE.py:NAME, got {text!r}.")
        try:
            found = named(text)
        except ValueError as error:
            raise ValueError(f"--estimator {error}") from error
        call = ours(found, "main") if isinstance(found, bk.Config) else found
        if not callable(call) or "StepRecords" in str(getattr(call, "__annotations__", "")):
            raise ValueError(
                f"--estimator {text} must name a bk.Config, such as bk.Config.gae(value=FUNCTION) where a function of "
                f"StepRecords gives values, or a function of a Batch that gives advantages, got {found!r}."
            )
        rows.append(Estimator(text, call, SIZES))
    return rows
