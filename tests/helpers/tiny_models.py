"""Tiny random decoders of each family, built from their configs: the architecture is real, the weights are noise."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

N_BLOCKS = 9
VOCABULARY = 101
COMMON: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": N_BLOCKS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
# sliding_window 6: shorter than the rows of these tests, so that it bites.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    "Gemma3": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20},
    "Phi3": {"original_max_position_embeddings": 256},
}
CONFIG_NAME = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig", "Llama4": "Llama4TextConfig"}


def make(family: str = "Qwen2", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A decoder with N_BLOCKS blocks, in eval mode.  Norms and biases are noise too, so that leaving one out shows."""
    name = f"{family}ForCausalLM"
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    settings = {**COMMON, **FAMILIES.get(family, {}), **changes}
    attention = settings.pop("attn_implementation")
    config = getattr(transformers, CONFIG_NAME.get(family, f"{family}Config"))(**settings)
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def prompts(rows: int = 5, width: int = 17, *, side: str = "left", seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask of rows of different lengths, the first of full width."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, width), generator=generator)
    length = torch.randint(3, width, (rows,), generator=generator)
    length[0] = width
    column = torch.arange(width)
    mask = column >= width - length[:, None] if side == "left" else column < length[:, None]
    return ids * mask, mask.long()


def packed(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same rows one after the other: input_ids [1, nnz], position_ids [1, nnz], cu_seqlens [R+1]."""
    length = mask.sum(1)
    position = torch.cat([torch.arange(n) for n in length.tolist()])
    return ids[mask.bool()][None], position[None], torch.cat([torch.zeros(1, dtype=torch.int64), length.cumsum(0)])


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Positions that only count tokens, as trainers make them for padded rows."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x.double(), dim=-1)


@torch.no_grad()
def hidden_states(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What Hugging Face itself gives."""
    states: tuple[torch.Tensor, ...] = model(
        ids, attention_mask=mask, position_ids=position_ids(mask), output_hidden_states=True, use_cache=False
    ).hidden_states
    return states


def last_states(model: Any, ids: torch.Tensor, mask: torch.Tensor, layer: int = -8) -> torch.Tensor:
    """[B, D] of these at the last token of each row."""
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return hidden_states(model, ids, mask)[layer][torch.arange(len(ids)), last]


def compile_blocks(model: Any, how: str) -> None:
    """The blocks "in place", where hooks come after; or "replaced" by compiled modules."""
    for i, block in enumerate(model.model.layers):
        if how == "in place":
            block.compile(backend="eager")
        else:
            model.model.layers[i] = torch.compile(block, backend="eager")
