"""torch.ops.bipace: the main stages, and the whole chain, as ops that torch.compile sees as opaque.

The compiler cannot change an opaque op, so compiled code gives the same bits.  An op checks its arguments, makes
`Records` of them and runs the same stage as `advantage()`.  Calls that are not compiled do not use the ops.
"""

import ast
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .. import pipeline
from ..backends import dispatch, threads
from ..backends.contract import FINGERPRINT_DTYPES, Critic
from ..backends.records import Records, check_offsets, check_places
from ..backends.schema import KERNELS, Kernel, Tokens
from ..config import Config
from ..settings import DELTA, EPSILON, GAMMA, NOISE, NOT_NEGATIVE, SAME, WIDTH, Range
from ..support.handles import find
from ..support.lazy import lazy
from . import compiled

_F32, _F64, _I64, _U8, _BOOL = torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool
#: Shape in the letters of `Records` and dtype of each tensor argument but token ids and fingerprints, whatever the op.
TENSORS: dict[str, tuple[str, torch.dtype]] = {
    "rewards": ("M", _F64), "value": ("M", _F64), "returns": ("M", _F32), "episode_advantage": ("M", _F32),
    "step": ("M", _I64), "time": ("M", _I64), "order": ("M", _I64), "labels": ("M", _I64), "action_key": ("M", _I64),
    "usable": ("M", _BOOL), "taken": ("M", _BOOL), "truncated": ("M", _BOOL), "depth_labels": ("H M", _I64),
    "landmarks": ("L", _I64), "episode_return": ("T", _F32), "spoilt": ("T", _BOOL),
    "trajectory_offsets": ("T+1", _I64), "group_offsets": ("G+1", _I64), "group_trajectories": ("G+1", _I64),
    "row_offsets": ("R+1", _I64), "table_offsets": ("V+1", _I64), "table_bytes": ("B", _U8),
}  # fmt: skip
_FINGERPRINT = "N D"
_SIZES = {"n_groups": "G", "n_records": "M", "n_trajectories": "T"}
#: Offsets rise from 0 to the size of a letter; places lie from a lowest one to below it.
OFFSETS = {
    "trajectory_offsets": "M", "group_offsets": "M", "group_trajectories": "T", "row_offsets": "E",
    "table_offsets": "B",
}  # fmt: skip
PLACES = {"order": ("N", 0), "time": ("2^53", 0), **dict.fromkeys(("labels", "depth_labels", "landmarks"), ("M", -1))}
_NUMBERS = {
    "gamma": GAMMA, "gae_lambda": GAMMA, "delta": DELTA, "epsilon": EPSILON, "epsilons": EPSILON, "alpha": NOT_NEGATIVE,
    "width": WIDTH, "horizon": Range("0 (no time), or finite and at least 0.05", lambda x: x == 0 or WIDTH.holds(x)),
    "noise": NOISE, "same": SAME,
    "n": Range(f"in [1, {1 << 40}]", lambda x: 1 <= x <= 1 << 40),
}  # fmt: skip
_WORDS: dict[str, tuple[str, ...]] = {
    "scope": ("trajectory", "step"), "norm": ("none", "std"), "lone": ("zero", "raw"), "estimator": KERNELS,
    "step_norm": ("none", "std"), "share": ("group", "batch"), "mode": ("action_tag", "first_n", "text"),
}  # fmt: skip
_OF_RECORDS = {field.name for field in fields(Records)}
_OF_KERNEL = {field.name for field in fields(Kernel)}


@dataclass(frozen=True)
class Op:
    """An op that runs one stage of a backend.

    results   shape and dtype of each
    """

    name: str
    stage: str
    arguments: str
    results: tuple[tuple[str, torch.dtype], ...]

    @property
    def schema(self) -> str:
        several = ", ".join("Tensor" for _ in self.results)
        return f"({self.arguments}) -> " + (several if len(self.results) == 1 else f"({several})")

    @lazy
    def types(self) -> dict[str, str]:
        """Type of each argument in torch's schema."""
        words = [word.split() for word in self.arguments.split(", ") if word != "*"]
        return {name: kind for kind, name in words}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name; torch omits the last ones where they are None."""
        arguments = dict(zip(self.types, args, strict=False)) | kwargs
        return {name: arguments.get(name) for name in self.types}

    @threads.using()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.bind(args, kwargs)
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        try:
            columns = {name: _checked(name, self.types[name], value, device) for name, value in arguments.items()}
            sizes = check_sizes(columns)
            if self.name == "hash_token_ids":
                _check_ids(columns)
            if device.type == "cpu":
                _check_places(columns, sizes)
            # Only now: a copy of a view can be far larger than what it is a view of.
            whole = {*TENSORS, "ids", "valid"} if columns.get("row_offsets") is not None else TENSORS
            columns |= {n: x.contiguous() for n, x in columns.items() if n in whole and isinstance(x, Tensor)}
            if self.name == "hash_token_ids":
                return _hash_token_ids(columns, device)
            if columns.get("estimator", "mean") != "mean" and columns["action_key"] is None:
                raise ValueError(f"action_key is missing; estimator={columns['estimator']!r} compares actions.")
        except (ValueError, TypeError) as error:
            raise type(error)(f"bipace::{self.name}: {error}") from None
        chosen = dispatch.choose("auto", device)
        records, columns = _records(columns, sizes, device)
        run = getattr(getattr(chosen, self.stage), self.name)
        if self.name == "kernel_values":
            run = functools.partial(_kernel_values, chosen.critic)
        with torch.no_grad():
            return run(records, **columns) if chosen.deferred else without_masks(run, records, columns)

    def fake(self, *args: Any, **kwargs: Any) -> Any:
        """Results in shape and dtype."""
        arguments = self.bind(args, kwargs)
        like = next(value for value in arguments.values() if isinstance(value, Tensor))
        sizes: dict[str, Any] = {"1": 1, "E": len(arguments.get("epsilons") or ())}
        sizes |= {letter: arguments[name] for name, letter in _SIZES.items() if name in arguments}
        for _, letter, size in _lengths(arguments):
            sizes.setdefault(letter, size)
        if "ids" in arguments:
            sizes.setdefault("R", arguments["ids"].shape[0])
        made = [like.new_empty([sizes[letter] for letter in shape.split()], dtype=kind) for shape, kind in self.results]
        return made[0] if len(made) == 1 else tuple(made)


_STEPS = "Tensor? step, Tensor trajectory_offsets"
_ROWS = "Tensor fingerprint, Tensor order"
_GROUPS = "SymInt n_groups, SymInt longest_group"
OPS = {
    op.name: op
    for op in (
        Op("discounted_returns", "returns", f"Tensor rewards, {_STEPS}, float gamma, *, SymInt n_trajectories",
           (("M", _F32),)),
        Op("episode_advantage", "episode",
           "Tensor episode_return, Tensor trajectory_offsets, Tensor group_trajectories, *, SymInt n_groups, "
           "SymInt n_records, str scope, str norm, str lone, float delta, Tensor? spoilt", (("M", _F32),)),
        Op("cluster_cosine", "clusters",
           f"{_ROWS}, Tensor group_offsets, Tensor? usable, float epsilon, *, {_GROUPS}, Tensor? taken",
           (("M", _I64),)),
        Op("cluster_sweep", "clusters",
           f"{_ROWS}, Tensor group_offsets, Tensor? usable, float[] epsilons, *, {_GROUPS}, Tensor? taken",
           (("E M", _I64),)),
        Op("step_advantage", "values",
           f"Tensor returns, Tensor labels, Tensor? action_key, Tensor group_offsets, *, {_GROUPS}, str estimator, "
           "str step_norm, float delta", (("M", _F32), ("M", _U8))),
        Op("hgpo_advantage", "values",
           f"Tensor returns, Tensor depth_labels, Tensor episode_advantage, Tensor group_offsets, *, {_GROUPS}, "
           "str step_norm, float delta, float alpha, bool base_group", (("M", _F32), ("M", _I64), ("M", _U8))),
        Op("kernel_values", "critic",
           f"{_ROWS}, Tensor returns, Tensor time, Tensor group_offsets, Tensor? usable, Tensor? landmarks, *, "
           f"{_GROUPS}, Tensor? taken, str share, float width, float horizon, float noise, float same",
           (("M", _F64),)),
        Op("gae_advantage", "critic",
           f"Tensor rewards, Tensor value, {_STEPS}, Tensor? truncated, float gamma, float gae_lambda, *, "
           "SymInt n_trajectories, Tensor? taken", (("M", _F64),)),
        Op("hash_token_ids", "action_keys",
           "Tensor ids, Tensor? row_offsets, Tensor? valid, Tensor? table_offsets, Tensor? table_bytes, *, str mode, "
           "int n, SymInt longest_row", (("R", _I64), ("R", _BOOL), ("1", _I64))),
    )
}  # fmt: skip


def _shape_of(name: str) -> list[str]:
    """Letters of a tensor argument; none of token ids and their mask, which may have two shapes."""
    return (_FINGERPRINT if name == "fingerprint" else TENSORS.get(name, ("",))[0]).split()


def _lengths(columns: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Argument, letter and size of each dimension of the tensors; of offsets [S+1] the number of runs, S."""
    for name, value in columns.items():
        for letter, size in zip(_shape_of(name), value.shape, strict=False) if isinstance(value, Tensor) else ():
            yield name, letter[0], size - 1 if letter.endswith("+1") else size


def _checked(name: str, kind: str, value: Any, device: torch.device) -> Any:
    """An argument as stages take it; TypeError for another dtype, ValueError for another device or range."""
    if value is None and kind == "Tensor":  # torch takes None for every tensor
        raise TypeError(f"{name} is missing; pass a tensor.")
    if name in _WORDS and value not in _WORDS[name]:
        raise ValueError(f"{name} must be one of {', '.join(_WORDS[name])}, got {value!r}.")
    for number in (value if kind.endswith("[]") else [value]) if name in _NUMBERS else ():
        if not _NUMBERS[name].holds(number):
            raise ValueError(f"{name} must be {_NUMBERS[name].text}, got {number!r}.")
    if not isinstance(value, Tensor):
        return value
    if value.device != device:
        raise ValueError(f"all tensors must be on one device, got {name} on {value.device}; move it to {device}.")
    if name == "fingerprint":
        if value.ndim != 2 or value.dtype not in FINGERPRINT_DTYPES:
            got = f"{value.dtype} {list(value.shape)}"
            raise TypeError(f"{name} must be [N, D] float32, bfloat16 or float16, got {got}; convert it.")
        if value.shape[1] == 0:
            raise ValueError(f"{name} must have at least one feature, got {list(value.shape)}.")
        return value
    if name not in TENSORS:
        return value  # token ids and their mask: any integers; any strides where they are [N, L]
    shape, dtype = TENSORS[name]
    if value.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {value.dtype}; convert it with .to({dtype}).")
    if value.ndim != len(shape.split()):
        raise ValueError(f"{name} must have shape [{', '.join(shape.split())}], got {list(value.shape)}.")
    return value


def check_sizes(columns: dict[str, Any]) -> dict[str, int]:
    """Sizes by letter; ValueError for lengths that contradict each other."""
    known = {letter: (columns[name], name) for name, letter in _SIZES.items() if name in columns}
    for name, letter, length in _lengths(columns):
        if length < 0:
            raise ValueError(f"{name} must hold at least one offset, got none.")
        other, where = known.setdefault(letter, (length, name))
        if length != other:
            raise ValueError(
                f"{name} must have shape [{', '.join(_shape_of(name))}] with {letter} = {other} as {where} has it, got "
                f"{list(columns[name].shape)}; take both from one layout."
            )
    return {letter: size for letter, (size, _) in known.items()}


def _check_places(columns: dict[str, Any], sizes: dict[str, int]) -> None:
    """Raises ValueError for offsets and places of CPU tensors that would make native code read out of bounds."""
    sizes = {**sizes, "2^53": 1 << 53}  # kernels compare times as float64
    if columns.get("row_offsets") is not None:
        sizes = {**sizes, "E": columns["ids"].shape[0]}
    for name, letter in OFFSETS.items():
        if columns.get(name) is not None:
            check_offsets(name, columns[name], letter, sizes[letter])
    for name, (letter, lowest) in PLACES.items():
        if columns.get(name) is not None:
            check_places(name, columns[name], letter, sizes[letter], lowest)


def _records(columns: dict[str, Any], sizes: dict[str, int], device: torch.device) -> tuple[Records, dict[str, Any]]:
    """Records of an op's arguments, and the others, as its stage takes them."""
    columns = {"step" if name == "time" else name: value for name, value in columns.items()}
    if "width" in columns:
        columns["kernel"] = Kernel(**{name: columns.pop(name) for name in _OF_KERNEL if name in columns})
    own = {name: columns.pop(name) for name in _OF_RECORDS if name in columns}
    return Records(**{"device": device, "n_records": sizes["M"], **own}), columns


def _kernel_values(critic: Critic, records: Records, fingerprint: Tensor, **columns: Any) -> Tensor:
    rows = critic.centred_rows(records, critic.unit_rows(records, fingerprint, 0), columns["kernel"].share)
    return critic.kernel_values(records, rows, None, **columns)


def without_masks(
    run: Callable[..., Any], records: Records, columns: dict[str, Any], by_record: Collection[str] = ()
) -> Any:
    """run(records, **columns) of a backend on the CPU: it gets the records that are taken only, and the others 0 or −1.

    by_record   names of columns [M] that no op has
    """
    taken, columns = records.taken, dict(columns)
    if records.spoilt is not None:
        good = torch.nonzero(~records.spoilt).flatten()
        taken = ~records.spoilt[records.trajectory_of_record]
        lengths = records.trajectory_offsets.diff()[good]  # a trajectory without records keeps its place
        records = replace(
            records, spoilt=None, trajectory_offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            group_trajectories=torch.searchsorted(good, records.group_trajectories), n_trajectories=good.shape[0],
            n_records=int(taken.sum()),
        )  # fmt: skip
        columns["episode_return"] = columns["episode_return"][good]
        kept = torch.nonzero(taken).flatten()
    elif taken is None:
        return run(records, **columns)
    else:
        kept = torch.nonzero(taken).flatten()
        offsets = {
            name: torch.unique_consecutive(torch.searchsorted(kept, getattr(records, name)))  # without empty runs
            for name in ("group_offsets", "trajectory_offsets")
        }
        rows = {name: getattr(records, name) for name in ("order", "step", "usable")}
        records = replace(
            records, taken=None, n_records=kept.shape[0], n_groups=max(len(offsets["group_offsets"]) - 1, 0),
            n_trajectories=max(len(offsets["trajectory_offsets"]) - 1, 0), **offsets,
            **{name: row if row is None or not row.numel() else row[kept] for name, row in rows.items()},
        )  # fmt: skip
        for name, value in columns.items():
            if isinstance(value, Tensor) and (_shape_of(name)[-1:] == ["M"] or name in by_record):
                columns[name] = value[..., kept]
        if columns.get("landmarks") is not None:
            columns["landmarks"] = torch.searchsorted(kept, columns["landmarks"][columns["landmarks"] >= 0])
    result: Tensor = run(records, **columns)
    whole = torch.full((*result.shape[:-1], taken.shape[0]), -1 if result.dtype == _I64 else 0, dtype=result.dtype)
    whole[..., kept] = result
    return whole


def _check_ids(columns: dict[str, Any]) -> None:
    """Raises errors for token ids, their mask and the table, as far as possible without reading values."""
    ids, valid, flat, mode = columns["ids"], columns["valid"], columns["row_offsets"] is not None, columns["mode"]
    if ids.ndim != (1 if flat else 2):
        raise ValueError(f"ids must be [N, T], or [E] with row_offsets, got {list(ids.shape)}.")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be of an integer dtype, got {ids.dtype}; convert them.")
    if valid is not None and valid.shape != ids.shape:
        raise ValueError(f"valid must have the shape of ids, {list(ids.shape)}, got {list(valid.shape)}.")
    if valid is not None and (valid.is_floating_point() or valid.is_complex()):
        raise TypeError(f"valid must be bool or integers, got {valid.dtype}; compare it.")
    if not flat and columns["longest_row"] != ids.shape[1]:
        raise ValueError(f"longest_row must be T = {ids.shape[1]}, got {columns['longest_row']}.")
    table = [columns[name] is not None for name in ("table_offsets", "table_bytes")]
    if table[0] != table[1] or not (table[0] or mode == "first_n"):
        raise ValueError(f"table_offsets and table_bytes must be given for mode {mode!r}; use token_bytes(tokenizer).")


def _hash_token_ids(columns: dict[str, Any], device: torch.device) -> Any:
    chosen = dispatch.choose("auto", device)
    with torch.no_grad():
        tokens = Tokens(**{name: columns[name] for name in Tokens._fields})
        keys, parsed, outside = chosen.action_keys.hash_token_ids(tokens, columns["mode"], columns["n"])
    if not chosen.deferred and (at := int(outside)) >= 0:
        token = int(columns["ids"].flatten()[at])
        raise ValueError(f"ids must be in the table, got {token} at flat position {at}; mask padding out.")
    return keys, parsed, outside


_CHAIN = (
    f"({', '.join(f'Tensor? {name}' for name in compiled.TENSORS)}, *, SymInt layout, SymInt config, str fields, "
    f"str backend, str check, int num_threads) -> ({', '.join(['Tensor'] * 9)})"
)


@threads.using()
def _advantage(
    *tensors: Tensor | None,  # those of compiled.TENSORS, each with N rows
    layout: int,
    config: int,
    fields: str,
    backend: str,
    check: str,
    num_threads: int,
) -> tuple[Tensor, ...]:
    """`advantage()` for a compiled graph: its results, and the flags of compiled.CompiledRecords.

    layout, config   handles; config 0: `fields` holds it, a dict as Python writes it
    num_threads      0: None
    """
    arguments = dict.fromkeys(("group", "trajectory", "step", *compiled.TENSORS))
    arguments |= dict(zip(compiled.TENSORS, tensors, strict=False))
    try:
        cfg = find(config) if config else Config(**ast.literal_eval(fields))
    except (SyntaxError, MemoryError, RecursionError) as error:  # what Python's parser raises
        raise ValueError(f"bipace::advantage: fields must be Config's fields, got {fields[:80]!r}.") from error
    with torch.no_grad():
        result = pipeline.run(arguments, find(layout), cfg, backend, check, num_threads or None)
        flags, late = compiled.flags_of(result)
    value = torch.zeros_like(result.advantage) if result.value is None else result.value
    return *(getattr(result, name) for name in compiled.ROWS), value, flags, late


def _advantage_fake(*tensors: Tensor | None, **_: Any) -> tuple[Tensor, ...]:
    like = next(t for t in tensors if t is not None)
    n = like.shape[0]
    rows = tuple(like.new_empty(n, dtype=dtype) for dtype in (*[_F32] * 4, _I64, _U8, _F32))
    return *rows, like.new_empty(len(compiled.FLAGS), n, dtype=_U8), like.new_empty(compiled.LATE, dtype=_BOOL)


def _register() -> Any:
    library: Any = torch.library.Library("bipace", "DEF")  # type: ignore[no-untyped-call]

    def add(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # run() itself stops gradients
        torch.library.register_fake(f"bipace::{name}", fake, lib=library)

    for op in OPS.values():
        add(op.name, op.schema, op, op.fake)
    add("advantage", _CHAIN, _advantage, _advantage_fake)
    return library


_LIBRARY = _register()  # the ops live as long as it does
