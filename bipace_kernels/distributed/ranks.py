"""Ranks of a process group: the collectives of bipace_kernels.distributed, and errors raised on all ranks."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..support.errors import InputError, InputTypeError

T = TypeVar("T")
_KINDS = {kind.__name__: kind for kind in (InputTypeError, InputError, TypeError, ValueError)}  # subclasses first


class Ranks:
    """The ranks of a process group, seen from one of them.  Every method is a collective: all ranks call it in order.

    rank     this rank's number in the group
    size     the number of ranks
    device   device for tensors of `where` in the group's collectives
    """

    def __init__(self, process_group: Any) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("process_group must be initialized; call torch.distributed.init_process_group() first.")
        self.group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("process_group must contain this process, but does not; call this on its ranks only.")

    def device(self, where: torch.device) -> torch.device:
        """The device where the group's backend takes tensors of `where`.  gloo's all_to_all only supports the CPU."""
        pairs = (pair.partition(":") for pair in str(dist.get_backend_config(self.group)).split(","))
        backends = {kind: name for kind, _, name in pairs}
        if where.type in backends and (where.type == "cpu" or backends[where.type] != "gloo"):
            return where
        return torch.device("cpu") if "cpu" in backends else torch.device("cuda", torch.cuda.current_device())

    def texts(self, mine: str) -> list[str]:
        """Every rank's text, in rank order."""
        encoded = np.frombuffer(mine.encode("utf-8", "surrogatepass"), np.uint8)
        data = torch.from_numpy(encoded.copy()).reshape(-1, 1)
        sizes = self.rows(torch.tensor([[len(data)]]), [1] * self.size).flatten().tolist()
        parts = torch.split(self.rows(data, sizes), sizes)
        return [part.numpy().tobytes().decode("utf-8", "surrogatepass") for part in parts]

    def agree(self, prepare: Callable[[], T], head: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """The result of `prepare` here, and the heads of its results on all ranks.  Its error on one is raised on all.

        A head is what JSON holds: a pickle would let a rank run code on the others.
        """
        failed: Exception | None = None
        try:
            mine = prepare()
            note = json.dumps({"head": head(mine)})
        except Exception as error:  # of any kind: the other ranks wait for an answer
            kind = next((name for name, each in _KINDS.items() if isinstance(error, each)), type(error).__name__)
            failed, note = error, json.dumps({"failed": [kind, str(error)]})
        notes = [json.loads(text) for text in self.texts(note)]
        for rank, one in enumerate(notes):
            if "failed" in one:
                name, message = one["failed"]
                error_type, text = _KINDS.get(name, RuntimeError), f"rank {rank}: {message}"
                text += "" if name in _KINDS else f" ({name})"
                raise error_type(text) from (failed if rank == self.rank else None)
        return mine, [one["head"] for one in notes]

    def all_or_none(self, make: Callable[[], T]) -> T:
        """The result of `make` here; its error, or a RuntimeError with that of another rank."""
        try:
            made = make()
        except Exception as error:  # of any kind: the other ranks wait for an answer
            self.texts(f"rank {self.rank}: {type(error).__name__}: {error}")
            raise
        failed = next(filter(None, self.texts("")), None)
        if failed is not None:
            raise RuntimeError(failed)
        return made

    def rows(self, mine: Tensor, counts: Sequence[int]) -> Tensor:
        """[Σ counts, K] rows of all ranks in rank order, bit for bit, on the device of `mine`.

        mine   [counts[rank], K] of a dtype that is the same on all ranks: they travel as bytes
        """
        device, width = self.device(mine.device), mine.shape[1] * mine.element_size()
        longest = max(counts)
        padded = torch.zeros(longest, width, dtype=torch.uint8, device=device)
        padded[: mine.shape[0]] = mine.contiguous().view(torch.uint8)
        parts = [torch.empty_like(padded) for _ in counts]
        if longest:
            with _together():
                dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)]).to(mine.device).view(mine.dtype)

    def exchange(self, mine: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """[Σ receive, D] rows sent to this rank, in rank order, bit for bit.

        mine      [Σ send, D] rows for rank 0, then those for rank 1, …; any dtype: they travel as bytes
        send      number of rows for each rank; receive: number of rows from each
        """
        device = self.device(mine.device)
        width = mine.shape[1] * mine.element_size()
        out = torch.empty(sum(receive), width, dtype=torch.uint8, device=device)
        with _together():
            dist.all_to_all_single(out, mine.contiguous().view(torch.uint8).to(device), receive, send, group=self.group)
        return out.to(mine.device).view(mine.dtype)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Around a collective: torch's error for a rank that is gone, with advice."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "the ranks of process_group cannot reach each other: one has exited, failed elsewhere or did not make this "
            f"call within the group's timeout. Every rank must make it; look at the first rank that failed. ({error})"
        ) from error
