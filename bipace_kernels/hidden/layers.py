"""The module of each hidden state: decoder blocks found through any wrapper, and the numbering of layers.

A model with L blocks has Hugging Face's `hidden_states` of length L + 1: [0] is the embedding, [k] the output of block
k − 1, and the last one the output of the final norm. So layer −8 of 28 blocks is hidden_states[21], the output of block
20 counted from 0. The output of the last block before the norm is not in hidden_states; it is called "block 27".
"""

import inspect
import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_NORM = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
# Attributes under which a wrapper keeps the module it wraps: FSDP 1, torch.compile, checkpoint_wrapper, DDP and others.
_WRAPPED = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "module")


@dataclass(frozen=True)
class Layer:
    """A hidden state by its block (counted from 0), printed with its number in every convention."""

    block: int
    n_blocks: int
    normed: bool = False  # taken after the final norm

    def __str__(self) -> str:
        if self.normed:
            return f"block {self.block} and the final norm (hidden_states[{self.n_blocks}] = [−1])"
        if self.block == self.n_blocks - 1:
            return f"block {self.block} before the final norm (not in hidden_states)"
        return f"block {self.block} (hidden_states[{self.block + 1}] = [−{self.n_blocks - self.block}])"


def layer_of(layer: Any, n_blocks: int) -> Layer:
    """The Layer of an index into hidden_states, negative or positive, of a text such as "block 16", or of itself."""
    if isinstance(layer, Layer) and layer.n_blocks == n_blocks:
        return layer
    if isinstance(layer, str):
        match = re.fullmatch(r"block (\d+)", layer)
        if match is None or int(match[1]) >= n_blocks:
            raise ValueError(f"layer must be an index or 'block 0' to 'block {n_blocks - 1}', got {layer!r}.")
        return Layer(int(match[1]), n_blocks)
    if isinstance(layer, bool) or not isinstance(layer, numbers.Integral):
        raise TypeError(f"layer must be an int or a text such as 'block 16', got {type(layer).__name__}.")
    index = int(layer) + (n_blocks + 1 if layer < 0 else 0)
    if not 0 <= index <= n_blocks:
        raise ValueError(
            f"layer must be an index into hidden_states, −{n_blocks} to −1 or 1 to {n_blocks} with the {n_blocks} "
            f"blocks of this model, got {layer}; e.g. −1 is {Layer(n_blocks - 1, n_blocks, True)}."
        )
    if index == 0:
        raise ValueError(
            f"layer {layer} is hidden_states[0], the embedding of the last token, which does not depend on the rest of "
            f"the prompt; take 1 ({Layer(0, n_blocks, n_blocks == 1)}) or higher."
        )
    return Layer(index - 1, n_blocks, normed=index == n_blocks)


def layers_of(layer: Any, layers: Any, n_blocks: int) -> list[Layer]:
    """The distinct layers of a call: `layers`, or only `layer` where it is None."""
    if layers is None:
        return [layer_of(layer, n_blocks)]
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise ValueError(f"layers must be a list of layers, e.g. [-8, -12], got {layers!r}.")
    return list(dict.fromkeys(layer_of(item, n_blocks) for item in layers))


@dataclass(frozen=True)
class Decoder:
    """The parts of a Hugging Face decoder that taps and early exits need, without wrappers."""

    model: nn.Module  # as given by the caller
    causal: nn.Module  # outermost Hugging Face model inside: PEFT, DDP, FSDP and torch.compile taken off
    base: nn.Module  # whose forward runs the blocks
    list_name: str  # base.<list_name> is the list of blocks
    norm_name: str | None  # base.<norm_name> is the final norm
    compiled: str  # the compiled part above the blocks, "" if there is none

    @property
    def blocks(self) -> nn.ModuleList:
        blocks: nn.ModuleList = self.base._modules[self.list_name]  # type: ignore[assignment]
        return blocks

    @property
    def device(self) -> torch.device:
        """The device of a forward's input."""
        return next(iter(self._embedding.parameters()), next(self.base.parameters())).device

    @property
    def n_ids(self) -> int | None:
        """Number of token ids in the embedding; None if unknown."""
        n_ids = getattr(self._embedding, "num_embeddings", None)
        return n_ids if isinstance(n_ids, int) else None

    @property
    def _embedding(self) -> nn.Module:
        return self.causal.get_input_embeddings()  # type: ignore[operator, no-any-return]

    @property
    def norm(self) -> nn.Module:
        norm = None if self.norm_name is None else self.base._modules[self.norm_name]
        if norm is None:
            raise ValueError(
                f"{type(self.base).__name__} has no final norm ({', '.join(_NORM)}); use a layer before it, as −8."
            )
        return norm


def find_decoder(model: Any) -> Decoder:
    """The decoder inside a model, through PEFT, DDP, FSDP, DeepSpeed and torch.compile.

    TypeError or ValueError says what was looked for and what was found instead.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, a Hugging Face decoder, got {type(model).__name__}.")
    causal = _hugging_face_model(model)
    _check_prompt_learning(model)
    if getattr(causal.config, "is_encoder_decoder", False):
        raise ValueError(f"model must be a decoder, got the encoder-decoder {type(causal).__name__}; pass its decoder.")
    n_blocks = getattr(text_config(causal), "num_hidden_layers", None)
    lists = [
        (name, parent, child_name, child)
        for name, parent in model.named_modules(remove_duplicate=True)
        for child_name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) > 0
    ]
    fitting = [x for x in lists if len(x[3]) == n_blocks and any(attention_of(block) is not None for block in x[3])]
    if len(fitting) > 1:  # a vision tower may be as deep: the text blocks are next to the token embedding
        embedding = causal.get_input_embeddings()  # type: ignore[operator]
        fitting = [x for x in fitting if any(m is embedding for c in x[1].children() for m in c.modules())] or fitting
    if len(fitting) != 1:
        shown = ", ".join(f"{type(p).__name__}.{c} of {len(m)}" for _, p, c, m in lists[:8]) or "none at all"
        raise ValueError(
            f"model has no list of blocks that can be identified: looked in {type(causal).__name__} for one "
            f"torch.nn.ModuleList of num_hidden_layers = {n_blocks} blocks that hold an attention "
            f"({', '.join(_ATTENTION)}), as in Qwen and Llama; found {len(fitting)}, and ModuleLists {shown}."
        )
    name, base, list_name, _ = fitting[0]
    norm = next((n for n in _NORM if base._modules.get(n) is not None), None)
    return Decoder(model, causal, base, list_name, norm, _compiled_above(model, name))


def _hugging_face_model(model: nn.Module) -> nn.Module:
    """The outermost module that is a Hugging Face model itself; wrappers such as PeftModel only pass names on."""
    for module in model.modules():
        if hasattr(type(module), "base_model_prefix") and "config" in module.__dict__:
            return module
    raise TypeError(
        f"model must be a Hugging Face decoder, bare or wrapped, but {type(model).__name__} has no PreTrainedModel "
        "(.config and .base_model_prefix) inside; pass what AutoModelForCausalLM.from_pretrained() gives."
    )


def _check_prompt_learning(model: nn.Module) -> None:
    """Raises ValueError if PEFT puts virtual tokens before the prompt, which the caller's columns do not count."""
    for module in model.modules():
        adapter = getattr(module, "active_peft_config", None) if hasattr(type(module), "active_peft_config") else None
        if adapter is not None and adapter.is_prompt_learning:
            raise ValueError(
                f"model must not add tokens, but its PEFT adapter {type(adapter).__name__} puts "
                f"{adapter.num_virtual_tokens} virtual ones before the prompt; use LoRA, or model.get_base_model()."
            )


def _compiled_above(model: nn.Module, name: str) -> str:
    """The outermost module on the way to the blocks' parent that torch.compile has replaced or compiled in place."""
    path = [model]
    for part in filter(None, name.split(".")):
        path.append(getattr(path[-1], part))
    for module in path:
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            return type(unwrap(module)).__name__
    return ""


def text_config(causal: nn.Module) -> Any:
    """The configuration of the language model, also of one with images."""
    config: Any = causal.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def unwrap(module: nn.Module, names: tuple[str, ...] = _WRAPPED) -> nn.Module:
    """The module inside its wrappers."""
    while True:
        inner = next((module._modules[n] for n in names if module._modules.get(n) is not None), None)
        if inner is None:
            return module
        module = inner


def attention_of(block: nn.Module) -> nn.Module | None:
    """The attention of a block; None where it has none (some hybrid models have such blocks)."""
    inner = unwrap(block)
    return next((inner._modules[n] for n in _ATTENTION if inner._modules.get(n) is not None), None)


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a module's call by name, including those that its forward takes as **."""
    signature = inspect.signature(type(module).forward)
    bound = signature.bind_partial(module, *args, **kwargs).arguments
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    return {**bound.pop(rest, {}), **bound}
