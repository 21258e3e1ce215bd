"""From records to the arguments of `bipace_kernels.advantage()`: states and fingerprints.

The state of a record is its observation, or with "history:K" its last K + 1 observations, its own included; a record
with fewer uses all it has.  For the partition "exact" such a state is the tuple of observations; where a text
is needed (n-grams, "similar") they are joined, oldest first, by the ASCII record separator (0x1E).
"""

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from ._console import CliError
from .rollouts import Rollouts, warn_if_changed

SEPARATOR = "\x1e"


def depth_of(text: str) -> int:
    """Observations before a record's own that its state has: 0 of 'observation', K of 'history:K'."""
    kind, _, depth = ("history:0" if text == "observation" else text).partition(":")
    if kind != "history" or not (depth.isascii() and depth.isdigit() and len(depth) < 10):
        raise CliError(f"--state must be observation or history:K with an integer K of at least 0, got {text!r}.")
    return int(depth)


def name_of(depth: int) -> str:
    return f"history:{depth}" if depth else "observation"


def observations(rollouts: Rollouts, depth: int) -> list[Any]:
    """[N] the states as keys: strings, or tuples of strings, equal where the states are equal."""
    return _histories(rollouts, depth) if depth else list(rollouts.observation)


def texts(rollouts: Rollouts, depth: int = 0) -> list[str]:
    """[N] the states as texts."""
    return [SEPARATOR.join(history) for history in _histories(rollouts, depth)]


def _histories(rollouts: Rollouts, depth: int) -> list[tuple[str, ...]]:
    """[N] the last depth + 1 observations of each record, by step; a repeated step counts once, by its first record."""
    rows_of: dict[int, list[int]] = {}
    for row, trajectory in enumerate(rollouts.trajectory.tolist()):
        if rollouts.is_valid(row):
            rows_of.setdefault(trajectory, []).append(row)
    histories: list[tuple[str, ...]] = [(observation,) for observation in rollouts.observation]
    for rows in rows_of.values():
        rows.sort(key=lambda row: rollouts.step[row])  # stable: equal steps keep the order of the file
        behind: list[str] = []  # observations of the distinct steps so far, the row's own included
        last: int | None = None
        for row in rows:
            if rollouts.step[row] != last:
                behind.append(rollouts.observation[row])
                last = rollouts.step[row]
            histories[row] = (*behind[max(0, len(behind) - 1 - depth) : -1], rollouts.observation[row])
    return histories


def load_fingerprints(path: str, n: int) -> npt.NDArray[Any]:
    """[N, D] hidden states from a .npy file, one row per record in the order of the files and their lines."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe would wait for its writer
            raise OSError("it is not a regular file")
        written = os.stat(path).st_mtime_ns
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # of any kind: a damaged file has many
        reason = str(error).split("\n")[0].rstrip(".")
        raise CliError(f"--fingerprint {path} cannot be read as a .npy file: {reason}.") from None
    if not isinstance(array, np.ndarray):
        raise CliError(f"--fingerprint {path} must be one array in .npy format, got an archive; save it with np.save.")
    if array.ndim != 2 or array.shape[0] != n or array.shape[1] == 0:
        raise CliError(f"--fingerprint {path} must have shape [N, D] with N = {n} records, got {list(array.shape)}.")
    dtype = array.dtype.newbyteorder("=")
    if dtype not in (np.float16, np.float32, np.float64):
        raise CliError(f"--fingerprint {path} must be float16, float32 or float64, got {array.dtype}.")
    copy = np.array(array, dtype, order="C")  # a page of a file that is written to meanwhile may differ, or be gone
    warn_if_changed(path, written)
    return copy


def hidden_states(rollouts: Rollouts) -> npt.NDArray[Any]:
    """[N, D] float16 or float32 fingerprints of the records."""
    fingerprint = np.asarray(rollouts.fingerprint)
    return fingerprint if fingerprint.dtype in (np.float16, np.float32) else fingerprint.astype(np.float32)
