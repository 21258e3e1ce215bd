"""BiPACE advantages for group-based RL of LLM agents: `advantage()` and its parts.

Importing this loads only torch and NumPy: no compiler, no GPU, no file.
`bipace_kernels.hidden` (hidden states of Hugging Face models) and `bipace_kernels.distributed` (several processes) are
imported at first use.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from . import ops as ops  # torch.ops.bipace
from ._version import __version__
from .backends.dispatch import BackendError, BackendStatus, backends
from .backends.schema import Branch
from .calibration.calibrate import calibrate
from .calibration.result import Calibration
from .clustering.action_clusters import action_clusters
from .clustering.cluster import cluster
from .clustering.controller import EpsilonController
from .clustering.epsilon import EpsilonChoice, choose_epsilon
from .config import Config
from .diagnostics.kernel_value_r2 import kernel_value_r2
from .diagnostics.value_r2 import ValueR2
from .estimators.memory import ValueMemory
from .estimators.returns import discounted_returns
from .estimators.table import StepRecords
from .features import embedders
from .features.action_keys import action_keys
from .features.ngrams import ngram_fingerprint
from .features.token_bytes import TokenBytes, token_bytes
from .features.tokens import to_tokens
from .inputs.layout import Layout, layout, trajectory_ids
from .pipeline import advantage
from .result import AdvantageResult

if TYPE_CHECKING:
    from . import distributed, hidden

__all__ = [
    "AdvantageResult", "BackendError", "BackendStatus", "Branch", "Calibration", "Config", "EpsilonChoice",
    "EpsilonController", "Layout", "StepRecords", "TokenBytes", "ValueMemory", "ValueR2", "__version__",
    "action_clusters", "action_keys", "advantage", "backends", "calibrate", "choose_epsilon", "cluster",
    "discounted_returns", "distributed", "embedders", "hidden", "kernel_value_r2", "layout", "ngram_fingerprint",
    "to_tokens", "token_bytes", "trajectory_ids",
]  # fmt: skip


# Modules that moved: pickles of earlier versions name them.
_MOVED = {"embedders": embedders.__name__, "layout": Layout.__module__, "value_memory": ValueMemory.__module__}
for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = sys.modules[_new]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in ("distributed", "hidden"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
