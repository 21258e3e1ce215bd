"""torch.ops.bipace: each stage of the device chain, and the whole chain, as an op that torch.compile sees as opaque.

The compiler cannot change what it cannot see, so compiled code gives the same bits.  An op runs the very functions that
`advantage()` runs: those of triton_kernels/ on a GPU, those of cpu/ behind masks (masked_stages.py) on the CPU.  Calls
that are not compiled go round the ops.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import torch

from . import _checks, _compiled, _dispatch, pipeline
from ._handles import find
from .action_keys import MODES
from .config import Config
from .masked_stages import MaskedStages

Tensor = torch.Tensor

_F32, _F64, _I64, _U8, _BOOL = torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool

#: Dtype and shape of each tensor argument: kernels read what they are told lies there.
_TENSORS: dict[str, tuple[torch.dtype, str]] = {
    "action_key": (_I64, "M"), "bad_record": (_BOOL, "M"), "branch": (_U8, "M"), "bytes": (_U8, "B"),
    "codes": (_I64, "M"), "depth_labels": (_I64, "H M"), "episode": (_F32, "M"), "episode_advantage": (_F32, "M"),
    "episode_return": (_F32, "T"), "group_offsets": (_I64, "G+1"), "group_trajectories": (_I64, "G+1"),
    "labels": (_I64, "M"), "offsets": (_I64, "S+1"), "order": (_I64, "M"), "returns": (_F32, "M"), "rewards": (_F64, "M"),
    "row_offsets": (_I64, "R+1"), "source": (_I64, "N"), "spoilt": (_BOOL, "T"), "step": (_I64, "M"),
    "step_return": (_F32, "M"), "step_term": (_F32, "M"), "table_bytes": (_U8, "B"), "table_offsets": (_I64, "V+1"),
    "taken": (_BOOL, "M"), "trajectory_offsets": (_I64, "T+1"), "trajectory_return": (_F32, "T"), "usable": (_BOOL, "M"),
}  # fmt: skip
#: Words that an argument may be, and ranges of numbers: a kernel takes any other for one of these, or reads astray.
_WORDS = {
    "estimator": ("mean", "diff_peer", "q_style"), "lone": ("zero", "raw"), "mode": MODES, "norm": ("none", "std"),
    "scope": ("trajectory", "step"), "step_norm": ("none", "std"),
}  # fmt: skip
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "alpha": ("finite and at least 0", lambda x: 0 <= x < math.inf),
    "delta": ("in (0, 1e-2]", lambda x: 0 < x <= 1e-2),
    "depth": ("at least 1", lambda x: x >= 1),
    "dim": ("in [1, 2^24]", lambda x: 1 <= x <= 1 << 24),
    "epsilon": ("0 or in [1e-4, 2]", lambda x: x == 0 or 1e-4 <= x <= 2),
    "gamma": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "weight": ("finite and at least 0", lambda x: 0 <= x < math.inf),
}
_LARGEST_N = {"hash_token_ids": 1 << 40, "ngram_fingerprints": 1 << 12}
_SIZES = {"n_groups": "G", "n_records": "M", "n_rows": "N", "n_trajectories": "T"}

_GROUPS = "SymInt n_groups, SymInt longest_group"
_COSINE = "Tensor fingerprint, Tensor order, Tensor group_offsets, Tensor? usable"


def _new(like: Tensor, *shape: Any, dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


#: (module of the stage, arguments, what comes back, a fake that gives its shapes and dtypes) of each op.
_STAGES: dict[str, tuple[str, str, str, Callable[..., Any]]] = {
    "discounted_returns": (
        "returns",
        "Tensor rewards, Tensor? step, Tensor trajectory_offsets, float gamma, *, SymInt n_trajectories",
        "Tensor",
        lambda rewards, *_, **__: _new(rewards, rewards.shape[0], dtype=_F32),
    ),
    "trajectory_returns": (
        "returns",
        "Tensor rewards, Tensor? step, Tensor trajectory_offsets, *, SymInt n_trajectories",
        "Tensor",
        lambda rewards, *_, n_trajectories: _new(rewards, n_trajectories, dtype=_F32),
    ),
    "spoilt_trajectories": (
        "returns",
        "Tensor step_return, Tensor trajectory_return, Tensor? bad_record, Tensor trajectory_offsets, *, "
        "SymInt n_trajectories",
        "Tensor",
        lambda step_return, *_, n_trajectories: _new(step_return, n_trajectories, dtype=_BOOL),
    ),
    "episode_advantage": (
        "episode",
        "Tensor episode_return, Tensor trajectory_offsets, Tensor group_trajectories, *, SymInt n_groups, "
        "SymInt n_records, str scope, str norm, str lone, float delta, Tensor? spoilt",
        "Tensor",
        lambda episode_return, *_, n_records, **__: _new(episode_return, n_records, dtype=_F32),
    ),
    "scan_rows": (
        "clusters",
        "Tensor fingerprint, Tensor order",
        "Tensor",
        lambda fingerprint, order: _new(order, order.shape[0], dtype=_U8),
    ),
    "cluster_cosine": (
        "clusters",
        f"{_COSINE}, float epsilon, *, {_GROUPS}, Tensor? taken",
        "Tensor",
        lambda fingerprint, order, *_, **__: _new(order, order.shape[0], dtype=_I64),
    ),
    "cluster_sweep": (
        "clusters",
        f"{_COSINE}, float[] epsilons, *, {_GROUPS}, Tensor? taken",
        "Tensor",
        lambda fingerprint, order, offsets, usable, epsilons, **_: _new(
            order, len(epsilons), order.shape[0], dtype=_I64
        ),
    ),
    "cluster_exact": (
        "observations",
        f"Tensor codes, Tensor group_offsets, *, {_GROUPS}, Tensor? taken",
        "Tensor",
        lambda codes, *_, **__: _new(codes, codes.shape[0], dtype=_I64),
    ),
    "cluster_history": (
        "observations",
        "Tensor codes, Tensor? step, Tensor trajectory_offsets, Tensor group_offsets, SymInt depth, *, "
        f"SymInt n_trajectories, {_GROUPS}, Tensor? taken",
        "Tensor",
        lambda codes, step, trajectories, groups, depth, **_: _new(codes, depth, codes.shape[0], dtype=_I64),
    ),
    "step_advantage": (
        "values",
        f"Tensor returns, Tensor labels, Tensor? action_key, Tensor group_offsets, *, {_GROUPS}, str estimator, "
        "str step_norm, float delta",
        "Tensor, Tensor",
        lambda returns, labels, *_, **__: tuple(_new(labels, labels.shape[0], dtype=d) for d in (_F32, _U8)),
    ),
    "hgpo_advantage": (
        "values",
        f"Tensor returns, Tensor depth_labels, Tensor episode_advantage, Tensor group_offsets, *, {_GROUPS}, "
        "str step_norm, float delta, float alpha, bool base_group",
        "Tensor, Tensor, Tensor",
        lambda returns, *_, **__: tuple(_new(returns, returns.shape[0], dtype=d) for d in (_F32, _I64, _U8)),
    ),
    "combine": (
        "combine",
        "Tensor episode, Tensor step_term, Tensor returns, Tensor labels, Tensor branch, Tensor source, Tensor? taken, *, "
        "float weight, bool total_is_step, SymInt n_rows",
        "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor",
        lambda episode, *_, n_rows, **__: tuple(_new(episode, n_rows, dtype=d) for d in (*[_F32] * 4, _I64, _U8)),
    ),
    "hash_token_ids": (
        "action_keys",
        "Tensor ids, Tensor? row_offsets, Tensor? valid, Tensor? table_offsets, Tensor? table_bytes, *, str mode, int n, "
        "SymInt longest_row",
        "Tensor, Tensor, Tensor",
        lambda ids, row_offsets, *_, **__: (
            _new(ids, _rows_of(ids, row_offsets), dtype=_I64),
            _new(ids, _rows_of(ids, row_offsets), dtype=_BOOL),
            _new(ids, 1, dtype=_I64),
        ),
    ),
    "ngram_fingerprints": (
        "ngrams",
        "Tensor bytes, Tensor offsets, *, int n, int dim",
        "Tensor",
        lambda data, offsets, *, n, dim: _new(data, offsets.shape[0] - 1, dim, dtype=_F32),
    ),
}


def _rows_of(ids: Tensor, row_offsets: Tensor | None) -> Any:
    return ids.shape[0] if row_offsets is None else row_offsets.shape[0] - 1


def _stage_op(name: str, module: str, arguments: list[str]) -> Callable[..., Any]:
    """What the op runs: the stage of the backend that the tensors' device takes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(arguments, args, strict=False)) | kwargs  # torch leaves the last ones out where they are None
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        given = {k: _tensor(name, k, v, device) if isinstance(v, Tensor) else v for k, v in given.items()}
        _check_sizes(name, given)
        _check_values(name, given)
        if name == "hash_token_ids":
            _check_ids(name, given)
        kernels = _dispatch.choose("auto", device)
        if not _dispatch.defers_checks(kernels):
            stage = getattr(MaskedStages(kernels, _dispatch.threads(None)), name)
        else:
            stage = getattr(getattr(kernels, module), name)
        if name == "hash_token_ids":
            if given.get("row_offsets") is not None:  # flat
                given |= {k: given[k].contiguous() for k in ("ids", "valid") if given.get(k) is not None}
            given = {"table_offsets": None, "table_bytes": None} | given
        positional = [given.pop(a) for a in list(given) if a in ("bytes", "offsets")]  # of n-grams: names differ
        with torch.no_grad():
            return stage(*positional, **given)

    return run


def _tensor(op: str, name: str, value: Tensor, device: torch.device) -> Tensor:
    """A tensor as the kernels take it; TypeError for another dtype, ValueError for another device."""
    if value.device != device:
        raise ValueError(
            f"bipace::{op}: all tensors must be on one device, got {name} on {value.device}; move it to {device}."
        )
    if name == "fingerprint":
        if value.ndim != 2 or value.dtype not in _checks.FINGERPRINT_DTYPES:
            got = f"{value.dtype} {list(value.shape)}"
            raise TypeError(
                f"bipace::{op}: fingerprint must be [N, D] float32, bfloat16 or float16, got {got}; convert it."
            )
        if value.shape[1] == 0:
            raise ValueError(f"bipace::{op}: fingerprint must have at least one feature, got {list(value.shape)}.")
        return value
    if name not in _TENSORS:
        return value  # token ids and their mask: any integers; any strides where they are [N, T]
    dtype = _TENSORS[name][0]
    if value.dtype != dtype:
        raise TypeError(f"bipace::{op}: {name} must be {dtype}, got {value.dtype}; convert it with .to({dtype}).")
    return value.contiguous()


def _check_sizes(op: str, given: dict[str, Any]) -> None:
    """ValueError for lengths that contradict each other."""
    known = {_SIZES[name]: (value, name) for name, value in given.items() if name in _SIZES}
    for name, value in given.items():
        if not isinstance(value, Tensor) or name not in _TENSORS:
            continue
        wanted = _TENSORS[name][1].split()
        if value.ndim != len(wanted):
            raise ValueError(f"bipace::{op}: {name} must have shape [{', '.join(wanted)}], got {list(value.shape)}.")
        for letter, size in zip(wanted, value.shape, strict=True):
            length = size - 1 if letter.endswith("+1") else size
            other, where = known.setdefault(letter[0], (length, name))
            if length != other:
                raise ValueError(
                    f"bipace::{op}: {name} must have shape [{', '.join(wanted)}] with {letter[0]} = {other} as {where} has "
                    f"it, got {list(value.shape)}; take both from one layout."
                )


def _check_values(op: str, given: dict[str, Any]) -> None:
    """ValueError for words and numbers of the host that no stage knows, and for an action key that is missing."""
    ranges = dict(_RANGES)
    if op in _LARGEST_N:
        most = _LARGEST_N[op]
        ranges["n"] = (f"in [1, {most}]", lambda x: 1 <= x <= most)
    for name, value in given.items():
        if name in _WORDS and value not in _WORDS[name]:
            raise ValueError(f"bipace::{op}: {name} must be one of {', '.join(_WORDS[name])}, got {value!r}.")
        which = "epsilon" if name == "epsilons" else name
        for number in value if name == "epsilons" else [value]:
            if which in ranges and not ranges[which][1](number):
                raise ValueError(f"bipace::{op}: {name} must be {ranges[which][0]}, got {number!r}.")
    if op == "step_advantage" and given["estimator"] != "mean" and given.get("action_key") is None:
        raise ValueError(f"bipace::{op}: action_key is missing; estimator={given['estimator']!r} compares actions.")


def _check_ids(op: str, given: dict[str, Any]) -> None:
    """Errors for token ids, their mask and the table, of what can be seen without looking at values."""
    ids, flat = given["ids"], given.get("row_offsets") is not None
    if ids.ndim != (1 if flat else 2):
        raise ValueError(f"bipace::{op}: ids must be [N, T], or [E] with row_offsets, got {list(ids.shape)}.")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"bipace::{op}: ids must be of an integer dtype, got {ids.dtype}; convert them.")
    valid = given.get("valid")
    if valid is not None and valid.shape != ids.shape:
        raise ValueError(f"bipace::{op}: valid must have the shape of ids, {list(ids.shape)}, got {list(valid.shape)}.")
    if valid is not None and (valid.is_floating_point() or valid.is_complex()):
        raise TypeError(f"bipace::{op}: valid must be bool or integers, got {valid.dtype}; compare it.")
    if not flat and given["longest_row"] != ids.shape[1]:
        raise ValueError(f"bipace::{op}: longest_row must be T = {ids.shape[1]}, got {given['longest_row']}.")
    table = [given.get("table_offsets") is not None, given.get("table_bytes") is not None]
    if table[0] != table[1] or not (table[0] or given["mode"] == "first_n"):
        raise ValueError(
            f"bipace::{op}: table_offsets and table_bytes must be given for mode {given['mode']!r}; take both from "
            "token_bytes(tokenizer)."
        )


_CHAIN_TENSORS = (
    "rewards",
    "returns",
    "episode_return",
    "fingerprint",
    "observation",
    "action_key",
    "action_parsed",
    "valid",
)
_CHAIN = (
    f"({', '.join(f'Tensor? {name}' for name in _CHAIN_TENSORS)}, *, SymInt layout, SymInt config, str fields, "
    "str backend, str check, int num_threads) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _advantage(
    *tensors: Tensor | None,  # those of _CHAIN_TENSORS, each with N rows
    layout: int,
    config: int,
    fields: str,
    backend: str,
    check: str,
    num_threads: int,
) -> tuple[Tensor, ...]:
    """`advantage()` for a compiled graph: its results, and the flags of _compiled.CompiledRecords.

    layout, config   handles; config 0: `fields` holds it, a dict as Python writes it
    num_threads      0: None
    """
    given = {"group": None, "trajectory": None, "step": None, **dict.fromkeys(_CHAIN_TENSORS)}
    given |= dict(zip(_CHAIN_TENSORS, tensors, strict=False))
    cfg = find(config) if config else Config(**ast.literal_eval(fields))
    with torch.no_grad():
        result = pipeline.run(given, find(layout), cfg, backend, check, num_threads or None)
        flags, late = _compiled.flags_of(result)
    return (
        result.advantage, result.step_advantage, result.episode_advantage, result.returns, result.cluster, result.branch,
        flags, late,
    )  # fmt: skip


def _advantage_fake(*tensors: Tensor | None, **_: Any) -> tuple[Tensor, ...]:
    like = next(t for t in tensors if t is not None)
    n = like.shape[0]
    rows = tuple(_new(like, n, dtype=d) for d in (*[_F32] * 4, _I64, _U8))
    return *rows, _new(like, len(_compiled.FLAGS), n, dtype=_U8), _new(like, _compiled.LATE, dtype=_BOOL)


def _register() -> Any:
    library: Any = torch.library.Library("bipace", "DEF")  # type: ignore[no-untyped-call]

    def add(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # run() itself stops gradients
        torch.library.register_fake(f"bipace::{name}", fake, lib=library)

    for name, (module, arguments, results, fake) in _STAGES.items():
        names = [part.split()[-1] for part in arguments.split(", ") if part != "*"]
        several = f"({results})" if "," in results else results
        add(name, f"({arguments}) -> {several}", _stage_op(name, module, names), fake)
    add("advantage", _CHAIN, _advantage, _advantage_fake)
    return library


_LIBRARY = _register()  # the ops live as long as it does
