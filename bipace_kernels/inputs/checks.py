"""Input checks: arguments become tensors; errors name the argument, what was expected, what was given, what to do."""

import numbers
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..backends.contract import FINGERPRINT_DTYPES as FINGERPRINT_DTYPES
from ..backends.schema import LIMIT
from ..settings import is_number
from ..support.errors import InputError, Named, Rows

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32)

# Functions that turn texts into numbers, for arguments where texts are a likely mistake.
_CURES = {"fingerprint": "; bk.ngram_fingerprint() takes texts", "action_key": "; bk.action_keys() takes texts"}


class LateCheck(NamedTuple):
    """A check of values that runs on the device and is read later."""

    failed: Tensor  # [] bool
    error: type[Exception]
    text: str


def unless(failed: Tensor, error: type[Exception], text: str, late: list[LateCheck] | None) -> None:
    """Raises the error where a flag [] bool is set: now, or, with a list of late checks, when they are read."""
    if late is not None:
        late.append(LateCheck(failed, error, text))
    elif bool(failed):
        raise error(text)


def check_check(check: object) -> None:
    if not isinstance(check, str) or check not in ("auto", "now"):
        raise ValueError(f"check must be 'auto' or 'now', got {check!r}.")


def length(value: Any, name: str) -> int:
    """Number of rows of an argument that has a length."""
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim == 0:
            raise ValueError(f"{name} must have one entry per row, got a scalar; put it into a list.")
        return value.shape[0]
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TypeError(f"{name} must be a tensor, array or list with one entry per row, got {type(value).__name__}.")
    return len(value)


def check_length(value: Any, name: str, n: int) -> None:
    if (got := length(value, name)) != n:
        raise ValueError(f"{name} must have one entry per row, N = {n} like group, got {got}.")


def path(value: Any, name: str) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} must be a path, got {type(value).__name__}.")
    return Path(value)


def to_tensor(value: Any, name: str, wish: str) -> Tensor:
    """A detached tensor of a tensor, a NumPy array or a list of numbers; never the caller's memory made writable."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, Tensor) for v in value):
        shapes = {tuple(v.shape) for v in value}
        if len(shapes) > 1:
            raise ValueError(f"{name} must be {wish}, got tensors of {len(shapes)} shapes, e.g. {sorted(shapes)[:2]}.")
        value = torch.stack([check_dense(v, name).detach() for v in value])
    if isinstance(value, Tensor):
        tensor: Tensor = check_dense(value, name)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.dtype != torch.uint64 or tensor.is_cuda:  # reading the largest value would synchronize
            return tensor
        value = tensor.cpu().numpy()
    check_unmasked(value, name)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:  # the last of tensors that require grad
        raise TypeError(f"{name} must be {wish}; NumPy cannot read it: {error}") from error
    if array.dtype.kind in "OUSV":
        # An object array may hold plain Python numbers (as verl-agent's rewards do).
        try:
            array = np.asarray(array.tolist())
        except (ValueError, TypeError) as error:
            raise TypeError(f"{name} must be {wish}, got ragged or mixed entries: {error}") from error
    if array.dtype.kind == "O" and all(isinstance(v, (int, float)) for v in array.flat):
        raise ValueError(f"{name} must be {wish}, got an integer of more than 64 bits; give floats or smaller numbers.")
    if array.dtype.kind not in "biuf":
        cure = _CURES.get(name, "") if array.dtype.kind in "US" else ""
        raise TypeError(f"{name} must be {wish}, got entries of NumPy dtype {array.dtype}{cure}.")
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"{name} must fit int64, got {int(array.max())}; view it as int64 or renumber it.")
        array = array.astype(np.int64)
    elif array.dtype == np.longdouble and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if any(s < 0 for s in array.strides) or not (array.flags.behaved and array.dtype.isnative):
        array = array.astype(array.dtype.newbyteorder("="), copy=True)
    return torch.from_numpy(array)


def check_dense(value: Tensor, name: str) -> Tensor:
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else "nested" if value.is_nested else str(value.layout)
        raise TypeError(f"{name} must be a dense tensor, got a {kind} one; use to_dense(), dequantize() or padding.")
    # The compiler cannot trace the question whether this is a derivative that torch knows to be 0.
    if value.is_meta or (not torch.compiler.is_compiling() and value._is_zerotensor()):
        raise TypeError(f"{name} must be a dense tensor, got one that has no memory; make it with torch.zeros().")
    if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # DTensor, MaskedTensor, FakeTensor
        raise TypeError(f"{name} must be a plain tensor, got {type(value).__name__}; pass e.g. DTensor.full_tensor().")
    return value.resolve_neg()


def check_unmasked(value: Any, name: str) -> None:
    """Raises TypeError for an array with masked entries, or a sequence with one."""
    arrays = value if isinstance(value, (list, tuple)) else [value]
    if any(issubclass(t, np.ma.MaskedArray) for t in set(map(type, arrays))) and any(map(np.ma.is_masked, arrays)):
        raise TypeError(
            f"{name} must not be a masked array, whose masked values would be read; leave the rows out, or use valid."
        )


def check_vector(tensor: Tensor, name: str, n: int, like: str = "group") -> Tensor:
    if tensor.ndim != 1:
        raise ValueError(f"{name} must have shape [N] = [{n}], got {list(tensor.shape)}; give one value per row.")
    if tensor.shape[0] != n:
        raise ValueError(f"{name} must have shape [N] = [{n}] like {like}, got [{tensor.shape[0]}].")
    return tensor


def real_vector(value: Any, name: str, n: int) -> Tensor:
    """[N] float64 from any real dtype."""
    tensor = check_vector(to_tensor(value, name, "real numbers, one per row"), name, n)
    if tensor.dtype.is_complex:
        raise TypeError(f"{name} must be real, got {tensor.dtype}; pass its real part.")
    return tensor.double()


def integer_vector(value: Any, name: str, n: int, like: str = "group") -> Tensor:
    """[N] int64 from any integer dtype; bool and floats are refused."""
    tensor = to_tensor(value, name, "integers, one per row")
    if tensor.numel() == 0 and not isinstance(value, (Tensor, np.ndarray)):
        tensor = tensor.to(torch.int64)
    check_vector(tensor, name, n, like)
    if tensor.dtype == torch.uint64:  # only on a GPU, where reading the largest value would synchronize
        return tensor.view(torch.int64)
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name} must have an integer dtype, got {tensor.dtype}; convert it with .to(torch.int64).")
    return tensor.long()


def bool_vector(value: Any, name: str, n: int, late: list[LateCheck] | None = None) -> Tensor:
    """[N] bool; integers 0 and 1 are accepted too, since many masks are integers.

    late   where given, other integers count as True for now, and the check is appended there
    """
    tensor = to_tensor(value, name, "booleans, one per row")
    if tensor.numel() == 0:
        tensor = tensor.to(torch.bool)
    check_vector(tensor, name, n)
    if tensor.dtype == torch.bool:
        return tensor
    text = f"{name} must be bool (or integers 0 and 1), got {tensor.dtype}; compare it, e.g. {name} > 0."
    if tensor.dtype not in (*_INTEGERS, torch.uint64):
        raise TypeError(text)
    unless(((tensor != 0) & (tensor != 1)).any(), TypeError, text, late)
    return tensor.to(torch.bool)


def fingerprint_matrix(value: Any, n: int, name: str = "fingerprint") -> Tensor:
    """[N, D] float32, bfloat16 or float16, with the caller's strides; float64 is rounded to float32."""
    wish = "real numbers of shape [N, D]"
    tensor = to_tensor(value, name, wish)
    if tensor.ndim != 2 and n == 0 and tensor.numel() == 0:
        tensor = tensor.reshape(0, 1).to(torch.float32)
    if tensor.ndim != 2 or tensor.shape[0] != n:
        cure = "; flatten the steps of all trajectories into rows" if tensor.ndim == 3 else ""
        raise ValueError(f"{name} must have shape [N, D] with N = {n} like group, got {list(tensor.shape)}{cure}.")
    if tensor.shape[1] == 0:
        raise ValueError(f"{name} must have at least one feature, got shape {list(tensor.shape)}.")
    if tensor.dtype == torch.float64 or (not isinstance(value, (Tensor, np.ndarray)) and tensor.dtype in _INTEGERS):
        return tensor.to(torch.float32)
    if tensor.dtype not in FINGERPRINT_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {tensor.dtype}; use .float().")
    return tensor


def integer_at_least(value: Any, name: str, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) < 1 << 63:
        raise ValueError(f"{name} must be an int of at least {low}, got {shown(value)}.")
    return int(value)


def shown(value: Any) -> str:
    """A value for a message; of tensors and long integers only their kind."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "an integer of more than 64 bits"
    return type(value).__name__ if isinstance(value, (Tensor, np.ndarray)) else repr(value)


def texts(values: Any, name: str, kinds: tuple[type, ...], cure: str = "render it first") -> tuple[Any, ...]:
    """The items of a sequence of texts, which cannot change any more."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        values = values.tolist()
    wish = " or ".join(kind.__name__ for kind in kinds)
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of {wish}, got {type(values).__name__}; put a single one into a list.")
    items = tuple(values)
    if not set(map(type, items)) <= set(kinds):
        for i, text in enumerate(items):
            if not isinstance(text, kinds):
                cure = "decode it first" if isinstance(text, bytes) else cure
                raise TypeError(f"{name} must all be {wish}, got {type(text).__name__} at index {i}; {cure}.")
    return items


def take_rows(values: Any, rows: Tensor) -> Any:
    """Some rows [M] int64 of a tensor, an array or a sequence."""
    if isinstance(values, Tensor):
        unsigned = values.dtype in (torch.uint16, torch.uint32, torch.uint64)  # which index_select does not take
        return values[rows] if unsigned else values.index_select(0, rows)
    return values[rows.numpy()] if isinstance(values, np.ndarray) else [values[i] for i in rows.tolist()]


def one_device(arguments: dict[str, Any]) -> torch.device:
    """The device that all tensors share; the CPU if there are no tensors."""
    devices: dict[torch.device, str] = {}
    for name, value in arguments.items():
        several = isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)
        for item in value if several else [value]:
            if isinstance(item, Tensor):
                devices.setdefault(item.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"all tensors must be on one device, got {places}; move them with .to(device).")
    return next(iter(devices)) if devices else torch.device("cpu")  # plain to torch.compile


def check_number_in(value: Any, name: str, low: float, high: float) -> float:
    if not (is_number(value) and low <= value <= high):
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}], got {shown(value)}.")
    return float(value)


def check_finite(values: Tensor, name: str, rows: Tensor | None) -> None:
    """ValueError for entries that are not finite or beyond ±1e37; rows [M]: the caller's row of each entry."""
    bad = ~(values.abs() <= LIMIT)
    if bool(bad.any()):
        at = int(torch.nonzero(bad)[0])
        row = at if rows is None else int(rows[at])
        text = f"{{}} must be finite (and within ±1e37), got {float(values[at]):g} at {{}}; correct the row."
        raise InputError(text, Named(name), Rows([row]))
