"""Python objects and array rows as integers: ids and observations become int64 codes."""

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..backends import native_loader
from ..support.warnings import warn_once
from .canonical import array_key, canonical, check_bytes, tensor_bytes

_MOST_OF_ONE_HASH = 64  # as of tuples of six numbers that are -1 or -2, whose hashes are equal
_INT64 = np.iinfo(np.int64)
_EQUAL_THEMSELVES = (str, bytes, int, np.ndarray, Tensor)  # the last two are compared by their bytes


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


def warn_of_numbered_ids(ids: Any, what: str, *, stacklevel: int) -> None:
    """Once where ids of trajectories are not integers: greedy clusters, `what`, depend on their numbers."""
    integers = isinstance(ids, Tensor) or (isinstance(ids, np.ndarray) and ids.dtype.kind in "iu")
    items = () if integers else as_sequence(ids, "trajectory")
    kinds = set(map(type, items))
    if float in kinds and all(x != x for x in items if type(x) is float):
        kinds.remove(float)  # padding may be None or NaN
    if bool in kinds or not all(issubclass(kind, (int, np.integer, Tensor, type(None))) for kind in kinds):
        text = f"trajectory ids that are not integers are numbered by first appearance, on which {what} depend: "
        text += "the same rows in another order may get other clusters. Integer ids avoid this."
        warn_once("numbered trajectory ids", text, stacklevel=stacklevel)


def _ids_of_list(values: Sequence[Any], name: str) -> tuple[Tensor, bool]:
    types = set(map(type, values))
    if any(issubclass(t, Tensor) for t in types):  # list(tensor) gives zero-dimensional tensors
        values = [v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for v in values]
        types = set(map(type, values))
    units = {value.dtype for value in values if isinstance(value, np.timedelta64)} if np.timedelta64 in types else ()
    if len(units) > 1:
        got = " and ".join(sorted(map(str, units)))
        raise TypeError(f"{name} must hold timedelta64 of one unit, got {got}; convert them to one, or to text.")
    if all(issubclass(t, (int, np.integer)) and not issubclass(t, (bool, np.timedelta64)) for t in types):
        try:
            array = np.array(values if types <= {int} else [int(v) for v in values], dtype=np.int64)
        except OverflowError:
            row = next(i for i, v in enumerate(values) if not _INT64.min <= int(v) <= _INT64.max)
            raise _beyond_int64(name, row, int(values[row])) from None
        return torch.from_numpy(array), True
    if not all(issubclass(t, _EQUAL_THEMSELVES) for t in types):
        for row, value in enumerate(values):
            if value is None or _holds_nan(value):
                raise _no_id(name, row, value)
    return _number_list(values, name), False


def _holds_nan(value: Any) -> bool:
    """Whether a value is NaN, NaT or pandas' NA, which do not equal themselves, or a tuple or set with one."""
    if isinstance(value, _EQUAL_THEMSELVES):
        return False
    if isinstance(value, (tuple, frozenset)):
        return any(map(_holds_nan, value))
    if isinstance(value, Decimal):  # comparing a signalling NaN raises
        return value.is_nan()
    equal = value == value  # of NA it is NA
    return not (isinstance(equal, (bool, np.bool_)) and equal)


def _number_list(values: Sequence[Any], name: str) -> Tensor:
    held = tuple(values)  # __hash__ and __eq__, or another thread, may change a list
    types = set(map(type, held))
    if types == {np.ndarray} and len({(value.dtype, value.shape) for value in held}) == 1:
        return _number_array_rows(np.stack(held), name)
    keys = held
    if any(issubclass(t, (np.ndarray, Tensor)) for t in types):
        keys = tuple(
            array_key(value, f"{name}[{row}]") if isinstance(value, (np.ndarray, Tensor)) else value
            for row, value in enumerate(held)
        )
    try:
        codes = _number(keys)
        return _number_list(_keyed(held, name), name) if codes is None else codes
    except TypeError as error:
        for row, value in enumerate(keys):
            try:
                hash(value)
            except TypeError:
                raise TypeError(
                    f"{name}[{row}] must be hashable, got {type(value).__name__}; make it a tuple, a text or an array."
                ) from error
        raise


def _number_array_rows(array: np.ndarray[Any, Any], name: str) -> Tensor:
    check_bytes(array.dtype, name)
    n, codes = array.shape[0], torch.zeros(array.shape[0], dtype=torch.int64)
    if array.size == 0:
        return codes
    rows = np.ascontiguousarray(array).reshape(n, -1)
    width = rows.shape[1] * rows.itemsize
    native = None if native_loader.reason() else native_loader.load()
    if native and native.number_rows(rows.ctypes.data, n, width, secrets.randbits(64), _MOST_OF_ONE_HASH, codes):
        return codes
    return _number_list(rows.view(f"V{width}").reshape(n).tolist(), name)  # as bytes


def _number_tensor_rows(values: Tensor, name: str) -> Tensor:
    flat, n = tensor_bytes(values, name), values.shape[0]
    return _number_array_rows(flat.numpy().reshape(n, flat.numel() // n if n else 0), name).to(values.device)


def _number(values: tuple[Any, ...]) -> Tensor | None:
    """Numbers of the values by first appearance, by hash and equality as in a dict; None where many have one hash.

    Values of one hash are compared with each other: hashes of numbers, and of tuples of them, can be chosen equal, and
    those of texts too by someone who knows PYTHONHASHSEED.
    """
    codes = torch.empty(len(values), dtype=torch.int64)
    if not native_loader.reason():
        few = native_loader.load().number_objects(values, secrets.randbits(64), _MOST_OF_ONE_HASH, codes)
        return codes if few else None
    numbers: dict[Any, int] = {}
    of_one_hash: Counter[int] = Counter()
    for row, value in enumerate(values):
        if value not in numbers:
            of_one_hash[hash(value)] += 1
            if of_one_hash[hash(value)] > _MOST_OF_ONE_HASH:
                return None
        codes[row] = numbers.setdefault(value, len(numbers))
    return codes


def _keyed(values: tuple[Any, ...], name: str) -> tuple[bytes, ...]:
    """Hashes of the values' canonical text with a random key, equal exactly where the values are."""
    secret = secrets.token_bytes(16)

    def keyed(value: Any) -> bytes:
        try:
            text = canonical(value, name)
        except TypeError as error:
            raise ValueError(
                f"{name} must hold at most {_MOST_OF_ONE_HASH} different values of one hash() if some are of type "
                f"{type(value).__name__}, since each is compared with all of the others; convert the values to text."
            ) from error
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32, key=secret).digest()

    return tuple(map(keyed, values))


def _as_array(values: Any) -> np.ndarray[Any, Any] | None:
    """The array that `values` is or holds (a pandas column); None for plain sequences."""
    if isinstance(values, np.ndarray):
        return values
    if hasattr(values, "__array__") and not isinstance(values, (list, tuple, np.generic)):
        array = np.asarray(values)
        of_type = getattr(values, "type", getattr(values, "dtype", ""))  # of pyarrow; of pandas and polars
        of_type = getattr(getattr(of_type, "categories", None), "dtype", getattr(of_type, "value_type", of_type))
        items = [getattr(values, name) for name in ("to_pylist", "to_list", "tolist") if hasattr(values, name)]
        if items and "int" in str(of_type).lower():
            parts = array.flat if array.dtype.hasobject else [array]
            if any(isinstance(part, np.ndarray) and part.dtype.kind == "f" for part in parts):
                rows = (tuple(row) if isinstance(row, list) else row for row in items[0]())
                return np.fromiter(rows, np.object_, len(array))  # integers beside nulls were made floats
        return array
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
        raise TypeError(f"{name} must be a list or array with a value per record, got {type(values).__name__}.")
    return list(values)


def elements(array: np.ndarray[Any, Any]) -> list[Any]:
    """The values along the first axis; rows of more than one value become tuples."""
    return list(array.tolist()) if array.ndim == 1 else [tuple(row.reshape(-1).tolist()) for row in array]


def is_integer(values: Tensor) -> bool:
    return not values.is_floating_point() and not values.is_complex()


def _check_axis(ndim: int, name: str) -> None:
    if ndim == 0:
        raise ValueError(f"{name} must have a first axis with one value per record, got a scalar; put it in a list.")


def _check_ids(ndim: int, shape: tuple[int, ...], name: str) -> None:
    if ndim != 1:
        raise ValueError(f"{name} must have shape [N], one id per record, got {list(shape)}; use {name}.reshape(-1).")


def _float_ids(name: str, dtype: str) -> TypeError:
    return TypeError(f"{name} must hold ids (integers, strings, other hashables), got dtype {dtype}; make it int64.")


def _no_id(name: str, row: int, value: Any) -> ValueError:
    return ValueError(f"{name}[{row}] must be an id, got {value}; give every row an id, and mark padding with valid.")


def _beyond_int64(name: str, row: int, value: int) -> ValueError:
    got = str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    return ValueError(f"{name}[{row}] must fit into int64, got {got}; use str(id) for each id, or smaller numbers.")
