"""Hidden states on a GPU: the tap in a log-prob forward and early exit, at Qwen2.5-7B's shape with random weights."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import hidden as h
from .gpu_report import TAP
from .gpu_rows import EAGER, Bench
from .report import SAMPLE
from .roofline import Work

Tensor = torch.Tensor

SEVEN_B = h.Shape(width=3584, intermediate=18_944, heads=28, kv_heads=4, vocabulary=152_064, rows=2, prompt=3584,
                  response=512,
                  recorded_steps=6, recorded_rollouts=8)  # fmt: skip
EQUAL = (8, 1024)  # prompts and tokens of each


def run(bench: Bench, device: torch.device, *, dry: bool, rollouts: Path = SAMPLE) -> None:
    """Rows of the part `hidden`."""
    shape = h.TINY if dry else SEVEN_B
    bench.say(f"making a model: {shape.text()}")
    with _weights(torch.float32 if dry else torch.bfloat16, device):
        model = h.make(shape)
    at = f"{shape.blocks} blocks × {shape.width:,}"
    _tap(bench, at, model, shape, device)
    rows, width = (2, 12) if dry else EQUAL
    ids = torch.randint(1, shape.vocabulary, (rows, width), device=device)
    _early_exit(bench, f"{at}, {rows} prompts of {width}", model, shape, ids, torch.ones_like(ids), "no padding")
    if not rollouts.is_file():
        bench.absent(at, "early exit, recorded lengths", f"there is no {rollouts.name} beside the benchmarks")
        return
    ids, mask, note = h.recorded_prompts(shape, rollouts)
    _early_exit(bench, f"{at}, recorded lengths", model, shape, ids.to(device), mask.to(device), note)


@contextlib.contextmanager
def _weights(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Sets the default device and dtype for tensors created inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _tap(bench: Bench, at: str, model: Any, shape: h.Shape, device: torch.device) -> None:
    """The forward without, with, and again without the tap: the first and last show the drift of the clock."""
    ids = torch.randint(1, shape.vocabulary, (shape.rows, shape.prompt + shape.response), device=device)
    log_probs = h.log_prob_forward(model, shape, ids)
    want = h.picked(model, ids[:, : shape.prompt], torch.ones_like(ids[:, : shape.prompt]))
    tapped = h.tapped(model, shape, log_probs)
    at = f"{at}, {shape.rows} × {ids.shape[1]:,} tokens"
    need = Work(flop=2 * ids.numel() * shape.parameters())
    effort: dict[str, Any] = {"how": EAGER, "need": need, "rounds": 15, "seconds": 60.0}
    before = bench.row(at, "log-prob forward", log_probs, kind="competitor", **effort)
    ours = bench.row(at, "log-prob forward with a tap", tapped, check=lambda x: _agreement(x, want),
                     note=_memory(tapped, log_probs, device), **effort)  # fmt: skip
    after = bench.row(at, "log-prob forward, again", log_probs, kind="competitor", **effort)
    if before.median_ms and ours.median_ms and after.median_ms:
        extra = ours.median_ms / ((before.median_ms + after.median_ms) / 2) - 1
        bench.part.figures[TAP] = 100 * extra
        share = h.PAPER_EXTRACTION / h.PAPER_STEP
        bench.part.lines.append(
            f"- {at}: the tap adds {extra:+.2%} to the log-prob forward (wanted: at most 0.5 %). Where that forward "
            f"costs what the paper's extraction does, {extra * share:+.3%} of a training step instead of {share:.1%}."
        )
        bench.save()


def _early_exit(bench: Bench, at: str, model: Any, shape: h.Shape, ids: Tensor, mask: Tensor, note: str) -> None:
    ours, theirs = h.sides(model, ids, mask)
    want = theirs()
    effort: dict[str, Any] = {"how": EAGER, "rounds": 15, "seconds": 60.0}
    need = Work(flop=2 * ids.numel() * shape.parameters())
    mine = bench.row(at, "bk.hidden.extract", ours, check=lambda x: _agreement(x, want),
                     note=f"{note}; {_memory(ours, theirs, ids.device)}", **effort)  # fmt: skip
    other = bench.row(at, "output_hidden_states=True, then pick", theirs, kind="competitor", need=need, **effort)
    if mine.median_ms and other.median_ms:
        bench.part.lines.append(f"- {at}: early exit is {other.median_ms / mine.median_ms:.2f}× as fast ({note}).")
        bench.save()


def _agreement(found: Tensor, want: Tensor) -> str:
    """Largest difference of a unit row.  With other padding, rows differ by the dtype's rounding in all blocks."""
    difference, allowed = h.difference(found, want), 1e-5 if want.dtype == torch.float32 else 2e-2
    return f"largest difference {difference:.1e}" + ("" if difference <= allowed else f", beyond {allowed:g}")


def _memory(ours: Callable[[], Any], theirs: Callable[[], Any], device: torch.device) -> str:
    """Peak memory of both, beyond that before the call."""
    if device.type != "cuda":
        return "memory not measured"
    highest = []
    for call in (ours, theirs):
        call()
        gc.collect()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        highest.append((torch.cuda.max_memory_allocated(device) - before) / 2**20)
    return f"memory at its highest {highest[0]:,.1f} MiB against {highest[1]:,.1f} MiB"
