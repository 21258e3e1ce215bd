"""The file format of a truth set: one compressed npz, no pickles, no field that needs this package to be read.

    meta          JSON text: name, environment, policy, role ("choose" | "hold"), gamma, horizon, continuations, seed,
                  made_by
    batch         [N] int16    independent batches from 0 on: an estimator sees one of them at a time
    group         [N] int32    prompt group, unique in the file
    trajectory    [N] int32    unique in the file; rows are sorted by group, trajectory, step
    step          [N] int16
    reward        [N] float32
    value_a       [N] float32  mean discounted return of the first half of the continuations from the record's state
    value_b       [N] float32  the same of the second half; both NaN where only a sample was measured, and is not in it
    observation   [N] int32    index into texts: what the policy saw last before it acted
    action        [N] int32    index into texts: the command that it gave
    texts         [bytes] uint8: JSON list of the distinct texts
    hidden_<k>    [N, D] float16  hidden_states[k] at the position before the command; where the set has any.  The lower
                  ones may be NaN after a prompt's first rollouts
    gradient      [N, K] float16  numbers whose inner products stand for those of ∇ log π(command | record), up to a
                  factor: coordinates in the leading directions, which hold meta's gradient_share of the squared
                  lengths, and random projections of the rest; 0 where batch < 0; where the set has any.  With meta's
                  "target": "other rollouts", the policy gradient to compare with is the expected one, which the other
                  rollouts estimate
A batch < 0 has no truth (values 0): it is what the updates before saw, -1 the last one; where the set has any.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

S = TypeVar("S", bound="TruthSet")
FOLDER = Path(__file__).resolve().parent / "truth"
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass
class TruthSet:
    """One file in memory: float64 and int64, texts looked up."""

    meta: dict[str, Any]
    batch: Integers  # [N]
    group: Integers  # [N]
    trajectory: Integers  # [N]
    step: Integers  # [N]
    reward: Floats  # [N]
    value_a: Floats  # [N]
    value_b: Floats  # [N]
    observation: list[str]  # [N]
    action: list[str]  # [N]
    hidden: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # [N, D] of each hidden_states[k]
    gradient: Floats | None = None  # [N, K]

    @property
    def name(self) -> str:
        return str(self.meta["name"])

    def __len__(self) -> int:
        return len(self.group)

    def select(self: S, rows: NDArray[np.bool_] | Integers) -> S:
        """The same set with only these rows."""
        index = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows)

        def at(column: Any) -> Any:
            if isinstance(column, np.ndarray):
                return column[index]
            return [column[i] for i in index] if isinstance(column, list) else column

        return replace(self, **{
            name: {k: at(x) for k, x in column.items()} if name == "hidden" else at(column)
            for name, column in vars(self).items()
        })  # fmt: skip


_DTYPES = {
    "batch": np.int16, "group": np.int32, "trajectory": np.int32, "step": np.int16, "reward": np.float32,
    "value_a": np.float32, "value_b": np.float32, "observation": np.int32, "action": np.int32,
}  # fmt: skip


def write(
    path: Path, meta: dict[str, Any], rows: Sequence[Sequence[Any]], hidden: dict[int, NDArray[np.float16]],
    gradient: Floats | None = None,
) -> None:  # fmt: skip
    """Rows (batch, group, trajectory, step, reward, value_a, value_b, observation, action), sorted by group,
    trajectory, step; ValueError otherwise."""
    columns: dict[str, Any] = dict(zip(_DTYPES, zip(*rows, strict=True), strict=True))
    order = np.lexsort((columns["step"], columns["trajectory"], columns["group"]))
    if not np.array_equal(order, np.arange(len(order))):
        raise ValueError("the rows of a truth set must be sorted by group, trajectory and step.")
    texts: dict[str, int] = {}
    for name in ("observation", "action"):
        columns[name] = [texts.setdefault(text, len(texts)) for text in columns[name]]
    arrays = {
        "meta": _bytes(meta),
        "texts": _bytes(list(texts)),
        **{name: np.array(columns[name], dtype) for name, dtype in _DTYPES.items()},
        **{f"hidden_{k}": states.astype(np.float16) for k, states in hidden.items()},
        **({} if gradient is None else {"gradient": gradient.astype(np.float16)}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with open(temporary, "wb") as file:  # a file object: np.savez would add .npz to a name
        np.savez_compressed(file, **arrays)
    temporary.replace(path)  # so that a set is there as a whole or not at all


def read(path: Path) -> TruthSet:
    with np.load(path, allow_pickle=False) as data:
        texts = json.loads(data["texts"].tobytes().decode("utf-8"))
        return TruthSet(
            meta=json.loads(data["meta"].tobytes().decode("utf-8")),
            **{name: data[name].astype(np.int64) for name in ("batch", "group", "trajectory", "step")},
            **{name: data[name].astype(np.float64) for name in ("reward", "value_a", "value_b")},
            observation=[texts[i] for i in data["observation"]],
            action=[texts[i] for i in data["action"]],
            hidden={int(name[7:]): data[name].astype(np.float32) for name in data.files if name.startswith("hidden_")},
            gradient=data["gradient"].astype(np.float64) if "gradient" in data.files else None,
        )


def _bytes(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value, ensure_ascii=False).encode("utf-8"), np.uint8)
