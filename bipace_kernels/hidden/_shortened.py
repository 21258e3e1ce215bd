"""Makes a model stop after one of its blocks, and restores it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Decoder

# Recognized by name, so that no missing package is imported: FSDP 1 and 2, and ZeRO-3's parameters.
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")


class FirstBlocks(nn.ModuleList):
    """A list that is shortened for forwards, while a walk through the module tree finds all blocks.

    FSDP looks for its shards once, at the very first forward: a block that is missing then would remain a separate
    root, which gathers by itself and keeps its parameters unsharded.
    """

    n_blocks = 0

    @classmethod
    def of(cls, blocks: nn.ModuleList, n_blocks: int) -> FirstBlocks:
        first = cls()
        first._modules.update(blocks._modules)
        first.n_blocks = n_blocks
        return first

    def _seen(self) -> list[Any]:
        return list(self._modules.values())[: self.n_blocks]

    def __len__(self) -> int:
        return self.n_blocks

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._seen())

    def __getitem__(self, index: Any) -> Any:
        blocks = self._seen()[index]
        return nn.ModuleList(blocks) if isinstance(index, slice) else blocks


class Skipped(nn.Module):
    """Replaces a module that must not run; holds it, for FSDP to find."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden


@contextmanager
def shortened(decoder: Decoder, n_blocks: int) -> Iterator[nn.Module]:
    """The module to call: it runs its first n_blocks blocks, the final norm and no head, in eval mode.

    Modules are replaced in their parents and always restored, so the forward ends normally: an exception through a
    wrapped module would leave FSDP and ZeRO in the middle of a forward.
    """
    blocks = decoder.blocks
    before: list[tuple[nn.Module, str, nn.Module]] = [(decoder.base, decoder.list_name, blocks)]
    head: nn.Module | None = getattr(decoder.causal, "get_output_embeddings", lambda: None)()  # states to logits
    if head is not None:
        before += [(m, n, head) for m in decoder.causal.modules() for n, child in m._modules.items() if child is head]
    training = [(module, module.training) for module in decoder.model.modules()]
    try:
        for module, _ in training:
            module.training = False
        for parent, name, part in before:
            parent._modules[name] = FirstBlocks.of(blocks, n_blocks) if part is blocks else Skipped(part)
        called = decoder.model
        while type(called).__name__ in ("DistributedDataParallel", "DataParallel"):  # would synchronise all buffers
            called = called._modules["module"]  # type: ignore[assignment]
        yield called
    finally:
        for parent, name, part in before:
            parent._modules[name] = part
        for module, was in training:
            module.training = was
        for module, _ in training:  # FSDP 2 would keep the outermost shards gathered until a backward, which never runs
            if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
                module.reshard()  # type: ignore[operator]


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward is a collective: every rank must run the same number."""
    if any(base.__name__ in _SHARDED for module in model.modules() for base in type(module).__mro__):
        return True
    return any(hasattr(p, "ds_id") for p in model.parameters())


def no_gradients(model: nn.Module) -> AbstractContextManager[Any]:
    """Inference mode, except where a forward leaves tensors in the model, which training could not use afterwards.

    These are gathered shards, and tables of rotary embeddings that grow with the input.
    """
    types = [str(module.__dict__.get("rope_type")) for module in model.modules()]
    growing = any("dynamic" in kind or "longrope" in kind for kind in types)
    return torch.no_grad() if growing or is_sharded(model) else torch.inference_mode()
