"""Seeded batches of rollouts for the tests; the seed is in every test's parameters, so a failure names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import bipace_kernels as bk

#: Every kind of configuration, by name.
CONFIGS: dict[str, bk.Config] = {
    "grpo": bk.Config.grpo(),
    "grpo_step": bk.Config.grpo(episode_scope="step", lone_trajectory="raw"),
    "gigpo": bk.Config.gigpo(),
    "gigpo_mean_norm": bk.Config.gigpo("mean_norm"),
    "gigpo_mean_std_norm": bk.Config.gigpo("mean_std_norm"),
    "hgpo": bk.Config.hgpo(),
    "hgpo_all": bk.Config.hgpo(3, step_norm="std", base_group=True, length_weight_alpha=0.5),
    "bigpo": bk.Config.bigpo(0.2),
    "bipace": bk.Config.bipace(0.2),
    "bipace_diff": bk.Config.bipace(0.2, "diff_peer"),
    "bipace_exact": bk.Config.bipace(partition="exact"),
    "bipace_history": bk.Config.bipace(partition="history", estimator="diff_peer"),
    "bipace_similar": bk.Config.bipace(partition="similar", similarity=0.6),
    "bipace_zero": bk.Config.bipace(0.0),
    "gae": bk.Config.gae(),
    "gae_plain": bk.Config.gae(share="group", step_norm="none", kernel_time=None, kernel_noise=0.5, episode_weight=1.0),
    "gae_group": bk.Config.gae("group", step_norm="group", gae_lambda=0.9, episode_weight=0.5),
    "gae_cluster": bk.Config.gae("cluster"),
    "gae_cosine": bk.Config.gae("cluster", partition="cosine", epsilon=0.2, shrinkage=0.0, step_norm="none"),
}


#: The tensors of a result, a row per row given.
OUTPUTS = ("advantage", "step_advantage", "episode_advantage", "returns", "cluster", "branch")


@dataclass
class Batch:
    group: Any
    trajectory: Any
    step: Any
    rewards: Any
    fingerprint: Any
    observation: list[str]
    action_key: Any

    @property
    def n(self) -> int:
        return len(self.group)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        return {**self.__dict__, **changes}

    def take(self, rows: Any) -> Batch:
        """Some rows, in the order given."""
        rows = np.asarray(rows, dtype=np.int64)
        columns = {name: column[rows] for name, column in self.__dict__.items() if name != "observation"}
        return Batch(**columns, observation=[self.observation[i] for i in rows])


def make_batch(seed: int, groups: int = 4, trajectories: int = 4, longest: int = 7, dim: int = 12, states=5) -> Batch:
    """Ragged rollouts in processing order; states are shared inside a group, so every partition has work to do."""
    rng = np.random.default_rng(seed)
    group, trajectory, step = [], [], []
    for g in range(groups):
        for t in range(int(rng.integers(1, trajectories + 1))):
            for s in range(int(rng.integers(1, longest + 1))):
                group.append(g)
                trajectory.append(g * trajectories + t)
                step.append(s)
    n = len(group)
    state = rng.integers(0, states, n)
    centres = rng.normal(size=(states, dim)) + 1.5
    words = ["You are in the kitchen", "You open the fridge 1", "Nothing happens.", "You arrive at loc 4.", "A cabinet"]
    return Batch(
        group=np.array(group, dtype=np.int64),
        trajectory=np.array(trajectory, dtype=np.int64),
        step=np.array(step, dtype=np.int64),
        rewards=rng.choice([0.0, 0.0, 1.0, -0.5, 0.3], n),
        fingerprint=(centres[state] + 0.3 * rng.normal(size=(n, dim))).astype(np.float32),
        observation=[words[s % len(words)] + "!" * int(rng.integers(0, 2)) for s in state],
        action_key=rng.integers(-3, 3, n) * 2**40,
    )


def assert_same(got: Any, want: Any, *, metrics: bool = True) -> None:
    """Two results of advantage(), bit for bit."""
    for name in OUTPUTS:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert getattr(got, name).dtype == getattr(want, name).dtype
    if metrics:
        assert got.metrics() == want.metrics() and got.value_r2() == want.value_r2()


def spread_out(seed: int = 0, n: int = 240, dim: int = 24) -> tuple[Any, Any]:
    """[n, dim] float32 rows, six around a state, and the groups of 60 records."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n // 6, dim)).repeat(6, axis=0) + 0.35 * rng.normal(size=(n, dim)) + 1.0
    return x.astype(np.float32), np.arange(n) // 60
