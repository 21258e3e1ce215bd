"""Early exit: hidden states of prompts by a forward that stops after the last chosen block."""

import inspect
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import threads
from ..support.progress import progress_bar
from . import _shortened
from ._pool import is_known
from ._prompts import Batch, Prompts, budget_of, packed_batch, padded_batch, prompts_of
from .layers import Decoder, Layer, text_config
from .positions import Positions
from .tap import Tap, tap

_ZERO = torch.zeros(1, dtype=torch.int64)
_ONE_TOKEN: Batch = ([_ZERO], Positions(_ZERO, torch.arange(2)))
_TWO_PROMPTS: Batch = ([_ZERO + 1, _ZERO], Positions(_ZERO.repeat(2), torch.arange(3)))


@threads.using()
def extract(
    model: Any,
    input_ids: Any,
    attention_mask: Any = None,
    layer: int | str = -8,
    *,
    positions: Any = "last",
    pooling: str = "last",
    normalize: bool = False,
    dtype: torch.dtype | None = None,
    token_budget: int | None = None,
    packed: bool | None = None,
    progress: bool | None = None,
    group: Any = None,
    backend: str = "auto",
) -> Tensor:
    """[n, D] hidden states of prompts, by default at their last token, by a forward that stops after the block.

        fingerprint = bk.hidden.extract(model, prompt_ids, prompt_mask, layer=-8)                        # [B, D]
        fingerprint = bk.hidden.extract(model, input_ids, attention_mask, positions=turns, layer=-8)     # [n, D]

    model           a Hugging Face decoder, bare or wrapped, as tap() takes it
    input_ids       [B, T] int   prompts, padded on either side; or a list of token ids per row
    attention_mask  [B, T] bool or 0 and 1; None: every column is a token
    layer           index into Hugging Face's hidden_states, or "block 16", as in tap()
    positions       "last", or columns of input_ids as in tap(): an int for every row, one per row, or any number per
                    row, such as from turn_positions(); states are in row order.  Tokens after a row's last position are
                    not run
    pooling         "last" | "mean" | "attention", as in tap()
    normalize       rows of unit length
    dtype           of the rows; None: that of the hidden states
    token_budget    tokens of one forward, including padding; it determines the memory.  A longer prompt runs by itself.
                    None: 512 on the CPU, where more hardly helps, 16,384 elsewhere
    packed          prompts one after the other in [1, nnz], without padding; None: with flash attention, in families
                    known to keep them apart.  Otherwise prompts of similar lengths are padded together
    progress        a bar on stderr; None: if stderr is a terminal and there are several forwards
    group           process group of a model that is sharded by FSDP or ZeRO-3; None: the default one.  All its ranks
                    call this together, each with its own prompts, and run the same number of forwards
    backend         deprecated, without effect

    Later blocks and the head do not run; identical prompts run once, in eval mode
    and without gradients.  Positions of rows without a token give zeros.  The model is always restored.
    """
    if not isinstance(pooling, str):
        raise TypeError(f"pooling must be one of 'last', 'mean', 'attention', got {pooling!r}; see extract_layers().")
    rows: dict[str, Any] = {"positions": positions, "pooling": pooling, "normalize": normalize, "dtype": dtype}
    forwards: dict[str, Any] = {"token_budget": token_budget, "packed": packed, "progress": progress, "group": group}
    states = extract_layers(model, input_ids, attention_mask, [layer], **rows, **forwards, backend=backend)
    return next(iter(states.values()))


@threads.using(alone=True)
def extract_layers(
    model: Any,
    input_ids: Any,
    attention_mask: Any = None,
    layers: Sequence[int | str] = (-8, -12),
    *,
    positions: Any = "last",
    pooling: str | Sequence[str] = "last",
    normalize: bool = False,
    dtype: torch.dtype | None = None,
    token_budget: int | None = None,
    packed: bool | None = None,
    progress: bool | None = None,
    group: Any = None,
    backend: str = "auto",
) -> dict[tuple[Layer, str], Tensor]:
    """extract() for several layers and poolings with the same forwards: {(Layer, pooling): [n, D]}.

    layers          indices into hidden_states or "block 16"; forwards stop after the last of them
    pooling         one or several of "last", "mean", "attention".  The other arguments are those of extract()
    """
    tapped = tap(model, layers=layers, pooling=pooling, normalize=normalize, dtype=dtype, backend=backend)
    decoder = tapped._decoder
    sharded = _shortened.is_sharded(decoder.model) and torch.distributed.is_initialized()
    device = decoder.device
    n_blocks = 1 + max(item.block for item in tapped.layers)
    failure, prompts, batches, packing = None, None, [], False
    try:
        packing = _packing(decoder, packed, n_blocks)
        # Transformers 5.10 counts chunks of attention from the first token of a pack, so one chunk is the longest pack.
        chunk = getattr(text_config(decoder.causal), "attention_chunk_size", None) if packing else None
        budget = min(budget_of(token_budget, device), chunk or sys.maxsize)
        prompts = prompts_of(input_ids, attention_mask, positions, n_ids=decoder.n_ids)
        batches = [_TWO_PROMPTS, _ONE_TOKEN] if packed else []  # not every model's mask follows position_ids
        batches += prompts.batches(budget, device, packed=packing)
    except (TypeError, ValueError) as error:
        failure = error
    n_forwards = _forwards(len(batches), failure, group, device) if sharded else len(batches)
    if failure is not None:
        raise failure
    assert prompts is not None
    # Where a token may see later ones, as some Gemmas are configured.
    masked = getattr(text_config(decoder.causal), "use_bidirectional_attention", None) in (True, "all")
    # Logits of only one token if the head runs, for which Gemma 4 would also run its last blocks on only that token.
    runs = getattr(decoder.causal, "get_output_embeddings", lambda: None)() is None
    known = inspect.signature(type(decoder.causal).forward).parameters if runs else ()
    one = next(({name: 1} for name in ("logits_to_keep", "num_logits_to_keep") if name in known), {})
    with (
        _shortened.shortened(decoder, n_blocks) as called,
        _shortened.no_gradients(decoder.model),
        tapped,
        progress_bar(progress if n_forwards > 1 else bool(progress), "hidden states", n_forwards) as bar,
    ):
        for i in range(n_forwards):
            tapped.enabled = i < len(batches)
            tokens, wanted = batches[i] if tapped.enabled else _ONE_TOKEN  # so that no rank waits
            arguments, cu_seqlens = packed_batch(tokens) if packing else padded_batch(tokens, masked=masked)
            if tapped.enabled:
                tapped.expect(wanted, cu_seqlens)
            called(**{name: tensor.to(device) for name, tensor in arguments.items()}, use_cache=False, **one)
            if packed and i == 1:
                _check_apart(tapped)
            bar.update()
    return {key: _rows(tapped, key, prompts) for key in itertools.product(tapped.layers, tapped._poolings)}


def _rows(tapped: Tap, key: tuple[Layer, str], prompts: Prompts) -> Tensor:
    """The caller's states from those of the distinct prompts."""
    if not prompts.tokens:
        decoder = tapped._decoder
        kinds = (p.dtype for p in decoder.base.parameters() if p.is_floating_point())
        dtype = tapped._dtype or next(kinds, torch.float32)
        shape = (len(prompts.of_state), text_config(decoder.causal).hidden_size)
        return torch.zeros(shape, dtype=dtype, device=decoder.device)
    rows = tapped.rows(*key)
    of_state = prompts.of_state.to(rows.device)
    return rows[of_state.clamp(min=0)].masked_fill_((of_state < 0)[:, None], 0)


def _packing(decoder: Decoder, packed: Any, n_blocks: int) -> bool:
    if packed is not None:
        if not isinstance(packed, bool):
            raise TypeError(f"packed must be None, True or False, got {packed!r}.")
        return packed
    varlen = "flash" in str(getattr(decoder.base.config, "_attn_implementation", None))
    # Others may not tell flash attention where prompts begin, as Ministral 3, or mix tokens beside it, as Falcon-H1.
    return varlen and all(is_known(block) for block in list(decoder.blocks)[:n_blocks])


def _check_apart(tapped: Tap) -> None:
    """Raises ValueError if the second of two packed prompts has another state than by itself."""
    kept = tapped._kept[max(tapped.layers, key=lambda item: item.block), tapped._poolings[0]]
    _, packed, alone = torch.cat([rows for rows in kept.values() if rows is not None])
    gap, size = (float(x.double().norm()) for x in (packed - alone, alone))
    decoder, name = tapped._decoder, type(tapped._decoder.causal).__name__
    # Linear attention, Mamba and short convolutions mix prompts too, but may do so little with these two tokens.
    linear = "linear_attention" in (getattr(text_config(decoder.causal), "layer_types", None) or ())
    mixes = linear or any(isinstance(module, nn.Conv1d) for module in decoder.blocks.modules())
    if mixes or gap > size * torch.finfo(alone.dtype).eps ** 0.5:
        raise ValueError(f"packed must be False for {name}: with its attention packed prompts would see each other.")
    tapped.clear()


def _forwards(n: int, failure: Exception | None, group: Any, device: torch.device) -> int:
    """The largest number of forwards of any rank.  Raises on all ranks if one cannot run, or the others would wait."""
    most = torch.tensor([n, failure is not None], device=device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
    count, failed = most.tolist()
    if failed and failure is None:
        raise RuntimeError("another rank could not prepare its prompts for extract(); its own error says why.")
    return int(count)
