"""verl's FSDP engine, with a tap on the log-prob forward: the hidden state before each turn comes back beside log_probs.

The driver asks for it by LAYER in the batch; no other forward (training, reference) carries that, and so none is tapped.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from ... import distributed
from ...hidden._shortened import shortened
from ...hidden.positions import Positions
from ...hidden.tap import Tap, tap
from .._turns import Turns
from . import plugin
from .estimator import CLUSTER, EARLY_EXIT, HIDDEN, IDS, LABELS, LAYER

Tensor = torch.Tensor


def turns_of(batch: Any) -> Positions:
    """The token before each turn of packed rows, as columns of their own sequence; one for a row without a turn."""
    if "response_mask" not in batch:
        raise ValueError(
            "response_mask must come with the batch of compute_log_prob, for turns are told by it, but there are "
            f"{', '.join(sorted(map(str, batch.keys())))}; let the agent loop give AgentLoopOutput.response_mask."
        )
    mask, length = batch["response_mask"].cpu(), batch["input_ids"].offsets().diff().cpu()
    if mask.is_nested:
        response = mask.offsets().diff()
        mask = mask.to_padded_tensor(0)
    elif "attention_mask" in batch:  # v0 pads: this tells how much of a response is there
        response = batch["attention_mask"][:, -mask.shape[1] :].sum(1).cpu()
    else:
        response = torch.full((len(mask),), mask.shape[1])
    return Turns.of(mask).positions(length - response)


def labels_of(states: Tensor, ids: Tensor, process_group: Any, **settings: Any) -> Tensor:
    """Clusters [turns] of each row, jagged, over the states [turns, D] of all ranks of data parallelism.

    A state that is bad is alone in its cluster c, which comes back as −1 − c.

    ids   [B, 4] int64   group, trajectory, place of the row in it, and whether the row is valid
    """
    offsets: Tensor = states.offsets()  # type: ignore[attr-defined]  # of jagged ones
    row = torch.repeat_interleave(torch.arange(len(ids), device=offsets.device), offsets.diff())
    turn = torch.arange(len(row), device=offsets.device) - offsets[row]
    group, trajectory, place, valid = torch.stack(ids.unbind()).to(offsets.device)[row].unbind(1)  # jagged or not
    labels = distributed.cluster(
        states.values(), group, process_group=process_group, trajectory=trajectory, step=(place << 32) + turn, valid=valid != 0,
        duplicates="once", **settings,
    )  # fmt: skip
    bad = ~states.values().isfinite().all(1) | ((states.values() == 0).all(1) & (settings["epsilon"] > 0))
    labels = torch.where(bad & (valid != 0), -1 - labels, labels)
    return torch.nested.nested_tensor_from_jagged(labels, offsets)


class KeepsStates:
    """Mixin of an FSDP engine: HIDDEN, [turns, D] of each row, in the model output of a forward that asks for it."""

    _tapped: Tap | None = None
    _early = False

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        layer = tu.get_non_tensor_data(data=data, key=LAYER, default=None)
        run = super().forward_backward_batch  # type: ignore[misc]
        if layer is None or not forward_only:
            return run(data, loss_function, forward_only)
        early = tu.get_non_tensor_data(data=data, key=EARLY_EXIT, default=False)
        if early and tu.get_non_tensor_data(data=data, key="use_fused_kernels", default=False):
            raise ValueError(
                "algorithm.bipace.embedder=actor_hidden needs a forward that ends early where no log-prob forward runs, and "
                "fused kernels need the head in it; set actor_rollout_ref.model.use_fused_kernels=False, or embedder=ngram."
            )
        try:
            tapped = tap(self.module, layer)  # type: ignore[attr-defined]
        except (TypeError, ValueError) as error:
            raise type(error)(f"algorithm.bipace.layer={layer}: {error}") from error
        (kept,) = tapped.layers
        cut = shortened(tapped._decoder, kept.block + 1, norm=kept.normed) if early else nullcontext()
        with cut, tapped:
            self._tapped, self._early = tapped, early
            try:
                output = run(data, None if early else loss_function, forward_only)
            finally:
                self._tapped, self._early = None, False
        cluster = tu.get_non_tensor_data(data=data, key=CLUSTER, default=None)
        if cluster is not None:
            states = output["model_output"].pop(HIDDEN)
            group = self.get_data_parallel_group()  # type: ignore[attr-defined]
            output["model_output"][LABELS] = labels_of(states, data[IDS], group, **cluster)
        return output

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        tapped = self._tapped
        if tapped is None:
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        turns = turns_of(micro_batch)
        begin = micro_batch["input_ids"].offsets().cpu()
        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        own = torch.ones(len(turns), dtype=torch.bool)
        if packed:  # one row [1, nnz], of which Ulysses gives each rank a slice
            column, width, rank = turns.column + begin[turns.row()], int(begin[-1]), 0
            sp = self.ulysses_sequence_parallel_size if self.use_ulysses_sp else 1  # type: ignore[attr-defined]
            if sp > 1:
                pad = getattr(self, "_get_packed_pad_size", None)  # since verl 0.9
                width = -(-(width + (pad(width) if pad else 0)) // sp)
                rank = torch.distributed.get_rank(self.ulysses_parallel_group)  # type: ignore[attr-defined]
                own = column // width == rank
            wanted = Positions(column[own] - rank * width, torch.tensor([0, int(own.sum())]))
        else:
            wanted, sp = turns, 1
        tapped.clear()
        tapped.expect(wanted)
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        states = tapped.rows()
        if sp > 1:  # each state is on one rank: the sum with the others' zeros is exact, and n rows travel, not nnz
            mine, states = states, states.new_zeros(len(turns), states.shape[1])
            states[own.to(states.device)] = mine
            torch.distributed.all_reduce(states, group=self.ulysses_parallel_group)  # type: ignore[attr-defined]
        ends = turns.offsets.tolist()
        rows = [states[a:b] for a, b in pairwise(ends)]
        output["model_output"][HIDDEN] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return loss, output

    def prepare_model_outputs(self, *args: Any, **kwargs: Any) -> Any:
        return {} if self._early else super().prepare_model_outputs(*args, **kwargs)  # type: ignore[misc]


class FSDPEngineKeepingStates(KeepsStates, FSDPEngineWithLMHead):  # type: ignore[misc]
    """FSDPEngineWithLMHead with KeepsStates, chosen by verl as the vendor's engine."""


def join() -> None:
    """Registers the engine for vendors of whom nobody has registered another."""
    for device, vendors in (("cuda", ("nvidia", "amd")), ("npu", ("huawei",))):
        for backend in ("fsdp", "fsdp2"):
            for vendor in vendors:
                if (device, vendor) not in EngineRegistry._engines["language_model"][backend]:
                    EngineRegistry.register("language_model", backend, device, vendor)(FSDPEngineKeepingStates)


plugin.finish()
