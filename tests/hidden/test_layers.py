"""The block of a layer number, and recognition of models and mistakes."""

import pytest
import tiny_models as tm
import torch
import transformers
from refusals import refused
from torch import nn

import bipace_kernels as bk
from bipace_kernels.hidden.layers import find_decoder, layer_of


@pytest.mark.parametrize("layer", [29, -30, 99, -29, 0, "block 28", "block -1", "16", ""])
def test_layers_that_are_not_there(layer):
    refused(r"^layer ", layer_of, layer, 28)


@pytest.mark.parametrize("layer", [True, 2.0, None, [3]])
def test_layers_of_the_wrong_type(layer):
    refused(r"^layer must be an int or a text such as 'block 16', got ", layer_of, layer, 28, error=TypeError)


def test_every_index_means_what_hugging_face_means(model, ids, mask):
    states = tm.hidden_states(model, ids, mask)
    at = (torch.arange(len(ids)), bk.hidden.last_tokens(mask))
    every = [*range(1, tm.N_BLOCKS + 1), *range(-tm.N_BLOCKS, 0)]
    with bk.hidden.tap(model, layers=every) as tapped, torch.no_grad():
        model(ids, attention_mask=mask, position_ids=tm.position_ids(mask))
    for layer in every:
        assert torch.equal(tapped.rows(layer), states[layer][at]), layer
    assert len(tapped.layers) == tm.N_BLOCKS  # −1 and 9 are one layer


def test_other_decoders_are_found_by_their_structure_beside_a_vision_tower_as_deep_too():
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=50)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 50, (2, 7))
    with bk.hidden.tap(model, -2) as tapped, torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(tapped.rows(), states[-2][:, -1])
    text = transformers.Qwen2Config(**{k: v for k, v in tm.COMMON.items() if k != "attn_implementation"})
    blocks = {"num_hidden_layers": tm.N_BLOCKS, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    vision = transformers.CLIPVisionConfig(**blocks, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=99)
    model = transformers.LlavaForConditionalGeneration(config)
    assert type(find_decoder(model).base).__name__ == "Qwen2Model"


class Unknown(nn.Module):
    """A Hugging Face model by its marks, with blocks that hold no attention."""

    base_model_prefix = "model"

    def __init__(self, blocks):
        super().__init__()
        self.config = type("Config", (), {"num_hidden_layers": 3})()
        self.mixers = nn.ModuleList([nn.Linear(2, 2) for _ in range(blocks)])


def test_unknown_architectures_say_what_was_looked_for_and_encoder_decoders_are_refused():
    refused(r"one torch.nn.ModuleList of num_hidden_layers = 3 .*self_attn.*mixers of 3", bk.hidden.tap, Unknown(3))
    refused(r"ModuleLists none at all", bk.hidden.tap, Unknown(0))
    refused(r"Linear has no PreTrainedModel", bk.hidden.tap, nn.Linear(2, 2), error=TypeError)
    refused(r"model must be a torch.nn.Module, .* got str", bk.hidden.tap, "Qwen/Qwen2.5-7B", error=TypeError)
    config = transformers.T5Config(d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8, vocab_size=30)
    model = transformers.T5ForConditionalGeneration(config)
    refused("encoder-decoder T5ForConditionalGeneration", bk.hidden.tap, model)


@pytest.mark.parametrize("how", ["torch.compile", "in place", "base in place"])
def test_models_compiled_as_a_whole_are_refused_with_the_cure(how):
    model = tm.make()
    if how == "torch.compile":
        model = torch.compile(model)
    else:
        (model if how == "in place" else model.model).compile()
    refused(r"calls no hooks once compiled\. Compile its blocks", bk.hidden.tap, model)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused_with_the_cure(kind, ids, mask):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(tm.make(), config)
    for call in (bk.hidden.tap, lambda m: bk.hidden.extract(m, ids, mask)):
        refused(rf"{kind} puts 4 virtual ones .* model\.get_base_model\(\)", call, model)
    assert torch.equal(bk.hidden.extract(model.get_base_model(), ids, mask), bk.hidden.extract(tm.make(), ids, mask))
