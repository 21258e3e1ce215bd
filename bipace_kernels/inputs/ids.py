"""Python objects and array rows as integers: ids and observations become int64 codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends import native_loader
from ..support.warnings import warn_once
from . import checks

_ARRAY, _TENSOR = object(), object()  # first items of array keys, unequal to any user's tuple
_INT64 = np.iinfo(np.int64)
# NaN and NaT (also pandas', a subclass of datetime) equal no id.
_MAY_BE_NONE = (float, np.floating, np.datetime64, np.timedelta64, datetime)


def number_objects(values: Any, name: str = "observation") -> Tensor:
    """Codes [N] int64, equal exactly where the values are equal.

    values
        a list, tuple or other sequence of hashable objects: numbered 0, 1, ... by first appearance, with Python's own
            equality (so 1 == 1.0 == True, "a" != b"a", and a NaN equals only itself, the same object);
            arrays and tensors among them are equal when dtype, shape and bytes are
        an array of str, bytes or objects: as the list of its elements
        a 1-D array or tensor of an integer dtype or bool: codes already, returned as int64 and not renumbered
        any other numeric array or tensor [N, ...], e.g. images [N, H, W, C]: its rows, numbered by first appearance and
            compared by their bytes, so -0.0 differs from 0.0 and equal NaNs are equal; a GPU tensor is copied

    Tensors give codes on their own device, everything else on the CPU.  TypeError names the first value that is not
    hashable.
    """
    if isinstance(values, Tensor):
        _check_axis(values.ndim, name)
        if values.ndim == 1 and is_integer(values):
            return values.detach().to(torch.int64)
        return _number_tensor_rows(values, name)
    array = _as_array(values)
    if array is None:
        return _number_list(_as_list(values, name), name)
    _check_axis(array.ndim, name)
    kind = array.dtype.kind
    if kind in "iub" and array.ndim == 1:
        # uint64 above the int64 range wraps round, which keeps equality.
        return torch.from_numpy(array.astype(np.int64))
    if kind in "iubmMfc" or (kind in "US" and array.ndim > 1):
        return _number_array_rows(array, name)
    return _number_list(elements(array), name)


def ids_to_int(values: Any, name: str) -> tuple[Tensor, bool]:
    """Ids as (int64 [N], is_numeric).

    An integer dtype, or a sequence that holds only int and no bool, keeps its values, and is_numeric is True: their
    order is kept.  Any other ids (uuid strings, tuples, ...) are numbered 0, 1, ... by first appearance in row
    order.  Integer tensors stay on their device.

    TypeError for arrays of floats; ValueError for integers outside int64, for None or NaN among the ids (with the
    index) and for anything that is not one-dimensional.
    """
    if isinstance(values, Tensor):
        _check_ids(values.ndim, tuple(values.shape), name)
        if values.is_floating_point() or values.is_complex():
            raise _float_ids(name, str(values.dtype))
        if values.dtype == torch.uint64:
            return ids_to_int(values.detach().cpu().numpy(), name)[0].to(values.device), True
        if values.dtype == torch.bool:
            return _number_tensor_rows(values, name), False
        return values.detach().to(torch.int64), True
    array = _as_array(values)
    if array is None:
        return _ids_of_list(_as_list(values, name), name)
    _check_ids(array.ndim, array.shape, name)
    kind = array.dtype.kind
    if kind in "fc":
        raise _float_ids(name, str(array.dtype))
    if kind in "iu":
        if kind == "u" and array.size and int(array.max()) > _INT64.max:
            raise _beyond_int64(name, int(array.argmax()), int(array.max()))
        return torch.from_numpy(array.astype(np.int64)), True
    if kind in "mM" and bool(np.isnat(array).any()):
        raise _no_id(name, int(np.isnat(array).argmax()), "NaT")
    if kind in "bmM":
        return _number_array_rows(array, name), False
    return _ids_of_list(elements(array), name)


def warn_of_text_ids(trajectory: Any, what: str, *, stacklevel: int) -> None:
    """Once where ids are texts: those are numbered by appearance, and greedy clusters, `what`, follow that order."""
    if (
        isinstance(trajectory, (list, tuple, np.ndarray))
        and len(trajectory)
        and isinstance(trajectory[0], (str, bytes))
    ):
        warn_once(
            "texts as trajectory ids",
            f"trajectory ids are strings, which are numbered in order of first appearance, and {what} depend on the order of "
            "rollouts: the same rows in another order may get other clusters. Integer ids avoid this.",
            stacklevel=stacklevel,
        )


def _ids_of_list(values: Sequence[Any], name: str) -> tuple[Tensor, bool]:
    types = set(map(type, values))
    if any(issubclass(t, Tensor) for t in types):  # list(tensor) gives zero-dimensional tensors
        values = [v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for v in values]
        types = set(map(type, values))
    if all(issubclass(t, (int, np.integer)) and t is not bool for t in types):
        try:
            array = np.array(values if types <= {int} else [int(v) for v in values], dtype=np.int64)
        except OverflowError:
            row = next(i for i, v in enumerate(values) if not _INT64.min <= int(v) <= _INT64.max)
            raise _beyond_int64(name, row, int(values[row])) from None
        return torch.from_numpy(array), True
    if type(None) in types or any(issubclass(t, _MAY_BE_NONE) for t in types):
        for row, value in enumerate(values):
            if value is None or (isinstance(value, _MAY_BE_NONE) and value != value):
                raise _no_id(name, row, value)
    return _number_list(values, name), False


def _number_list(values: Sequence[Any], name: str) -> Tensor:
    held = tuple(values)  # __hash__ and __eq__, or another thread, may change a list
    if native_loader.reason():
        return _number_list_python(held, name)
    codes = torch.empty(len(held), dtype=torch.int64)
    load = native_loader.load()
    load.number_objects(held, len(held), codes.data_ptr(), (np.ndarray, Tensor), array_key, name)
    return codes


def _number_list_python(values: tuple[Any, ...], name: str) -> Tensor:
    """The native function in Python, for when the compiled module does not load."""
    seen: dict[Any, int] = {}
    numbers = []
    for row, value in enumerate(values):
        key = array_key(value, name, row) if isinstance(value, (np.ndarray, Tensor)) else value
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"{name}[{row}] must be hashable, got {type(value).__name__}; convert it to a tuple or to text "
                "(json.dumps(value, sort_keys=True)), an image to an array"
            ) from error
        numbers.append(seen.setdefault(key, len(seen)))
    return torch.tensor(numbers, dtype=torch.int64)


def array_key(value: np.ndarray[Any, Any] | Tensor, name: str, row: int) -> tuple[Any, ...]:
    """A hashable stand-in for an array or tensor: its dtype, shape and bytes."""
    if isinstance(value, Tensor):
        _check_strided(value, f"{name}[{row}]")
        return _TENSOR, value.dtype, tuple(value.shape), _tensor_bytes(value).numpy().tobytes()
    checks.check_unmasked(value, f"{name}[{row}]")
    _check_bytes(value.dtype, f"{name}[{row}]")
    return _ARRAY, value.dtype, value.shape, value.tobytes()


def _number_array_rows(array: np.ndarray[Any, Any], name: str) -> Tensor:
    _check_bytes(array.dtype, name)
    array = np.ascontiguousarray(array)
    n = array.shape[0]
    row_bytes = array.nbytes // n if n else 0
    if native_loader.reason():
        return _number_list([row.tobytes() for row in array], name)
    codes = torch.empty(n, dtype=torch.int64)
    native_loader.load().number_rows(array.ctypes.data, n, row_bytes, codes.data_ptr())
    return codes


def _number_tensor_rows(values: Tensor, name: str) -> Tensor:
    _check_strided(values, name)
    n = values.shape[0]
    flat = _tensor_bytes(values)
    return _number_array_rows(flat.numpy().reshape(n, flat.numel() // n if n else 0), name).to(values.device)


def _tensor_bytes(values: Tensor) -> Tensor:
    """The tensor's bytes in row-major order, uint8 on the CPU."""
    flat = values.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _as_array(values: Any) -> np.ndarray[Any, Any] | None:
    """The array that `values` is or holds (a pandas column); None for plain sequences."""
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "__array__") and not isinstance(values, (list, tuple, np.generic)):
        return np.asarray(values)
    return None


def as_sequence(values: Any, name: str) -> Any:
    """The tensor, array, list or tuple that `values` is or holds; TypeError for sets, dicts and single texts."""
    if isinstance(values, Tensor):
        return values
    array = _as_array(values)
    return _as_list(values, name) if array is None else array


def _as_list(values: Any, name: str) -> list[Any] | tuple[Any, ...]:
    if isinstance(values, (list, tuple)):
        return values
    if isinstance(values, (str, bytes, bytearray, Mapping, Set)) or not isinstance(values, Sequence):
        raise TypeError(
            f"{name} must be a list, tuple, array or tensor with one value per record, got {type(values).__name__}; "
            "convert it to a list in row order."
        )
    return list(values)


def elements(array: np.ndarray[Any, Any]) -> list[Any]:
    """The values along the first axis; rows of more than one value become tuples."""
    if array.ndim == 1:
        elements: list[Any] = array.tolist()
        return elements
    return [tuple(row.reshape(-1).tolist()) for row in array]


def is_integer(values: Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex()


def _check_axis(ndim: int, name: str) -> None:
    if ndim == 0:
        raise ValueError(
            f"{name} must have a first axis with one value per record, got a single value; put it in a list."
        )


def _check_ids(ndim: int, shape: tuple[int, ...], name: str) -> None:
    if ndim != 1:
        raise ValueError(f"{name} must have shape [N], one id per record, got {list(shape)}; use {name}.reshape(-1).")


def _check_strided(values: Tensor, name: str) -> None:
    if values.layout != torch.strided or values.is_quantized or values.is_meta:
        raise TypeError(
            f"{name} must be a dense tensor, got {values.layout} on {values.device}; use {name}.to_dense()."
        )


def _check_bytes(dtype: np.dtype[Any], name: str) -> None:
    if dtype.hasobject:
        raise TypeError(
            f"{name} must hold numbers or text to be compared by bytes, got an array of dtype object; convert it to a "
            "tuple (tuple(x.tolist())) or to a numeric dtype."
        )
    if dtype.char in "gG":
        raise TypeError(f"{name} must not be {dtype}, whose padding bytes are undefined; use .astype('float64').")


def _float_ids(name: str, dtype: str) -> TypeError:
    return TypeError(
        f"{name} must hold ids (integers, strings or other hashable objects), got dtype {dtype}; convert it with "
        f"{name}.long() or {name}.astype('int64') if its values are whole numbers."
    )


def _no_id(name: str, row: int, value: Any) -> ValueError:
    return ValueError(
        f"{name}[{row}] must be an id, got {value}; give every row an id, and mark padding rows with valid."
    )


def _beyond_int64(name: str, row: int, value: int) -> ValueError:
    got = str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    return ValueError(f"{name}[{row}] must fit into int64, got {got}; use str(id) for each id, or smaller numbers.")
