"""The tap: what Hugging Face's hidden_states hold at the wanted positions, and nothing else changed or kept."""

import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import tiny_models as tm
import torch
from marks import slow
from pooling_definition import Made
from refusals import refused
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import bipace_kernels as bk

LAYER = -8


def forward(model, ids, mask, **more):
    return model(ids, attention_mask=mask, position_ids=tm.position_ids(mask), use_cache=False, **more)


def tapped_forward(model, ids, mask, layer=LAYER, **options):
    with bk.hidden.tap(model, layer, **options) as tapped, torch.no_grad():
        forward(model, ids, mask)
    return tapped


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_have_the_models_dtype_and_are_rounded_once(dtype):
    model, (ids, mask) = tm.make(dtype=dtype), tm.prompts()
    want = tm.last_states(model, ids, mask)
    for normalize in (False, True):
        for out in (None, torch.float32):
            tapped = tapped_forward(model, ids, mask, normalize=normalize, dtype=out)
            exact = tm.unit(want) if normalize else want.double()
            assert tapped.rows().dtype == (out or dtype)
            assert torch.equal(tapped.rows(), exact.float().to(out or dtype))


def test_padding_between_tokens_is_not_pooled():
    model, (ids, mask) = tm.make(), tm.prompts(side="right")
    mask[0, 5] = 0
    assert tapped_forward(model, ids, mask).rows().any(1).all()
    assert tapped_forward(model, ids, mask, pooling="mean", positions=[[4], *[[1]] * 4]).rows().any(1).all()
    refused("row 0 is outside its 17 columns", tapped_forward, model, ids, mask, pooling=("last", "mean"))


def test_forwards_of_two_threads_at_once_are_an_error():
    """Their rows would have no order.  One after the other they have one, also after a forward that failed."""
    model, (ids, mask) = tm.make(), tm.prompts()
    with ThreadPoolExecutor(1) as other, bk.hidden.tap(model, LAYER) as tapped, torch.no_grad():

        def begins(*_):
            other.submit(forward, model, ids, mask).result(60)

        hook = model.model.layers[0].register_forward_pre_hook(begins)
        with pytest.raises(RuntimeError, match="two threads run it at once"):
            forward(model, ids, mask)
        hook.remove()
        tapped.clear()
        other.submit(forward, model, ids[:2], mask[:2]).result(60)
        forward(model, ids[2:], mask[2:])
    assert torch.equal(tapped.rows(), tm.last_states(model, ids, mask))


def test_packed_rows_by_cu_seqlens():
    """One row per sequence, where a forward on [1, nnz] is what the trainer runs."""
    model, (ids, mask) = tm.make(), tm.prompts(side="right")
    flat, position, cu = tm.packed(ids, mask)
    with torch.no_grad():
        states = model(flat, position_ids=position, output_hidden_states=True, use_cache=False).hidden_states[LAYER][0]
        for where in ({"cu_seqlens": cu}, {"cu_seqlens": cu, "positions": -1}, {"positions": [(cu[1:] - 1).tolist()]}):
            with bk.hidden.tap(model, LAYER, **where) as tapped:
                model(flat, position_ids=position, use_cache=False)
            assert torch.equal(tapped.rows(), states[cu[1:] - 1])
        with bk.hidden.tap(model, LAYER, positions=[[0, 2], [], [1], [2, 0], [0]], cu_seqlens=cu.int()) as tapped:
            model(flat, position_ids=position, use_cache=False)
        assert torch.equal(tapped.rows(), states[torch.stack([cu[0], cu[0] + 2, cu[2] + 1, cu[3] + 2, cu[3], cu[4]])])
        assert tapped.row_index().tolist() == [0, 0, 2, 3, 3, 4]
        with bk.hidden.tap(model, LAYER) as tapped:  # the forward's own arguments say it
            model(flat, position_ids=position, use_cache=False, cu_seq_lens_q=cu.int(), cu_seq_lens_k=cu.int())
        assert torch.equal(tapped.rows(), states[cu[1:] - 1])
        with bk.hidden.tap(model, LAYER, pooling="mean", cu_seqlens=cu) as tapped:
            model(flat, position_ids=position, use_cache=False)
    means = torch.stack([states[a:b].double().mean(0) for a, b in itertools.pairwise(cu)])
    assert torch.equal(tapped.rows(), means.float())


def test_the_token_before_each_turn():
    """Prompt, turn, tool result, turn: each state is what a forward over the tokens up to it gives."""
    model, (ids, mask) = tm.make(), tm.prompts(4, 14)
    responses = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 1, 1]])
    turns = bk.hidden.turn_positions(responses, prompt_length=14)
    ids = torch.cat([ids, tm.prompts(4, 6, seed=2)[0].clamp(min=1)], 1)
    mask = torch.cat([mask, torch.ones_like(responses)], 1)
    tapped = tapped_forward(model, ids, mask, positions=turns)
    assert tapped.row_index().tolist() == [0, 0, 0, 1, 3, 3]
    for row, state, column in zip(tapped.row_index().tolist(), tapped.rows(), turns.column.tolist(), strict=True):
        upto = slice(0, column + 1)
        alone = tm.last_states(model, ids[row : row + 1, upto], mask[row : row + 1, upto])
        assert (tm.unit(state[None]) - tm.unit(alone)).norm() < 1e-5


WINDOWED = {"use_sliding_window": True, "sliding_window": 4}  # in every second block


@pytest.mark.parametrize(
    ("family", "changes"), [*((name, {}) for name in tm.FAMILIES), ("Olmo", {"clip_qkv": 0.1}), ("Qwen2Moe", WINDOWED)]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_family_and_pooling(family, changes, side):
    """Mean and attention-weighted mean, the weights being those that the model's own eager attention gives out."""
    if changes is WINDOWED:
        pytest.importorskip("transformers.masking_utils", reason="blocks had one kind of mask")
    model, (ids, mask) = tm.make(family, **changes), tm.prompts(side=side)
    layers = [-8, -7]  # Gemma: one with a sliding window, one without
    with torch.no_grad():
        full = forward(model, ids, mask, output_hidden_states=True, output_attentions=True)
        with bk.hidden.tap(model, layers=layers, pooling=("last", "mean", "attention")) as tapped:
            forward(model, ids, mask)
    at = (torch.arange(len(ids)), bk.hidden.last_tokens(mask))
    for layer in layers:
        states, weights = full.hidden_states[layer].double(), full.attentions[layer + tm.N_BLOCKS].double()
        weight = weights.mean(1)[at] * mask
        want = {"mean": (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True),
                "attention": torch.einsum("bt,btd->bd", weight, states)}  # fmt: skip
        for pooling, rows in want.items():
            assert (tapped.rows(layer, pooling) - rows).norm(dim=1).max() < 1e-6 * rows.norm(dim=1).max(), pooling
        assert torch.equal(tapped.rows(layer, "last"), full.hidden_states[layer][at])
    for outer in (model, model.model):
        assert torch.equal(tapped_forward(outer, ids, mask, -1).rows(), tm.last_states(model, ids, mask, -1))


def test_a_row_of_padding_gives_zeros(model, ids, mask):
    mask[2] = 0
    for positions in ("last", -1):
        tapped = tapped_forward(model, ids, mask, positions=positions)
        assert torch.equal(tapped.rows()[2], torch.zeros(48))
        assert (tapped.rows()[[0, 1, 3, 4]].norm(dim=1) > 0).all()


def test_micro_batches_accumulate_in_order():
    model, (ids, mask) = tm.make(), tm.prompts(7)
    columns = bk.hidden.last_tokens(mask)
    want = tm.last_states(model, ids, mask)
    several = bk.hidden.Positions(columns.repeat_interleave(2), torch.arange(0, 15, 2))
    for positions, times in (("last", 1), (columns, 1), (several, 2)):
        with bk.hidden.tap(model, LAYER, positions=positions) as tapped, torch.no_grad():
            for first, last in ((0, 3), (3, 4), (4, 7)):
                forward(model, ids[first:last], mask[first:last])
        rows = tapped.rows()
        assert tapped.rows() is rows
        assert (tm.unit(rows) - tm.unit(want.repeat_interleave(times, 0))).norm(dim=1).max() < 1e-5
        assert tapped.row_index().tolist() == torch.arange(7).repeat_interleave(times).tolist()


def test_expect_is_for_one_forward(model, ids, mask):
    flat, position, cu = tm.packed(ids, mask)
    with bk.hidden.tap(model, LAYER) as tapped, torch.no_grad():
        forward(model, ids, mask)
        tapped.expect([[16, 15]] + [[]] * 4)
        forward(model, ids, mask)
        tapped.expect(cu_seqlens=cu)
        model(flat, position_ids=position, use_cache=False)
        forward(model, ids, mask)
    assert tapped.rows().shape == (5 + 2 + 5 + 5, 48)
    assert tapped.row_index().tolist() == [0, 1, 2, 3, 4, 5, 5, *range(10, 20)]
    assert torch.equal(tapped.rows()[5], tapped.rows()[0])


def test_switched_off_it_lets_forwards_pass_and_entered_again_it_begins_anew(model, ids, mask):
    with bk.hidden.tap(model, LAYER) as tapped, torch.no_grad():
        tapped.enabled = False
        model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        tapped.enabled = True
        forward(model, ids, mask)
    assert torch.equal(tapped.rows(), tm.last_states(model, ids, mask))
    tapped = bk.hidden.tap(model, LAYER, positions=bk.hidden.last_tokens(mask))
    for _ in range(2):
        with tapped, torch.no_grad():
            forward(model, ids, mask)
        assert tapped.rows().shape == (5, 48)
    with tapped, pytest.raises(RuntimeError, match="before it is entered again"):
        tapped.__enter__()


def test_two_taps_at_once(model, ids, mask):
    with bk.hidden.tap(model, -8) as one, bk.hidden.tap(model, -3, positions=[16] * 5) as two, torch.no_grad():
        forward(model, ids, mask)
    assert torch.equal(one.rows(), tm.last_states(model, ids, mask, -8))
    assert torch.equal(two.rows(), tm.last_states(model, ids, mask, -3))


def test_outputs_and_gradients_are_bit_equal_with_and_without(model, ids, mask):
    model.train()
    found = []
    for on in (False, True):
        model.zero_grad()
        with bk.hidden.tap(model, layers=[-8, -1], pooling=("last", "mean")) as tapped:
            tapped.enabled = on
            loss = forward(model, ids, mask, labels=ids).loss
            loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    rows = tapped.rows(-8, "mean")
    assert not rows.requires_grad and rows.grad_fn is None


@pytest.mark.parametrize("how", ["plain", "reentrant", "wrapper"])
def test_gradient_checkpointing_does_not_add_rows_twice(how, model, ids, mask):
    want, calls = tm.last_states(model, ids, mask), []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    if how == "wrapper":
        for i, block in enumerate(model.model.layers):
            model.model.layers[i] = checkpoint_wrapper(block)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
    model.enable_input_require_grads()
    model.train()
    with bk.hidden.tap(model, LAYER, pooling=("last", "attention")) as tapped:
        for _ in range(2):
            forward(model, ids, mask, labels=ids).loss.backward()
    assert len(calls) == 4, "the block must have run again in the backward, or this test shows nothing"
    assert torch.equal(tapped.rows(None, "last"), want.repeat(2, 1))
    assert tapped.rows(None, "attention").shape == (10, 48)


def test_only_the_rows_are_kept(model, ids, mask):
    """After the forward the block's output is gone, and what the tap holds is as large as its rows."""
    outputs = []

    def note(module, given, out):
        outputs.append(weakref.ref(out[0] if isinstance(out, tuple) else out))

    model.model.layers[1].register_forward_hook(note)
    tapped = tapped_forward(model, ids, mask, pooling=("last", "mean", "attention"))
    gc.collect()
    assert outputs[0]() is None
    for pooling in ("last", "mean", "attention"):
        assert tapped.rows(None, pooling).untyped_storage().nbytes() == 5 * 48 * 4


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_larger_than_the_rows_is_ever_made(dtype, normalize):
    """The rows and all forwards' rows in one; for unit length also those in float64 and their rounding."""
    model = tm.make(dtype=dtype, hidden_size=512, num_hidden_layers=2)
    ids, mask = tm.prompts(8, 12)
    made = []
    for on in (False, True):
        with Made() as count, bk.hidden.tap(model, -2, normalize=normalize) as tapped, torch.no_grad():
            tapped.enabled = on
            for i in (0, 4):
                forward(model, ids[i : i + 4], mask[i : i + 4])
            if on:
                rows = tapped.rows()
        made.append(sum(count.bytes))
    small = 4096  # indices of the rows
    size = rows.element_size()
    assert made[1] - made[0] <= rows.numel() * (3 * size + 8 if normalize else 2 * size) + small


def test_rows_of_an_inference_forward_are_plain_tensors(model, ids, mask):
    with bk.hidden.tap(model, LAYER, pooling=("last", "attention")) as tapped, torch.inference_mode():
        forward(model, ids, mask)
    weight = torch.ones(48, requires_grad=True)
    (tapped.rows(None, "last") * weight).sum().backward()
    assert not tapped.rows(None, "attention").is_inference()


@pytest.mark.parametrize("how", ["plain", "compiled in place"])
def test_the_model_is_left_as_it_was_found_whatever_happens(how, model, ids, mask):
    if how == "compiled in place":
        tm.compile_blocks(model, "in place")
    marks = lambda: [(len(m._forward_hooks), len(m._forward_pre_hooks), m._compiled_call_impl) for m in model.modules()]  # noqa: E731
    before = marks()
    tapped = bk.hidden.tap(model, layers=[-8, -1], pooling="last")
    handle = model.model.norm.register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
    with tapped, torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            forward(model, ids, mask)
        handle.remove()
        forward(model, ids, mask)
    refused(
        r"1 of 2 tapped forwards of Qwen2ForCausalLM .* through block 8 .* clear\(\) after an error", tapped.rows, -1
    )
    assert marks() == before
    with pytest.raises(ValueError, match="outside"), bk.hidden.tap(model, LAYER, positions=[99] * 5):
        forward(model, ids, mask)
    assert marks() == before


@pytest.mark.parametrize("how", [slow("in place"), slow("replaced")])
def test_compiled_blocks(how, model, ids, mask):
    """Compiled before the tap comes, which is when a block would not notice a hook."""
    torch._dynamo.reset()
    want = tm.last_states(model, ids, mask)
    tm.compile_blocks(model, how)
    with torch.no_grad():
        forward(model, ids, mask)
        for pooling in ("last", "attention"):
            with bk.hidden.tap(model, LAYER, pooling=pooling) as tapped:
                forward(model, ids, mask)
                forward(model, ids, mask)
            assert tapped.rows().shape == (10, 48)
            if pooling == "last":
                assert torch.equal(tapped.rows(), want.repeat(2, 1))
    torch._dynamo.reset()


def test_peft(model, ids, mask):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "up_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config).eval()
    tapped = tapped_forward(model, ids, mask, pooling=("last", "attention"))
    assert torch.equal(tapped.rows(None, "last"), tm.last_states(model, ids, mask))
    with model.disable_adapter(), bk.hidden.tap(model, LAYER) as bare, torch.no_grad():
        forward(model, ids, mask)
    assert not torch.allclose(bare.rows(), tapped.rows(None, "last"))


def test_an_adapters_dropout_draws_the_same_numbers_as_without_a_tap(model, ids, mask):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        with bk.hidden.tap(model, LAYER, pooling="attention") as tapped:
            tapped.enabled = on
            found.append(forward(model, ids, mask).logits)
    assert torch.equal(*found) and model.base_model.model.model.layers[1].self_attn.q_proj.training


def test_a_block_that_runs_several_times_is_refused(model, ids, mask):
    model.model.layers[2] = model.model.layers[1]
    with pytest.raises(ValueError, match=r"layer must be of a block that runs once in a forward, got block 1"):
        tapped_forward(model, ids, mask)


def test_wrong_arguments():
    for arguments, error, text in (
        ({"layer": -11}, ValueError, r"layer must be an index into hidden_states, −9 to −1 or 1 to 9 .* got -11"),
        ({"layers": []}, ValueError, "layers must be a list"),
        ({"pooling": "max"}, ValueError, "pooling must be 'last', 'mean', 'attention'"),
        ({"pooling": ["last", "last"]}, ValueError, "pooling must be"),
        ({"layer": -1, "pooling": "attention"}, ValueError, "needs a block's output, as 'block 8', got block 8 and"),
        ({"dtype": torch.int8}, ValueError, "dtype must be None"),
        ({"backend": "fast"}, ValueError, "backend must be one of"),
        ({"positions": "first"}, TypeError, "positions must be 'last', an int"),
        ({"cu_seqlens": [0]}, ValueError, r"cu_seqlens must have shape \[R\+1\]"),
    ):
        refused(text, bk.hidden.tap, tm.make(), error=error, **arguments)


def test_positions_that_do_not_fit(model, ids, mask):
    for positions, text in (
        ([17] * 5, "one of row 0 is outside its 17 columns"),
        (-18, "one of row 0 is outside"),
        ([16, 0, 16, 16, 16], "one of row 1 is outside its 17 columns or on padding"),
        ([16] * 4, "positions are for 4 rows, the forwards have 5 or more"),
        ([16] * 6, "positions are for 6 rows, the forwards had 5"),
    ):
        with pytest.raises(ValueError, match=text), bk.hidden.tap(model, LAYER, positions=positions), torch.no_grad():
            forward(model, ids, mask)


def test_masks_and_packing_that_do_not_fit(model, ids, mask):
    flat, position, cu = tm.packed(ids, mask)
    with torch.no_grad():
        with pytest.raises(ValueError, match="needs packed input"), bk.hidden.tap(model, LAYER, cu_seqlens=cu):
            forward(model, ids, mask)
        for where, pooling in (("last", "last"), (3, "last"), ([[3, 9]], "mean")):
            tapped = bk.hidden.tap(model, LAYER, positions=where, pooling=pooling)
            with pytest.raises(ValueError, match="on packed input needs cu_seqlens"), tapped:
                model(flat, position_ids=position, use_cache=False)
        for wrong in (cu + 1, cu.flip(0), [0, 5, 999]):
            text = f"cu_seqlens must begin with 0, never decrease and end within the forward's {flat.shape[1]} tokens"
            with pytest.raises(ValueError, match=text), bk.hidden.tap(model, LAYER, cu_seqlens=wrong):
                model(flat, position_ids=position, use_cache=False)
        with bk.hidden.tap(model, LAYER, cu_seqlens=cu):
            model(flat, position_ids=position, use_cache=False)
            refused("was for one forward", model, flat, position_ids=position, use_cache=False)
        with pytest.raises(ValueError, match="its attention_mask or its cache covers"), bk.hidden.tap(model, LAYER):
            model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
        cache = model(ids[:, :9]).past_key_values
        with pytest.raises(ValueError, match="or its cache covers"), bk.hidden.tap(model, LAYER, pooling="mean"):
            model(ids[:, 9:], past_key_values=cache)
        block = torch.zeros(5, 1, 17, 17)
        with pytest.raises(ValueError, match=r"needs an attention_mask \[B, T\]"), bk.hidden.tap(model, LAYER):
            model(ids, attention_mask=block, use_cache=False)


def test_asking_for_what_is_not_there(model, ids, mask):
    tapped = bk.hidden.tap(model, layers=[-8, -3], pooling=("last", "mean"))
    named = "block 1 (hidden_states[2] = [−8]), block 6 (hidden_states[7] = [−3])"
    assert repr(tapped) == f"<Tap on {named} of Qwen2ForCausalLM>"
    refused(r"0 of 0 tapped forwards of Qwen2ForCausalLM .* through block 1 ", tapped.rows, -8, "last")
    with tapped, torch.no_grad():
        forward(model, ids, mask)
    refused("layer must name one of the tapped layers: block 1 ", tapped.rows, None, "last")
    refused(r"layer must be one of the tapped layers, .* got block 2 ", tapped.rows, -7, "last")
    refused("pooling must name one of last, mean", tapped.rows, -8)
    refused("pooling must be one of last, mean, got 'attention'", tapped.rows, -8, "attention")
    assert tapped.rows(2, "mean") is tapped.rows(-8, "mean")


def test_attention_pooling_is_only_for_families_whose_weights_were_compared():
    with pytest.raises(TypeError, match=r"not for Cohere2DecoderLayer, only .* Llama, .* use 'last' or 'mean'"):
        bk.hidden.tap(tm.make("Cohere2"), -2, pooling="attention")  # every fourth block has no rotary positions
