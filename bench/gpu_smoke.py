"""Each stage and preset of a backend once on a small ragged batch of the current GPU, against the CPU backend.

It is the first thing to run on a new machine (`bench gpu smoke`: a process for each check), what the sanitizer watches
(`--small`), and what the profiler counts (`--profile`: one whole chain at 16 × 400).
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

import bipace_kernels as bk

from . import gpu_stages, workloads as w
from .gpu_cases import BACKENDS, Batch, dry_cuda
from .gpu_checks import WATCHED, watched
from .stages import number_agreement, partition_agreement

GROUPS = ((1,), (3, 2), (7, 1, 12, 5), (30, 41))  # records of each trajectory, by prompt group
LONGER = ((40, 60, 50), (1,), (129, 12))  # several tiles of a Gram matrix
# With LARGE_DIM: stages of a tile that come round again, a dozen panels of a scan.
LARGE = ((100, 100, 100, 100), (60, 40))
LARGE_DIM = 512
Groups = tuple[tuple[int, ...], ...]
STATES, DIM = 6, 72


@functools.cache
def host() -> str:
    """The backend to compare with: an image may lack what the CPU's kernels are built with."""
    return "cpu" if bk.backends()["cpu"].available else "reference"


class Ragged:
    """Small groups of records with planted states, in shuffled row order, on one device; the same on the host."""

    def __init__(self, device: torch.device, backend: str, *, dtype: torch.dtype, groups: Groups, dim: int) -> None:
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

    def advantages(self, config: bk.Config) -> str:
        ours = bk.advantage(**self.there, config=config, backend=self.backend)
        want = bk.advantage(**self.host, config=config, backend=host())
        labels = partition_agreement(ours.cluster.cpu(), want.cluster)
        return f"{labels}, {number_agreement(ours.advantage.cpu(), want.advantage)}"

    def sweep(self, epsilons: Sequence[float] = (0.0, 0.05, 0.10, 0.30)) -> str:
        ours = bk.cluster(self.there["fingerprint"], self.there["group"], list(epsilons), backend=self.backend)
        want = bk.cluster(self.host["fingerprint"], self.host["group"], list(epsilons), backend=host())
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
            ids, mask = made.ids.to(self.device), made.mask.to(self.device)
            ours = bk.action_keys(ids, mask=mask, backend=self.backend, **more)
            want = bk.action_keys(made.ids, mask=made.mask, backend=host(), **more)
            same = all(torch.equal(a.cpu(), b) for a, b in zip(ours, want, strict=True))
            found.append(f"{mode}: {'same keys' if same else 'DIFFERENT'}")
        return ", ".join(found)


def _planted(batch: w.Steps, dtype: torch.dtype) -> torch.Tensor:
    """[N, D] rows around one direction per state, cosines far from any threshold."""
    generator = torch.Generator().manual_seed(4)
    shared, own = (torch.randn(n, batch.shape.dim, generator=generator) for n in (1, STATES))
    noise = torch.randn(len(batch.state), batch.shape.dim, generator=generator)
    rows = shared + 0.8 * own[torch.from_numpy(batch.state)] + 0.05 * noise
    return rows.to(dtype)


def _tile(device: torch.device, warpgroups: bool) -> str:
    """One tile of the tensor cores against float64: by groups of four warps where the GPU has them, or by single
    warps."""
    with mock.patch.object(gpu_stages.module("cuda", "gram"), "WARPGROUPS", warpgroups):
        worst = gpu_stages.worst_cosine(device, 1, 128, 64)
    beyond = f", beyond {gpu_stages.COSINE:g}" * (not worst <= gpu_stages.COSINE)
    return f"largest |cosine − float64| {worst:.2g}{beyond}"


def checks(device: torch.device, backend: str, *, small: bool = False) -> dict[str, Callable[[], str]]:
    """{name: a call whose text says what came out}, the most telling first; inputs are made by the call."""

    @functools.cache
    def ragged(groups: Groups = GROUPS, dim: int = DIM, dtype: torch.dtype = torch.bfloat16) -> Ragged:
        return Ragged(device, backend, dtype=dtype, groups=groups, dim=dim)

    def of(config: bk.Config, *which: Any) -> Callable[[], str]:
        return lambda: ragged(*which).advantages(config)

    def by_warps() -> str:
        with mock.patch.object(gpu_stages.module("cuda", "gram"), "WARPGROUPS", False):
            return ragged(LONGER).advantages(bk.Config.bipace())

    def by_memory() -> str:
        """Matrices of two sizes and little shared memory: a few clusters fit, one per record does not."""
        clusters = gpu_stages.module("cuda", "clusters")
        with mock.patch.object(clusters, "LIMITS", clusters.Limits(middle=100, shared=60_000)):
            return ragged(LONGER).sweep((1e-4, 0.10))

    make, cuda = bk.Config, backend == "cuda"
    found: dict[str, Callable[[], str]] = {}
    if cuda:
        found["one tile by groups of four warps (wgmma)"] = lambda: _tile(device, True)
        found["one tile by single warps (mma, ldmatrix)"] = lambda: _tile(device, False)
    found |= {
        "Config.bipace()": of(make.bipace()),
        "Config.bipace(estimator='diff_peer')": of(make.bipace(estimator="diff_peer")),
        "Config.bigpo(), ε = 0": of(make.bigpo(epsilon=0.0)),
        "Config.gigpo('mean_std_norm')": of(make.gigpo("mean_std_norm")),
        "Config.hgpo()": of(make.hgpo()),
        "Config.gae()": of(make.gae()),
        "Config.gae(share='group')": of(make.gae(share="group")),
        "a sweep of ε": lambda: ragged().sweep(),
        "Config.bipace(), longer groups": of(make.bipace(), LONGER),
        "action_keys": lambda: ragged().keys(),
    }
    if cuda:
        found["a sweep of ε, longer groups with S in memory"] = by_memory
        found["Config.bipace(), longer groups, by warps"] = by_warps
    if not small:
        large = LARGE if device.type == "cuda" else GROUPS[:2]  # without a GPU those would take minutes
        found |= {
            f"Config.bipace(), a group of 400, D = {LARGE_DIM}": of(make.bipace(), large, LARGE_DIM),
            "Config.bipace(), float32 rows": of(make.bipace(), GROUPS, DIM, torch.float32),
            "Config.grpo()": of(make.grpo()),
        }
    return found


def ask(check: Callable[[], str]) -> tuple[str, bool]:
    """What a check says, and whether all is well."""
    try:
        text = check()
    except Exception as error:  # the other checks are worth having
        text = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return text, not any(word in text for word in ("DIFFERENT", "FAILED", "beyond"))


def profile(backend: str) -> None:
    """One whole chain between the profiler's marks, after another that compiles and fills the allocator."""
    x = Batch(w.ON_GPU[0], torch.device("cuda"))
    call = x.chain
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
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="(default: %(default)s)")
    parser.add_argument("--check", metavar="NAME", help="only this one")
    parser.add_argument("--small", action="store_true", help="fewer checks: for the sanitizer")
    parser.add_argument("--profile", action="store_true", help="one whole chain between the profiler's marks")
    parser.add_argument("--dry", action="store_true", help="on the CPU, by interpreter and emulator")
    parser.add_argument("--watched", action="store_true", help=WATCHED)
    arguments = parser.parse_args(argv)
    if arguments.profile:
        profile(arguments.backend)
        return 0
    if arguments.dry:
        dry_cuda()
    every = checks(torch.device("cpu" if arguments.dry else "cuda"), arguments.backend, small=arguments.small)
    if arguments.watched:
        watched()
    fine = True
    for name, check in every.items():
        if arguments.check in (None, name):
            text, well = ask(check)
            fine &= well
            print(text if arguments.check else f"{arguments.backend}: {name}: {text}", flush=True)
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
