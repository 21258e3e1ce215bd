"""A stand-in for vLLM: a tiny model, and files in the format of vLLM 0.32.0's ExampleHiddenStatesConnector.

Names, keys, shapes, dtypes, locks and the numbering of layers are those of its source (vllm/distributed/kv_transfer/
kv_connector/v1/example_hidden_states_connector.py, vllm/model_executor/models/qwen2.py and interfaces.py).
"""

import fcntl
import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file


def write(path: Path, hidden_states: torch.Tensor, token_ids: Any, *, lock: bool = True) -> None:
    """One finished request: hidden_states [tokens, layers, D]."""
    os.makedirs(path.parent, exist_ok=True)
    held = locked(path) if lock else None
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    save_file({"hidden_states": hidden_states.contiguous(), "token_ids": ids.clone()}, path)
    if held is not None:
        os.close(held)


def locked(path: Path) -> int:
    """A request that has begun: holds the lock of its file; closing releases it."""
    held = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def output(path: Path, prompt: Any = None, n: int = 1) -> SimpleNamespace:
    """The fields of a RequestOutput that matter here."""
    return SimpleNamespace(
        kv_transfer_params={"hidden_states_path": str(path)},
        prompt_token_ids=None if prompt is None else list(prompt),
        outputs=[SimpleNamespace(index=i, token_ids=[7, 8, 2]) for i in range(n)],
    )


class SamplingParams:
    def __init__(self, max_tokens: int = 3, n: int = 1, extra_args: dict[str, Any] | None = None) -> None:
        self.max_tokens, self.n, self.extra_args = max_tokens, n, extra_args or {}


class LLM:
    """Takes the two configurations as vllm.LLM does, and complains of what it would not understand."""

    def __init__(self, model: str, *, speculative_config: dict[str, Any], kv_transfer_config: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        draft = speculative_config.pop("draft_model_config")
        assert speculative_config == {"method": "extract_hidden_states", "num_speculative_tokens": 1}
        assert kv_transfer_config["kv_connector"] == "ExampleHiddenStatesConnector"
        assert kv_transfer_config["kv_role"] == "kv_producer"
        self.folder = Path(kv_transfer_config["kv_connector_extra_config"]["shared_storage_path"])
        self.layers = sorted(set(draft["hf_config"]["eagle_aux_hidden_state_layer_ids"]))
        self.model = AutoModelForCausalLM.from_pretrained(model).eval()

    @torch.no_grad()
    def generate(self, prompts: list[dict[str, Any]], sampling: SamplingParams) -> list[SimpleNamespace]:
        outputs = []
        for number, prompt in enumerate(prompts):
            ids = prompt["prompt_token_ids"]
            tokens = list(ids)
            if sampling.extra_args.get("kv_transfer_params", {}).get("include_output_tokens"):
                tokens += [7, 8, 2][: sampling.max_tokens][:-1]
            states = self._states(tokens)
            name = f"{number}-{uuid.uuid4().hex[:8]}.safetensors"
            names = [name] if sampling.n == 1 else [f"{i}_{name}" for i in range(sampling.n)]
            for each in names:
                write(self.folder / each, states, tokens)
            outputs.append(output(self.folder / names[-1], ids, sampling.n))
        return outputs

    def _states(self, tokens: list[int]) -> torch.Tensor:  # [tokens, layers, D]
        """Layer k: what enters block k; beyond the last block what would go into the norm."""
        entering: dict[int, torch.Tensor] = {}
        blocks = self.model.model.layers
        parts = enumerate([*blocks, self.model.model.norm])
        hooks = [p.register_forward_pre_hook(lambda _, a, k=k: entering.update({k: a[0]})) for k, p in parts]
        self.model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return torch.stack([entering[k][0] for k in self.layers], 1)
