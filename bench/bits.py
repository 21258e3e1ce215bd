"""Digests of the CPU's results over random batches: equal before and after a change that must not change a bit.

    python -m bench bits                     # one SHA-256 for each preset, over 200 batches
    PYTHONPATH=OTHER_CHECKOUT python bench/bits.py --batches 200     # the same of another build

Digests depend on the instruction set (`bipace info` shows it), so compare two builds on one machine.  Only public names
are used, so the file runs with any version that has Config.gae().
"""

import argparse
import hashlib
import random
import sys
import warnings
from typing import Any

import torch

import bipace_kernels as bk

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def presets() -> dict[str, bk.Config]:
    """Every preset, and the variants whose arithmetic differs."""
    make = bk.Config
    return {
        "grpo": make.grpo(),
        "gigpo": make.gigpo(),
        "gigpo mean_norm": make.gigpo("mean_norm"),
        "gigpo mean_std_norm": make.gigpo("mean_std_norm"),
        "gigpo similar": make.gigpo(partition="similar"),
        "hgpo": make.hgpo(),
        "hgpo base_group std": make.hgpo(base_group=True, step_norm="std"),
        "bigpo": make.bigpo(),
        "bigpo epsilon 0": make.bigpo(epsilon=0.0),
        "bipace": make.bipace(),
        "bipace diff_peer": make.bipace(estimator="diff_peer"),
        "bipace exact": make.bipace(partition="exact", step_weight=0.5),
        "bipace episode_weight 0": make.bipace(episode_weight=0.0),
        "gae": make.gae(),
        "gae in the group": make.gae(share="group", step_norm="group"),
        "gae without a time term": make.gae(kernel_time=None, gae_lambda=0.9),
        "gae group": make.gae("group"),
        "gae cluster": make.gae("cluster"),
    }


def batch(seed: int) -> dict[str, Any]:
    """Arguments of advantage(): ragged groups, steps, copies of steps, padding, bad values, every dtype in turn."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    group, trajectory, step = [], [], []
    number = 0
    for g in range(rng.randint(1, 7)):
        for _ in range(rng.randint(1, 8)):
            length = rng.randint(1, 30)
            group += [g * 3] * length
            trajectory += [number * 5] * length
            first = rng.choice((0, 0, 4))
            step += [first + (t if seed % 7 else 2 * t) for t in range(length)]
            number += 1
    n = len(group)
    states = rng.choice((3, 12, 60))
    state = torch.randint(0, states, (n,), generator=torch_rng)
    base = torch.randn(states, 64, generator=torch_rng) + 1.5
    fingerprint = base[state] + rng.choice((0.0, 0.05, 0.3)) * torch.randn(n, 64, generator=torch_rng)
    rewards = torch.where(torch.rand(n, generator=torch_rng) < 0.15, torch.rand(n, generator=torch_rng), 0.0)
    if seed % 5 == 1:
        fingerprint[rng.randrange(n)] = float("nan")
        rewards[rng.randrange(n)] = float("inf")
    given: dict[str, Any] = {
        "group": torch.tensor(group), "trajectory": torch.tensor(trajectory), "step": torch.tensor(step),
        "rewards": rewards.double(), "fingerprint": fingerprint.to(DTYPES[seed % 3]), "observation": state,
        "action_key": torch.randint(0, 3, (n,), generator=torch_rng),
    }  # fmt: skip
    if seed % 3 == 0:
        given["valid"] = torch.rand(n, generator=torch_rng) < 0.9
    order = torch.randperm(n, generator=torch_rng)
    if seed % 4 == 2:
        order = torch.cat([order, order[: max(1, n // 10)]])  # copies of steps
    return {name: value[order] for name, value in given.items()}


def digest(config: bk.Config, seeds: range) -> str:
    """SHA-256 over all results and metrics of the batches."""
    from dataclasses import replace

    total = hashlib.sha256()
    for seed in seeds:
        given = batch(seed)
        changes: dict[str, Any] = {"on_invalid": "singleton", "duplicates": ("once", "count")[seed // 4 % 2]}
        if config.partition == "similar":
            given["observation"] = [f"you see item {int(i)} on the table" * 2 for i in given["observation"]]
        if seed % 9 == 4:
            returns = bk.discounted_returns(given["rewards"].nan_to_num(0, 0, 0), given["trajectory"], step=None)
            given["returns"] = returns + torch.where(given["rewards"].isfinite(), 0.0, float("nan"))
        result = bk.advantage(**given, config=replace(config, **changes))
        for name in ("advantage", "step_advantage", "episode_advantage", "returns", "cluster", "branch", "value"):
            if (column := getattr(result, name, None)) is not None:
                total.update(column.contiguous().numpy().tobytes())
        # Shares of branches, which some builds leave out without clusters, are those of `branch`.
        shares = {f"bipace/{branch}_row_fraction" for branch in ("pace", "leave_one_out", "singleton")}
        metrics = sorted((name, number) for name, number in result.metrics().items() if name not in shares)
        total.update(repr((metrics, result.value_r2())).encode())
    return total.hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench bits", description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore", RuntimeWarning)
    for name, config in presets().items():
        print(f"{digest(config, range(options.batches))}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
