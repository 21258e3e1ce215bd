"""BiPACE advantages for group-based RL of LLM agents: `advantage()` and its parts.

Importing this loads only torch and NumPy: no compiler, no GPU, no file.
`bipace_kernels.hidden` (hidden states of Hugging Face models) and `bipace_kernels.distributed` (several processes) are
imported at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import _ops as _ops  # torch.ops.bipace
from . import embedders
from ._dispatch import BackendError, BackendStatus, backends
from ._version import __version__
from .action_clusters import action_clusters
from .action_keys import action_keys
from .calibrate import calibrate
from .calibration import Calibration
from .clusters import cluster
from .config import Config
from .epsilon import EpsilonChoice, choose_epsilon
from .epsilon_controller import EpsilonController
from .estimators import StepRecords
from .kernel_value_r2 import kernel_value_r2
from .layout import Layout, layout, trajectory_ids
from .ngrams import ngram_fingerprint
from .pipeline import advantage
from .result import AdvantageResult
from .returns import discounted_returns
from .schema import Branch
from .token_bytes import TokenBytes, token_bytes
from .tokens import to_tokens
from .value_memory import ValueMemory
from .value_r2 import ValueR2

if TYPE_CHECKING:
    from . import distributed, hidden

__all__ = [
    "AdvantageResult",
    "BackendError",
    "BackendStatus",
    "Branch",
    "Calibration",
    "Config",
    "EpsilonChoice",
    "EpsilonController",
    "Layout",
    "StepRecords",
    "TokenBytes",
    "ValueMemory",
    "ValueR2",
    "__version__",
    "action_clusters",
    "action_keys",
    "advantage",
    "backends",
    "calibrate",
    "choose_epsilon",
    "cluster",
    "discounted_returns",
    "distributed",
    "embedders",
    "hidden",
    "kernel_value_r2",
    "layout",
    "ngram_fingerprint",
    "to_tokens",
    "token_bytes",
    "trajectory_ids",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in ("distributed", "hidden"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
