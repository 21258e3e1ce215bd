"""BiPACE in TRL: one advantage per turn instead of one per completion.  docs/trl.md"""

from .._settings import Settings
from .._states import States
from .config import BiPACEGRPOConfig
from .credit import Credit, bipace_advantages
from .rollouts import ToolLoop
from .trainer import BiPACEGRPOTrainer

__all__ = ["BiPACEGRPOConfig", "BiPACEGRPOTrainer", "Credit", "Settings", "States", "ToolLoop", "bipace_advantages"]
