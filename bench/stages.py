"""The stages: what is compared with what, on which data, and which result must come out on both sides."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

import bipace_kernels as bk

from . import competitors as c, memory, roofline, workloads as w
from .measure import Effort, Side, available_memory, busy, compare
from .report import PICTURES, Columns, Target, about, page, remark, short, shorts, table, target_table
from .roofline import Ceilings, Work

SCHEMA = 1
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
        rows = (r.ratio for r in self.rows if (r.stage, r.workload, r.side) == (stage, workload, side))
        return next(rows, None)


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

    def shapes(self, *shapes: w.Shape) -> Iterator[w.Shape]:
        """The shapes, or one tiny one; what a stage made of the one before is gone when the next comes."""
        for shape in (w.TINY,) if self.quick else shapes:
            self.say(f"making {shape.name}")
            yield shape
            gc.collect()


class Entry(NamedTuple):
    """A side of a comparison with the text printed next to its time; without a call, the note says why it is absent."""

    kind: str
    side: str
    call: Callable[[Any], Any] | None
    work: Work = Work()
    agreement: str | Callable[[], str] = ""  # a callable is asked after the timing
    note: str = ""
    prepare: Callable[[], Any] = lambda: None
    dtype: str = ""


def _optional(make: Callable[[], Entry], side: str) -> Entry:
    """A competitor that needs a package, or the row that says which one is missing."""
    try:
        return make()
    except ImportError as error:
        return Entry("not available", side, None, note=str(error))


def _compare(
    ctx: Context, stage: str, workload: str, shape: str, dtype: str, entries: Sequence[Entry], effort: Effort
) -> None:
    """Times the entries in turns and appends their rows; a ratio is against the nearest row of ours above."""
    ctx.say(f"{stage}: {workload}")
    sides = [Side(e.side, e.call, e.prepare) for e in entries if e.call is not None]
    timings = compare(sides, effort, tick=ctx.tick)
    first = ours = timings[entries[0].side].median
    for e in entries:
        row = Row(stage, workload, e.side, shape, e.dtype or dtype, e.kind, note=e.note)
        ctx.results.rows.append(row)
        if e.call is None:
            continue
        timing = timings[e.side]
        row.median_ms, row.iqr_ms, row.cpu_ms, row.rounds = timing.median, timing.iqr, timing.cpu_median, timing.rounds
        if e.kind == "ours":
            ours = timing.median
        row.ratio = timing.median / (first if e.kind == "ours" else ours)
        row.bytes, row.flop = e.work.bytes, e.work.flop
        row.gb_s = e.work.bytes / timing.median / 1e6 or None
        row.gflop_s = e.work.flop / timing.median / 1e6 or None
        row.agreement = e.agreement if isinstance(e.agreement, str) else e.agreement()


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

    def __init__(
        self,
        shape: w.Shape,
        dtype: torch.dtype = torch.float32,
        *,
        threads: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape, self.threads = shape, threads
        self.batch = batch = w.steps(shape)
        self.fingerprint = w.fingerprints(batch, dtype=dtype, device=device)
        ids = {"group": batch.group, "trajectory": batch.trajectory, "step": batch.step}
        self.ids: dict[str, Any] = {name: torch.from_numpy(values) for name, values in ids.items()}
        self.rewards = torch.from_numpy(batch.rewards).to(device)
        self.action_key = torch.from_numpy(batch.action_key).to(device)
        self.config = bk.Config.bipace(epsilon=w.EPSILON)
        self.layout = bk.layout(**self.ids)
        self.offsets = batch.offsets

    @functools.cached_property
    def single(self) -> torch.Tensor:
        """[N, D] float32 where the fingerprints are: what a loop in torch works on."""
        return self.fingerprint.float()

    @functools.cached_property
    def rows(self) -> Any:
        """[N, D] float32 for NumPy."""
        return self.single.cpu().numpy()

    def cluster(self, _: Any = None) -> torch.Tensor:
        return bk.cluster(self.fingerprint, None, w.EPSILON, layout=self.layout)

    def whole(self, **changes: Any) -> Any:
        """The whole call; changes: other arguments, such as a layout, which replaces the ids."""
        ids = {} if "layout" in changes else self.ids
        rows = {"rewards": self.rewards, "fingerprint": self.fingerprint, "action_key": self.action_key}
        return bk.advantage(**{"config": self.config, **ids, **rows, **changes})

    def advantage(self, _: Any = None) -> Any:
        return self.whole()

    def advantage_with_layout(self, _: Any = None) -> Any:
        return self.whole(layout=self.layout)

    def clone(self, _: Any = None) -> torch.Tensor:
        return self.fingerprint.clone()

    def numpy(self, _: Any = None) -> Any:
        return c.numpy_clusters(self.rows, self.offsets)

    def numpy_pool(self, _: Any = None) -> Any:
        return c.numpy_clusters(self.rows, self.offsets, threads=self.threads)

    def torch_loop(self, _: Any = None) -> torch.Tensor:
        return c.torch_clusters(self.single, self.offsets)

    def communities(self, _: Any = None) -> torch.Tensor:
        return c.communities(self.single, self.offsets)

    def bipace_loop(self, _: Any = None) -> torch.Tensor:
        b = self.batch
        return c.bipace_loop(self.fingerprint, self.offsets, b.rewards, b.shape.steps, b.action_key)

    def clone_entry(self) -> Entry:
        return Entry("bound", CLONE, self.clone, roofline.clone_work(self.fingerprint), note="lower bound")


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
        return lambda x: c.gigpo_pipeline(rewards, score, x.group, x.trajectory, x.objects, divide=divide)


# ------------------------------------------------------------------------------------------------------------ stages


def clusters(ctx: Context) -> None:
    """bk.cluster against NumPy, torch and sentence_transformers; all get sorted rows and ready offsets."""
    for shape in ctx.shapes(*w.CLUSTERING):
        x, half = Hidden(shape, threads=ctx.threads), Hidden(shape, torch.bfloat16)
        label = x.cluster()
        planted = _check_states(x.batch, label)
        work, half_work = (roofline.cluster_work(y.fingerprint, label.numpy(), x.offsets) for y in (x, half))

        def against(name: str, call: Callable[[Any], Any], note: str = "") -> Entry:
            return Entry("competitor", name, call, work, partition_agreement(call(None), label), note)  # noqa: B023

        note = "another algorithm: largest neighbourhoods first, no centroids"
        same = partition_agreement(half.cluster(), label)
        entries = [
            Entry("ours", OURS, x.cluster, work, planted),
            against(NUMPY, x.numpy),
            against(NUMPY_POOL, x.numpy_pool),
            against(TORCH_LOOP, x.torch_loop),
            _optional(functools.partial(against, COMMUNITY, x.communities, note), COMMUNITY),
            x.clone_entry(),
            Entry("ours", f"{OURS}, bfloat16 rows", half.cluster, half_work, same, dtype="bfloat16"),
        ]
        _compare(ctx, "clusters", shape.name, shape.text(), "float32", entries, ctx.effort)


def advantage(ctx: Context) -> None:
    """The whole BiPACE call (fingerprints to advantages) against loops, and against the pipeline's mere GiGPO."""
    for shape in ctx.shapes(*w.TRAINING, w.LONG):
        x = Hidden(shape)
        result = x.advantage()
        planted = _check_states(x.batch, result.cluster)
        clustering = roofline.cluster_work(x.fingerprint, result.cluster.numpy(), x.offsets)
        work = roofline.advantage_work(clustering, shape.records)
        ready = x.advantage_with_layout
        by_loop = number_agreement(x.bipace_loop(), result.advantage)
        by_layout = number_agreement(ready().advantage, result.advantage)
        if shape.records <= 20_000:
            seen = Observed(shape)
            note = "another estimator, no fingerprints: the yardstick of what trainers spend today"
            pipeline = Entry("competitor", PIPELINE, seen.pipeline(), note=note, prepare=seen.with_strings)
        else:
            note = f"one search per record over {shape.records:,} records: tens of minutes"
            pipeline = Entry("not available", PIPELINE, None, note=note)
        entries = [
            Entry("ours", OURS, x.advantage, work, planted),
            Entry("competitor", TORCH_LOOP, x.bipace_loop, work, by_loop),
            x.clone_entry(),
            pipeline,
            Entry("ours", f"{OURS}, layout ready", ready, work, by_layout),
        ]
        _compare(ctx, "advantage", shape.name, shape.text(), "float32", entries, ctx.slow)


def critic(ctx: Context) -> None:
    """Config.gae() against BiPACE on the same fingerprints, and against a Gaussian process by BLAS and LAPACK."""
    group, batch = bk.Config.gae(share="group"), bk.Config.gae()
    plain = bk.Config.gae(share="group", luck_noise=0, kernel_directions=None)  # the first form
    for shape in ctx.shapes(*w.TRAINING[:2]):
        x = Hidden(shape)
        result = x.whole(config=plain)
        data = x.rows, x.offsets, result.returns.numpy(), x.ids["step"].numpy()
        naive = functools.partial(c.numpy_values, *data, plain)
        same = number_agreement(torch.from_numpy(naive()), result.value.double())
        work = roofline.value_work(x.fingerprint, x.offsets)
        entries = [
            Entry("ours", BIPACE_CALL, x.advantage, note="the yardstick"),
            Entry("ours", GAE_GROUP, lambda _, x=x: x.whole(config=group), work),
            Entry("competitor", NUMPY_VALUES, lambda _, naive=naive: naive(), work, same, "only values, first form"),
            Entry("ours", GAE_BATCH, lambda _, x=x: x.whole(config=batch), work),
        ]
        _compare(ctx, "critic", shape.name, shape.text(), "float32", entries, ctx.slow)


def gigpo(ctx: Context) -> None:
    """The GiGPO preset on string observations against the dict-of-lists pipeline, same inputs on both sides."""
    alfworld, _, webshop, textcraft = w.TRAINING
    for shape in ctx.shapes(alfworld, webshop, textcraft):
        x = Observed(shape)
        strings, integers = x.with_strings, x.with_integers
        plain, divided = x.ours(bk.Config.gigpo(mode="mean_norm")), x.ours(bk.Config.gigpo(mode="mean_std_norm"))
        theirs, theirs_divided = x.pipeline(), x.pipeline(divide=True)
        work = roofline.text_work(x.texts, out_bytes=25 * len(x.texts))
        same = number_agreement(theirs(strings()), plain(strings()).advantage)
        same_ints = number_agreement(theirs(integers()), plain(integers()).advantage)
        same_divided = _divided_agreement(theirs_divided(strings()), divided(strings()))
        mode, note = "mean_norm", "Config.gigpo(), uuid strings as ids"
        entries = [
            Entry("ours", OURS, x.ours(bk.Config.gigpo()), work, note=note, prepare=strings),
            Entry("ours", f"{OURS}, mean_norm", plain, work, prepare=strings),
            Entry("competitor", PIPELINE, theirs, work, same, mode, strings),
            Entry("ours", f"{OURS}, mean_std_norm", divided, work, prepare=strings),
            Entry("competitor", f"{PIPELINE}, mean_std_norm", theirs_divided, work, same_divided, prepare=strings),
            Entry("ours", f"{OURS}, integer ids", plain, work, note=mode, prepare=integers),
            Entry("competitor", PIPELINE_INTS, theirs, work, same_ints, mode, integers),
        ]
        _compare(ctx, "gigpo", shape.name, f"{shape.groups}×{shape.rollouts}×{shape.steps}", "str", entries, ctx.slow)


def loaded(ctx: Context) -> None:
    """GiGPO on strings beside a busy process for each core, as on a training machine."""
    for shape in ctx.shapes(w.TRAINING[0]):
        x = Observed(shape)
        ours, theirs = x.ours(bk.Config.gigpo(mode="mean_norm")), x.pipeline()
        same = number_agreement(theirs(x.with_strings()), ours(x.with_strings()).advantage)
        entries = [
            Entry("ours", OURS, ours, note="mean_norm", prepare=x.with_strings),
            Entry("competitor", PIPELINE, theirs, Work(), same, "mean_norm", x.with_strings),
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
        row = Row("action_keys", "token ids", DECODE, shape, "int64", "not available", note=str(error))
        return ctx.results.rows.append(row)
    table, tokenizer = bk.token_bytes(batch.tokenizer), batch.tokenizer
    texts = tokenizer.batch_decode(batch.ids, skip_special_tokens=True)

    def ours(_: Any) -> Any:
        return bk.action_keys(batch.ids, mode="action_tag", mask=batch.mask, token_bytes=table)

    def against(name: str, call: Callable[[Any], Any], note: str = "") -> Entry:
        return Entry("competitor", name, call, work, _key_agreement(call(None), from_ids), note)

    again, ours_text = functools.partial(w.fresh, texts), functools.partial(bk.action_keys, mode="action_tag")
    from_ids, from_text = ours(None), ours_text(texts)
    parsed, parsed_text = (f"{int(keys[1].sum())} of {count} parsed" for keys in (from_ids, from_text))
    work, text_work = Work(bytes=8 * batch.tokens + 9 * count), roofline.text_work(texts, out_bytes=9 * count)
    note = "rows decoded in parallel, outside Python"
    by_ids = [
        Entry("ours", OURS, ours, work, parsed),
        against(DECODE, lambda _: c.decoded_keys(tokenizer, batch.ids, 8)),
        against(DECODE_RUST, lambda _: c.decoded_keys(tokenizer, batch.ids, 8, in_rust=True), note),
    ]
    same = _key_agreement(c.keys_of_texts(texts), from_text)
    by_text = [
        Entry("ours", OURS, ours_text, text_work, parsed_text, prepare=again),
        Entry("competitor", "re + hash", c.keys_of_texts, text_work, same, prepare=again),
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
    x = Observed(shape, w.similar_observations(w.steps(shape), length=160 if ctx.quick else 400))
    config = bk.Config(partition="similar", estimator="mean")
    group, trajectory = torch.from_numpy(x.batch.group), torch.from_numpy(x.batch.trajectory)
    again = functools.partial(w.fresh, x.texts)

    def ours(texts: list[str]) -> Any:
        return bk.advantage(group, trajectory, x.batch.rewards, observation=texts, config=config)

    label = ours(again()).cluster
    labels: dict[str, Any] = {}  # the loops take a minute: their timed calls are the ones that are checked

    def against(name: str, loop: Callable[..., Any]) -> Entry:
        def call(texts: list[str]) -> None:
            labels[name] = loop(texts, x.batch.offsets, config.similarity)

        return Entry("competitor", name, call, work, lambda: partition_agreement(labels[name], label), prepare=again)

    work, count = roofline.text_work(x.texts, out_bytes=8 * len(x.texts)), f"{int(label.max()) + 1} clusters"
    entries = [
        Entry("ours", OURS, ours, work, count, "the whole bk.advantage call", again),
        against(DIFFLIB, c.similar_loop),
        against(DIFFLIB_BEST, c.similar_loop_best),
    ]
    text = f"{len(x.texts)} texts of {len(x.texts[0])} characters, {shape.groups} groups"
    few = dataclasses.replace(ctx.slow, fewest=1, warm_up=False)
    _compare(ctx, "similar", "observations", text, "str", entries, few)


def ngrams(ctx: Context) -> None:
    """Hashed character n-grams of observations against the xxhash library and np.bincount."""
    texts = w.observations(w.steps(w.TINY if ctx.quick else w.TRAINING[0]))
    again = functools.partial(w.fresh, texts)
    result = bk.ngram_fingerprint(texts)
    work = roofline.text_work(texts, out_bytes=result.numel() * result.element_size())

    def theirs(x: list[str]) -> Any:
        return c.ngram_loop(x, 3, 4096)

    def library() -> Entry:
        same = number_agreement(torch.from_numpy(theirs(texts)), result, tolerance=1e-6)
        return Entry("competitor", XXHASH, theirs, work, same, prepare=again)

    entries = [
        Entry("ours", OURS, bk.ngram_fingerprint, work, prepare=again),
        _optional(library, XXHASH),
        Entry("bound", CLONE, lambda _: result.clone(), roofline.clone_work(result), note="lower bound"),
    ]
    text = f"{len(texts)} texts of {len(texts[0])} characters"
    _compare(ctx, "ngrams", "observations", text, "str", entries, ctx.effort)


# -------------------------------------------------------------------------------------------------- growth and memory


def scaling(ctx: Context) -> None:
    """Time of the whole call as the groups grow to 64 times their size, with the number of clusters fixed."""
    sizes = [6, 24] if ctx.quick else [50, 200, 800, 3200]  # steps of each rollout
    groups, rollouts, dim, states = (2, 2, 48, 5) if ctx.quick else (16, 8, 3584, 20)
    bytes_ = 4 * groups * rollouts * sizes[-1] * dim
    dtype = torch.float32 if available_memory() > 2 * bytes_ else torch.bfloat16  # half the memory, same rows
    for steps in sizes:
        shape = w.Shape("growing", groups, rollouts, steps, dim, states, "ALFWorld's rollouts made longer")
        ctx.say(f"scaling: {shape.records:,} records")
        x = Hidden(shape, dtype)
        _check_states(x.batch, x.advantage().cluster)
        sides = [Side("bk.advantage, BiPACE", x.advantage)]
        if x.fingerprint.numel() * x.fingerprint.element_size() < 0.8 * available_memory():
            sides.append(Side(CLONE, x.clone))
        effort = ctx.slow if shape.records < 200_000 else dataclasses.replace(ctx.slow, rounds=5)
        size = shape.records, groups * states, dim, str(dtype).removeprefix("torch.")
        for series, t in compare(sides, effort, tick=ctx.tick).items():
            ctx.results.scaling.append(Point(series, *size, t.median, t.iqr, t.rounds, t.cpu_median))
        del x
        gc.collect()


def memory_stage(ctx: Context) -> None:
    """Peak memory beyond the inputs, a process per case."""
    for case in memory.cases(quick=ctx.quick):
        ctx.say(f"memory: {case.name}")
        ctx.results.memory.append(memory.measure(case, threads=ctx.threads))
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


def targets(found: Results) -> list[Target]:
    """The project's promises against these results; the fastest of a competitor's variants counts."""

    def against(name: str, limit: float, stage: str, workload: str, *sides: str) -> Target:
        ratios = [r for r in (found.ratio(stage, workload, side) for side in sides) if r is not None]
        return Target(name, limit, min(ratios, default=None), stage=stage, workload=workload, sides=sides)

    name = w.TRAINING[0].name
    times = {side: found.ratio("critic", name, side) for side in (GAE_GROUP, GAE_BATCH)}
    worst, grown = max((m.peak_bytes / m.allowed_bytes for m in found.memory), default=None), growth(found.scaling)
    return [
        *(against(f"clustering against NumPy/BLAS, {shape}", limit, "clusters", shape, NUMPY, NUMPY_POOL)
          for shape, limit in (("16x130-k12", 6), ("16x400-k20", 6), ("16x400-k70", 5), ("2x4096-k200", 3))),
        against("GiGPO on 6,400 strings against dict-of-lists", 100, "gigpo", name, PIPELINE),
        against("BiPACE on 6,400 × 3,584 against dict-of-lists GiGPO", 15, "advantage", name, PIPELINE),
        against("action_tag keys of 6,400 × 512 token ids", 50, "action_keys", "token ids", DECODE, DECODE_RUST),
        against("similar, 6,400 texts of 400 characters, against difflib", 30, "similar", "observations", DIFFLIB),
        Target("GAE inside the group on 6,400 × 3,584, times BiPACE", 3, times[GAE_GROUP], False, stage="critic"),
        Target("GAE over the batch on 6,400 × 3,584, times BiPACE", 3, times[GAE_BATCH], False, stage="critic"),
        Target("memory beyond the inputs, worst case / allowed", 1.0, worst, False, stage="memory"),
        Target("time per record, largest / smallest batch at fixed K", 1.2, grown, False, stage="scaling"),
    ]  # fmt: skip


def growth(points: Sequence[Point]) -> float | None:
    """Time per record at the largest size over time per record at the smallest."""
    own = sorted((p for p in points if p.series != CLONE), key=lambda p: p.records)
    if len(own) < 2:
        return None
    return (own[-1].median_ms / own[-1].records) / (own[0].median_ms / own[0].records)


# -------------------------------------------------------------------------------------------------------------- page

_TIMES: Columns = {
    "workload": "{workload}", "side": "{side}", "dtype": "{dtype}",
    "ms": lambda row: short(row["median_ms"]) or row["kind"], "IQR": shorts("iqr_ms"), "CPU ms": shorts("cpu_ms"),
    "rounds": "{rounds}", "slower": lambda row: "" if row["ratio"] is None else f"{short(row['ratio'])}×",
    "GB/s": shorts("gb_s"), "% copy": shorts("copy_percent"), "GFLOP/s": shorts("gflop_s"),
    "% GEMM": shorts("gemm_percent"), "result": remark,
}  # fmt: skip
_SCALING: Columns = {
    "series": "{series}", "records": "{records:,}", "clusters": "{clusters:,}", "D": "{dim}", "dtype": "{dtype}",
    "ms": shorts("median_ms"), "IQR": shorts("iqr_ms"), "rounds": "{rounds}",
    "µs/record": lambda p: short(p["median_ms"] * 1e3 / p["records"]),
}  # fmt: skip
_MEMORY: Columns = {
    "case": "{name}", "shape": "{shape}", "dtype": "{dtype}", "clusters K": "{clusters:,}",
    "peak MiB": lambda m: f"{m['peak_bytes'] / 2**20:,.1f}",
    "allowed MiB": lambda m: f"{m['allowed_bytes'] / 2**20:,.1f}",
    "met": lambda m: "yes" if m["peak_bytes"] <= m["allowed_bytes"] else "NO",
}  # fmt: skip


def document(
    machine: dict[str, Any], ceilings: Ceilings, results: Results, reached: Sequence[Target]
) -> dict[str, Any]:
    """What bench.json holds."""
    return {
        "schema": SCHEMA, "machine": machine, "ceilings": asdict(ceilings), **asdict(results),
        "growth": growth(results.scaling), "targets": [t.asdict() for t in reached],
    }  # fmt: skip


def as_markdown(found: dict[str, Any], reached: Sequence[Target], pictures: Sequence[str] = ()) -> str:
    """The page of the stages, with these of report's pictures, each before the first of its stages."""
    ran = list(dict.fromkeys(row["stage"] for row in found["rows"]))
    parts: list[str | list[str]] = [
        "Written by `python -m bench`; what each row means is in `bench/README.md`.",
        about(found["machine"]),
        "Ceilings: copy {copy_gb_s:.1f} GB/s, float32 product {gemm_gflop_s:.0f} GFLOP/s.".format(**found["ceilings"]),
        "## Targets",
        target_table([t for t in reached if t.stage in ran or found.get(t.stage)]),
    ]
    first = {next(s for s in of if s in ran): name for name, of in PICTURES.items() if name in pictures}
    for stage in ran:
        rows = [row for row in found["rows"] if row["stage"] == stage]
        shapes = "; ".join(dict.fromkeys(f"{r['workload']}: {r['shape']}" for r in rows))
        picture = f"![Times slower than bipace_kernels]({first[stage]})" if stage in first else ""
        parts += [f"## {stage}", picture, shapes, table(_TIMES, rows)]
    if found["scaling"]:
        grown = found["growth"]
        text = "" if grown is None else f"Time per record at the largest size over the smallest: {grown:.2f}."
        parts += ["## scaling", table(_SCALING, found["scaling"]), text]
    if found["memory"]:
        parts += ["## memory beyond the inputs", table(_MEMORY, found["memory"])]
    return page("Benchmark results", *parts)
