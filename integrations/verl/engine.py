"""verl's FSDP engine, with a tap on the log-prob forward: hidden states before turns come back beside log_probs.

The driver requests it in the batch; other forwards (training, reference) carry no request, and are not tapped.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from ... import distributed
from ...hidden._shortened import shortened
from ...hidden.positions import Positions
from ...hidden.tap import Tap, expect
from .._states import no_hidden, tap_of
from .._turns import Turns
from .estimator import HIDDEN, IDS, LABELS, NAME, WHERE


def turns_of(batch: Any) -> Positions:
    """The token before each turn of packed rows, as columns of their own sequence; one for a row without a turn."""
    if "response_mask" not in batch:
        raise ValueError(
            "response_mask must come with the batch of compute_log_prob, to mark the turns, but the batch has only "
            f"{', '.join(sorted(map(str, batch.keys())))}; let the agent loop give AgentLoopOutput.response_mask."
        )
    mask, length = batch["response_mask"].cpu(), batch["input_ids"].offsets().diff().cpu()
    if mask.is_nested:
        response, mask = mask.offsets().diff(), mask.to_padded_tensor(0)
    else:  # v0 pads; the length of each response
        response = batch["attention_mask"][:, -mask.shape[1] :].sum(1).cpu()
    return Turns.of(mask).positions(length - response)


def labels_of(states: Tensor, ids: Tensor, process_group: Any, **settings: Any) -> Tensor:
    """Clusters [turns] of each row, jagged, over the states [turns, D] of all ranks of data parallelism.

    A bad state has a cluster c of its own, which comes back as −1 − c.

    ids   [B, 4] int64   group, trajectory, place of the row in it, and whether the row takes part
    """
    offsets: Tensor = states.offsets()  # type: ignore[attr-defined]  # of jagged ones
    row = torch.repeat_interleave(torch.arange(len(ids), device=offsets.device), offsets.diff())
    turn = torch.arange(len(row), device=offsets.device) - offsets[row]
    group, trajectory, place, valid = torch.stack(ids.unbind()).to(offsets.device)[row].unbind(1)  # jagged or not
    ids_of = {"trajectory": trajectory, "step": (place << 32) + turn, "valid": valid != 0}
    labels = distributed.cluster(states.values(), group, process_group=process_group, **ids_of, **settings)
    bad = ~states.values().isfinite().all(1) | ((states.values() == 0).all(1) & (settings["epsilon"] > 0))
    labels = torch.where(bad & (valid != 0), -1 - labels, labels)
    return torch.nested.nested_tensor_from_jagged(labels, offsets)


class FSDPEngineKeepingStates(FSDPEngineWithLMHead):  # type: ignore[misc]
    """The engine with HIDDEN, [turns, D] of each row, or LABELS in the output of a forward that requests it."""

    _tapped: Tap | None = None
    _early = False

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        option = partial(tu.get_non_tensor_data, data, default=None)
        asked, run = option(NAME), super().forward_backward_batch
        if asked is None or not forward_only:
            return run(data, loss_function, forward_only)
        early = asked["early_exit"]
        if early and option("use_fused_kernels"):
            raise no_hidden(
                WHERE,
                "rollout_correction.bypass_mode leaves only a forward that ends before the head, but fused kernels "
                "need the head (disable them by actor_rollout_ref.model.use_fused_kernels=False)",
            )
        tapped = tap_of(self.module, asked["layer"], f"{WHERE}layer")
        (kept,) = tapped.layers
        with shortened(tapped._decoder, kept.block + 1) if early else nullcontext(), tapped:
            self._tapped, self._early = tapped, early
            try:
                output = run(data, None if early else loss_function, forward_only)
            finally:
                self._tapped, self._early = None, False
        if "cluster" in asked:
            outputs, group = output["model_output"], self.get_data_parallel_group()
            outputs[LABELS] = labels_of(outputs.pop(HIDDEN), data[IDS], group, **asked["cluster"])
        return output

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        tapped, run = self._tapped, super().forward_step
        if tapped is None:
            return run(micro_batch, loss_function, forward_only)
        turns, begin, tokens, group = turns_of(micro_batch), None, 0, None
        if tu.get_non_tensor_data(micro_batch, "use_remove_padding", True):
            *begin, tokens = micro_batch["input_ids"].offsets().tolist()
            tokens += getattr(self, "_get_packed_pad_size", lambda _: 0)(tokens)  # not in every release
            group = self.ulysses_parallel_group if self.use_ulysses_sp else None
        states = expect(tapped, turns, None if begin is None else torch.tensor(begin), tokens, group)
        loss, output = run(micro_batch, loss_function, forward_only)
        rows = states()
        output["model_output"][HIDDEN] = torch.nested.nested_tensor_from_jagged(rows, turns.offsets.to(rows.device))
        return loss, output

    def prepare_model_outputs(self, *args: Any, **kwargs: Any) -> Any:
        return {} if self._early else super().prepare_model_outputs(*args, **kwargs)


def join() -> None:
    """Registers the engine for vendors without another registered engine."""
    for device, vendor in (("cuda", "nvidia"), ("cuda", "amd"), ("npu", "huawei")):
        for backend in ("fsdp", "fsdp2"):
            if (device, vendor) not in EngineRegistry._engines["language_model"][backend]:
                EngineRegistry.register("language_model", backend, device, vendor)(FSDPEngineKeepingStates)
