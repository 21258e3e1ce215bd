"""Recorder: step records of every n-th update of a training run, as Parquet files that `bipace report --html` reads."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import _optional
from ..result import AdvantageResult
from ._turns import Turns

Tensor = torch.Tensor
Texts = Callable[[Tensor], tuple[Sequence[Any], Sequence[Any]]]

RECORDS = 2000  # of a file, whole prompt groups; a larger first group is written nevertheless
CHARACTERS = 10_000  # of an observation or an action
FILES = 20  # kept in the folder, the newest
SHARE = 0.01  # of the run's time that recording may take


class Recorder:
    """Writes into `folder` the records of the first update and of each that is `every` or more after the last one written.

    An update is passed over as long as writing it, at the cost of the one before, would bring recording above 1 % of the time
    since the run began.  A file that cannot be written is a warning and ends the recording, not the run.

    where   what goes before the settings' names in messages
    clock   seconds, of whatever begin
    """

    def __init__(self, folder: str, every: int, where: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        _optional.need("pyarrow", f"{where}record_dir")
        self.folder, self.every, self.where, self.clock = Path(folder), every, where, clock
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{where}record_dir={folder} cannot be made: {error.strerror}; name another folder."
            ) from error
        self._began, self._spent, self._last = clock(), 0.0, 0.0
        self._next: int | None = 0  # the update from which on one is due; None: never again
        self._expected: tuple[int, Texts] | None = None

    def expect(self, update: int, texts: Texts) -> None:
        """Announces a batch, which write() will get; where none is due nothing is kept.

        update   its number in the run
        texts    gives observations and actions of some of its records [k]: whole rows of the batch
        """
        due = self._next is not None and update >= self._next
        fits = self._spent + self._last <= SHARE * (self.clock() - self._began)
        self._expected = (update, texts) if due and fits else None

    def write(self, records: Mapping[str, Any], result: AdvantageResult) -> None:
        """The batch that was announced, if one was.

        records   `group`, `trajectory`, `step` and `rewards` [n], and `valid` where there is padding
        result    of advantage() on them
        """
        if self._expected is None:
            return
        (update, texts), self._expected = self._expected, None
        began = self.clock()
        try:
            self._write(update, records, result, texts)
        except OSError as error:
            warnings.warn(
                f"{self.where}record_dir={self.folder}: update {update} cannot be written ({error.strerror or error}); no "
                "further one is recorded.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._next = None
            return
        self._last = self.clock() - began
        self._spent, self._next = self._spent + self._last, update + self.every

    def _write(self, update: int, records: Mapping[str, Any], result: AdvantageResult, texts: Texts) -> None:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        ids = {name: torch.as_tensor(records[name]).cpu() for name in ("group", "trajectory", "step")}
        rows = shown(*ids.values(), records.get("valid"))
        if not len(rows):
            return
        observation, action = texts(rows)
        table = pa.table(
            {
                "task_id": ids["group"][rows].numpy(),
                "rollout": ids["trajectory"][rows].numpy(),
                "step": ids["step"][rows].numpy(),
                "observation": [_text(text) for text in observation],
                "action": [_text(text) for text in action],
                "reward": torch.as_tensor(records["rewards"]).cpu().double()[rows].numpy(),
                "bipace_advantage": result.advantage.cpu()[rows].numpy(),
                "bipace_cluster": result.cluster.cpu()[rows].numpy(),
            }
        )
        path = self.folder / f"update_{update:08d}.parquet"
        begun = path.with_suffix(".begun")
        pq.write_table(table, begun, compression="zstd")
        begun.replace(path)  # as a whole or not at all
        files = sorted(self.folder.glob("update_*.parquet"), key=lambda file: file.stat().st_mtime_ns)
        for old in files[:-FILES]:
            old.unlink()


def shown(group: Tensor, trajectory: Tensor, step: Tensor, valid: Tensor | None = None) -> Tensor:
    """[k] records of the first prompt groups, as many as make up to 2,000: without padding, copies of a step once."""
    kept, seen, counts = [], set(), dict.fromkeys(group.tolist(), 0)
    mask = [True] * len(group) if valid is None else valid.tolist()
    for i, (g, *place) in enumerate(zip(group.tolist(), trajectory.tolist(), step.tolist(), strict=True)):
        if mask[i] and tuple(place) not in seen:
            seen.add(tuple(place))
            kept.append((g, i))
            counts[g] += 1
    total, chosen = 0, set()
    for g, count in counts.items():
        if total and total + count > RECORDS:
            break
        total += count
        chosen.add(g)
    return torch.tensor([i for g, i in kept if g in chosen], dtype=torch.int64)


def texts_of(
    turns: Turns, rows: Tensor, prompts: Sequence[Tensor], ids: Tensor, tokenizer: Any
) -> tuple[list[str], list[str]]:
    """What some turns [k] answer and what they write, decoded; all turns of their rows, or of a row the first ones."""
    some = replace(turns, **{name: getattr(turns, name)[rows] for name in ("row", "step", "start", "stop")})
    written = [
        ids[row, a:b].tolist()
        for row, a, b in zip(*(x.tolist() for x in (some.row, some.start, some.stop)), strict=True)
    ]
    return some.observation_texts(prompts, ids, tokenizer), tokenizer.batch_decode(written, skip_special_tokens=True)


def _text(value: Any) -> str:
    """A text of Parquet: valid Unicode, at most 10,000 characters."""
    text = value if isinstance(value, str) else str(value)
    return text[:CHARACTERS].encode(errors="replace").decode()
