"""The batches of the GPU benchmarks, the timed calls, and the least work of each."""

import dataclasses
import importlib
import os
import sys
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bipace_kernels as bk
from bipace_kernels.backends import native_loader

from . import roofline, workloads as w
from .measure import all_cores
from .roofline import Work
from .stages import Hidden, canonical, number_agreement, partition_agreement

BACKENDS = ("triton", "cuda")
SWEEP = torch.linspace(0.02, 0.40, 32, dtype=torch.float64)  # on the host: thresholds, not data

responses = lru_cache(maxsize=1)(w.responses)  # seconds for a large batch, and the same for every K


def absent(backend: str) -> str:
    """Why a backend does not run here; empty where it does."""
    return bk.backends()[backend].reason


def expected(backend: str) -> bool:
    """Whether a backend has to run here: on any GPU, and the CUDA kernels where nvcc was there at the build."""
    built = not native_loader.cuda_decision().startswith("no CUDA kernels")
    return torch.cuda.is_available() and (backend != "cuda" or built)


def dry_cuda() -> None:
    """Triton by its interpreter, CUDA kernels by the tests' emulator on CPU tensors: in a checkout, with a compiler."""
    os.environ["TRITON_INTERPRET"] = "1"  # nothing has imported Triton so far
    helpers = Path(__file__).resolve().parent.parent / "tests/helpers"
    if (helpers / "cuda_emulator.py").exists():
        sys.path.insert(0, str(helpers))
        emulator = importlib.import_module("cuda_emulator")
        emulator.run_on_cpu(emulator.of_checkout())


class Batch(Hidden):
    """A batch on a device: bfloat16 fingerprints, token ids of the responses, layout; all inputs made once."""

    def __init__(self, shape: w.Shape, device: torch.device, *, tokens: int = 512) -> None:
        super().__init__(shape, torch.bfloat16, threads=all_cores(), device=device)
        self.steps, self.device, self.tokens = self.batch, device, tokens
        self.on_device = self.layout.on(device)

    @cached_property
    def responses(self) -> w.Responses:
        """ImportError where tokenizers or transformers are missing."""
        return responses(self.shape.records, self.tokens)

    @cached_property
    def response_tensors(self) -> dict[str, Any]:
        made = self.responses
        table = bk.token_bytes(made.tokenizer)
        return {"ids": made.ids.to(self.device), "mask": made.mask.to(self.device), "table": table}

    def keys(self, backend: str) -> Any:
        """Action keys of the responses, where the token ids are."""
        x = self.response_tensors
        return bk.action_keys(x["ids"], mode="action_tag", mask=x["mask"], token_bytes=x["table"], backend=backend)

    def with_keys(self, backend: str) -> Any:
        """BiPACE with given keys."""
        return self.whole(layout=self.layout, backend=backend)

    def chain(self, backend: str, layout: bk.Layout | None = None) -> Any:
        """Keys, returns, clustering, means, combination."""
        keys, parsed = self.keys(backend)
        layout = self.layout if layout is None else layout
        return self.whole(layout=layout, action_key=keys, action_parsed=parsed, backend=backend)

    def chain_with_layout_made(self, backend: str) -> Any:
        """The same from ids on the host: sorting, numbering and the copy included."""
        return self.chain(backend, bk.layout(**self.ids))

    def with_gae(self, share: Any, backend: str) -> Any:
        return self.whole(layout=self.layout, config=bk.Config.gae(share=share), backend=backend)

    @cached_property
    def half(self) -> torch.Tensor:
        """The same rows for our CPU code."""
        return self.fingerprint.cpu()

    def cpu_cluster(self) -> torch.Tensor:
        return bk.cluster(self.half, None, w.EPSILON, layout=self.layout, backend="cpu", num_threads=self.threads)

    def cpu_advantage(self, **changes: Any) -> Any:
        rows = {"rewards": self.steps.rewards, "fingerprint": self.half, "action_key": self.steps.action_key}
        return self.whole(**{**rows, "layout": self.layout, "backend": "cpu", "num_threads": self.threads, **changes})

    @cached_property
    def planted(self) -> Any:
        """[N] the planted states, numbered as a clustering numbers them."""
        return canonical(self.steps.group * self.shape.states + self.steps.state)

    def check_labels(self, labels: Any) -> str:
        """The planted partition, or how the labels differ from it."""
        found = labels.cpu().numpy() if isinstance(labels, torch.Tensor) else np.asarray(labels)
        if np.array_equal(canonical(found), self.planted):
            return f"{self.shape.states} clusters in each of {self.shape.groups} groups, as planted"
        return partition_agreement(found, self.planted)

    def check_advantage(self, result: Any, *, whole: bool = False) -> str:
        """Labels against the planted partition, advantages against the CPU backend; whole: by keys of the responses."""
        numbers = number_agreement(result.advantage.cpu(), self.on_cpu_whole if whole else self.on_cpu_advantage)
        return f"{self.check_labels(result.cluster)}; advantages: {numbers}"

    def check_gae(self, share: Any, result: Any) -> str:
        want = self.cpu_advantage(config=bk.Config.gae(share=share)).advantage
        return f"advantages: {number_agreement(result.advantage.cpu(), want)}"

    @cached_property
    def on_cpu_advantage(self) -> torch.Tensor:
        return self.cpu_advantage().advantage

    @cached_property
    def on_cpu_whole(self) -> torch.Tensor:
        return self.cpu_advantage(action_key=self.on_cpu_keys[0]).advantage

    @cached_property
    def on_cpu_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        made, table = self.responses, self.response_tensors["table"]
        return bk.action_keys(made.ids, mode="action_tag", mask=made.mask, token_bytes=table, backend="cpu")

    def check_keys(self, found: Any) -> str:
        """Keys and flags against the CPU backend."""
        keys, parsed = self.on_cpu_keys
        same = torch.equal(found[0].cpu(), keys) and torch.equal(found[1].cpu(), parsed)
        return f"{int(parsed.sum())} of {len(keys)} parsed, " + ("keys as on the CPU" if same else "DIFFERENT keys")

    @cached_property
    def cluster_need(self) -> Work:
        """The fewer operations of the lower triangle of the Gram matrix and of the paper's loop over open centroids."""
        loop = roofline.cluster_work(self.fingerprint, self.planted, self.offsets)
        n, groups = self.shape.per_group, self.shape.groups
        gram = groups * n * (n + 1) * self.shape.dim
        return Work(loop.bytes, min(loop.flop, gram))

    @cached_property
    def keys_need(self) -> Work:
        """Valid ids and the whole mask in, key and flag out."""
        made = self.responses
        return Work(bytes=8 * made.tokens + made.mask.numel() + 9 * self.shape.records)

    @cached_property
    def advantage_need(self) -> Work:
        """Clustering, rewards and keys in, six results out."""
        need = self.cluster_need
        return dataclasses.replace(need, bytes=need.bytes + (4 + 8 + 4 * 4 + 1) * self.shape.records)

    @cached_property
    def whole_need(self) -> Work:
        need = self.advantage_need
        return dataclasses.replace(need, bytes=need.bytes + self.keys_need.bytes)
