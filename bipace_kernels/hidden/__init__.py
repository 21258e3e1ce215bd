"""Hidden states at little cost: a tap on the forward that trainers run anyway, or a forward that stops early.

    with bk.hidden.tap(model, layer=-8, positions=bk.hidden.turn_positions(response_mask, prompt_length)) as tapped:
        model(input_ids, attention_mask=attention_mask)
    fingerprint = tapped.rows()

    fingerprint = bk.hidden.extract(model, prompt_ids, prompt_mask, layer=-8)   # where no such forward runs

Neither trainers nor transformers are imported here: models are recognized by their structure.
"""

from . import vllm
from .extract import extract, extract_layers
from .layers import Layer
from .positions import Positions, last_tokens, turn_positions
from .tap import Tap, tap

__all__ = ["Layer", "Positions", "Tap", "extract", "extract_layers", "last_tokens", "tap", "turn_positions", "vllm"]
