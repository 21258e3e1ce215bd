"""The tap: keeps a block's output at the chosen positions during forwards run by the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..backends import dispatch
from ._forward import Consumer, hidden_of
from ._pool import Spans, check_block, check_dtype, check_poolings, pool, scores_of
from .layers import Decoder, Layer, find_decoder, layer_of, layers_of, unwrap
from .positions import Positions


def tap(
    model: Any,
    layer: int | str = -8,
    *,
    positions: Any = "last",
    cu_seqlens: Any = None,
    pooling: str | Sequence[str] = "last",
    normalize: bool = False,
    dtype: torch.dtype | None = None,
    layers: Sequence[int | str] | None = None,
    backend: str = "auto",
) -> Tap:
    """Context manager that keeps a layer's hidden states at the chosen positions of every forward run inside it.

        with bk.hidden.tap(model, layer=-8, positions=turns) as tapped:
            model(input_ids, attention_mask=attention_mask)      # the log-prob forward, in any number of micro-batches
        fingerprint = tapped.rows()                              # [n, D]

    model        a Hugging Face decoder, bare or in PEFT, DDP, FSDP, DeepSpeed, with gradient checkpointing or compiled
                 blocks (a model compiled as a whole calls no hooks and is refused)
    layer        index into Hugging Face's hidden_states, negative or positive (−1: after the final norm), or "block 16"
    positions    "last": the last token of each row, from the forward's attention_mask (only prompts); or columns of the
                 model's input: an int for every row (negative from the end), one per row, or several per row
                 (`Positions`, a list of lists).  Rows are assigned in order, over any number of forwards
    cu_seqlens   [R+1] int   of a forward on packed input [1, nnz]: row r is [cu_seqlens[r], cu_seqlens[r+1]), and
                 columns count from its beginning.  For several packed forwards call `expect()` before each
    pooling      "last": the token itself; "mean": of its prompt up to it; "attention": of its prompt, weighted by the
                 token's attention in that block (softmax over the prompt, mean over heads); or several of them
    normalize    rows of unit length; the norm is taken in float64 and rows are rounded once
    dtype        of the rows; None: that of the hidden states
    layers       several layers at once, instead of `layer`
    backend      deprecated: a name as in bipace_kernels.advantage(), without effect; torch pools on the states' device

    Nothing else of the forward is kept, its outputs and autograd graph are unchanged, and recomputation by gradient
    checkpointing in the backward is not counted twice.  See `Tap` for the results.
    """
    decoder = find_decoder(model)
    if decoder.compiled:
        raise ValueError(
            f"model must not be compiled as a whole: {decoder.compiled} calls no hooks once compiled. Compile its "
            "blocks instead (for block in model.model.layers: block.compile()), or pass the model inside (_orig_mod)."
        )
    dispatch.check_name(backend)
    several = layers_of(layer, layers, len(decoder.blocks))
    poolings = check_poolings(pooling)
    for item in several if "attention" in poolings else ():
        if item.normed:
            raise ValueError(f"pooling 'attention' needs a block's output, as 'block {item.block}', got {item}.")
        check_block(decoder.blocks[item.block])
    consumer = Consumer(positions, cu_seqlens, one_token=poolings == ("last",))
    return Tap(several, decoder, poolings, consumer, bool(normalize), check_dtype(dtype))


@dataclass(repr=False, eq=False)
class Tap:
    """The result of tap(): rows of hidden states, in the order of forwards, rows and positions.

    enabled    set it to False to ignore forwards (of a reference model, of generation)
    layers     the tapped layers; they print as "block 20 (hidden_states[21] = [−8])"
    rows()     the states.  row_index(): the row of each.  expect(): positions of only the next forward.  clear()
    """

    layers: list[Layer]
    _decoder: Decoder
    _poolings: tuple[str, ...]
    _consumer: Consumer
    _normalize: bool
    _dtype: torch.dtype | None
    enabled: bool = True

    def __post_init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._spans: Spans | None = None
        self._thread: int | None = None  # of the forward that runs
        self._kept: dict[tuple[Layer, str], dict[int, Tensor | None]] = {}  # by the number of the forward
        self._forwards = 0

    def __repr__(self) -> str:
        return f"<Tap on {', '.join(map(str, self.layers))} of {type(self._decoder.causal).__name__}>"

    def __enter__(self) -> Tap:
        if self._undo:
            raise RuntimeError("a tap must be exited before it is entered again; make another for a nested context.")
        self.clear()
        try:
            base = self._decoder.base
            self._undo.append(base.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            self._undo.append(base.register_forward_hook(self._end, always_call=True).remove)
            rest = tuple(p for p in self._poolings if p != "attention")
            for layer in self.layers:
                block = self._decoder.blocks[layer.block]
                if rest:
                    module = self._decoder.norm if layer.normed else block
                    self._undo.append(_on_output(module, self._hook(layer, rest)))
                if "attention" in self._poolings:
                    # Inside the shards: the block's own parameters are needed, which FSDP frees in its own hook.
                    inside = unwrap(block, ("_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
                    self._undo.append(_on_output(inside, self._hook(layer, ("attention",)), first=True))
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: object) -> None:
        self._detach()
        if kind is None:
            self._consumer.check_done()

    def rows(self, layer: Layer | int | str | None = None, pooling: str | None = None) -> Tensor:
        """[n, D] hidden states of one layer and pooling; both may be omitted if there is only one.

        A position with no token (a row of padding) gives zeros.  ValueError if no forward ran, or if a position
        on a GPU was outside its tensor (which is not checked before).
        """
        self._consumer.check_outside()
        key = self._key(layer, pooling)
        kept = self._kept.get(key, {})
        if not kept or len(kept) < self._forwards:
            raise ValueError(
                f"{len(kept)} of {self._forwards} tapped forwards of {type(self._decoder.causal).__name__} ran through "
                f"{key[0]}; run the model in the with block while `enabled` is True, and clear() after an error."
            )
        parts = [rows for rows in kept.values() if rows is not None]
        if len(parts) > 1:
            kept |= {**dict.fromkeys(kept), self._forwards: torch.cat(parts)}
        return kept[self._forwards]  # type: ignore[return-value]

    def row_index(self) -> Tensor:
        """[n] int64 on the CPU: the row of each state, counted over all forwards."""
        return self._consumer.row_index()

    def expect(self, positions: Any = None, cu_seqlens: Any = None) -> None:
        """Positions and cu_seqlens of only the next forward; None keeps those of tap()."""
        self._consumer.expect(positions, cu_seqlens)

    def clear(self) -> None:
        """Discards all rows, and restarts with the first row of the positions."""
        self._spans, self._thread = None, None
        self._kept, self._forwards = {}, 0
        self._consumer.restart()

    def _key(self, layer: Layer | int | str | None, pooling: str | None) -> tuple[Layer, str]:
        names = ", ".join(map(str, self.layers))
        if layer is None and len(self.layers) > 1:
            raise ValueError(f"layer must name one of the tapped layers: {names}.")
        item = self.layers[0] if layer is None else layer_of(layer, len(self._decoder.blocks))
        if item not in self.layers:
            raise ValueError(f"layer must be one of the tapped layers, {names}, got {item}.")
        if pooling is None and len(self._poolings) > 1:
            raise ValueError(f"pooling must name one of {', '.join(self._poolings)}.")
        chosen = self._poolings[0] if pooling is None else pooling
        if chosen not in self._poolings:
            raise ValueError(f"pooling must be one of {', '.join(self._poolings)}, got {pooling!r}.")
        return item, chosen

    def _detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._spans = None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the decoder's own forward: finds its chosen tokens."""
        if _recomputing():
            return
        if not self.enabled:
            self._spans = None
            return
        if self._thread is not None:
            self._check_thread()
        self._spans, self._thread = None, threading.get_ident()
        with torch.inference_mode(False), torch.no_grad():
            self._spans = self._consumer.next(module, args, kwargs)
        self._forwards += 1

    def _end(self, *_: Any) -> None:
        """After that forward, also where it failed."""
        if self._thread == threading.get_ident():
            self._spans, self._thread = None, None

    def _check_thread(self) -> None:
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "the model must run its tapped forwards one after the other, but two threads run it at once, as "
                "nn.DataParallel does; use DDP or a tap for each copy of the model, and clear() this one."
            )

    def _hook(self, layer: Layer, poolings: tuple[str, ...]) -> Callable[..., None]:
        def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if self._spans is None or not self.enabled or _recomputing():
                return
            self._check_thread()
            # Rows of an inference-mode forward must still be plain tensors, so that later code can use them freely.
            with torch.inference_mode(False), torch.no_grad():
                hidden = hidden_of(output).detach()
                if hidden.shape[1] == self._consumer.logits_to_keep:  # what Gemma 4 runs its last blocks on
                    raise ValueError(f"layer must be before {layer}, which ran on only the last logits_to_keep tokens.")
                spans = self._spans.to(hidden.device)
                for pooling in poolings:
                    scores = scores_of(block, args, kwargs, spans) if pooling == "attention" else None
                    rows = pool(hidden, spans, pooling, self._normalize, self._dtype, scores)
                    kept = self._kept.setdefault((layer, pooling), {})
                    if self._forwards in kept and not layer.normed:  # some also run the norm before the first block
                        raise ValueError(f"layer must be of a block that runs once in a forward, got {layer}.")
                    kept[self._forwards] = rows

        return keep


def expect(
    tapped: Tap, positions: Positions | int, begin: Tensor | None = None, tokens: int = 0, group: Any = None
) -> Callable[[], Tensor]:
    """Sets which positions of the next forward a tap keeps: on padded rows, a packed row [1, tokens], or a slice of it.

    With sequence parallelism (Ulysses) each rank's forward sees a slice of the packed tokens.

    positions   [n] columns of each of R sequences
    begin       [R] int64, the sequences' first columns in the packed row; None: rows are padded, the rest is ignored
    tokens      in the packed row, including padding
    group       process group of the ranks, each with a slice of ceil(tokens / ranks) columns; None: not sliced

    Returns a function that gives every rank the states [n, D] after the forward: the sum of each rank's own and the
    others' zeros, which is exact.  Only n rows are sent, not all tokens.
    """
    tapped.clear()
    if begin is None or isinstance(positions, int):
        tapped.expect(positions)
        return tapped.rows
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    width = max(1, -(-tokens // ranks))
    column = positions.column.cpu() + begin.cpu()[positions.row()]
    mine = column // width == rank
    tapped.expect(Positions(column[mine] - rank * width, torch.tensor([0, int(mine.sum())])))

    def states() -> Tensor:
        own = tapped.rows()
        if group is None:
            return own
        rows = own.new_zeros(len(mine), own.shape[1])
        rows[mine.to(own.device)] = own
        dist.all_reduce(rows, group=group)
        return rows

    return states


def _on_output(module: nn.Module, hook: Callable[..., None], *, first: bool = False) -> Callable[[], None]:
    """Calls hook(module, args, kwargs, output) after each call of the module; returns a function that undoes it."""
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        return module.register_forward_hook(hook, prepend=first, with_kwargs=True).remove

    # A block compiled in place has its hooks compiled too, and ignores new ones: call the hook around it.
    def call(*args: Any, **kwargs: Any) -> Any:
        output = compiled(*args, **kwargs)
        hook(module, args, kwargs, output)
        return output

    module._compiled_call_impl = call

    def undo() -> None:
        module._compiled_call_impl = compiled

    return undo


def _recomputing() -> bool:
    """Whether this is inside a backward, where gradient checkpointing reruns the forward."""
    return torch._C._current_graph_task_id() != -1
