"""Hidden states out of the forward that a worker runs for its log-probabilities."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ... import hidden
from ...hidden.positions import Positions
from .batch import HIDDEN, HIDDEN_IDS, IDS, LAYER

Tensor = torch.Tensor


def log_prob(worker: Any, inner: Callable[[Any], Any], data: Any) -> Any:
    """inner(data), a worker's compute_log_prob(), with the rows' hidden states in its output where the batch asks for them.

    The reference policy of a LoRA actor is the same worker without its adapter, and is not asked.
    """
    layer = data.meta_info.get(LAYER)
    if layer is None or data.meta_info.get("is_lora", False):
        return inner(data)
    ids = data.batch[IDS]  # before Ulysses gathers those of the other ranks
    manager = worker.ulysses_sharding_manager
    with Capture(worker.actor, layer, manager.device_mesh) as capture:
        output = inner(data)
    rows = manager.postprocess_data(type(data).from_dict(tensors={HIDDEN: capture.rows()}))
    output.batch[HIDDEN], output.batch[HIDDEN_IDS] = rows.batch[HIDDEN].cpu(), ids.cpu()
    return output


class Capture:
    """One row of hidden states, at the last prompt token, for each row of one DataParallelPPOActor.compute_log_prob().

    Prompts are left-padded to one width P: column P − 1.  Packed, it is the prompt's last token in its sequence; under
    Ulysses each rank sees a slice of the packed tokens, and the states are summed over ranks, of which one has each.
    """

    def __init__(self, actor: Any, layer: int | str, mesh: Any = None) -> None:
        self._actor, self._tap = actor, hidden.tap(actor.actor_module, layer)
        self._sp = None if mesh is None else mesh["sp"]
        self._module: Any = sys.modules[type(actor).__module__]
        self._mine: list[Tensor] = []  # which rows of each micro-batch this rank has
        self._order: list[int] | None = None  # the batch's row of each, where micro-batches are made by length

    def __enter__(self) -> Capture:
        self._forward, self._rearrange = self._actor._forward_micro_batch, self._module.rearrange_micro_batches
        self._tap.__enter__()
        self._actor._forward_micro_batch = self._expect_and_forward
        self._module.rearrange_micro_batches = self._note_order
        return self

    def __exit__(self, *error: Any) -> None:
        del self._actor._forward_micro_batch
        self._module.rearrange_micro_batches = self._rearrange
        self._tap.__exit__(*error)

    def rows(self) -> Tensor:
        """[N, D] in the order of the batch."""
        mine, found = torch.cat(self._mine), self._tap.rows()
        rows = found.new_zeros((len(mine), found.shape[1]))
        rows[mine] = found
        if self._sp is not None:
            torch.distributed.all_reduce(rows, group=self._sp.get_group())
        return rows if self._order is None else rows[torch.tensor(self._order, device=rows.device).argsort()]

    def _note_order(self, *args: Any, **kwargs: Any) -> Any:
        batches, indices = self._rearrange(*args, **kwargs)
        self._order = [i for part in indices for i in part]
        return batches, indices

    def _expect_and_forward(self, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        attended = micro_batch["attention_mask"] != 0
        width = attended.shape[1] - micro_batch["responses"].shape[1]
        mine = torch.ones(len(attended), dtype=torch.bool, device=attended.device)
        cu = torch.nn.functional.pad(attended.sum(1).cumsum(0), (1, 0))
        last = attended[:, :width].sum(1) - 1
        if not self._actor.use_remove_padding:
            self._tap.expect(width - 1)
        elif self._sp is None:
            self._tap.expect(last, cu)
        elif "multi_modal_inputs" in micro_batch:
            raise ValueError(
                "images under Ulysses are cut behind the embedding, where no hidden states are read: set "
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 or algorithm.gigpo.bisim_embedder=ngram."
            )
        else:
            share = -(-cu[-1] // self._sp.size())
            place = cu[:-1] + last - share * self._sp.get_local_rank()
            mine = (place >= 0) & (place < share)
            self._tap.expect(Positions(place[mine], torch.tensor([0, int(mine.sum())])))
        self._mine.append(mine)
        return self._forward(micro_batch, *args, **kwargs)
