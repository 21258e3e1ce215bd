"""BiPACE in TRL: per-turn credit on the tokens of a GRPOTrainer.

from bipace_kernels.integrations.trl import BiPACEGRPOConfig, BiPACEGRPOTrainer

docs/trl.md
"""

from .config import BiPACEGRPOConfig
from .credit import Credit, bipace_advantages
from .trainer import BiPACEGRPOTrainer

__all__ = ["BiPACEGRPOConfig", "BiPACEGRPOTrainer", "Credit", "bipace_advantages"]
