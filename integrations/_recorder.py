"""Recorder: step records of every n-th update of a training run, as Parquet files that `bipace report --html` reads."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import Config
from ..diagnostics.kernel_value_r2 import nearest
from ..result import AdvantageResult
from ..support import optional
from ..support.files import atomic_file
from ..support.warnings import warn_once

Texts = Callable[[Tensor], tuple[Sequence[Any], Sequence[Any]]]

RECORDS = 2000  # per file, in whole prompt groups; a larger first group is still written
CHARACTERS = 10_000  # of an observation or an action
FILES = 20  # the newest files are kept
NEIGHBOURS = 5  # of a step, by the kernel of "gae"
SHARE = 0.01  # largest share of the run's time for recording


class Recorder:
    """Writes into `folder` a training's first update, and each that is `every` or more after the last one written.

    An update is skipped if writing it, at the cost of the previous one, would bring recording above 1 % of the time
    since the run began.  A file that cannot be written gives a warning and ends the recording, not the run.

    where   prefix of the settings' names in messages
    clock   seconds since any fixed time
    """

    def __init__(self, folder: str, every: int, where: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        optional.need("pyarrow", f"{where}record_dir")
        self.folder, self.every, self.where, self.clock = Path(folder), every, where, clock
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{where}record_dir={folder} cannot be made: {error.strerror}; name another.") from error
        self._began, self._spent, self._last = clock(), 0.0, 0.0
        self._next: int | None = 0  # the next update to be recorded; None: none
        self._expected: tuple[int, Texts] | None = None

    def expect(self, update: int, texts: Texts) -> None:
        """Announces a batch for write(); keeps nothing if none is due.

        update   its number in the run
        texts    function from records [k], in whole rows of the batch, to their observations and actions
        """
        due = self._next is not None and not self._next - self.every <= update < self._next
        fits = self._spent + self._last <= SHARE * (self.clock() - self._began)
        self._expected = (update, texts) if due and fits else None

    def write(self, records: Mapping[str, Any], result: AdvantageResult, config: Config) -> None:
        """Writes the announced batch, if any.

        records   `group`, `trajectory`, `step` and `rewards` [n]; `valid` of padding; `truncated` if it is read;
                  `fingerprint` if values are estimated from these records alone; `trained_rewards` where these differ
        result    of advantage() on them
        config    its configuration
        """
        if self._expected is None:
            return
        (update, texts), self._expected = self._expected, None
        began = self.clock()
        try:
            self._write(update, records, result, config, texts)
        except Exception as error:  # of any kind: the other ranks wait, and the run goes on without it
            what = f"{self.where}record_dir={self.folder}: update {update} cannot be written"
            why = getattr(error, "strerror", None) or repr(error)
            warn_once(what, f"{what} ({why}); recording stops.")
            self._next = None
            return
        self._last = self.clock() - began
        self._spent, self._next = self._spent + self._last, update + self.every

    def _write(
        self, update: int, records: Mapping[str, Any], result: AdvantageResult, config: Config, texts: Texts
    ) -> None:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        ids = {name: torch.as_tensor(records[name]).cpu() for name in ("group", "trajectory", "step")}
        rows = shown(*ids.values(), records.get("valid"))
        if not len(rows):
            return
        observation, action = texts(rows)
        cut = records.get("truncated")
        table = pa.table(
            {
                "task_id": ids["group"][rows].numpy(),
                "rollout": ids["trajectory"][rows].numpy(),
                "step": ids["step"][rows].numpy(),
                "observation": [_text(text) for text in observation],
                "action": [_text(text) for text in action],
                "reward": torch.as_tensor(records["rewards"]).cpu().double()[rows].numpy(),
                **({} if cut is None else {"truncated": torch.as_tensor(cut).cpu().bool()[rows].numpy()}),
                "bipace_advantage": result.advantage.cpu()[rows].numpy(),
                "bipace_cluster": result.cluster.cpu()[rows].numpy(),
                **({} if result.value is None else reasons(records, ids, rows, result, config)),
            }
        )
        path = self.folder / f"update_{update:08d}.parquet"
        later = [file.name for file in self.folder.glob("update_*.parquet") if file.name > path.name]
        if later:
            what = f"{self.where}record_dir={self.folder} holds {min(later)}, of a later update: of another run, or of "
            what += "this one before it was resumed. A report takes both for one; give each run its own folder."
            warn_once(f"two runs: {self.folder}", what)
        with atomic_file(path) as temporary:
            pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)
        with contextlib.suppress(FileNotFoundError):  # another run in this folder removes files too
            for old in sorted(self.folder.glob("update_*.parquet"), key=lambda f: f.stat().st_mtime_ns)[:-FILES]:
                old.unlink()


def reasons(
    records: Mapping[str, Any], ids: Mapping[str, Tensor], rows: Tensor, result: AdvantageResult, config: Config
) -> dict[str, Any]:
    """Columns [k] of why the records `rows`, each step once, got their advantage under "gae".

        δ = r + γ^Δt V̂(next step) − V̂,   V̂ = 0 after the last step, γ V̂ of that step where it was cut off

    With the kernel's value also the nearest states of the prompt group, as rows among the k, with their k: centred as
    in training.  Values of records that were set aside are 0.
    """
    assert result.value is not None
    trajectory, step = ids["trajectory"].numpy(), ids["step"].numpy()
    everyone = shown(*ids.values(), records.get("valid"), len(step)).numpy()
    taken = everyone[result.cluster.cpu().numpy()[everyone] >= 0]
    value, cut = result.value.cpu().double().numpy(), records.get("truncated")
    reward = records["rewards"] if records.get("trained_rewards") is None else records["trained_rewards"]
    order = taken[np.lexsort((step[taken], trajectory[taken]))]
    own, follows = value[order], np.append(trajectory[order[1:]] == trajectory[order[:-1]], False)[: len(order)]
    after = own * (0.0 if cut is None else torch.as_tensor(cut).cpu().numpy()[order])
    after = np.where(follows, np.roll(own, -1), after)
    gap = np.where(follows, np.roll(step[order], -1) - step[order], 1)
    delta = np.zeros(len(value))
    delta[order] = torch.as_tensor(reward).cpu().double().numpy()[order] + config.gamma**gap * after - own
    columns = {"value": value, "returns": result.returns, "delta": delta, "step_term": result.step_advantage}
    table: dict[str, Any] = {f"bipace_{k}": torch.as_tensor(x).cpu()[rows].numpy() for k, x in columns.items()}
    if config.value == "kernel" and records.get("fingerprint") is not None and config.share != "memory":
        places = {row: k for k, row in enumerate(rows.tolist())}
        near = nearest(result, records["fingerprint"], config, NEIGHBOURS)
        kept = [[(places[other], k) for other, k in zip(*near[row], strict=True) if other in places] for row in places]
        table["bipace_neighbours"] = [[other for other, _ in pairs] for pairs in kept]
        table["bipace_kernel"] = [[k for _, k in pairs] for pairs in kept]
    return table


def shown(group: Tensor, trajectory: Tensor, step: Tensor, valid: Tensor | None = None, most: int = RECORDS) -> Tensor:
    """[k] records of the first prompt groups, at most `most`: without padding, copies of a step once."""
    group, trajectory, step = group.cpu(), trajectory.cpu(), step.cpu()
    rows = torch.arange(len(group)) if valid is None else torch.nonzero(valid.cpu()).flatten()
    places = torch.stack([trajectory[rows], step[rows]], 1).numpy()
    rows = rows[np.sort(np.unique(places, axis=0, return_index=True)[1])]
    total, chosen = 0, []
    for g, count in Counter(group[rows].tolist()).items():
        if total and total + count > most:
            break
        total += count
        chosen.append(g)
    return rows[torch.isin(group[rows], torch.tensor(chosen, dtype=group.dtype))]


def _text(value: Any) -> str:
    """A text for Parquet: valid Unicode, at most 10,000 characters."""
    return str(value)[:CHARACTERS].encode(errors="replace").decode()
