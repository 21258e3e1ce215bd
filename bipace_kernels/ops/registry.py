"""torch.ops.bipace: each stage, and the whole chain, as an op that torch.compile sees as opaque.

The compiler cannot change an opaque op, so compiled code gives the same bits.  Schemas, fakes and checks of
arguments are derived from the contract (stages.py), and an op runs the same stage as `advantage()`.  Calls that are
not compiled do not use the ops.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch

from .. import pipeline
from ..backends import dispatch
from ..backends.contract import FINGERPRINT_DTYPES, OPS, Offsets, OneOf, Places, Private, Range, Size, Spec
from ..config import Config
from ..support.handles import find
from . import compiled

Tensor = torch.Tensor

_F32, _I64, _U8, _BOOL = torch.float32, torch.int64, torch.uint8, torch.bool
_PLAIN = {float: "float", int: "int", str: "str", bool: "bool"}


@dataclass(frozen=True)
class Argument:
    """One argument of an op, as its stage's Protocol annotates it."""

    name: str
    type: str  # of torch's schema
    keyword: bool
    spec: Spec | None = None
    size: Size | None = None
    range: Range | None = None
    words: OneOf | None = None
    values: Offsets | Places | None = None
    default: Any = None  # None: it must be given

    @property
    def several(self) -> bool:
        return self.type.endswith("[]")


@dataclass(frozen=True)
class Op:
    """An op and the stage that it runs."""

    name: str
    stage: str
    arguments: tuple[Argument, ...]
    results: tuple[Spec, ...]

    @property
    def schema(self) -> str:
        words = [f"{a.type} {a.name}" + ("" if a.default is None else f"={a.default}") for a in self.arguments]
        first = next((i for i, a in enumerate(self.arguments) if a.keyword), None)
        if first is not None:
            words.insert(first, "*")
        several = ", ".join("Tensor" for _ in self.results)
        return f"({', '.join(words)}) -> " + (several if len(self.results) == 1 else f"({several})")

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name; torch omits the last ones where they are None."""
        given = dict(zip((a.name for a in self.arguments), args, strict=False)) | kwargs
        return {a.name: given.get(a.name, a.default) for a in self.arguments}


def _argument(name: str, hint: Any, keyword: bool, default: Any) -> Argument:
    optional = get_origin(hint) in (Union, UnionType)
    if optional:
        hint = next(each for each in get_args(hint) if each is not type(None))
    marks: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        marks = tuple(rest)

    def mark(kind: type) -> Any:
        return next((each for each in marks if isinstance(each, kind)), None)

    size = mark(Size)
    if hint is Tensor:
        kind = "Tensor?" if optional else "Tensor"
    elif get_origin(hint) is not None:  # Sequence[float]
        kind = f"{_PLAIN[get_args(hint)[0]]}[]"
    else:
        kind = "SymInt" if size is not None and name != "dim" else _PLAIN[hint]
    values = mark(Offsets) or mark(Places)
    return Argument(name, kind, keyword, mark(Spec), size, mark(Range), mark(OneOf), values, default)


def _is_private(hint: Any) -> bool:
    return any(isinstance(mark, Private) for each in get_args(hint) for mark in get_args(each))


def _ops() -> dict[str, Op]:
    """Every method of a stage's Protocol."""
    found = {}
    for stage, protocol in OPS.items():
        for name, method in vars(protocol).items():
            if name.startswith("_") or not inspect.isfunction(method):
                continue
            hints = get_type_hints(method, include_extras=True)
            back = hints.pop("return")
            results = get_args(back) if get_origin(back) is tuple else (back,)
            arguments = tuple(
                _argument(p.name, hints[p.name], p.kind is p.KEYWORD_ONLY, None if p.default is p.empty else p.default)
                for p in list(inspect.signature(method).parameters.values())[1:]
                if not _is_private(hints[p.name])
            )
            found[name] = Op(name, stage, arguments, tuple(get_args(each)[1] for each in results))
    return found


STAGE_OPS = _ops()


def _run(op: Op) -> Callable[..., Any]:
    """What an op runs: its stage, by the backend of the tensors' device."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = op.bind(args, kwargs)
        device = next(value.device for value in given.values() if isinstance(value, Tensor))
        for a in op.arguments:
            if isinstance(given[a.name], Tensor):
                given[a.name] = _tensor(op.name, a, given[a.name], device)
            elif a.type == "Tensor":  # torch takes None for every tensor
                raise TypeError(f"bipace::{op.name}: {a.name} is missing; pass a tensor.")
        sizes = check_sizes(op, given)
        _check_values(op, given)
        if op.name == "hash_token_ids":
            _check_ids(op.name, given)
        if device.type == "cpu":
            _check_places(op, given, sizes)
        chosen = dispatch.choose("auto", device)
        positional = [given.pop(a.name) for a in op.arguments if not a.keyword]
        with torch.no_grad():
            found = getattr(getattr(chosen, op.stage), op.name)(*positional, **given)
        if op.name == "hash_token_ids" and not chosen.deferred and int(found[2]) >= 0:
            raise ValueError(
                f"bipace::{op.name}: ids must be in the table, got {int(positional[0].flatten()[int(found[2])])} at flat "
                f"position {int(found[2])}; mask padding out."
            )
        return found

    return run


def _fake(op: Op) -> Callable[..., Any]:
    """Results of an op in shape and dtype."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        given = op.bind(args, kwargs)
        like = next(value for value in given.values() if isinstance(value, Tensor))
        sizes: dict[str, Any] = {"1": 1}
        for a in op.arguments:
            value = given[a.name]
            if a.size is not None:
                sizes[a.size.letter] = value
            elif a.several:
                sizes["E"] = len(value)
            elif isinstance(value, Tensor) and a.spec is not None:
                for letter, size in zip(a.spec.shape.split(), value.shape, strict=True):
                    sizes.setdefault(letter[0], size - 1 if letter.endswith("+1") else size)
        if op.name == "hash_token_ids":
            sizes.setdefault("R", given["ids"].shape[0])
        made = [_new(like, *(sizes[letter] for letter in s.shape.split()), dtype=s.dtypes[0]) for s in op.results]
        return made[0] if len(made) == 1 else tuple(made)

    return fake


def _new(like: Tensor, *shape: Any, dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _tensor(op: str, a: Argument, value: Tensor, device: torch.device) -> Tensor:
    """A tensor as the kernels take it; TypeError for another dtype, ValueError for another device."""
    name = a.name
    if value.device != device:
        raise ValueError(
            f"bipace::{op}: all tensors must be on one device, got {name} on {value.device}; move it to {device}."
        )
    if a.spec is None:
        return value  # token ids and their mask: any integers; any strides where they are [N, L]
    if a.spec.dtypes == FINGERPRINT_DTYPES:
        if value.ndim != 2 or value.dtype not in FINGERPRINT_DTYPES:
            got = f"{value.dtype} {list(value.shape)}"
            raise TypeError(
                f"bipace::{op}: fingerprint must be [N, D] float32, bfloat16 or float16, got {got}; convert it."
            )
        if value.shape[1] == 0:
            raise ValueError(f"bipace::{op}: fingerprint must have at least one feature, got {list(value.shape)}.")
        return value
    (dtype,) = a.spec.dtypes
    if value.dtype != dtype:
        raise TypeError(f"bipace::{op}: {name} must be {dtype}, got {value.dtype}; convert it with .to({dtype}).")
    return value.contiguous()


def check_sizes(op: Op, given: dict[str, Any]) -> dict[str, int]:
    """Sizes by letter; ValueError for lengths that contradict each other."""
    known = {
        a.size.letter: (given[a.name], a.name) for a in op.arguments if a.size is not None and a.name.startswith("n_")
    }
    for a in op.arguments:
        value = given.get(a.name)
        if not isinstance(value, Tensor) or a.spec is None:
            continue
        wanted = a.spec.shape.split()
        if value.ndim != len(wanted):
            raise ValueError(
                f"bipace::{op.name}: {a.name} must have shape [{', '.join(wanted)}], got {list(value.shape)}."
            )
        for letter, size in zip(wanted, value.shape, strict=True):
            length = size - 1 if letter.endswith("+1") else size
            if length < 0:
                raise ValueError(f"bipace::{op.name}: {a.name} must hold at least one offset, got none.")
            other, where = known.setdefault(letter[0], (length, a.name))
            if length != other:
                raise ValueError(
                    f"bipace::{op.name}: {a.name} must have shape [{', '.join(wanted)}] with {letter[0]} = {other} as "
                    f"{where} has it, got {list(value.shape)}; take both from one layout."
                )
    return {letter: size for letter, (size, _) in known.items()}


def _check_places(op: Op, given: dict[str, Any], sizes: dict[str, int]) -> None:
    """Raises ValueError for offsets and places of CPU tensors that would make native code read out of bounds.

    By NumPy: torch's threads would hang in a forked child.
    """
    if op.name == "hash_token_ids" and given["row_offsets"] is not None:
        sizes = {**sizes, "E": given["ids"].shape[0]}
    for a in op.arguments:
        if a.values is None or given[a.name] is None:
            continue
        values, end = given[a.name].numpy(), sizes[a.values.letter]
        if isinstance(a.values, Offsets):
            if values[0] != 0 or values[-1] != end or (values[1:] < values[:-1]).any():
                raise ValueError(
                    f"bipace::{op.name}: {a.name} must increase from 0 to {a.values.letter} = {end}, got "
                    f"{_shown(values)}; take it from one layout with the others."
                )
        elif values.size and (values.min() < a.values.lowest or values.max() >= end):
            raise ValueError(
                f"bipace::{op.name}: {a.name} must hold numbers from {a.values.lowest} to below {a.values.letter} = {end}, "
                f"got {values.min()} to {values.max()}."
            )


def _shown(values: Any) -> str:
    """The ends of a vector of numbers, for an error."""
    several = values.tolist() if values.size <= 6 else [*values[:3].tolist(), "…", *values[-2:].tolist()]
    return f"[{', '.join(map(str, several))}]"


def _check_values(op: Op, given: dict[str, Any]) -> None:
    """Raises ValueError for words and numbers that no stage knows, and for a missing action key."""
    for a in op.arguments:
        value = given[a.name]
        if a.words is not None and value not in a.words.words:
            raise ValueError(f"bipace::{op.name}: {a.name} must be one of {', '.join(a.words.words)}, got {value!r}.")
        for number in value if a.several else [value]:
            if a.range is not None and not a.range.holds(number):
                raise ValueError(f"bipace::{op.name}: {a.name} must be {a.range.text}, got {number!r}.")
    if op.name == "cluster_history" and given["depth"] > max(given["codes"].shape[0], 1):
        raise ValueError(
            f"bipace::{op.name}: depth must be at most M = {given['codes'].shape[0]}, the number of records, got "
            f"{given['depth']}."
        )
    if op.name == "step_advantage" and given["estimator"] != "mean" and given["action_key"] is None:
        raise ValueError(
            f"bipace::{op.name}: action_key is missing; estimator={given['estimator']!r} compares actions."
        )


def _check_ids(op: str, given: dict[str, Any]) -> None:
    """Raises errors for token ids, their mask and the table, as far as possible without reading values."""
    ids, flat = given["ids"], given["row_offsets"] is not None
    if ids.ndim != (1 if flat else 2):
        raise ValueError(f"bipace::{op}: ids must be [N, T], or [E] with row_offsets, got {list(ids.shape)}.")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"bipace::{op}: ids must be of an integer dtype, got {ids.dtype}; convert them.")
    valid = given["valid"]
    if valid is not None and valid.shape != ids.shape:
        raise ValueError(f"bipace::{op}: valid must have the shape of ids, {list(ids.shape)}, got {list(valid.shape)}.")
    if valid is not None and (valid.is_floating_point() or valid.is_complex()):
        raise TypeError(f"bipace::{op}: valid must be bool or integers, got {valid.dtype}; compare it.")
    if not flat and given["longest_row"] != ids.shape[1]:
        raise ValueError(f"bipace::{op}: longest_row must be T = {ids.shape[1]}, got {given['longest_row']}.")
    table = [given["table_offsets"] is not None, given["table_bytes"] is not None]
    if table[0] != table[1] or not (table[0] or given["mode"] == "first_n"):
        raise ValueError(
            f"bipace::{op}: table_offsets and table_bytes must be given for mode {given['mode']!r}; take both from "
            "token_bytes(tokenizer)."
        )
    if flat:
        given |= {k: given[k].contiguous() for k in ("ids", "valid") if given[k] is not None}


_CHAIN_TENSORS = (
    "rewards",
    "returns",
    "episode_return",
    "fingerprint",
    "observation",
    "action_key",
    "action_parsed",
    "valid",
    "truncated",
)
_CHAIN = (
    f"({', '.join(f'Tensor? {name}' for name in _CHAIN_TENSORS)}, *, SymInt layout, SymInt config, str fields, "
    f"str backend, str check, int num_threads) -> ({', '.join(['Tensor'] * 9)})"
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
    cfg = find(config) if config else _config(fields)
    with torch.no_grad():
        result = pipeline.run(given, find(layout), cfg, backend, check, num_threads or None)
        flags, late = compiled.flags_of(result)
    return (
        result.advantage, result.step_advantage, result.episode_advantage, result.returns, result.cluster, result.branch,
        torch.zeros_like(result.advantage) if result.value is None else result.value, flags, late,
    )  # fmt: skip


def _config(fields: str) -> Config:
    try:
        return Config(**ast.literal_eval(fields))
    except (SyntaxError, MemoryError, RecursionError) as error:  # what Python's parser raises
        raise ValueError(
            f"bipace::advantage: fields must be a dict of Config's fields, got {fields[:80]!r}."
        ) from error


def _advantage_fake(*tensors: Tensor | None, **_: Any) -> tuple[Tensor, ...]:
    like = next(t for t in tensors if t is not None)
    n = like.shape[0]
    rows = tuple(_new(like, n, dtype=d) for d in (*[_F32] * 4, _I64, _U8, _F32))
    return *rows, _new(like, len(compiled.FLAGS), n, dtype=_U8), _new(like, compiled.LATE, dtype=_BOOL)


def _register() -> Any:
    library: Any = torch.library.Library("bipace", "DEF")  # type: ignore[no-untyped-call]

    def add(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # run() itself stops gradients
        torch.library.register_fake(f"bipace::{name}", fake, lib=library)

    for op in STAGE_OPS.values():
        add(op.name, op.schema, _run(op), _fake(op))
    add("advantage", _CHAIN, _advantage, _advantage_fake)
    return library


_LIBRARY = _register()  # the ops live as long as it does
