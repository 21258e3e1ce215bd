"""Python values as text that is equal exactly where the values are: how ids and observations travel without pickle."""

import hashlib
import json
import secrets
import uuid
from typing import Any

import numpy as np
import torch

from . import checks

_ARRAY, _TENSOR = object(), object()  # first items of array keys, unequal to any user's tuple


def canonical(value: Any, name: str) -> str:
    """Text of a value, equal to another's exactly where the values are equal and of equal hash in Python.

    str, bytes, numbers, None, UUIDs, and tuples and frozensets of them; NumPy's scalars as Python's; arrays and tensors
    by dtype, shape and a 256-bit hash of their bytes, as number_objects() compares them.  A NaN equals nothing.
    TypeError, with the name of the argument, for any other type: only its own code could compare it.
    """
    if _is(value, str) or isinstance(value, np.str_):  # most observations; no JSON of another type begins with "s"
        return "".join(("s", value))
    return json.dumps(_plain(value, name))


def _plain(value: Any, name: str) -> Any:
    """What JSON holds: a text, a number or None as itself, a tuple as a list, the others as {kind: content}."""
    if isinstance(value, np.generic) and not isinstance(value, (np.datetime64, np.timedelta64)):
        value = value.item()
    if value is None or _is(value, str):
        return value
    if _is(value, float) and not value.is_integer():
        # repr() of a finite float is exact.  A fresh number makes NaNs differ.
        return {"nan": secrets.token_hex(16)} if value != value else value
    if _is(value, int) or _is(value, float):  # 1 == 1.0 == True
        whole = int(value)
        return whole if whole.bit_length() <= 64 else {"int": hex(whole)}  # Python refuses long decimals
    if _is(value, bytes):
        return {"bytes": value.hex()}
    if _is(value, uuid.UUID):
        return {"uuid": value.hex}
    if _is(value, tuple):
        return [_plain(item, name) for item in value]
    if _is(value, frozenset):
        return {"set": sorted(json.dumps(_plain(item, name)) for item in value)}
    if isinstance(value, (np.ndarray, torch.Tensor)):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        _, dtype, shape, content = array_key(value, name)
        return {kind: [str(dtype), list(shape), hashlib.blake2b(content, digest_size=32).hexdigest()]}
    raise TypeError(
        f"{name} must hold str, bytes, numbers, None, UUIDs, arrays, or tuples and frozensets of these, for other "
        f"ranks compare them, got {type(value).__name__}; convert it to text or integers."
    )


def _is(value: Any, kind: type) -> bool:
    """Of this type, or of a subclass that compares as it does."""
    own = type(value)
    return isinstance(value, kind) and own.__eq__ is kind.__eq__ and own.__hash__ is kind.__hash__


def array_key(value: np.ndarray[Any, Any] | torch.Tensor, name: str) -> tuple[Any, ...]:
    """A hashable stand-in for an array or tensor: its dtype, shape and bytes."""
    if isinstance(value, torch.Tensor):
        return _TENSOR, value.dtype, tuple(value.shape), tensor_bytes(value, name).numpy().tobytes()
    checks.check_unmasked(value, name)
    check_bytes(value.dtype, name)
    return _ARRAY, value.dtype, value.shape, value.tobytes()


def tensor_bytes(values: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor's bytes in row-major order, uint8 on the CPU."""
    flat = checks.check_dense(values, name).detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def check_bytes(dtype: np.dtype[Any], name: str) -> None:
    """TypeError for arrays whose bytes do not say whether two values are equal."""
    if dtype.hasobject:
        raise TypeError(
            f"{name} must hold numbers or text, got an array of dtype object; make it a tuple (tuple(x.tolist()))."
        )
    if dtype.char in "gG":
        raise TypeError(f"{name} must not be {dtype}, whose padding bytes are undefined; use .astype('float64').")
