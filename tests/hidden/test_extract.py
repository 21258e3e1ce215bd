"""Early exit: the states that Hugging Face's own hidden_states hold, out of a forward that ends after the wanted
block."""

import contextlib
import importlib.util
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import tiny_models as tm
import torch
from marks import slow
from refusals import refused

import bipace_kernels as bk
from bipace_kernels.hidden._prompts import budget_of, cheapest, prompts_of
from bipace_kernels.hidden.extract import _packing
from bipace_kernels.hidden.layers import find_decoder

LAYER = -8
PACKS = importlib.util.find_spec("transformers.masking_utils") is not None
needs_packing = pytest.mark.skipif(not PACKS, reason="transformers before 4.53 packs only with flash attention")


def distance(one, other):
    return (tm.unit(one) - tm.unit(other)).norm(dim=1).max()


class Calls:
    """Which parts of a model ran, and on how many tokens."""

    def __init__(self, model):
        self.blocks, self.tokens, self.parts = [], [], []
        model.model.register_forward_pre_hook(self.begin, with_kwargs=True)
        for i, block in enumerate(model.model.layers):
            block.register_forward_pre_hook(lambda *_, i=i: self.blocks.append(i))
        for name, part in (("norm", model.model.norm), ("lm_head", model.lm_head)):
            part.register_forward_pre_hook(lambda *_, name=name: self.parts.append(name))

    def begin(self, module, args, kwargs):
        self.tokens.append(tuple(kwargs["input_ids"].shape))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*tm.FAMILIES, "NanoChat"])  # NanoChat: its final norm also runs first
def test_every_family(family, side):
    model, (ids, mask) = tm.make(family), tm.prompts(7, side=side)
    for layer in (LAYER, -1):
        want = tm.last_states(model, ids, mask, layer)
        for packed in (None, True) if PACKS else (None,):
            rows = bk.hidden.extract(model, ids, mask, layer, token_budget=40, packed=packed)
            assert distance(rows, want) < 1e-5, (layer, packed)


def test_threads_with_one_model_wait_for_each_other(model, ids, mask):
    """A second call would count layers in the model that the first has shortened, and leave it so."""
    layers, model = [-8, -1] * 8, model.train()
    want = {layer: bk.hidden.extract(model, ids, mask, layer) for layer in layers[:2]}
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda layer: bk.hidden.extract(model, ids, mask, layer), layers)
        assert all(map(torch.equal, found, map(want.get, layers)))
    assert len(model.model.layers) == tm.N_BLOCKS and all(module.training for module in model.modules())


def test_every_layer_and_pooling_is_what_a_tap_gives(model, ids, mask):
    layers, poolings = [1, -8, "block 8", -1], ("last", "mean")
    with bk.hidden.tap(model, layers=layers, pooling=poolings) as tapped, torch.no_grad():
        model(ids, attention_mask=mask, position_ids=tm.position_ids(mask))
    found = bk.hidden.extract_layers(model, ids, mask, layers, pooling=poolings)
    assert len(found) == 8
    for (layer, pooling), rows in found.items():
        assert distance(rows, tapped.rows(layer, pooling)) < 1e-5, (layer, pooling)
    attention = bk.hidden.extract(model, ids, mask, LAYER, pooling="attention", normalize=True)
    with bk.hidden.tap(model, LAYER, pooling="attention", normalize=True) as tapped, torch.no_grad():
        model(ids, attention_mask=mask, position_ids=tm.position_ids(mask))
    assert (attention - tapped.rows()).norm(dim=1).max() < 1e-5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_kinds_of_attention(attention, dtype):
    model, (ids, mask) = tm.make(dtype=dtype, attn_implementation=attention), tm.prompts()
    rows = bk.hidden.extract(model, ids, mask)
    assert rows.dtype == dtype
    # As far as the same model's own padded forwards are from each other, by the side of the padding.
    other = torch.zeros_like(ids), torch.zeros_like(mask)
    for i, n in enumerate(mask.sum(1).tolist()):
        other[0][i, :n], other[1][i, :n] = ids[i, -n:], 1
    want = tm.last_states(model, ids, mask)
    own = distance(want, tm.last_states(model, *other))
    assert distance(rows, want) < max(1e-5, 2 * own)
    assert bk.hidden.extract(model, ids, mask, dtype=torch.float32).dtype == torch.float32


def test_ids_come_in_every_form(model, ids, mask):
    want = bk.hidden.extract(model, ids, mask)
    ragged = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    for given in ((ids.numpy(), mask.bool().numpy()), (ids.int(), mask.int())):
        assert torch.equal(bk.hidden.extract(model, *given), want)
    for rows in (ragged, [r.tolist() for r in ragged], [r.numpy() for r in ragged]):
        assert torch.equal(bk.hidden.extract(model, rows), want)
    full = tm.prompts(3, 5)[0]
    assert distance(bk.hidden.extract(model, full), tm.last_states(model, full, torch.ones_like(full))) < 1e-5


def several(mask, seed=3):
    """Any number of tokens of each row, in any order, some twice."""
    rng = random.Random(seed)
    return [[rng.choice(row.nonzero().flatten().tolist()) for _ in range(rng.randrange(4))] for row in mask]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["Qwen2", "Gemma3"])
def test_several_positions_of_a_row(family, side):
    model, (ids, mask) = tm.make(family), tm.prompts(9, side=side)
    ids[4:7], mask[4:7] = ids[1], mask[1]  # equal rows with different positions
    columns = several(mask)
    states = tm.hidden_states(model, ids, mask)[LAYER]
    want = torch.cat([states[row, at] for row, at in enumerate(columns)])
    for packed in (None, True) if PACKS else (None,):
        rows = bk.hidden.extract(model, ids, mask, positions=columns, token_budget=40, packed=packed)
        assert rows.shape == want.shape and distance(rows, want) < 1e-5, packed
    ragged = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    first = mask.argmax(1).tolist()
    inside = [[at - begin for at in some] for some, begin in zip(columns, first, strict=True)]
    padded = bk.hidden.extract(model, ids, mask, positions=columns)
    assert torch.equal(bk.hidden.extract(model, ragged, positions=inside), padded)


def test_positions_in_every_form(model, ids, mask):
    want = bk.hidden.extract(model, ids, mask)
    turns = bk.hidden.turn_positions(torch.ones(5, 3).int(), 17)
    for same in (-1, 16, [16] * 5, torch.full((5,), 16), [[16]] * 5, turns):
        assert torch.equal(bk.hidden.extract(model, ids, mask, positions=same), want)
    assert bk.hidden.extract(model, ids, mask, positions=[[]] * 5).shape == (0, 48)
    mask[2] = 0
    rows = bk.hidden.extract(model, ids, mask, positions=[[16], [15, 16], [3, 4], [], [16]])
    assert torch.equal(rows[3:5], torch.zeros(2, 48)) and distance(rows[[0, 2, 5]], want[[0, 1, 4]]) < 1e-5


def test_it_stops_after_the_wanted_block_and_the_last_position_of_a_row(model, ids, mask):
    calls = Calls(model)
    bk.hidden.extract(model, ids, mask, LAYER)
    assert calls.blocks == [0, 1] and calls.parts == ["norm"]
    calls.blocks.clear()
    bk.hidden.extract_layers(model, ids, mask, [2, "block 4"])
    assert calls.blocks == [0, 1, 2, 3, 4] and calls.parts == ["norm"] * 2
    bk.hidden.extract(model, ids, mask, -1)
    assert calls.blocks == [0, 1, 2, 3, 4, *range(9)] and calls.parts == ["norm"] * 3
    model, (ids, mask) = tm.make(), tm.prompts(3, side="right")
    calls = Calls(model)
    bk.hidden.extract(model, ids, mask, positions=[[0, 2], [1], [2]])
    assert sum(rows * width for rows, width in calls.tokens) == 9
    calls.tokens.clear()
    bk.hidden.extract(model, ids[:1].expand(4, -1), positions=[[0, 5], [5], [3, 5], [5]])
    assert calls.tokens == [(1, 6)]  # one row, four times asked for


@pytest.mark.parametrize("bad", [[[0]] * 4, [[17]] + [[16]] * 4, [[16], [0], [16], [16], [16]], -18])
def test_positions_that_are_no_tokens(bad, model, ids, mask):
    with pytest.raises(ValueError, match=r"positions (are for 4 rows|must be tokens of their rows)"):
        bk.hidden.extract(model, ids, mask, positions=bad)


def test_rows_without_a_token_are_zeros(model, ids, mask):
    mask[2] = 0
    rows = bk.hidden.extract(model, ids, mask)
    assert torch.equal(rows[2], torch.zeros(48))
    assert distance(rows[[0, 1, 3, 4]], tm.last_states(model, ids, mask)[[0, 1, 3, 4]]) < 1e-5
    for prompts in ((ids, 0 * mask), ([[], []],), ([],)):
        none = bk.hidden.extract(model, *prompts)
        assert none.shape[1] == 48 and not none.any()
    assert bk.hidden.extract(model, ids[:0], mask[:0]).shape == (0, 48)


def test_identical_prompts_run_once_and_progress_goes_to_stderr_only_when_asked(capsys, model, ids, mask):
    bk.hidden.extract(model, ids, mask, token_budget=20)
    assert capsys.readouterr() == ("", "")
    bk.hidden.extract(model, ids, mask, token_budget=20, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "hidden states" in shown.err and "100%" in shown.err
    model, (ids, mask) = tm.make(), tm.prompts(6)
    ids, mask = ids.repeat(4, 1), mask.repeat(4, 1)
    # The same prompt with other padding is the same prompt.
    shifted = torch.nn.functional.pad(ids, (0, 3)), torch.nn.functional.pad(mask, (0, 3))
    calls = Calls(model)
    rows = bk.hidden.extract(model, ids, mask, token_budget=10_000)
    assert calls.tokens == [(6, 17)] and torch.equal(rows, rows[:6].repeat(4, 1))
    assert torch.equal(bk.hidden.extract(model, *shifted, token_budget=10_000), rows)
    assert calls.tokens == [(6, 17)] * 2


def test_micro_batches_hold_the_budget_and_sort_by_length():
    model, (ids, mask) = tm.make(), tm.prompts(40, 25)
    lengths = sorted({tuple(r[m.bool()].tolist()) for r, m in zip(ids, mask, strict=True)}, key=len, reverse=True)
    lengths = [len(r) for r in lengths]
    calls = Calls(model)
    rows = bk.hidden.extract(model, ids, mask, token_budget=60)
    assert all(r * t <= 60 for r, t in calls.tokens) and sum(r for r, _ in calls.tokens) == len(lengths)
    assert [t for _, t in calls.tokens] == sorted((t for _, t in calls.tokens), reverse=True)
    assert sum(r * t for r, t in calls.tokens) < 1.1 * sum(lengths)
    assert distance(rows, tm.last_states(model, ids, mask)) < 1e-5
    calls.tokens.clear()
    bk.hidden.extract(model, ids, mask, token_budget=1)
    assert calls.tokens == [(1, n) for n in lengths]


def test_cuts_cost_least():

    def cost(lengths, cuts, each):
        return sum(lengths[a] * (b - a) + each for a, b in itertools.pairwise(cuts))

    def allowed(lengths, cuts):
        return all(b - a == 1 or lengths[a] * (b - a) <= 2000 for a, b in itertools.pairwise(cuts))

    generator = random.Random(5)
    for case in range(20):
        lengths = sorted((generator.randrange(1, 900) for _ in range(1 + case % 8)), reverse=True)
        n = len(lengths)
        every = [[0, *inner, n] for k in range(n) for inner in itertools.combinations(range(1, n), k)]
        each = (32, 256)[case % 2]
        found = cheapest(lengths, 2000, each)
        assert allowed(lengths, found), lengths
        assert cost(lengths, found, each) == min(cost(lengths, c, each) for c in every if allowed(lengths, c)), lengths
    assert cheapest([], 2000, 32) == [0]


def test_only_attention_that_looks_ahead_needs_a_mask():
    model, (ids, mask) = tm.make(attn_implementation="sdpa"), tm.prompts(6)
    block, masks = model.model.layers[0], []
    block.register_forward_pre_hook(lambda _, __, given: masks.append(given["attention_mask"]), with_kwargs=True)
    rows = bk.hidden.extract(model, ids, mask, token_budget=10_000)
    assert masks == [None] and distance(rows, tm.last_states(model, ids, mask)) < 1e-5
    model, (ids, mask) = tm.make("Gemma3", sliding_window=256), tm.prompts(6)
    model.config.use_bidirectional_attention = True
    rows = bk.hidden.extract(model, ids, mask, token_budget=10_000)
    assert distance(rows, tm.last_states(model, ids, mask)) < 1e-5
    model.config.use_bidirectional_attention = False
    assert distance(rows, tm.last_states(model, ids, mask)) > 1e-2, "or it looked at nothing ahead"


def test_blocks_that_logits_to_keep_lets_run_on_the_last_tokens_only(ids, mask):
    """Gemma 4's that share keys, from some release of transformers on."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 101}
    model = tm.make("Gemma4", layer_types=[*kinds * 4, kinds[1]], num_kv_shared_layers=4, **sizes)
    for layer in (-2, -1):
        want = tm.last_states(model, ids, mask, layer)
        assert distance(bk.hidden.extract(model, ids, mask, layer), want) < 1e-5
        with contextlib.suppress(ValueError), torch.no_grad():  # what the tap raises in these releases
            with bk.hidden.tap(model, layer) as tapped:
                model(ids, attention_mask=mask, position_ids=tm.position_ids(mask), logits_to_keep=2)
            assert distance(tapped.rows(), want) < 1e-5


@needs_packing
def test_packed_rows_have_no_padding():
    model, (ids, mask) = tm.make(), tm.prompts(12)
    calls = Calls(model)
    rows = bk.hidden.extract(model, ids, mask, token_budget=50, packed=True)
    assert all(r == 1 and t <= 50 for r, t in calls.tokens)
    assert sum(t for _, t in calls.tokens) == 3 + sum(len(p) for p in prompts_of(ids, mask).tokens)
    assert distance(rows, tm.last_states(model, ids, mask)) < 1e-5


@needs_packing
def test_a_pack_is_within_a_chunk_of_attention():
    model, (ids, mask) = tm.make("Llama4", attention_chunk_size=8, num_local_experts=2), tm.prompts(7)
    packed, padded = (bk.hidden.extract(model, ids, mask, packed=packed) for packed in (True, False))
    assert distance(packed, padded) < 1e-5


def test_flash_attention_packs_and_others_pad():
    decoder = find_decoder(tm.make())
    assert not _packing(decoder, None, 2)
    for name in ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"):
        decoder.base.config._attn_implementation_internal = name
        assert _packing(decoder, None, 2), name
        assert not _packing(decoder, False, 2)


def test_families_that_flash_attention_may_not_keep_apart_pad():
    decoder = find_decoder(tm.make("Ministral3", head_dim=16))
    decoder.base.config._attn_implementation_internal = "flash_attention_2"
    assert not _packing(decoder, None, 2)


@needs_packing
@pytest.mark.parametrize("family", ["MiniMax", "Lfm2"])
def test_packs_are_refused_where_tokens_mix_beside_attention(family, ids, mask):
    kinds = {"MiniMax": "linear_attention", "Lfm2": "conv"}  # every second block
    changes = {"num_local_experts": 2, "head_dim": 16} if family == "MiniMax" else {}
    model = tm.make(family, layer_types=["full_attention", *[kinds[family], "full_attention"] * 4], **changes)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0  # as padding's: linear attention gives zeros there
    with pytest.raises(ValueError, match="packed must be False"):
        bk.hidden.extract(model, ids, mask, layer=8, packed=True)


def test_no_gradients_plain_tensors_and_dropout_is_off_and_the_mode_comes_back(model, ids, mask):
    model.train()
    model.enable_input_require_grads()
    rows = bk.hidden.extract(model, ids, mask)
    assert not rows.requires_grad and not rows.is_inference()
    loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    model, (ids, mask) = tm.make(attention_dropout=0.5), tm.prompts()
    model.train()
    model.model.layers[3].eval()
    before = [m.training for m in model.modules()]
    assert torch.equal(bk.hidden.extract(model, ids, mask), bk.hidden.extract(model, ids, mask))
    assert [m.training for m in model.modules()] == before


def test_rotary_tables_that_grow_stay_usable_for_training(ids, mask):
    model = tm.make("Llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=8)
    bk.hidden.extract(model, ids, mask)
    assert not any(b.is_inference() for b in model.buffers())
    model.train()
    model(ids, attention_mask=mask, labels=ids).loss.backward()


def marks(model):
    """Everything about the modules that extract() could leave changed, by identity and in order."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return hooks, [(id(m), m.training, list(m._modules.items())) for m in model.modules()]


@pytest.mark.parametrize("where", ["a block", "the decoder", "not at all"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_model_is_left_as_it_was_found_even_when_interrupted(where, error, model, ids, mask):
    want = tm.last_states(model, ids, mask)
    states = model(ids, attention_mask=mask, position_ids=tm.position_ids(mask)).logits
    model.model.layers[5].train()
    stop = Mock(side_effect=error)
    if where != "not at all":
        handle = (model.model.layers[1] if where == "a block" else model.model).register_forward_hook(stop)
        before = marks(model)
        with pytest.raises(error):
            bk.hidden.extract(model, ids, mask)
        assert marks(model) == before
        handle.remove()
    before = marks(model)
    assert distance(bk.hidden.extract(model, ids, mask), want) < 1e-5 and marks(model) == before
    assert torch.equal(model(ids, attention_mask=mask, position_ids=tm.position_ids(mask)).logits, states)


def test_the_decoder_alone_models_without_a_head_and_in_checkpointing_wrappers_serve_too(model, ids, mask):
    assert torch.equal(bk.hidden.extract(model.model, ids, mask), bk.hidden.extract(model, ids, mask))
    want = tm.last_states(model, ids, mask)
    model.gradient_checkpointing_enable()
    model.train()
    assert distance(bk.hidden.extract(model, ids, mask), want) < 1e-5


def test_peft(model, ids, mask):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.eval()
    before = marks(model)
    rows = bk.hidden.extract(model, ids, mask)
    assert marks(model) == before and distance(rows, tm.last_states(model, ids, mask)) < 1e-5
    with model.disable_adapter():
        assert distance(bk.hidden.extract(model, ids, mask), rows) > 1e-3


@pytest.mark.parametrize("how", [slow("in place"), slow("replaced")])
def test_compiled_blocks(how, model, ids, mask):
    torch._dynamo.reset()
    want = tm.last_states(model, ids, mask)
    tm.compile_blocks(model, how)
    assert distance(bk.hidden.extract(model, ids, mask, token_budget=40), want) < 1e-5
    torch._dynamo.reset()


def test_wrong_arguments(model, ids, mask):
    for arguments, error, text in (
        ({"layer": -11}, ValueError, "layer must be an index into hidden_states"),
        ({"pooling": ("last", "mean")}, TypeError, "pooling must be one of .* see extract_layers"),
        ({"pooling": "max"}, ValueError, "pooling must be 'last', 'mean', 'attention'"),
        ({"token_budget": 0}, ValueError, "token_budget must be an int of at least 1, got 0"),
        ({"packed": "yes"}, TypeError, "packed must be None, True or False, got 'yes'"),
        ({"input_ids": torch.zeros(5)}, ValueError, r"input_ids must have shape \[B, T\], got \[5\]"),
        ({"input_ids": [[1, 2], None], "attention_mask": None}, TypeError, r"input_ids\[1\] must be .* got NoneType"),
        ({"input_ids": {"input_ids": [[1]]}}, TypeError, "input_ids must be token ids, got dict; give its items"),
        ({"input_ids": [[1, 2], [3]]}, ValueError, r"attention_mask is for input_ids of shape \[B, T\]"),
        ({"attention_mask": torch.ones(5, 3)}, TypeError, "attention_mask must be bool or integers"),
        ({"backend": "fast"}, ValueError, "backend must be one of"),
    ):
        refused(text, bk.hidden.extract, model, error=error, **{"input_ids": ids, "attention_mask": mask, **arguments})


def test_masks_with_holes_are_refused(model, ids, mask):
    for row, columns in ((0, [5]), (0, [5, 9]), (3, [15])):
        holed = mask.clone()
        holed[row, columns] = 0
        refused(f"row {row} has padding between its tokens", bk.hidden.extract, model, ids, holed)
    both = torch.zeros_like(mask)
    both[:, 4:9] = 1
    assert bk.hidden.extract(model, ids, both).shape == (5, 48)


def test_ids_that_the_embedding_has_not_are_refused(model, ids, mask):
    for bad in (tm.VOCABULARY, -100):
        wrong = ids.clone()
        wrong[3, -1] = bad
        for given in ((wrong, mask), ([row.tolist() for row in wrong], None)):
            refused(rf"^input_ids\[3\] must hold token ids from 0 to 100, got {bad};", bk.hidden.extract, model, *given)
    wrong[3, -1], wrong[:, 0] = 5, -100
    mask[:, 0] = 0
    bk.hidden.extract(model, wrong, mask)  # values on padding do not matter
    with pytest.raises(ValueError, match=r"^prompts\[1\] must hold token ids from 0 to 100, got 101;"):
        bk.calibrate(model, [[5], [101], [6], [7]], ["a", "b"] * 2, folds=2)


@pytest.mark.parametrize("packed", [False, True] if PACKS else [False])
def test_a_cpu_takes_few_tokens_at_a_time_and_a_gpu_many(packed, model):
    """The widest forward, which determines memory."""
    prompts = torch.randint(3, tm.VOCABULARY, (12, 100), generator=torch.Generator().manual_seed(3))
    calls = Calls(model)
    rows = bk.hidden.extract(model, prompts, packed=packed)
    assert [r * t for r, t in calls.tokens] == [2, 1] * packed + [500, 500, 200]  # first whether prompts stay apart
    assert distance(rows, tm.last_states(model, prompts, torch.ones_like(prompts))) < 1e-5
    assert budget_of(None, torch.device("cuda")) == 16_384
    calls.tokens.clear()
    bk.hidden.extract(model, prompts, packed=packed, token_budget=budget_of(None, torch.device("cuda")))
    assert [r * t for r, t in calls.tokens] == [2, 1] * packed + [1200]


@pytest.mark.parametrize("family", ["GptOss", "OPT"])  # whose masks do not follow position_ids
def test_packing_is_refused_where_prompts_would_see_each_other(family):
    changes = {"word_embed_proj_dim": 48} if family == "OPT" else {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = tm.make(family, **changes)
    with pytest.raises(ValueError, match=rf"packed must be False for {family}ForCausalLM: "):
        bk.hidden.extract(model, [[1, 2], [3]], layer=2, packed=True)
    assert bk.hidden.extract(model, [[1, 2], [3]], layer=2).shape == (2, 48)
