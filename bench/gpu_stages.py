"""Each stage of a device backend by itself, as the pipeline calls it, and what it needs at least."""

import functools
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

import bipace_kernels as bk
from bipace_kernels.backends.schema import Terms

from . import workloads as w
from .gpu_cases import Batch
from .gpu_report import BY_WARPS, CLUSTERING, DECISIONS, GRAM, KEYS, STAGE, WHOLE
from .measure import all_cores
from .roofline import Work
from .stages import canonical, number_agreement, partition_agreement

COSINE = 2e-6  # how far a cosine may be from float64
_OF_CUDA = ("action_keys", "clusters", "gram", "scan", "values")
Case = tuple[str, Callable[[], Any], Work, Callable[[Any], str]]


def module(backend: str, stem: str) -> Any:
    """A stage's module in backends.triton or backends.cuda, which leaves most stages to Triton."""
    package = "cuda" if backend == "cuda" and stem in _OF_CUDA else "triton"
    return importlib.import_module(f"bipace_kernels.backends.{package}.{stem}")


def clusters(x: Batch, backend: str, epsilon: float = w.EPSILON) -> torch.Tensor:
    """Labels of all records: row checks, Gram matrix, decisions, numbering."""
    return module(backend, "clusters").cluster_cosine(x.on_device, x.fingerprint, epsilon)


def sweep(x: Batch, epsilons: torch.Tensor, backend: str) -> torch.Tensor:
    """[E, M] labels under every threshold."""
    return module(backend, "clusters").cluster_sweep(x.on_device, x.fingerprint, epsilons.tolist())


def clustering(x: Batch, backend: str) -> Case:
    return CLUSTERING, functools.partial(clusters, x, backend), x.cluster_need, x.check_labels


def with_keys(x: Batch, backend: str) -> Case:
    return "BiPACE with given keys", functools.partial(x.with_keys, backend), x.advantage_need, x.check_advantage


def whole(x: Batch, backend: str) -> Case:
    """ImportError where tokenizers or transformers are missing."""
    check = functools.partial(x.check_advantage, whole=True)
    return WHOLE, functools.partial(x.chain, backend), x.whole_need, check


def whole_or_with_keys(x: Batch, backend: str) -> Case:
    try:
        return whole(x, backend)
    except ImportError:
        return with_keys(x, backend)


def gae(x: Batch, backend: str, share: str = "batch") -> Case:
    name = "Config.gae()" if share == "batch" else f"Config.gae(share={share!r})"
    return name, functools.partial(x.with_gae, share, backend), Work(), functools.partial(x.check_gae, share)


def check_sweep(x: Batch, found: torch.Tensor, epsilons: torch.Tensor) -> str:
    """Each row of a sweep against the CPU backend; near a threshold the two may differ and both be right."""
    half, same = x.half, 0
    for labels, epsilon in zip(found.cpu(), epsilons.tolist(), strict=True):
        ours = bk.cluster(half, None, epsilon, layout=x.layout, backend="cpu", num_threads=all_cores())
        same += np.array_equal(canonical(labels), canonical(ours))
    return f"{same} of {len(epsilons)} partitions equal to the CPU's"


def _inside_clusters(x: Batch, backend: str) -> list[Case]:
    """The launches inside a clustering; the decisions with their state apart, or a replay would find it changed."""
    lay = x.on_device
    rows, gram, numbering = (module(backend, stem) for stem in ("rows", "gram", "numbering"))
    side = -(-lay.longest_group // gram.UNIT) * gram.UNIT
    n, d = x.fingerprint.shape

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    kind, scale, first = empty(n, dtype=torch.uint8), empty(n), empty(1, n, dtype=torch.int64)
    products = empty(lay.n_groups, side, side)
    lowest = [1.0 - w.EPSILON - 1e-5]

    def look() -> None:
        rows.read(x.fingerprint, lay.order, kind=kind, scale=scale)

    kernels = module(backend, "scan")
    if backend == "cuda":
        reciprocal = empty(n)
        part = gram.Groups(lay.group_offsets[:-1], lay.group_offsets[1:], side + 1)
        shared = module(backend, "clusters").LIMITS.shared

        def multiply() -> None:
            gram.multiply(x.fingerprint, lay.order, part, scale, products, reciprocal)

        def decide() -> torch.Tensor:
            kernels.decide(products, kind, part, reciprocal, lowest, first, shared)
            return first
    else:
        reciprocal, state = empty(lay.n_groups, side), empty(1, *products.shape)
        lowest_of = torch.full((1,), lowest[0], device=x.device)

        def multiply() -> None:
            given = (x.fingerprint, lay.order, lay.group_offsets, scale)
            gram.multiply_groups(*given, products, reciprocal, first_group=0)

        def decide() -> torch.Tensor:
            kernels.decide_groups(lay, kind, products, reciprocal, state, first, lowest, lowest_of, 0)
            return first

    look()
    multiply()
    triangles = sum(m * (m + 1) // 2 for m in np.diff(x.offsets).tolist())
    size = x.fingerprint.numel() * x.fingerprint.element_size()
    tiles, read = Work(bytes=size + 4 * triangles, flop=2 * d * triangles), Work(bytes=4 * triangles + 8 * n)

    def multiply_by_warps() -> None:
        with mock.patch.object(gram, "WARPGROUPS", False):
            multiply()

    others: list[Case] = []
    if backend == "triton":
        others = [("inside clusters: rows looked at", look, Work(bytes=size + 5 * n), _nothing)]
    elif gram.warpgroups(x.device):  # groups of four warps feed the tensor cores, and single warps could as well
        others = [(GRAM + BY_WARPS, multiply_by_warps, tiles, _nothing)]
    return [
        *others,
        (GRAM, multiply, tiles, _nothing),
        (DECISIONS, decide, read, lambda found: x.check_labels(numbering.dense_labels(found)[0])),
    ]


def decisions(x: Batch, backend: str) -> Case:
    """Only the scan."""
    return _inside_clusters(x, backend)[-1]


def _nothing(_: Any) -> str:
    return ""


def stages(x: Batch, backend: str) -> list[Case]:
    """One case per stage that the backend has itself, on tensors that lie ready; the chain of `whole` in its order."""
    lay, n = x.on_device, x.shape.records
    kernels = functools.partial(module, backend)
    rewards = x.rewards.double()
    returns = kernels("returns").discounted_returns(lay, rewards, w.GAMMA)
    totals = kernels("returns").trajectory_returns(lay, rewards)
    labels = clusters(x, backend)

    def discounted() -> torch.Tensor:
        return kernels("returns").discounted_returns(lay, rewards, w.GAMMA)

    def episode() -> torch.Tensor:
        return kernels("episode").episode_advantage(lay, totals, "trajectory", "std", "zero", 1e-6)

    def values() -> Any:
        return kernels("values").step_advantage(lay, returns, labels, x.action_key, "q_style", "none", 1e-6)

    terms = Terms(labels, *values())
    episodes = episode()

    def combine() -> Any:
        return kernels("combine").combine(lay, returns, episodes, terms, (1.0, 1.0))

    def rows() -> torch.Tensor:
        return kernels("clusters").scan_rows(lay, x.fingerprint)

    size = x.fingerprint.numel() * x.fingerprint.element_size()
    try:
        need = x.keys_need
    except ImportError:
        need = Work()  # the call says which package is missing
    out: list[Case] = [
        (KEYS, lambda: x.keys(backend), need, x.check_keys),
        (STAGE, lambda: clusters(x, backend), x.cluster_need, x.check_labels),
        ("values: V, Q, leave-one-out", values, Work(bytes=n * (4 + 8 + 8 + 4 + 1)), _nothing),
    ]
    if backend == "triton":
        out += [
            ("scan_rows: finite, not zero", rows, Work(bytes=size + n), _nothing),
            ("returns", discounted, Work(bytes=n * (8 + 8 + 4)), _nothing),
            ("episode", episode, Work(bytes=4 * n), _nothing),
            ("combine", combine, Work(bytes=n * (3 * 4 + 8 + 1 + 8) + n * (4 * 4 + 8 + 1)), _nothing),
        ]
    return [*out, *_inside_clusters(x, backend)]


def presets(x: Batch, backend: str) -> list[Case]:
    """Whole calls without cosine clusters, and equality of rows."""
    n = x.shape.records
    codes_on_host = torch.from_numpy(x.steps.group * x.shape.states + x.steps.state)
    codes = codes_on_host.to(x.device)
    small = Work(bytes=n * (8 + 4 + 4 * 4 + 8 + 1))
    size = x.fingerprint.numel() * x.fingerprint.element_size()

    def preset(config: bk.Config) -> Callable[[], Any]:
        given: dict[str, Any] = {"observation": codes, "layout": x.layout, "config": config}
        return lambda: bk.advantage(None, None, x.rewards, **given, backend=backend)

    def same_as_cpu(config: bk.Config) -> Callable[[Any], str]:
        def check(found: Any) -> str:
            given: dict[str, Any] = {"observation": codes_on_host, "layout": x.layout, "config": config}
            ours = bk.advantage(None, None, x.steps.rewards, **given, backend="cpu")
            same = partition_agreement(found.cluster.cpu(), ours.cluster)
            return f"{same}; advantages: {number_agreement(found.advantage.cpu(), ours.advantage)}"

        return check

    gigpo, hgpo = bk.Config.gigpo(), bk.Config.hgpo()
    cases: list[Case] = [
        ("Config.gigpo(), observations as codes", preset(gigpo), small, same_as_cpu(gigpo)),
        ("Config.hgpo(), observations as codes", preset(hgpo), small, same_as_cpu(hgpo)),
    ]
    if backend == "triton":
        equal = functools.partial(clusters, x, backend, 0.0)
        cases.append(("clusters of equal rows, ε = 0", equal, Work(bytes=size + 8 * n), _nothing))
    return cases


def worst_cosine(device: torch.device, groups: int, records: int, dim: int) -> float:
    """The largest |cosine − float64| of a pair: rows with a common direction, some features far larger than others."""
    generator = torch.Generator().manual_seed(dim)
    x = 1.5 * torch.randn(1, dim, generator=generator) + 0.15 * torch.randn(groups * records, dim, generator=generator)
    x[:, :4] *= 60
    rows = x.to(torch.bfloat16).to(device)
    kernels, side = module("cuda", "gram"), -(-records // 128) * 128
    offsets = torch.arange(groups + 1, device=device) * records
    ones = torch.ones(len(rows), device=device)
    products, reciprocal = torch.empty((groups, side, side), device=device), torch.empty(len(rows), device=device)
    whole = kernels.Groups(offsets[:-1], offsets[1:], records + 1)
    kernels.multiply(rows, torch.arange(len(rows), device=device), whole, ones, products, reciprocal)
    worst = 0.0
    for group, own, r in zip(products, rows.double().split(records), reciprocal.split(records), strict=True):
        exact = own @ own.T / own.norm(dim=1)[:, None] / own.norm(dim=1)
        found = (group[:records, :records] * r[:, None]) * r
        worst = max(worst, float((found.double() - exact).abs().triu().max()))
    return worst
