"""START HERE: advantage(), the whole flow on one page.

    rows ─► layout ─► returns ─► episode term ─► partition ─► step term ─► A = A_ep + w · A_S ─► rows
            who        R_t        A_ep            who shares    A_S                              result
            belongs                               a state
            together

Everything between `layout` and the result is in processing order; `_scatter` brings it back to the caller's rows.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _checks, _dispatch
from .config import Config
from .layout import Layout, check_copies
from .layout import layout as make_layout
from .observations import history_labels, observation_codes, observation_texts
from .result import AdvantageResult, Records
from .schema import LIMIT, Branch

Tensor = torch.Tensor


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

    Tensors, NumPy arrays and lists may be mixed; tensors must share a device.  Arguments that the configuration does
    not use are checked for length and otherwise ignored.  The caller's tensors are never changed.
    Returns an `AdvantageResult` in the caller's row order.  Same input, same bits, at any thread count; a prompt group
    alone gives the same bits as inside any batch.  No output holds NaN.
    ValueError or TypeError names the argument, what was wanted, what came and the cure; nothing is computed then.
    """
    cfg = _config(config)
    _dispatch.check_name(backend)
    _check_check(check)
    given = {
        "group": group, "trajectory": trajectory, "rewards": rewards, "step": step, "returns": returns,
        "episode_return": episode_return, "fingerprint": fingerprint, "observation": observation,
        "action_key": action_key, "action_parsed": action_parsed, "valid": valid,
    }  # fmt: skip
    device = _checks.one_device(given)
    kernels = _dispatch.choose(backend, device)
    threads = _dispatch.threads(num_threads)
    _check_present(given, cfg, layout)

    # Lengths, shapes and dtypes of everything, before any values.
    n = _checks.length(group, "group") if layout is None else layout.n_rows
    for name, value in given.items():
        if value is not None and name != "group":
            _checks.check_length(value, name, n)
    unused = returns is not None and episode_return is not None
    reward = None if rewards is None or unused else _checks.real_vector(rewards, "rewards", n)
    given_return = None if returns is None else _checks.real_vector(returns, "returns", n)
    given_episode = None if episode_return is None else _checks.real_vector(episode_return, "episode_return", n)
    key = _keys(action_key, cfg, n)
    parsed = None if action_parsed is None else _checks.bool_vector(action_parsed, "action_parsed", n)
    matrix = _checks.fingerprint_matrix(fingerprint, n) if cfg.partition == "cosine" else None
    lay = everyone = _layout(given, layout)
    codes = observation_codes(observation, lay) if cfg.partition in ("exact", "history") else None

    # Values: repeated steps, returns, one episode return per trajectory, fingerprints.
    _check_duplicates(lay, cfg, reward)
    copies_spoilt = _spoilt_by_copies(lay, reward)
    if cfg.duplicates == "once" and lay.n_duplicates:
        lay = _once(lay)
    n_checked = lay.n_records
    step_return, trajectory_return = _returns(kernels, lay, cfg, reward, given_return, given_episode, threads)
    spoilt = _spoilt_trajectories(lay, step_return, trajectory_return, copies_spoilt)
    if spoilt is not None:
        if cfg.on_invalid == "raise":
            _raise_spoilt(everyone, spoilt, reward, given_return, given_episode)
        keep = ~spoilt[lay.trajectory_of_record()]
        lay, step_return, trajectory_return = lay.restrict(keep), step_return[keep], trajectory_return[~spoilt]
    usable = _usable_rows(kernels, lay, cfg, matrix, threads)
    texts = observation_texts(observation, lay) if cfg.partition == "similar" else None

    episode = kernels.episode.episode_advantage(
        trajectory_return, lay.trajectory_offsets, lay.group_trajectories, scope=cfg.episode_scope,
        norm=cfg.episode_norm, lone=cfg.lone_trajectory, delta=cfg.delta, num_threads=threads,
    )  # fmt: skip
    keys = None if key is None else key[lay.order]
    if cfg.estimator == "hgpo":
        assert codes is not None
        depths = kernels.observations.cluster_history(
            codes[lay.order],
            lay.step,
            lay.trajectory_offsets,
            lay.group_offsets,
            _depth(cfg, lay),
            num_threads=threads,
        )
        step_term, deepest, branch = kernels.values.hgpo_advantage(
            step_return, depths, episode, step_norm=cfg.step_norm, delta=cfg.delta, alpha=float(cfg.length_weight_alpha),
            base_group=cfg.base_group, num_threads=threads,
        )  # fmt: skip
        labels = history_labels(kernels, depths, lay, deepest.clamp(min=1))
        total = step_term
    else:
        labels = _partition(kernels, lay, cfg, matrix, codes, texts, usable, threads)
        step_term, branch = _step_term(kernels, cfg, step_return, labels, keys, threads)
        total = _combine(episode, step_term, float(cfg.step_weight))

    source = _source(everyone, lay)
    records = Records(
        layout=lay,
        returns=step_return,
        labels=labels,
        branch=branch,
        advantage=total,
        action_key=keys,
        action_parsed=None if parsed is None else parsed[lay.order],
        n_checked=n_checked,
        n_invalid=n_checked - lay.n_records + (0 if usable is None else int((~usable).sum())),
        partition=cfg.partition,
    )
    return AdvantageResult(
        advantage=_scatter(total, source, 0.0),
        step_advantage=_scatter(step_term, source, 0.0),
        episode_advantage=_scatter(episode, source, 0.0),
        returns=_scatter(step_return, source, 0.0),
        cluster=_scatter(labels, source, -1),
        branch=_scatter(branch, source, int(Branch.SINGLETON)),
        records=records,
    )


def _config(config: Config | None) -> Config:
    if config is None:
        return Config.bipace()
    if not isinstance(config, Config):
        raise TypeError(
            f"config must be a bipace_kernels.Config, got {_checks.type_name(config)}; e.g. Config.gigpo()."
        )
    return config


def _check_check(check: object) -> None:
    if check not in ("auto", "now"):
        raise ValueError(f"check must be 'auto' or 'now', got {check!r}.")


def _check_present(given: dict[str, Any], cfg: Config, layout: Layout | None) -> None:
    """Everything the configuration needs is there, and nothing stands against the layout."""
    if layout is None:
        for name in ("group", "trajectory"):
            if given[name] is None:
                raise ValueError(
                    f"{name} is missing; pass one id per row, or a layout made by bipace_kernels.layout()."
                )
    else:
        if not isinstance(layout, Layout):
            raise TypeError(f"layout must come from bipace_kernels.layout(), got {_checks.type_name(layout)}.")
        for name in ("group", "trajectory", "step"):
            if given[name] is not None:
                raise ValueError(f"{name} must be None where a layout is given; the layout holds the ids.")
    if given["rewards"] is None and (given["returns"] is None or given["episode_return"] is None):
        raise ValueError("rewards is missing; it may be None only where both returns and episode_return are given.")
    needs = {"cosine": "fingerprint", "exact": "observation", "history": "observation", "similar": "observation"}
    argument = needs.get(cfg.partition)
    if argument is not None and given[argument] is None:
        raise ValueError(
            f"{argument} is missing; partition={cfg.partition!r} needs one per row, or choose another partition."
        )
    if cfg.needs_keys and given["action_key"] is None:
        raise ValueError(
            f"action_key is missing; estimator={cfg.estimator!r} compares actions. Make keys with "
            "bipace_kernels.action_keys(responses), or use an estimator without keys such as Config.bigpo()."
        )


def _keys(action_key: Any, cfg: Config, n: int) -> Tensor | None:
    """[N] int64 keys; where no estimator asks for them they serve the metrics alone, and anything else is ignored."""
    if action_key is None:
        return None
    if cfg.needs_keys:
        return _checks.integer_vector(action_key, "action_key", n)
    try:
        return _checks.integer_vector(action_key, "action_key", n)
    except (TypeError, ValueError):
        return None


def _layout(given: dict[str, Any], layout: Layout | None) -> Layout:
    if layout is None:
        return make_layout(given["group"], given["trajectory"], given["step"], given["valid"])
    if given["valid"] is not None:
        valid = _checks.bool_vector(given["valid"], "valid", layout.n_rows)
        own = torch.ones(layout.n_rows, dtype=torch.bool) if layout.valid is None else layout.valid
        if not torch.equal(valid, own):
            raise ValueError(
                "valid must be None or the mask that the layout was made with; make a new layout for this one."
            )
    return layout


def _check_duplicates(lay: Layout, cfg: Config, reward: Tensor | None) -> None:
    if lay.first is None:
        return
    repeat = lay.first != torch.arange(lay.n_records)
    at = int(torch.nonzero(repeat)[0])
    row, other = int(lay.order[at]), int(lay.order[lay.first[at]])
    if cfg.duplicates == "raise":
        raise ValueError(
            f"step must be unique inside a trajectory, but rows {other} and {row} share group, trajectory and step "
            f"({lay.n_duplicates} such rows); set Config(duplicates='once') to count copies once, or 'count' to count each."
        )
    if reward is not None:
        check_copies(lay, reward)


def _spoilt_by_copies(lay: Layout, reward: Tensor | None) -> Tensor | None:
    """[T] bool: trajectories with a bad reward in any copy of a step, also one that will not count."""
    if lay.first is None or reward is None:
        return None
    bad = ~(reward[lay.order].abs() <= LIMIT)
    spoilt = torch.zeros(lay.n_trajectories, dtype=torch.bool)
    spoilt[lay.trajectory_of_record()[bad]] = True
    return spoilt


def _once(lay: Layout) -> Layout:
    assert lay.first is not None
    return lay.restrict(lay.first == torch.arange(lay.n_records))


def _returns(
    kernels: Any,
    lay: Layout,
    cfg: Config,
    reward: Tensor | None,
    given_return: Tensor | None,
    given_episode: Tensor | None,
    threads: int,
) -> tuple[Tensor, Tensor]:
    """Return-to-go of each record [M] and return of each trajectory [T], float32, rounded once."""
    ordered = None if reward is None else reward[lay.order]
    if given_return is not None:
        step_return = given_return[lay.order].to(torch.float32)
    else:
        step_return = kernels.returns.discounted_returns(
            ordered, lay.step, lay.trajectory_offsets, float(cfg.gamma), num_threads=threads
        )
    if given_episode is None:
        return step_return, kernels.returns.trajectory_returns(
            ordered, lay.step, lay.trajectory_offsets, num_threads=threads
        )
    per_record = given_episode[lay.order]
    per_trajectory = per_record[lay.trajectory_offsets[:-1]]
    expected = per_trajectory[lay.trajectory_of_record()]
    differ = (per_record != expected) & per_record.isfinite() & expected.isfinite()
    if bool(differ.any()):
        at = int(torch.nonzero(differ)[0])
        first = int(lay.order[lay.trajectory_offsets[:-1][lay.trajectory_of_record()[at]]])
        raise ValueError(
            f"episode_return must be one value per trajectory, but rows {first} and {int(lay.order[at])} of one "
            f"trajectory hold {float(expected[at]):g} and {float(per_record[at]):g}; repeat R(τ) on each of its rows."
        )
    # One bad row spoils its trajectory even where the first row is fine.
    bad = ~per_record.isfinite()
    if bool(bad.any()):
        per_trajectory = per_trajectory.clone()
        per_trajectory[lay.trajectory_of_record()[bad]] = float("nan")
    return step_return, per_trajectory.to(torch.float32)


def _spoilt_trajectories(
    lay: Layout, step_return: Tensor, trajectory_return: Tensor, copies_spoilt: Tensor | None
) -> Tensor | None:
    """[T] bool: trajectories with a return that is not finite (or beyond ±1e37); None where there is none."""
    bad_step = ~(step_return.abs() <= LIMIT)
    bad_trajectory = ~(trajectory_return.abs() <= LIMIT)
    if copies_spoilt is not None:
        bad_trajectory |= copies_spoilt
    if not bool(bad_step.any()) and not bool(bad_trajectory.any()):
        return None
    bad_trajectory[lay.trajectory_of_record()[bad_step]] = True
    return bad_trajectory


def _raise_spoilt(
    lay: Layout, spoilt: Tensor, reward: Tensor | None, given_return: Tensor | None, given_episode: Tensor | None
) -> None:
    """ValueError that names the argument and rows at fault."""
    cure = "mend the rows, or set Config(on_invalid='singleton') to set their trajectories aside."
    inside = torch.zeros(lay.n_rows, dtype=torch.bool)
    inside[lay.order] = True
    used = {
        "rewards": reward if given_return is None or given_episode is None else None,
        "returns": given_return,
        "episode_return": given_episode,
    }
    for name, values in used.items():
        if values is None:
            continue
        bad = inside & ~(values.abs() <= LIMIT)
        if bool(bad.any()):
            worst = float(values[int(torch.nonzero(bad)[0])])
            raise ValueError(
                f"{name} must be finite (and within ±1e37), got {worst:g} at row {_checks.indices_text(bad)}; {cure}"
            )
    rows = torch.zeros(lay.n_rows, dtype=torch.bool)
    rows[lay.order[spoilt[lay.trajectory_of_record()]]] = True
    raise ValueError(
        f"rewards must sum to finite returns within ±1e37, rows {_checks.indices_text(rows)} do not; {cure}"
    )


def _usable_rows(kernels: Any, lay: Layout, cfg: Config, matrix: Tensor | None, threads: int) -> Tensor | None:
    """[M] bool: records whose fingerprint is finite and not zero; None where all are."""
    if matrix is None:
        return None
    state: Tensor = kernels.clusters.scan_rows(matrix, lay.order, num_threads=threads)
    if not bool(state.any()):
        return None
    if cfg.on_invalid == "raise":
        for code, fact in ((1, "holds a non-finite value"), (2, "is zero, so it has no direction")):
            rows = torch.zeros(lay.n_rows, dtype=torch.bool)
            rows[lay.order[state == code]] = True
            if bool(rows.any()):
                raise ValueError(
                    f"fingerprint must have finite, non-zero rows, but row {_checks.indices_text(rows)} {fact}; mend it, mask "
                    "it by valid=False, or set Config(on_invalid='singleton') to give each such row a cluster of its own."
                )
    return state == 0


def _partition(
    kernels: Any,
    lay: Layout,
    cfg: Config,
    matrix: Tensor | None,
    codes: Tensor | None,
    texts: list[str] | None,
    usable: Tensor | None,
    threads: int,
) -> Tensor:
    """[M] int64 cluster of each record, numbered over the batch by first appearance."""
    if cfg.partition == "cosine":
        labels: Tensor = kernels.clusters.cluster_cosine(
            matrix, lay.order, lay.group_offsets, usable, float(cfg.epsilon), num_threads=threads
        )
        return labels
    if cfg.partition == "similar":
        assert texts is not None
        labels = kernels.similar.cluster_similar(texts, lay.group_offsets, float(cfg.similarity), num_threads=threads)
        return labels
    if cfg.partition == "none":
        return torch.arange(lay.n_records)
    assert codes is not None
    ordered_codes = codes[lay.order]
    if cfg.partition == "exact":
        labels = kernels.observations.cluster_exact(ordered_codes, lay.group_offsets, num_threads=threads)
        return labels
    depths = kernels.observations.cluster_history(
        ordered_codes, lay.step, lay.trajectory_offsets, lay.group_offsets, _depth(cfg, lay), num_threads=threads
    )
    return history_labels(kernels, depths, lay, (depths >= 0).sum(dim=0))


def _depth(cfg: Config, lay: Layout) -> int:
    """Observations in the longest history: no record has more behind it than its trajectory is long."""
    longest = int(lay.trajectory_offsets.diff().max()) if lay.n_trajectories else 1
    return min(cfg.history_length + 1, longest)


def _step_term(
    kernels: Any, cfg: Config, step_return: Tensor, labels: Tensor, keys: Tensor | None, threads: int
) -> tuple[Tensor, Tensor]:
    if cfg.estimator == "none":
        return torch.zeros_like(step_return), torch.full(labels.shape, int(Branch.SINGLETON), dtype=torch.uint8)
    n_clusters = int(labels.max()) + 1 if labels.numel() else 0
    step_term, branch = kernels.values.step_advantage(
        step_return, labels, n_clusters, keys, estimator=cfg.estimator, step_norm=cfg.step_norm, delta=cfg.delta,
        num_threads=threads,
    )  # fmt: skip
    return step_term, branch


def _combine(episode: Tensor, step_term: Tensor, weight: float) -> Tensor:
    """A = A_ep + w · A_S in float64, rounded once; w = 0 gives A_ep back bit for bit.  Saturates, never overflows."""
    if weight == 0:
        return episode.clone()  # adding 0 would turn −0.0 into 0.0
    total = episode.to(torch.float64) + weight * step_term.to(torch.float64)
    limit = torch.finfo(torch.float32).max
    return total.clamp(-limit, limit).to(torch.float32)


def _source(everyone: Layout, lay: Layout) -> Tensor:
    """[N] int64: the record whose results each row gets; −1 for padding and for rows set aside."""
    source = torch.full((everyone.n_rows,), -1, dtype=torch.int64)
    source[lay.order] = torch.arange(lay.n_records)
    if everyone.first is not None:
        # Copies of a record that counts once get its results; where each copy counts, each has its own already.
        own = source[everyone.order]
        source[everyone.order] = torch.where(own >= 0, own, own[everyone.first])
    return source


def _scatter(values: Tensor, source: Tensor, absent: float) -> Tensor:
    """The results of records in the caller's row order."""
    if not values.numel():
        return torch.full(source.shape, absent, dtype=values.dtype)
    out = values[source.clamp(min=0)]
    return out.masked_fill_(source < 0, absent)
