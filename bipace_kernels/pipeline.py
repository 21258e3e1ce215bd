"""START HERE: advantage(), the whole flow on one page.

    rows ─► layout ─► returns ─► episode term ─► partition ─► step term ─► A = A_ep + w · A_S ─► rows
            groups     R_t        A_ep            states        A_S                              result
            and order

advantage() checks shapes and types, run() chooses a backend, chain() is the arrows: everything between `layout` and the
result is in processing order, and each arrow is a stage (backends/contract.py) of the backend.  Partition and step term
are rows of two tables (estimators/rows.py).  Bad rows stay in place behind masks.  On the CPU chain() raises their
errors before anything is clustered; on a GPU nothing synchronizes, and errors are raised when the result is read.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from .backends import dispatch, threads
from .backends.dispatch import Backend
from .backends.records import Records, out_of_range
from .config import Config
from .diagnostics.records import Unread
from .estimators.memory import ValueMemory
from .estimators.partitions import Batch
from .estimators.table import terms_of
from .inputs import checks, interop
from .inputs.columns import Inputs, check_config, check_inputs, check_memory
from .inputs.layout import Layout
from .inputs.values import raise_duplicates, unlike_first
from .ops import compiled
from .result import AdvantageResult
from .support.errors import refuse_unknown
from .support.warnings import warn_once


def advantage(
    group: Any = None,
    trajectory: Any = None,
    rewards: Any = None,
    *,
    step: Any = None,
    returns: Any = None,
    episode_return: Any = None,
    fingerprint: Any = None,
    observation: Any = None,
    action_key: Any = None,
    action_parsed: Any = None,
    valid: Any = None,
    truncated: Any = None,
    memory: ValueMemory | None = None,
    layout: Layout | None = None,
    config: Config | str | None = None,
    backend: str = "auto",
    check: str = "auto",
    num_threads: int | None = None,
    **unknown: NoReturn,
) -> AdvantageResult:
    """Advantage of every step record of a batch of rollouts.

        A_i = A_ep(τ_i) + w · A_S(i),    A_ep(τ) = (R(τ) − μ_p) / (σ_p + δ)        (paper eq. 1, 10)

    A_S is the estimator's term inside the record's cluster: R − mean, R − mean of other actions, or
    Q̂(s, a) − V̂(s) (paper eq. 7 to 9), or GAE(λ) over a value estimated from the batch (docs/gae.md).  Clusters never
    cross prompt groups.  docs/estimator.md has the definitions.

    group            [N] prompt-group id of each step record: integers, or any hashable ids such as uuid strings
    trajectory       [N] trajectory id, unique in the batch
    rewards          [N] real   environment reward of the step; None only with both returns and episode_return
    step             [N] int ≥ 0   step number inside the trajectory; None: the row order is the time order
    returns          [N] real   discounted return-to-go; None: from rewards and config.gamma
    episode_return   [N] real   return of the record's trajectory, one value per trajectory; None: the sum of rewards
    fingerprint      [N, D] float32 | bfloat16 | float16 (float64 is rounded), any length; partition "cosine",
                     value "kernel"
    observation      [N] str | bytes | any hashable | integers      partitions "exact", "history", "similar" (str)
    action_key       [N] int   equal for equal actions              estimators "diff_peer", "q_style"; "gae" if given
    action_parsed    [N] bool   feeds the metric action_parse_rate; estimator "gae" averages only where it is True
    valid            [N] bool   False rows (padding) are ignored: advantages 0, cluster −1
    truncated        [N] bool   estimator "gae": True on the last step of a trajectory that was cut off there; V̂ of
                     that step then replaces the missing future.  Ignored on other steps, and under duplicates="once" on
                     all copies but the first; None: no trajectory was cut off
    memory           a `ValueMemory`, which share="memory" reads and then adds this batch to; None: no memory
    layout           a `Layout` of these ids; group, trajectory and step are then None
    config           `Config`, or a preset's name such as "gae"; None: Config.bipace()
    backend          "auto" | "reference" | "cpu" | "triton" | "cuda"; by name it never falls back
    check            "auto" | "now": on CPU tensors values are always checked at the call
    num_threads      threads of the cpu backend; None: torch.get_num_threads().  The result is the same at any count.

    Tensors, NumPy arrays, lists and arrays of other libraries by DLPack or the CUDA array interface may be mixed;
    tensors must share a device.  Results are tensors, or arrays of another library if the fingerprint (without one:
    rewards, then returns) is such an array and the library has from_dlpack, like CuPy and JAX.  Arguments that the
    configuration does not use are checked for length and otherwise ignored, a fingerprint with a warning.  The caller's
    tensors are never changed.  Returns an `AdvantageResult` in the caller's row order.  Same input, same bits, at any
    thread count; a prompt group gives the same bits by itself as inside any batch, except where estimator "gae" reads
    or divides over the batch.  No output holds NaN.  ValueError or TypeError names the argument, what was expected,
    what was given and what to do; nothing is computed then.
    """
    arguments = {
        "group": group, "trajectory": trajectory, "rewards": rewards, "step": step, "returns": returns,
        "episode_return": episode_return, "fingerprint": fingerprint, "observation": observation,
        "action_key": action_key, "action_parsed": action_parsed, "valid": valid, "truncated": truncated,
    }  # fmt: skip
    if unknown:
        refuse_unknown("advantage()", unknown, [parameter.name for parameter in _known])
    if torch.compiler.is_compiling():
        if memory is not None:
            raise ValueError("memory must be None under torch.compile: graphs keep no state; call advantage() outside.")
        return compiled.advantage(arguments, layout, config, backend, check, num_threads)
    # A call that the compiler cannot trace runs eagerly as a whole, not in pieces.  Importing the compiler is slow.
    function = compiled.untraced(run) if "torch._dynamo" in sys.modules else run
    result = function(interop.all_to_torch(arguments), layout, config, backend, check, num_threads, memory)
    back = interop.from_dlpack_of(arguments)
    return result if back is None else result.as_arrays(back)


_all = inspect.signature(advantage)
_known = [parameter for name, parameter in _all.parameters.items() if name != "unknown"]  # which catches misspelt ones
advantage.__signature__ = _all.replace(parameters=_known)  # type: ignore[attr-defined]


def run(
    arguments: dict[str, Any],
    layout: Layout | None,
    config: Config | str | None,
    backend: str,
    check: str,
    num_threads: int | None,
    memory: ValueMemory | None = None,
) -> AdvantageResult:
    """advantage() of its arguments by name; torch.ops.bipace.advantage runs it too."""
    cfg = check_config(config)
    checks.check_check(check)
    check_memory(memory, cfg)
    where = checks.one_device(arguments)
    chosen = dispatch.choose(backend, where)
    at_end: list[Callable[[], None]] = []
    with threads.using(num_threads, alone=chosen.name == "reference"):
        x, everyone = check_inputs(arguments, layout, cfg, where, deferred=chosen.deferred)
        result = chain(chosen, x, everyone, memory, at_end)
        if check == "now":
            result.check()
        for keep in at_end:
            keep()
    return result


def chain(
    backend: Backend, x: Inputs, everyone: Layout, memory: ValueMemory | None, at_end: list[Callable[[], None]]
) -> AdvantageResult:
    """The arrows.  ValueError for copies of a step under duplicates="raise" and, on the CPU, for bad values.

    everyone   the layout of all records, including copies of a step
    at_end     gets what a call that succeeds adds to the memory
    """
    cfg = x.config
    if everyone.first is not None and cfg.duplicates == "raise":
        raise_duplicates(everyone)
    layout = everyone.once() if cfg.duplicates == "once" else everyone
    records = layout.on(x.device)

    bad, episode_differs, copy_differs = _bad_records(x, everyone, records)
    step_return, trajectory_return, spoilt = _returns(backend, x, records, bad)
    if x.truncated is not None and not backend.deferred:
        _warn_of_truncated(x.truncated, records)
    state = _state(backend, x, records)
    unread = Unread(everyone, layout, x.kept(), state, episode_differs, copy_differs, checked=not backend.deferred)
    if backend.deferred:
        taken = spoilt.index_select(0, records.trajectory_of_record).logical_not_()
        usable = None if state is None or cfg.has_epsilon else state == 0
        written = state if cfg.has_epsilon else None
        records = replace(records, taken=taken, spoilt=spoilt, usable=usable, state=written)
    else:
        unread.raise_for(spoilt)
        if bool(spoilt.any()):
            taken = ~spoilt.index_select(0, records.trajectory_of_record)
            layout = layout.restrict(taken)
            records = layout.on(x.device)
            step_return, trajectory_return = step_return[taken], trajectory_return[~spoilt]
            state = None if state is None else state[taken]
        if state is not None:
            records = replace(records, usable=state == 0)
    episode = backend.episode.episode_advantage(
        records, trajectory_return, cfg.episode_scope, cfg.episode_norm, cfg.lone_trajectory, cfg.delta
    )

    terms = terms_of(Batch(backend, cfg, x, layout, records, step_return, episode, memory, at_end))
    weights = None if cfg.estimator_row.whole else (float(cfg.episode_weight), float(cfg.step_weight))
    rows = backend.combine.combine(records, step_return, episode, terms, weights)
    if terms.value is None:
        return AdvantageResult(*rows, unread)
    unread = replace(unread, value=terms.value, raw=terms.raw, source=records.source)
    return AdvantageResult(*rows, unread, value=_by_row(terms.value, records))


def _warn_of_truncated(truncated: Tensor, records: Records) -> None:
    """Once where a row before the last step of its trajectory is marked as cut off, which has no effect."""
    last = records.time.index_select(0, records.trajectory_offsets[1:] - 1)
    early = records.time < last.index_select(0, records.trajectory_of_record)
    rows = records.order[truncated.index_select(0, records.order) & early]
    if len(rows):
        text = f"truncated is True at {len(rows)} rows before the last step of their trajectory, such as "
        warn_once("truncated", f"{text}{', '.join(map(str, rows[:5].tolist()))}: it is ignored there.", stacklevel=4)


def _by_row(value: Tensor, records: Records) -> Tensor:
    """[N] float32 of V̂ [M], saturating; 0 for rows without a record and for records set aside."""
    if not records.n_records:
        return torch.zeros(records.n_rows, dtype=torch.float32, device=value.device)
    at, missing = records.source.clamp(min=0), records.source < 0
    if records.taken is not None:
        missing |= ~records.taken.index_select(0, at)
    limit = torch.finfo(torch.float32).max
    return value.clamp(-limit, limit).to(torch.float32).index_select(0, at).masked_fill(missing, 0.0)


def _bad_records(x: Inputs, everyone: Layout, lay: Records) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Records that spoil their trajectory for another reason than its returns [M] bool, and the flags `episode_differs`
    and `copy_differs` of Unread; None: there are none."""
    bad = episode_differs = copy_differs = None
    if x.episode_return is not None:
        value = x.episode_return.index_select(0, lay.order)
        first = value.index_select(0, lay.trajectory_offsets[:-1])
        episode_differs = unlike_first(value, first.index_select(0, lay.trajectory_of_record))
        bad = episode_differs | ~value.isfinite()
    if x.rewards is not None and "rewards" in x.config.needs:
        unfit = out_of_range(x.rewards.index_select(0, lay.order))
        bad = unfit if bad is None else bad | unfit
    if everyone.first is not None and x.rewards is not None:
        every = everyone.on(x.device)
        reward = x.rewards.index_select(0, every.order)
        copy_differs = unlike_first(reward, reward[every.first])
        # A bad copy invalidates the record whose results its row gets.
        hits = torch.zeros(lay.n_records, dtype=torch.int32, device=x.device)
        wrong = (copy_differs | out_of_range(reward)).to(torch.int32)
        hits.index_add_(0, lay.source.index_select(0, every.order), wrong)
        bad = hits > 0 if bad is None else bad | (hits > 0)
    return bad, episode_differs, copy_differs


def _returns(backend: Backend, x: Inputs, lay: Records, bad: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """[M] float32 return-to-go of records, [T] float32 return of trajectories, rounded once; [T] bool: invalid ones."""
    stage, gamma = backend.returns, float(x.config.gamma)
    rewards = None if x.rewards is None else x.rewards.index_select(0, lay.order)
    if rewards is not None and x.returns is None and x.episode_return is None:
        return stage.all_returns(lay, rewards, bad, gamma)
    if x.returns is not None:
        step_return = x.returns.index_select(0, lay.order).to(torch.float32)
    else:
        assert rewards is not None
        step_return = stage.discounted_returns(lay, rewards, gamma)
    if x.episode_return is not None:
        first = lay.order.index_select(0, lay.trajectory_offsets[:-1])
        trajectory_return = x.episode_return.index_select(0, first).to(torch.float32)
    else:
        assert rewards is not None
        trajectory_return = stage.trajectory_returns(lay, rewards)
    return step_return, trajectory_return, stage.spoilt_trajectories(lay, step_return, trajectory_return, bad)


def _state(backend: Backend, x: Inputs, records: Records) -> Tensor | None:
    """[M] uint8 of the fingerprints, as in Unread; on a GPU the cosine partition writes it, which saves a pass."""
    if x.fingerprint is None:
        return None
    if backend.deferred and x.config.has_epsilon:
        return torch.empty(records.n_records, dtype=torch.uint8, device=x.device)
    state = backend.clusters.scan_rows(records, x.fingerprint)
    return state if backend.deferred or bool(state.any()) else None
