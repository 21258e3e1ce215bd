"""Observations for the partitions: integer codes, and texts."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..support.errors import InputError, InputTypeError, Named, Rows
from . import checks
from .ids import as_sequence, is_integer, number_objects
from .layout import Layout
from .transfer import to_host


def observation_codes(observation: Any, lay: Layout) -> Tensor:
    """[N] int64, equal where the observations are equal; padding may hold anything.

    Strings, bytes and any hashable objects by Python's own equality; arrays and images by dtype, shape and bytes;
    integer arrays and tensors are codes already, and stay on their device; other tensors are copied to the host.
    """
    if isinstance(observation, Tensor) and observation.ndim == 1 and is_integer(observation):
        return number_objects(observation)
    (observation,) = to_host([observation])
    if lay.valid is None:
        return checks.check_vector(number_objects(observation), "observation", lay.n_rows)
    taken = torch.nonzero(lay.valid).flatten()
    codes = torch.zeros(lay.n_rows, dtype=torch.int64)
    numbers = number_objects(checks.take_rows(as_sequence(observation, "observation"), taken))
    return codes.index_copy_(0, taken, numbers)


def observation_texts(observation: Any, lay: Layout, longest: int) -> list[str]:
    """[M] the observations of the records, in processing order, all of them as check_text() wants."""
    items = as_sequence(observation, "observation")
    if isinstance(items, (np.ndarray, Tensor)):
        items = items.tolist()
    texts = []
    for row in lay.order.tolist():
        check_text(items[row], row, longest)
        texts.append(items[row])
    return texts


def check_text(text: Any, row: int, longest: int) -> None:
    """Of partition "similar": TypeError for what is not a str, ValueError for one of more than `longest` characters."""
    name, similar, exact = Named("observation"), Named("partition", ("similar",)), Named("partition", ("exact",))
    at = Rows([row])
    if not isinstance(text, str):
        message = "{} must hold str for {}, got {} at {}; decode it, or use {}."
        raise InputTypeError(message, name, similar, type(text).__name__, at, exact)
    if len(text) > longest:
        message = (
            "{} must hold texts of at most longest_text = {} characters for {}, whose time grows with the product of "
            "two lengths, got {} at {}; cut it off, use {}, or set {}."
        )
        longer = Named("longest_text", (len(text),), in_config=True)
        raise InputError(message, name, longest, similar, len(text), at, exact, longer)
