"""Hidden states at little cost: a tap on the forward that trainers run anyway, or a forward that stops early.

docs/hidden_states.md has examples.  No trainer and no transformers are imported: a model is known by its structure.
"""

from . import vllm
from .extract import extract, extract_layers
from .layers import Layer
from .positions import Positions, last_tokens, turn_positions
from .tap import Tap, tap

__all__ = ["Layer", "Positions", "Tap", "extract", "extract_layers", "last_tokens", "tap", "turn_positions", "vllm"]
