"""Each stage and preset of a backend once on a small ragged batch of the current GPU, against the CPU backend.

It is what the sanitizer watches (`--small`), what the profiler counts (`--profile`: one whole chain at 16 × 400), and
the first thing to run on a new machine. Under TRITON_INTERPRET=1 Triton's runs on CPU tensors.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

import bipace_kernels as bk

from . import workloads as w
from .gpu_cases import BACKENDS, Batch, absent, expected
from .stages import number_agreement, partition_agreement

GROUPS = ((1,), (3, 2), (7, 1, 12, 5), (30, 41))  # records of each trajectory, by prompt group
LONGER = ((40, 60, 50), (1,), (129, 12))  # several tiles of a Gram matrix
# With LARGE_DIM: stages of a tile that come round again, a dozen panels of a scan.
LARGE = ((100, 100, 100, 100), (60, 40))
LARGE_DIM = 512
# An image may lack what the CPU's kernels are built with.
HOST = "cpu" if bk.backends()["cpu"].available else "reference"
Groups = tuple[tuple[int, ...], ...]
STATES, DIM = 6, 72


class Ragged:
    """Small groups of records with planted states, in shuffled row order, on one device; the same on the host."""

    def __init__(
        self,
        device: torch.device,
        backend: str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        groups: Groups = GROUPS,
        dim: int = DIM,
    ) -> None:
        self.device, self.backend = device, backend
        rng = np.random.default_rng(3)
        lengths = [n for group in groups for n in group]
        group = np.repeat(np.arange(len(groups)), [sum(g) for g in groups])
        trajectory = np.repeat(np.arange(len(lengths)), lengths)
        step = np.concatenate([np.arange(n) for n in lengths])
        state = rng.integers(0, STATES, len(group))
        shape = w.Shape("ragged", len(groups), 1, len(group), dim, STATES, "")
        batch = w.Steps(shape, group, trajectory, step, rng.random(len(group), np.float32), step, state)
        rows = _planted(batch, dtype)
        shuffle = torch.from_numpy(rng.permutation(len(group)))
        self.host: dict[str, Any] = {
            "group": torch.from_numpy(group)[shuffle],
            "trajectory": torch.from_numpy(trajectory)[shuffle],
            "step": torch.from_numpy(step)[shuffle],
            "rewards": torch.from_numpy(batch.rewards)[shuffle],
            "fingerprint": rows[shuffle],
            "observation": torch.from_numpy(state)[shuffle],
            "action_key": torch.from_numpy(rng.integers(0, 3, len(group)))[shuffle],
        }
        self.there = {name: value.to(device) for name, value in self.host.items()}
        self.texts = [f"state {s}, step {t}" * (1 + t % 3) for s, t in zip(state.tolist(), step.tolist(), strict=True)]

    def advantages(self, config: bk.Config) -> str:
        ours = bk.advantage(**self.there, config=config, backend=self.backend)
        want = bk.advantage(**self.host, config=config, backend=HOST)
        labels = partition_agreement(ours.cluster.cpu(), want.cluster)
        return f"{labels}, {number_agreement(ours.advantage.cpu(), want.advantage)}"

    def sweep(self, epsilons: Sequence[float] = (0.0, 0.05, 0.10, 0.30)) -> str:
        ours = bk.cluster(self.there["fingerprint"], self.there["group"], list(epsilons), backend=self.backend)
        want = bk.cluster(self.host["fingerprint"], self.host["group"], list(epsilons), backend=HOST)
        agreement = {partition_agreement(a, b) for a, b in zip(ours.cpu(), want, strict=True)}
        return ", ".join(sorted(agreement))

    def keys(self) -> str:
        try:
            made = w.responses(40, 48)
        except ImportError as error:
            return f"left out: {error}"
        table = bk.token_bytes(made.tokenizer)
        found = []
        for mode in ("action_tag", "first_n"):
            more: dict[str, Any] = {"mode": mode, "token_bytes": table}
            ours = bk.action_keys(
                made.ids.to(self.device), mask=made.mask.to(self.device), backend=self.backend, **more
            )
            want = bk.action_keys(made.ids, mask=made.mask, backend=HOST, **more)
            same = all(torch.equal(a.cpu(), b) for a, b in zip(ours, want, strict=True))
            found.append(f"{mode}: {'same keys' if same else 'DIFFERENT'}")
        return ", ".join(found)


def ngrams(x: Ragged) -> str:
    found = bk.ngram_fingerprint(x.texts, device=x.device, backend=x.backend)
    same = torch.equal(found.cpu(), bk.ngram_fingerprint(x.texts, backend=HOST))
    return "same bits" if same else "DIFFERENT"


def _planted(batch: w.Steps, dtype: torch.dtype) -> torch.Tensor:
    """[N, D] rows around one direction per state, cosines far from any threshold."""
    generator = torch.Generator().manual_seed(4)
    shared, own = (torch.randn(n, batch.shape.dim, generator=generator) for n in (1, STATES))
    noise = torch.randn(len(batch.state), batch.shape.dim, generator=generator)
    rows = shared + 0.8 * own[torch.from_numpy(batch.state)] + 0.05 * noise
    return rows.to(dtype)


def by_warps(x: Ragged, config: bk.Config) -> str:
    """Without groups of four warps, as on GPUs whose tensor cores do not support them."""
    with mock.patch.object(importlib.import_module("bipace_kernels.backends.cuda.gram"), "WARPGROUPS", False):
        return x.advantages(config)


def by_memory(x: Ragged) -> str:
    """Matrices of two sizes and little shared memory: a few clusters fit, one per record does not."""
    clusters = importlib.import_module("bipace_kernels.backends.cuda.clusters")
    with mock.patch.object(clusters, "LIMITS", clusters.Limits(middle=100, shared=60_000)):
        return x.sweep((1e-4, 0.10))


def run(device: torch.device, backends: Sequence[str], *, small: bool = False) -> tuple[list[str], bool]:
    """One line per check and backend, and whether all is well."""
    lines, fine = [], True
    for backend in backends:
        if why := absent(backend):
            texts, well = [f"not available: {why}"], not expected(backend)
        else:
            texts, well = _run(device, backend, small)
        lines += [f"{backend}: {line}" for line in texts]
        fine &= well
    return lines, fine


def _run(device: torch.device, backend: str, small: bool) -> tuple[list[str], bool]:
    x, longer = Ragged(device, backend), Ragged(device, backend, groups=LONGER)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("Config.bipace()", lambda: x.advantages(bk.Config.bipace())),
        ("Config.bipace(estimator='diff_peer')", lambda: x.advantages(bk.Config.bipace(estimator="diff_peer"))),
        ("Config.bigpo(), ε = 0", lambda: x.advantages(bk.Config.bigpo(epsilon=0.0))),
        ("Config.gigpo('mean_std_norm')", lambda: x.advantages(bk.Config.gigpo("mean_std_norm"))),
        ("Config.hgpo()", lambda: x.advantages(bk.Config.hgpo())),
        ("Config.gae()", lambda: x.advantages(bk.Config.gae())),
        ("Config.gae(share='group')", lambda: x.advantages(bk.Config.gae(share="group"))),
        ("a sweep of ε", x.sweep),
        ("Config.bipace(), longer groups", lambda: longer.advantages(bk.Config.bipace())),
        ("action_keys", x.keys),
    ]
    if backend == "cuda":
        checks.append(("a sweep of ε, longer groups with S in memory", lambda: by_memory(longer)))
        checks.append(("Config.bipace(), longer groups, by warps", lambda: by_warps(longer, bk.Config.bipace())))
    if not small:
        # Without a GPU that would take minutes.
        large = Ragged(device, backend, groups=LARGE if device.type == "cuda" else GROUPS[:2], dim=LARGE_DIM)
        checks += [
            (f"Config.bipace(), a group of 400, D = {LARGE_DIM}", lambda: large.advantages(bk.Config.bipace())),
            ("n-gram fingerprints", lambda: ngrams(x)),
        ]
        single = Ragged(device, backend, dtype=torch.float32)
        checks += [
            ("Config.bipace(), float32 rows", lambda: single.advantages(bk.Config.bipace())),
            ("Config.grpo()", lambda: x.advantages(bk.Config.grpo())),
        ]
    lines, fine = [], True
    for name, check in checks:
        try:
            text = check()
        except Exception as error:  # the other checks are worth having
            text = f"FAILED: {type(error).__name__}: {error}"
        fine &= not any(word in text for word in ("DIFFERENT", "FAILED", "beyond"))
        lines.append(f"{name}: {text}")
    return lines, fine


def profile(backend: str) -> None:
    """One whole chain between the profiler's marks, after another that compiles and fills the allocator."""
    x = Batch(w.ON_GPU[0], torch.device("cuda"))
    call = x.whole
    try:
        call(backend)
    except ImportError:  # no tokenizer to make responses with: the chain without the keys
        call = x.with_keys
        call(backend)
    torch.cuda.synchronize()
    profiler: Any = torch.cuda.profiler
    profiler.start()
    call(backend)
    torch.cuda.synchronize()
    profiler.stop()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_smoke", description=str(__doc__).splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer calls: for the sanitizer")
    parser.add_argument("--profile", action="store_true", help="one whole chain between the profiler's marks")
    parser.add_argument("--backend", choices=BACKENDS, help="one of them; all of them without, but for the profile")
    arguments = parser.parse_args(argv)
    if arguments.profile:
        profile(arguments.backend or BACKENDS[0])
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines, fine = run(device, [arguments.backend] if arguments.backend else BACKENDS, small=arguments.small)
    sys.stdout.write("\n".join(lines) + "\n")
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
