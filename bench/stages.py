"""The stages: what is compared with what, on which data, and which result must come out on both sides."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

import bipace_kernels as bk

from . import competitors as c
from . import memory, roofline
from . import workloads as w
from .measure import Effort, Side, Timing, available_memory, busy, compare
from .roofline import Ceilings, Work

OURS = "bipace_kernels"
CLONE = "torch.clone of the fingerprints"


@dataclass
class Row:
    """One implementation on one workload."""

    stage: str
    workload: str
    side: str
    shape: str
    dtype: str
    kind: str  # "ours" | "competitor" | "bound" | "not available"
    median_ms: float | None = None
    iqr_ms: float | None = None
    cpu_ms: float | None = None  # of all threads together, waiting in a spin included
    rounds: int = 0
    bytes: int = 0
    flop: int = 0
    gb_s: float | None = None
    copy_percent: float | None = None
    gflop_s: float | None = None
    gemm_percent: float | None = None
    ratio: float | None = None  # this median / that of the nearest row of ours above: over 1, we are faster
    agreement: str = ""
    note: str = ""

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Point:
    """One size on the scaling curve."""

    series: str
    records: int
    clusters: int
    dim: int
    dtype: str
    median_ms: float
    iqr_ms: float
    rounds: int
    cpu_ms: float = 0.0


@dataclass
class Results:
    rows: list[Row] = field(default_factory=list)
    scaling: list[Point] = field(default_factory=list)
    memory: list[memory.Peak] = field(default_factory=list)

    def hold_against(self, ceilings: Ceilings) -> None:
        """Fills in the percentages of the ceilings."""
        for row in self.rows:
            row.copy_percent = None if row.gb_s is None else 100 * row.gb_s / ceilings.copy_gb_s
            row.gemm_percent = None if row.gflop_s is None else 100 * row.gflop_s / ceilings.gemm_gflop_s

    def ratio(self, stage: str, workload: str, side: str) -> float | None:
        """How much slower `side` was than ours; None where it was not measured."""
        for row in self.rows:
            if (row.stage, row.workload, row.side) == (stage, workload, side):
                return row.ratio
        return None


@dataclass
class Context:
    """What every stage needs."""

    quick: bool
    threads: int
    effort: Effort
    slow: Effort  # for sides that take seconds a call
    results: Results
    say: Callable[[str], None]  # what is being done now
    tick: Callable[[], None]  # one call done


class Entry(NamedTuple):
    """A side with the text printed next to its time."""

    side: Side
    kind: str
    work: Work
    agreement: str | Callable[[], str] = ""  # a callable is asked after the timing
    note: str = ""
    dtype: str = ""


def _compare(
    ctx: Context, stage: str, workload: str, shape: str, dtype: str, entries: Sequence[Entry], effort: Effort
) -> None:
    """Times the entries in turns and appends their rows; a ratio is against the nearest row of ours above."""
    ctx.say(f"{stage}: {workload}")
    timings = compare([e.side for e in entries], effort, tick=ctx.tick)
    first = ours = timings[entries[0].side.name].median
    for entry in entries:
        timing = timings[entry.side.name]
        if entry.kind == "ours":
            ours = timing.median
        base = first if entry.kind == "ours" else ours
        ctx.results.rows.append(_row(stage, workload, shape, dtype, entry, timing, base))


def _row(stage: str, workload: str, shape: str, dtype: str, entry: Entry, timing: Timing, ours: float) -> Row:
    seconds = timing.median / 1e3
    gb_s = entry.work.bytes / seconds / 1e9 if entry.work.bytes else None
    gflop_s = entry.work.flop / seconds / 1e9 if entry.work.flop else None
    return Row(
        stage=stage,
        workload=workload,
        side=entry.side.name,
        shape=shape,
        dtype=entry.dtype or dtype,
        kind=entry.kind,
        median_ms=timing.median,
        iqr_ms=timing.iqr,
        cpu_ms=timing.cpu_median,
        rounds=len(timing.samples),
        bytes=entry.work.bytes,
        flop=entry.work.flop,
        gb_s=gb_s,
        gflop_s=gflop_s,
        ratio=timing.median / ours,
        agreement=entry.agreement if isinstance(entry.agreement, str) else entry.agreement(),
        note=entry.note,
    )


def _absent(ctx: Context, stage: str, workload: str, shape: str, dtype: str, side: str, reason: str) -> None:
    ctx.results.rows.append(Row(stage, workload, side, shape, dtype, "not available", note=reason))


# --------------------------------------------------------------------------------------------------------- agreement


def canonical(labels: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Labels renumbered by first appearance, so that equal partitions are equal arrays."""
    flat = labels.numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
    _, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[inverse.reshape(-1)])


def partition_agreement(theirs: Any, ours: Any) -> str:
    """ "same partition", or how the two differ."""
    a, b = canonical(theirs), canonical(ours)
    if np.array_equal(a, b):
        return "same partition"
    both = len(np.unique(np.stack([a, b]), axis=1).T)
    return f"DIFFERENT: {a.max() + 1} clusters against {b.max() + 1}, {both} in the common refinement"


def number_agreement(theirs: torch.Tensor, ours: torch.Tensor, *, tolerance: float = 2e-5) -> str:
    """Largest difference, or how many rows are beyond the tolerance."""
    gap = (theirs.double() - ours.double()).abs()
    far = int((gap > tolerance).sum())
    return f"largest difference {float(gap.max()):.1e}" + (f", {far} rows beyond {tolerance:g}" if far else "")


def _check_states(batch: w.Steps, label: torch.Tensor) -> str:
    """The planted states must have come out; their number goes into the table."""
    planted = batch.group * batch.shape.states + batch.state
    found = canonical(label)
    if not np.array_equal(found, canonical(planted)):
        raise RuntimeError(
            f"{batch.shape.name}: expected {batch.shape.groups * batch.shape.states} planted clusters at "
            f"ε = {w.EPSILON}, got {found.max() + 1}; workload or clustering is wrong, timings would mean nothing"
        )
    return f"{batch.shape.states} clusters in each of {batch.shape.groups} groups, as planted"


# ------------------------------------------------------------------------------------------------------------ inputs

NUMPY = "NumPy loop, BLAS threads"
NUMPY_POOL = "NumPy loop, one thread per group"
TORCH_LOOP = "torch loop, one record at a time"
COMMUNITY = "community_detection (sentence_transformers)"
PIPELINE = "dict-of-lists GiGPO, uuid strings"
PIPELINE_INTS = "dict-of-lists GiGPO, integer ids"
DECODE = "tokenizer.batch_decode + re + hash"
DECODE_RUST = "tokenizers' decode_batch + re + hash"
DIFFLIB = "difflib loop"
DIFFLIB_BEST = "difflib loop, indexed once, bounds first"
BIPACE_CALL = "bk.advantage, Config.bipace()"
GAE_GROUP, GAE_BATCH = "bk.advantage, Config.gae(share='group')", "bk.advantage, Config.gae()"
NUMPY_VALUES = "NumPy/BLAS and LAPACK, group by group"
XXHASH = "xxhash + np.bincount loop"


class Hidden:
    """Fingerprints with their ids, and every call that is timed on them (each takes and ignores one argument)."""

    def __init__(self, shape: w.Shape, dtype: torch.dtype = torch.float32, *, threads: int = 1) -> None:
        self.batch = batch = w.steps(shape)
        self.fingerprint = w.fingerprints(batch, dtype=dtype)
        self.ids: dict[str, Any] = {
            "group": torch.from_numpy(batch.group),
            "trajectory": torch.from_numpy(batch.trajectory),
            "step": torch.from_numpy(batch.step),
        }
        self.values: dict[str, Any] = {
            "rewards": torch.from_numpy(batch.rewards),
            "action_key": torch.from_numpy(batch.action_key),
            "config": bk.Config.bipace(epsilon=w.EPSILON),
        }
        self.layout = bk.layout(**self.ids)
        self.offsets = batch.offsets
        self.threads = threads

    def cluster(self, _: Any = None) -> torch.Tensor:
        return bk.cluster(self.fingerprint, None, w.EPSILON, layout=self.layout)

    def advantage(self, _: Any = None) -> Any:
        return bk.advantage(**self.ids, **self.values, fingerprint=self.fingerprint)

    def gae(self, config: bk.Config) -> Any:
        return bk.advantage(**self.ids, **{**self.values, "config": config}, fingerprint=self.fingerprint)

    def advantage_with_layout(self, _: Any = None) -> Any:
        return bk.advantage(None, None, **self.values, layout=self.layout, fingerprint=self.fingerprint)

    def clone(self, _: Any = None) -> torch.Tensor:
        return self.fingerprint.clone()

    def numpy(self, _: Any = None) -> Any:
        return c.numpy_clusters(self.fingerprint.numpy(), self.offsets, w.EPSILON)

    def numpy_pool(self, _: Any = None) -> Any:
        return c.numpy_clusters_pool(self.fingerprint.numpy(), self.offsets, w.EPSILON, threads=self.threads)

    def torch_loop(self, _: Any = None) -> torch.Tensor:
        return c.torch_clusters(self.fingerprint, self.offsets, w.EPSILON)

    def communities(self, _: Any = None) -> torch.Tensor:
        return c.communities(self.fingerprint, self.offsets, w.EPSILON)

    def bipace_loop(self, _: Any = None) -> torch.Tensor:
        b = self.batch
        return c.bipace_loop(
            self.fingerprint, self.offsets, b.rewards, b.shape.steps, b.action_key, epsilon=w.EPSILON, gamma=w.GAMMA
        )

    def clone_entry(self) -> Entry:
        return Entry(Side(CLONE, self.clone), "bound", roofline.clone_work(self.fingerprint), note="lower bound")


class _Records(NamedTuple):
    """One repetition's inputs of a GiGPO call: strings without cached hashes."""

    group: Any  # [N] object array of uuid strings, or integers
    trajectory: Any
    texts: list[str]
    objects: Any  # the same texts as an object array, the form trainers keep them in


class Observed:
    """A batch with observations, and every call that is timed on it; `texts` are kept to be copied from."""

    def __init__(self, shape: w.Shape, texts: list[str] | None = None) -> None:
        self.batch = w.steps(shape)
        self.texts = w.observations(self.batch) if texts is None else texts
        score = torch.from_numpy(self.batch.rewards.reshape(-1, shape.steps).sum(1))
        self.score = score.repeat_interleave(shape.steps)

    def with_strings(self) -> _Records:
        return self._records(w.uuids(self.batch.group), w.uuids(self.batch.trajectory, seed=1))

    def with_integers(self) -> _Records:
        return self._records(self.batch.group, self.batch.trajectory)

    def _records(self, group: Any, trajectory: Any) -> _Records:
        texts = w.fresh(self.texts)
        objects = np.empty(len(texts), object)
        objects[:] = texts
        return _Records(group, trajectory, texts, objects)

    def ours(self, config: bk.Config) -> Callable[[_Records], Any]:
        rewards = self.batch.rewards
        return lambda x: bk.advantage(x.group, x.trajectory, rewards, observation=x.texts, config=config)

    def pipeline(self, *, divide: bool = False) -> Callable[[_Records], torch.Tensor]:
        rewards, score = self.batch.rewards, self.score
        return lambda x: c.gigpo_pipeline(
            rewards, score, x.group, x.trajectory, x.objects, gamma=w.GAMMA, divide=divide
        )


# ------------------------------------------------------------------------------------------------------------ stages


def clusters(ctx: Context) -> None:
    """bk.cluster against NumPy, torch and sentence_transformers; all get sorted rows and ready offsets."""
    for shape in (w.TINY,) if ctx.quick else w.CLUSTERING:
        _clusters_at(ctx, shape)
        gc.collect()


def _clusters_at(ctx: Context, shape: w.Shape) -> None:
    ctx.say(f"clusters: making {shape.name}")
    x, half = Hidden(shape, threads=ctx.threads), Hidden(shape, torch.bfloat16)
    label = x.cluster()
    planted = _check_states(x.batch, label)
    work = roofline.cluster_work(x.fingerprint, label.numpy(), x.offsets)
    half_work = roofline.cluster_work(half.fingerprint, label.numpy(), x.offsets)

    def against(name: str, call: Callable[[Any], Any], note: str = "") -> Entry:
        return Entry(Side(name, call), "competitor", work, partition_agreement(call(None), label), note)

    entries = [
        Entry(Side(OURS, x.cluster), "ours", work, planted),
        against(NUMPY, x.numpy),
        against(NUMPY_POOL, x.numpy_pool),
        against(TORCH_LOOP, x.torch_loop),
    ]
    absent = ""
    try:
        c.community_detection()
    except ImportError as error:
        absent = str(error)
    else:
        note = "another algorithm: largest neighbourhoods first, no centroids"
        entries.append(against(COMMUNITY, x.communities, note))
    in_half = Side(f"{OURS}, bfloat16 rows", half.cluster)
    entries += [
        x.clone_entry(),
        Entry(in_half, "ours", half_work, partition_agreement(half.cluster(), label), dtype="bfloat16"),
    ]
    _compare(ctx, "clusters", shape.name, shape.text(), "float32", entries, ctx.effort)
    if absent:
        _absent(ctx, "clusters", shape.name, shape.text(), "float32", COMMUNITY, absent)


def advantage(ctx: Context) -> None:
    """The whole BiPACE call (fingerprints to advantages) against loops, and against the pipeline's mere GiGPO."""
    for shape in (w.TINY,) if ctx.quick else (*w.TRAINING, w.LONG):
        _advantage_at(ctx, shape)
        gc.collect()


def _advantage_at(ctx: Context, shape: w.Shape) -> None:
    ctx.say(f"advantage: making {shape.name}")
    x = Hidden(shape)
    result = x.advantage()
    planted = _check_states(x.batch, result.cluster)
    clustering = roofline.cluster_work(x.fingerprint, result.cluster.numpy(), x.offsets)
    work = roofline.advantage_work(clustering, shape.records)

    def against(name: str, call: Callable[[Any], Any], kind: str, found: torch.Tensor) -> Entry:
        return Entry(Side(name, call), kind, work, number_agreement(found, result.advantage))

    entries = [
        Entry(Side(OURS, x.advantage), "ours", work, planted),
        against(TORCH_LOOP, x.bipace_loop, "competitor", x.bipace_loop()),
        x.clone_entry(),
    ]
    searched = shape.records <= 20_000
    if searched:
        seen = Observed(shape)
        note = "another estimator, no fingerprints: the yardstick of what trainers spend today"
        entries.append(Entry(Side(PIPELINE, seen.pipeline(), seen.with_strings), "competitor", Work(), note=note))
    with_layout = x.advantage_with_layout
    entries.append(against(f"{OURS}, layout ready", with_layout, "ours", with_layout().advantage))
    _compare(ctx, "advantage", shape.name, shape.text(), "float32", entries, ctx.slow)
    if not searched:
        reason = f"one search per record over {shape.records:,} records: tens of minutes"
        _absent(ctx, "advantage", shape.name, shape.text(), "str", PIPELINE, reason)


def critic(ctx: Context) -> None:
    """Config.gae() against BiPACE on the same fingerprints, and against a Gaussian process by BLAS and LAPACK."""
    for shape in (w.TINY,) if ctx.quick else w.TRAINING[:2]:
        _critic_at(ctx, shape)
        gc.collect()


def _critic_at(ctx: Context, shape: w.Shape) -> None:
    ctx.say(f"critic: making {shape.name}")
    x = Hidden(shape)
    group, batch = bk.Config.gae(share="group"), bk.Config.gae()
    result, time = x.gae(group), torch.as_tensor(x.ids["step"]).numpy()
    rows, returns = x.fingerprint.numpy(), result.returns.numpy()
    work = roofline.value_work(x.fingerprint, x.offsets)

    def naive(_: Any = None) -> Any:
        return c.numpy_values(
            rows, x.offsets, returns, time, width=group.kernel_width, horizon=group.kernel_time or math.inf,
            noise=group.kernel_noise,
        )  # fmt: skip

    same = number_agreement(torch.from_numpy(naive()), result.value.double())
    entries = [
        Entry(Side(BIPACE_CALL, x.advantage), "ours", Work(), note="the yardstick"),
        Entry(Side(GAE_GROUP, lambda _: x.gae(group)), "ours", work),
        Entry(Side(NUMPY_VALUES, naive), "competitor", work, same, "only values of states"),
        Entry(Side(GAE_BATCH, lambda _: x.gae(batch)), "ours", work),
    ]
    _compare(ctx, "critic", shape.name, shape.text(), "float32", entries, ctx.slow)


def gigpo(ctx: Context) -> None:
    """The GiGPO preset on string observations against the dict-of-lists pipeline, same inputs on both sides."""
    alfworld, _, webshop, textcraft = w.TRAINING
    for shape in (w.TINY,) if ctx.quick else (alfworld, webshop, textcraft):
        _gigpo_at(ctx, shape)


def _gigpo_at(ctx: Context, shape: w.Shape) -> None:
    ctx.say(f"gigpo: {shape.name}")
    x = Observed(shape)
    ours = x.ours(bk.Config.gigpo())
    plain, divided = x.ours(bk.Config.gigpo(mode="mean_norm")), x.ours(bk.Config.gigpo(mode="mean_std_norm"))
    theirs, theirs_divided = x.pipeline(), x.pipeline(divide=True)
    work = roofline.text_work(x.texts, out_bytes=25 * len(x.texts))
    strings, integers = x.with_strings, x.with_integers
    same = number_agreement(theirs(strings()), plain(strings()).advantage)
    same_ints = number_agreement(theirs(integers()), plain(integers()).advantage)
    same_divided = _divided_agreement(theirs_divided(strings()), divided(strings()))
    entries = [
        Entry(Side(OURS, ours, strings), "ours", work, note="Config.gigpo(), uuid strings as ids"),
        Entry(Side(f"{OURS}, mean_norm", plain, strings), "ours", work),
        Entry(Side(PIPELINE, theirs, strings), "competitor", work, same, "mean_norm"),
        Entry(Side(f"{OURS}, mean_std_norm", divided, strings), "ours", work),
        Entry(Side(f"{PIPELINE}, mean_std_norm", theirs_divided, strings), "competitor", work, same_divided),
        Entry(Side(f"{OURS}, integer ids", plain, integers), "ours", work, note="mean_norm"),
        Entry(Side(PIPELINE_INTS, theirs, integers), "competitor", work, same_ints, "mean_norm"),
    ]
    _compare(ctx, "gigpo", shape.name, f"{shape.groups}×{shape.rollouts}×{shape.steps}", "str", entries, ctx.slow)


def loaded(ctx: Context) -> None:
    """GiGPO on strings beside a busy process for each core, as on a training machine."""
    shape = w.TINY if ctx.quick else w.TRAINING[0]
    x = Observed(shape)
    ours, theirs = x.ours(bk.Config.gigpo(mode="mean_norm")), x.pipeline()
    same = number_agreement(theirs(x.with_strings()), ours(x.with_strings()).advantage)
    entries = [
        Entry(Side(OURS, ours, x.with_strings), "ours", Work(), note="mean_norm"),
        Entry(Side(PIPELINE, theirs, x.with_strings), "competitor", Work(), same, "mean_norm"),
    ]
    for name, count in (("nothing beside it", 0), ("a busy process per core", os.cpu_count() or 1)):
        with busy(count):
            _compare(ctx, "loaded", f"{shape.name}, {name}", shape.text(), "str", entries, ctx.slow)


def _divided_agreement(theirs: torch.Tensor, ours: Any) -> str:
    """Where all returns of a cluster are equal, a float32 mean leaves rounding that the division by δ blows up."""
    label, returns = ours.cluster.numpy(), ours.returns.numpy()
    low, high = np.full(label.max() + 1, np.inf), np.full(label.max() + 1, -np.inf)
    np.minimum.at(low, label, returns)
    np.maximum.at(high, label, returns)
    flat = torch.from_numpy((low == high)[label])
    text = number_agreement(theirs[~flat], ours.advantage[~flat])
    noise = float((theirs - ours.advantage)[flat].abs().max()) if bool(flat.any()) else 0.0
    if noise > 2e-5:
        text += f"; up to {noise:.2g} off the exact 0 on {int(flat.sum())} rows whose cluster's returns are all equal"
    return text


def action_keys(ctx: Context) -> None:
    """action_tag keys from token ids against decoding and matching; and from text against re + hash."""
    count, length = (24, 48) if ctx.quick else (6400, 512)
    shape = f"{count}×{length} tokens"
    ctx.say("action_keys: training a tokenizer")
    try:
        batch = w.responses(count, length)
    except ImportError as error:
        _absent(ctx, "action_keys", "token ids", shape, "int64", DECODE, str(error))
        return
    table = bk.token_bytes(batch.tokenizer)
    texts = batch.tokenizer.batch_decode(batch.ids, skip_special_tokens=True)

    def ours(_: Any) -> Any:
        return bk.action_keys(batch.ids, mode="action_tag", mask=batch.mask, token_bytes=table)

    def ours_text(x: list[str]) -> Any:
        return bk.action_keys(x, mode="action_tag")

    def decoded(_: Any) -> Any:
        return c.decoded_keys(batch.tokenizer, batch.ids, 8)

    def rust(_: Any) -> Any:
        return c.rust_decoded_keys(batch.tokenizer, batch.ids, 8)

    def again() -> list[str]:
        return w.fresh(texts)

    result, from_text = ours(None), ours_text(texts)
    work, text_work = Work(bytes=8 * batch.tokens + 9 * count), roofline.text_work(texts, out_bytes=9 * count)
    note = "rows decoded in parallel, outside Python"
    by_ids = [
        Entry(Side(OURS, ours), "ours", work, f"{int(result[1].sum())} of {count} parsed"),
        Entry(Side(DECODE, decoded), "competitor", work, _key_agreement(decoded(None), result)),
        Entry(Side(DECODE_RUST, rust), "competitor", work, _key_agreement(rust(None), result), note),
    ]
    same = _key_agreement(c.keys_of_texts(texts), from_text)
    by_text = [
        Entry(Side(OURS, ours_text, again), "ours", text_work, f"{int(from_text[1].sum())} of {count} parsed"),
        Entry(Side("re + hash", c.keys_of_texts, again), "competitor", text_work, same),
    ]
    _compare(ctx, "action_keys", "token ids", shape, "int64", by_ids, ctx.slow)
    _compare(ctx, "action_keys", "texts", f"{count} texts", "str", by_text, ctx.effort)


def _key_agreement(theirs: tuple[list[int], list[bool]], ours: Any) -> str:
    keys, parsed = ours
    flags = int((np.asarray(theirs[1]) != parsed.numpy()).sum())
    return partition_agreement(np.asarray(theirs[0]), keys) + (f", {flags} parsed flags differ" if flags else "")


def similar(ctx: Context) -> None:
    """verl-agent's similarity mode against difflib."""
    shape = w.TINY if ctx.quick else w.TRAINING[0]
    ctx.say("similar")
    x = Observed(shape, w.similar_observations(w.steps(shape), length=160 if ctx.quick else 400))
    config = bk.Config(partition="similar", estimator="mean")
    group, trajectory = torch.from_numpy(x.batch.group), torch.from_numpy(x.batch.trajectory)
    threshold = config.similarity

    def again() -> list[str]:
        return w.fresh(x.texts)

    def ours(texts: list[str]) -> Any:
        return bk.advantage(group, trajectory, x.batch.rewards, observation=texts, config=config)

    label = ours(again()).cluster
    found: dict[str, Any] = {}  # the loops take a minute: their timed calls are the ones that are checked

    def loop(texts: list[str]) -> None:
        found[DIFFLIB] = c.similar_loop(texts, x.batch.offsets, threshold)

    def best(texts: list[str]) -> None:
        found[DIFFLIB_BEST] = c.similar_loop_best(texts, x.batch.offsets, threshold)

    def same(name: str) -> Callable[[], str]:
        return lambda: partition_agreement(found[name], label)

    work = roofline.text_work(x.texts, out_bytes=8 * len(x.texts))
    entries = [
        Entry(Side(OURS, ours, again), "ours", work, f"{int(label.max()) + 1} clusters", "the whole bk.advantage call"),
        Entry(Side(DIFFLIB, loop, again), "competitor", work, same(DIFFLIB)),
        Entry(Side(DIFFLIB_BEST, best, again), "competitor", work, same(DIFFLIB_BEST)),
    ]
    text = f"{len(x.texts)} texts of {len(x.texts[0])} characters, {shape.groups} groups"
    few = dataclasses.replace(ctx.slow, fewest=1, warm_up=False)
    _compare(ctx, "similar", "observations", text, "str", entries, few)


def ngrams(ctx: Context) -> None:
    """Hashed character n-grams of observations against the xxhash library and np.bincount."""
    ctx.say("ngrams")
    texts = w.observations(w.steps(w.TINY if ctx.quick else w.TRAINING[0]))
    shape = f"{len(texts)} texts of {len(texts[0])} characters"

    def again() -> list[str]:
        return w.fresh(texts)

    def ours(x: list[str]) -> Any:
        return bk.ngram_fingerprint(x)

    def theirs(x: list[str]) -> Any:
        return c.ngram_loop(x, 3, 4096)

    result = ours(texts)
    work = roofline.text_work(texts, out_bytes=result.numel() * result.element_size())
    entries = [Entry(Side(OURS, ours, again), "ours", work)]
    absent = ""
    try:
        agreement = number_agreement(torch.from_numpy(theirs(texts)), result, tolerance=1e-6)
    except ImportError as error:
        absent = str(error)
    else:
        entries.append(Entry(Side(XXHASH, theirs, again), "competitor", work, agreement))
    clone = Side(CLONE, lambda _: result.clone())
    entries.append(Entry(clone, "bound", roofline.clone_work(result), note="lower bound"))
    _compare(ctx, "ngrams", "observations", shape, "str", entries, ctx.effort)
    if absent:
        _absent(ctx, "ngrams", "observations", shape, "str", XXHASH, absent)


# -------------------------------------------------------------------------------------------------- growth and memory


def scaling(ctx: Context) -> None:
    """Time of the whole call as the groups grow to 64 times their size, with the number of clusters fixed."""
    sizes = [6, 24] if ctx.quick else [50, 200, 800, 3200]  # steps of each rollout
    groups, rollouts, dim, states = (2, 2, 48, 5) if ctx.quick else (16, 8, 3584, 20)
    bytes_ = 4 * groups * rollouts * sizes[-1] * dim
    dtype = torch.float32 if available_memory() > 2 * bytes_ else torch.bfloat16  # half the memory, same rows
    for steps in sizes:
        shape = w.Shape("growing", groups, rollouts, steps, dim, states, "ALFWorld's rollouts made longer")
        _scaling_at(ctx, shape, dtype)
        gc.collect()


def _scaling_at(ctx: Context, shape: w.Shape, dtype: torch.dtype) -> None:
    ctx.say(f"scaling: making {shape.records:,} records")
    x = Hidden(shape, dtype)
    _check_states(x.batch, x.advantage().cluster)
    ctx.say(f"scaling: {shape.records:,} records")
    sides = [Side("bk.advantage, BiPACE", x.advantage)]
    if x.fingerprint.numel() * x.fingerprint.element_size() < 0.8 * available_memory():
        sides.append(Side(CLONE, x.clone))
    effort = ctx.slow if shape.records < 200_000 else dataclasses.replace(ctx.slow, rounds=5)
    clusters, name = shape.groups * shape.states, str(dtype).removeprefix("torch.")
    for series, t in compare(sides, effort, tick=ctx.tick).items():
        point = Point(series, shape.records, clusters, shape.dim, name, t.median, t.iqr, len(t.samples), t.cpu_median)
        ctx.results.scaling.append(point)


def memory_stage(ctx: Context) -> None:
    """Peak memory beyond the inputs, a process per case."""
    for case in memory.cases(quick=ctx.quick):
        ctx.say(f"memory: {case.name}")
        ctx.results.memory.append(memory.measure(case, quick=ctx.quick, threads=ctx.threads))
        ctx.tick()


STAGES: dict[str, Callable[[Context], None]] = {
    "clusters": clusters,
    "advantage": advantage,
    "critic": critic,
    "gigpo": gigpo,
    "loaded": loaded,
    "action_keys": action_keys,
    "similar": similar,
    "ngrams": ngrams,
    "scaling": scaling,
    "memory": memory_stage,
}


# ----------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    """A figure the project promises, and what was measured; `value` is None where its stage did not run."""

    name: str
    limit: float
    value: float | None
    at_least: bool = True
    unit: str = "×"
    stage: str = ""
    workload: str = ""
    sides: tuple[str, ...] = ()  # competitors the promise is about

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def asdict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def targets(found: Results) -> list[Target]:
    """The project's promises against these results; the fastest of a competitor's variants counts."""

    def against(name: str, limit: float, stage: str, workload: str, *sides: str) -> Target:
        ratios = [r for r in (found.ratio(stage, workload, side) for side in sides) if r is not None]
        return Target(name, limit, min(ratios, default=None), stage=stage, workload=workload, sides=sides)

    out = [
        against(f"clustering against NumPy/BLAS, {shape}", limit, "clusters", shape, NUMPY, NUMPY_POOL)
        for shape, limit in (("16x130-k12", 6), ("16x400-k20", 6), ("16x400-k70", 5), ("2x4096-k200", 3))
    ]
    name = w.TRAINING[0].name
    out += [
        against("GiGPO on 6,400 strings against dict-of-lists", 100, "gigpo", name, PIPELINE),
        against("BiPACE on 6,400 × 3,584 against dict-of-lists GiGPO", 15, "advantage", name, PIPELINE),
        against("action_tag keys of 6,400 × 512 token ids", 50, "action_keys", "token ids", DECODE, DECODE_RUST),
        against("similar, 6,400 texts of 400 characters, against difflib", 30, "similar", "observations", DIFFLIB),
    ]
    for text, side, limit in (("inside the group", GAE_GROUP, 3), ("over the batch", GAE_BATCH, 10)):
        times = found.ratio("critic", name, side)
        out.append(Target(f"GAE {text} on 6,400 × 3,584, times BiPACE", limit, times, at_least=False))
    worst = max((m.peak_bytes / m.allowed_bytes for m in found.memory), default=None)
    out.append(Target("memory beyond the inputs, worst case / allowed", 1.0, worst, at_least=False))
    out.append(
        Target("time per record, largest / smallest batch at fixed K", 1.2, growth(found.scaling), at_least=False)
    )
    return out


def growth(points: Sequence[Point]) -> float | None:
    """Time per record at the largest size over time per record at the smallest."""
    own = sorted((p for p in points if p.series != CLONE), key=lambda p: p.records)
    if len(own) < 2:
        return None
    return (own[-1].median_ms / own[-1].records) / (own[0].median_ms / own[0].records)
