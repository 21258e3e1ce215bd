"""START HERE: advantage(), the whole flow on one page.

    rows ─► layout ─► returns ─► episode term ─► partition ─► step term ─► A = A_ep + w · A_S ─► rows
            who        R_t        A_ep            who shares    A_S                              result
            belongs                               a state
            together

advantage() checks what it is given and takes one of two chains with these same arrows:
    host_chain     tensors of the CPU: values are checked before anything is computed, bad rows are taken out;
    device_chain   tensors of a GPU: nothing waits for the device, so bad rows stay, behind masks, and errors come later.
Everything between `layout` and the result is in processing order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import _checks, _compiled, _dispatch, _interop
from . import device_stages as device
from . import host_stages as host
from . import value_checks as values
from ._inputs import Inputs, check_check, check_config, check_inputs
from .config import Config
from .device_layout import DeviceLayout
from .device_stages import Rows
from .layout import Layout
from .observations import similar_on_host
from .result import AdvantageResult, DeviceRecords, Records
from .schema import Branch

Tensor = torch.Tensor
Similar = Callable[[Tensor], Tensor]


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
    layout: Layout | None = None,
    config: Config | None = None,
    backend: str = "auto",
    check: str = "auto",
    num_threads: int | None = None,
) -> AdvantageResult:
    """Advantage of every step record of a batch of rollouts.

        A_i = A_ep(τ_i) + w · A_S(i),    A_ep(τ) = (R(τ) − μ_p) / (σ_p + δ)        (paper eq. 1, 10)

    A_S is the estimator's term inside the record's cluster: R − mean, R − mean of other actions, or
    Q̂(s, a) − V̂(s) (paper eq. 7 to 9); clusters never leave a prompt group.  docs/estimator.md defines all of it.

    group            [N] prompt-group id of each step record: integers, or any hashable ids such as uuid strings
    trajectory       [N] trajectory id, unique in the batch
    rewards          [N] real   environment reward of the step; None only with both returns and episode_return
    step             [N] int ≥ 0   step number inside the trajectory; None: the row order is the time order
    returns          [N] real   discounted return-to-go; None: from rewards and config.gamma
    episode_return   [N] real   return of the record's trajectory, one value per trajectory; None: the sum of rewards
    fingerprint      [N, D] float32 | bfloat16 | float16 (float64 is rounded), any length     partition "cosine"
    observation      [N] str | bytes | any hashable | integers      partitions "exact", "history", "similar" (str)
    action_key       [N] int   equal for equal actions              estimators "diff_peer", "q_style"
    action_parsed    [N] bool   feeds the metric action_parse_rate
    valid            [N] bool   False rows (padding) take part in nothing: advantages 0, cluster −1
    layout           a `Layout` of these ids; group, trajectory and step are then None
    config           `Config`; None: Config.bipace()
    backend          "auto" | "reference" | "cpu" | "triton" | "cuda"; by name it never falls back
    check            "auto" | "now": on CPU tensors values are always checked at the call
    num_threads      threads of the cpu backend; None: torch.get_num_threads().  The result is the same at any count.

    Tensors, NumPy arrays, lists and arrays of other libraries by DLPack or the CUDA array interface may be mixed; tensors
    must share a device.  Results are tensors; they are arrays of another library where the fingerprint (without one:
    rewards, then returns) is such an array and the library has from_dlpack, as CuPy and JAX have.  Arguments that the
    configuration does not use are checked for length and otherwise ignored.  The caller's tensors are never changed.
    Returns an `AdvantageResult` in the caller's row order.  Same input, same bits, at any thread count; a prompt group
    alone gives the same bits as inside any batch.  No output holds NaN.
    ValueError or TypeError names the argument, what was wanted, what came and the cure; nothing is computed then.
    """
    given = {
        "group": group, "trajectory": trajectory, "rewards": rewards, "step": step, "returns": returns,
        "episode_return": episode_return, "fingerprint": fingerprint, "observation": observation,
        "action_key": action_key, "action_parsed": action_parsed, "valid": valid,
    }  # fmt: skip
    if torch.compiler.is_compiling():
        return _compiled.advantage(given, layout, config, backend, check, num_threads)
    result: AdvantageResult = _compiled.untraced(run)(
        _interop.all_to_torch(given), layout, config, backend, check, num_threads
    )
    back = _interop.from_dlpack_of(given)
    return result if back is None else result.as_arrays(back)


def run(
    given: dict[str, Any],
    layout: Layout | None,
    config: Config | None,
    backend: str,
    check: str,
    num_threads: int | None,
) -> AdvantageResult:
    """advantage() of its arguments by name; torch.ops.bipace.advantage runs it too."""
    cfg = check_config(config)
    _dispatch.check_name(backend)
    check_check(check)
    where = _checks.one_device(given)
    kernels = _dispatch.choose(backend, where)
    threads = _dispatch.threads(num_threads)
    deferred = _dispatch.defers_checks(kernels)
    x, everyone = check_inputs(given, layout, cfg, where, deferred=deferred)
    if not deferred:
        return host_chain(kernels, x, everyone, threads)
    if everyone.first is not None and cfg.duplicates == "raise":
        values.raise_duplicates(everyone)
    lay = everyone.once() if cfg.duplicates == "once" else everyone
    similar = partial(similar_on_host, x.observation, lay, cfg, threads)
    rows = device_chain(kernels, x, everyone.on(where), lay.on(where), similar)
    result = _with_late_checks(rows, x, everyone, lay)
    if check == "now":
        result.check()
    return result


def _with_late_checks(rows: Rows, x: Inputs, everyone: Layout, lay: Layout) -> AdvantageResult:
    """The result of rows whose values nobody has looked at yet."""
    records = DeviceRecords(
        everyone=everyone,
        layout=lay,
        config=x.config,
        rewards=x.rewards,
        returns=x.returns,
        episode_return=x.episode_return,
        action_key=x.action_key,
        action_parsed=x.action_parsed,
        state=rows.state,
        episode_differs=rows.episode_differs,
        copy_differs=rows.copy_differs,
        late=tuple(x.late),
    )
    return AdvantageResult(
        rows.advantage, rows.step_advantage, rows.episode_advantage, rows.returns, rows.cluster, rows.branch, records
    )


def host_chain(kernels: Any, x: Inputs, everyone: Layout, threads: int) -> AdvantageResult:
    """The arrows on the CPU.  ValueError for bad values; on_invalid="singleton" takes bad rows out instead."""
    cfg, lay = x.config, host.records_of(x, everyone)
    n_checked = lay.n_records
    step_return, trajectory_return = host.returns(kernels, x, lay, threads)
    spoilt = host.spoilt_trajectories(x, everyone, lay, step_return, trajectory_return)
    if spoilt is not None:
        keep = ~spoilt[lay.trajectory_of_record()]
        lay, step_return, trajectory_return = lay.restrict(keep), step_return[keep], trajectory_return[~spoilt]
    usable = host.usable(kernels, x, lay, threads)

    episode = kernels.episode.episode_advantage(
        trajectory_return, lay.trajectory_offsets, lay.group_trajectories, scope=cfg.episode_scope,
        norm=cfg.episode_norm, lone=cfg.lone_trajectory, delta=cfg.delta, num_threads=threads,
    )  # fmt: skip
    keys = None if x.action_key is None else x.action_key[lay.order]
    if cfg.estimator == "hgpo":
        labels, step_term, branch = host.hgpo(kernels, x, lay, step_return, episode, threads)
        total = step_term
    else:
        labels = host.partition(kernels, x, lay, usable, threads)
        step_term, branch = host.step_term(kernels, cfg, step_return, labels, keys, threads)
        total = host.combine(episode, step_term, float(cfg.step_weight))

    source = host.source(everyone, lay)
    records = Records(
        layout=lay,
        returns=step_return,
        labels=labels,
        branch=branch,
        advantage=total,
        action_key=keys,
        action_parsed=None if x.action_parsed is None else x.action_parsed[lay.order],
        n_checked=n_checked,
        usable=usable,
        partition=cfg.partition,
    )
    return AdvantageResult(
        advantage=host.scatter(total, source, 0.0),
        step_advantage=host.scatter(step_term, source, 0.0),
        episode_advantage=host.scatter(episode, source, 0.0),
        returns=host.scatter(step_return, source, 0.0),
        cluster=host.scatter(labels, source, -1),
        branch=host.scatter(branch, source, int(Branch.SINGLETON)),
        records=records,
    )


def device_chain(
    kernels: Any, x: Inputs, everyone: DeviceLayout, lay: DeviceLayout, similar: Similar | None = None
) -> Rows:
    """The same arrows on a GPU.  Nothing waits: bad rows stay in their places behind `taken` and `usable`.

    lay       `everyone`, or the layout in which copies of a step count once
    similar   labels [M] of the texts of the records taken [M], for partition "similar"
    """
    cfg = x.config
    step_return, trajectory_return, doubts = device.returns(kernels, x, everyone, lay)
    spoilt = kernels.returns.spoilt_trajectories(
        step_return, trajectory_return, doubts.bad_record, lay.trajectory_offsets, n_trajectories=lay.n_trajectories
    )
    taken = ~spoilt[lay.trajectory_of_record]
    episode = kernels.episode.episode_advantage(
        trajectory_return, lay.trajectory_offsets, lay.group_trajectories, n_groups=lay.n_groups,
        n_records=lay.n_records, scope=cfg.episode_scope, norm=cfg.episode_norm, lone=cfg.lone_trajectory,
        delta=cfg.delta, spoilt=spoilt,
    )  # fmt: skip
    at_once = device.fused(kernels, x, lay, taken, step_return, episode)
    if at_once is not None:
        return Rows(*at_once[0], at_once[1], doubts.episode_differs, doubts.copy_differs)

    state, usable = device.usable(kernels, x, lay)
    if cfg.estimator == "hgpo":
        labels, step_term, branch = device.hgpo(kernels, x, lay, taken, step_return, episode)
    else:
        if cfg.partition == "similar":
            assert similar is not None
            labels = similar(taken)
        else:
            labels = device.partition(kernels, x, lay, taken, usable)
        step_term, branch = device.step_term(kernels, x, lay, step_return, labels)

    combined = kernels.combine.combine(
        episode, step_term, step_return, labels, branch, lay.source, taken, weight=float(cfg.step_weight),
        total_is_step=cfg.estimator == "hgpo", n_rows=lay.n_rows,
    )  # fmt: skip
    advantage, step_advantage, episode_advantage, returns, cluster, branch = combined
    return Rows(
        advantage, step_advantage, episode_advantage, returns, cluster, branch,
        state, doubts.episode_differs, doubts.copy_differs,
    )  # fmt: skip
