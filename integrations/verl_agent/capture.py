"""Hidden states from the forward that a worker runs for its log-probabilities."""

from collections.abc import Callable
from typing import Any

import torch

from ... import hidden
from ...hidden.tap import expect
from .._replace import replaced
from .._states import tap_of
from .batch import HIDDEN, HIDDEN_IDS, IDS, LAYER
from .settings import WHERE


def log_prob(worker: Any, inner: Callable[[Any], Any], data: Any) -> Any:
    """inner(data), a worker's compute_log_prob(), with hidden states in its output if the batch requests them.

    States are appended to the log-probabilities as further columns, so that the actor restores the batch's order.
    """
    layer = data.meta_info.get(LAYER)
    # The reference of a LoRA run is the same worker with its adapter disabled.
    if layer is None or data.meta_info.get("is_lora", False):
        return inner(data)
    actor, mesh = worker.actor, worker.ulysses_sharding_manager.device_mesh
    group = None if mesh is None else mesh["sp"].get_group()
    tapped, dtypes = tap_of(actor.actor_module, layer, f"{WHERE}bisim_layer"), [torch.float32] * 2

    def _forward_micro_batch(forward: Callable[..., Any], micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        states = expect_last(tapped, micro_batch, actor.use_remove_padding, group)
        entropy, log_probs = forward(micro_batch, *args, **kwargs)
        rows = states()
        dtypes[:] = log_probs.dtype, rows.dtype
        return entropy, torch.cat([log_probs, rows], 1)

    ids, width = data.batch[IDS], data.batch["responses"].shape[1]  # before Ulysses gathers the other ranks' states
    with tapped, replaced(actor, _forward_micro_batch):
        output = inner(data)
    both = output.batch["old_log_probs"]
    output.batch["old_log_probs"], states = both[:, :width].to(dtypes[0]), both[:, width:].to(dtypes[1])
    output.batch[HIDDEN], output.batch[HIDDEN_IDS] = states.cpu(), ids.cpu()
    return output


def expect_last(tapped: hidden.Tap, micro_batch: Any, packed: bool, group: Any) -> Callable[[], torch.Tensor]:
    """expect() of each row's last prompt token: column P − 1, where rows are not packed, of prompts padded to P."""
    attended, length = micro_batch["attention_mask"] != 0, micro_batch["responses"].shape[1]
    if not packed:
        return expect(tapped, attended.shape[1] - length - 1)
    if group is not None and "multi_modal_inputs" in micro_batch:
        raise ValueError(
            "images under Ulysses are sliced after the embedding, where no hidden states can be taken: set "
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 or algorithm.gigpo.bisim_embedder=ngram."
        )
    ends = attended.sum(1).cumsum(0)
    last = hidden.Positions(attended[:, :-length].sum(1) - 1, torch.arange(len(ends) + 1))
    return expect(tapped, last, ends - attended.sum(1), int(ends[-1]), group)
