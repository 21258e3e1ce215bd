"""Greedy cosine clusters: rows to be clustered, the compiled kernels on them, and what must hold of their labels."""

from typing import Any

import numpy as np
import torch
from certificate import margins, replay
from ragged import sentinels, stage
from sized import Sized

from bipace_kernels.backends import threads
from bipace_kernels.backends.cpu import clusters as cpu_clusters

cpu = Sized(cpu_clusters)

TOLERANCE = 1e-5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ODD_DIMS = (1, 3, 15, 16, 17, 255, 257, 513, 3584)
EPSILONS = [1e-4, 0.05, 0.1, 0.3, 0.6, 0.9, 1.0]


def mixture(seed: int, n: int, dim: int, clusters: int, *, noise: float = 0.3, common: float = 2.0) -> torch.Tensor:
    """[n, dim] float32: directions around a strong common one, as hidden states are, with lengths that vary."""
    rng = np.random.default_rng(seed)
    centre = common * rng.standard_normal(dim) + 1.5 * rng.standard_normal((clusters, dim))
    x = centre[rng.integers(0, clusters, n)] + noise * rng.standard_normal((n, dim))
    return torch.from_numpy((x * np.exp(rng.standard_normal((n, 1)))).astype(np.float32))


def offsets_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int64)


def sample(kind: str, n: int, dim: int, seed: int) -> torch.Tensor:
    """[n, dim] float32 rows of a kind: "normal", "counts", "few" or "mixture"."""
    rng = np.random.default_rng(seed)
    if kind == "normal":
        x = rng.standard_normal((n, dim))
    elif kind == "counts":
        x = rng.integers(-2, 3, (n, dim)).astype(np.float64)
    elif kind == "few":
        x = rng.standard_normal((4, dim))[rng.integers(0, 4, n)]
    else:
        return mixture(seed, n, dim, 5)
    x[(x == 0).all(axis=1), 0] = 1
    return torch.from_numpy(x.astype(np.float32))


def bit_case(dim: int = 300) -> tuple[torch.Tensor, list[int]]:
    """Near-threshold data: a change of the last bit anywhere is likely to move a label."""
    rng = np.random.default_rng(21)
    sizes = [130, 1, 77, 0, 400, 12, 60]
    x = rng.integers(-1, 3, (sum(sizes), dim)).astype(np.float32)
    x[:, : dim // 2] += 1
    return torch.from_numpy(x + 1e-4 * rng.standard_normal(x.shape).astype(np.float32)), sizes


def cosine(x: torch.Tensor, sizes: list[int] | None = None, epsilon: float = 0.10, **how: Any) -> torch.Tensor:
    """Labels [M] by the compiled kernels.

    how   usable, order: columns of the records; num_threads: 2
    """
    return _labels(cpu.cluster_cosine, x, sizes, epsilon, **how)


def sweep(x: torch.Tensor, sizes: list[int] | None = None, epsilons: Any = EPSILONS, **how: Any) -> torch.Tensor:
    """Labels [E, M] by the compiled kernels."""
    return _labels(cpu.cluster_sweep, x, sizes, epsilons, **how)


def _labels(
    stage: Any, x: Any, sizes: Any, epsilon: Any, usable: Any = None, order: Any = None, num_threads: int = 2
) -> Any:
    order = torch.arange(x.shape[0]) if order is None else order
    sizes = [order.shape[0]] if sizes is None else sizes
    with threads.using(num_threads):
        return stage(x, order, offsets_of(sizes), usable, epsilon)


def device_sweep(
    device: Any, x: Any, sizes: Any = None, epsilons: Any = EPSILONS, *, usable: Any = None, taken: Any = None,
    order: Any = None, **how: Any,
) -> torch.Tensor:  # fmt: skip
    """Labels [E, M] on the CPU by the device's kernels, every output and scratch between sentinels."""
    order = torch.arange(x.shape[0]) if order is None else order
    sizes = [order.shape[0]] if sizes is None else sizes
    usable, taken = (None if mask is None else mask.to(device) for mask in (usable, taken))
    there = (x.to(device), order.to(device), offsets_of(sizes).to(device), usable, epsilons)
    with sentinels():
        found: torch.Tensor = stage("clusters").cluster_sweep(*there, taken=taken, **how)
    return found.cpu()


def check_partition(
    x: torch.Tensor, sizes: list[int], epsilon: float, labels: torch.Tensor, usable: Any = None, taken: Any = None
) -> bool:
    """Labels equal the float64 rule's where its margins allow, else the certificate holds; True where all are equal.

    Records that are not usable are alone, those not taken have no cluster, and their values count in nothing.
    """
    before, begin, equal = 0, 0, True
    for size in sizes:
        group = slice(begin, begin + size)
        begin += size
        takes_part = np.ones(size, bool) if taken is None else taken[group].numpy()
        good = takes_part if usable is None else takes_part & usable[group].numpy()
        own = labels[group].numpy()
        assert (own[~takes_part] == -1).all()
        present = own[takes_part] - before
        _, appearance = np.unique(present, return_index=True)
        assert (present[np.sort(appearance)] == np.arange(len(appearance))).all(), "numbered by first appearance"
        before += len(appearance)
        single = own[takes_part & ~good].tolist()
        assert len(set(single)) == len(single)
        assert not set(single) & set(own[good].tolist()), "a record that is not usable has company"
        values = x[group].to(torch.float64).numpy()[good]
        _, first, inverse = np.unique(own[good], return_index=True, return_inverse=True)
        among = np.argsort(np.argsort(first))[inverse].astype(np.int64)
        expected, margin = margins(values, epsilon)
        if margin > TOLERANCE:
            np.testing.assert_array_equal(among, expected, err_msg=f"margin {margin:.2e}, {size}, epsilon {epsilon}")
        else:
            worst = replay(values, among, epsilon)
            assert worst.excess <= TOLERANCE, (worst, margin, size, epsilon)
            equal = equal and bool((among == expected).all())
    return equal
