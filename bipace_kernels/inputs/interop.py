"""Conversion of arguments: arrays of other libraries (CuPy, JAX, Numba) without a copy, with results of the same kind;
lists as tuples, which cannot change."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from . import checks

# Arguments of advantage(); the first that is given decides the type of the results.
DECIDING = ("fingerprint", "rewards", "returns")


def is_interop_array(value: Any) -> bool:
    """Whether a value is an array by DLPack or the CUDA array interface, of a kind that is not read otherwise.

    NumPy's arrays and pyarrow's columns, which may hold texts, support DLPack too, but NumPy reads them as tensors.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, list, tuple, str, bytes)) or value is None:
        return False
    library = type(value).__module__.partition(".")[0]
    return library != "pyarrow" and (hasattr(type(value), "__dlpack__") or hasattr(value, "__cuda_array_interface__"))


def to_torch(value: Any, name: str) -> Any:
    """A tensor that shares the memory of another library's array, a tuple of a list; anything else unchanged.

    The current stream of torch waits for the array's, as DLPack specifies; the host does not wait.  Lists are copied
    because later code first measures and then reads them: another thread may change a list in between, and a
    subclass's __len__ may be wrong.  TypeError for nested tensors, and for masked arrays, whose mask would be ignored.
    """
    if isinstance(value, torch.Tensor):
        return checks.check_dense(value, name) if value.is_nested or type(value) is not torch.Tensor else value
    if isinstance(value, (list, tuple)):
        return tuple(value)
    checks.check_unmasked(value, name)
    kind = str(getattr(value, "type", "")) if type(value).__module__ == "pyarrow.lib" else ""
    if kind.startswith("dictionary"):
        return value.cast(value.type.value_type)  # NumPy would read a null as another value
    if not is_interop_array(value):
        return value
    try:
        if hasattr(type(value), "__dlpack__"):
            return torch.utils.dlpack.from_dlpack(value)
        return torch.as_tensor(value, device="cuda")
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array that torch can read, got {type(value).__name__}: {error}") from error


def all_to_torch(arguments: dict[str, Any]) -> dict[str, Any]:
    """to_torch() of arguments by name, at the start of every public function that takes rows."""
    converted = dict(arguments)
    for name, value in arguments.items():
        if value is not None and (type(value) is not torch.Tensor or value.is_nested):
            converted[name] = to_torch(value, name)
    return converted


def tensors(**arguments: Any) -> list[Any]:
    """The device that the arguments share, and each of them by to_torch()."""
    converted = all_to_torch(arguments)
    return [checks.one_device(converted), *converted.values()]


def from_dlpack_of(arguments: dict[str, Any]) -> Callable[[Any], Any] | None:
    """from_dlpack of the library that the deciding argument is from; None where the results stay tensors.

    This includes arrays with only the CUDA array interface, which has no constructor.
    """
    value = next((arguments[name] for name in DECIDING if arguments[name] is not None), None)
    if not is_interop_array(value) or not hasattr(type(value), "__dlpack__"):
        return None
    namespace = getattr(value, "__array_namespace__", None)
    library = sys.modules.get(type(value).__module__.partition(".")[0]) if namespace is None else namespace()
    function: Callable[[Any], Any] | None = getattr(library, "from_dlpack", None)
    return function
