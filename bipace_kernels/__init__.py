"""BiPACE advantages for group-based RL of LLM agents: `advantage()` and what it is made of.

Importing this loads torch and NumPy and nothing else: no compiler, no GPU, no file.
"""

from ._dispatch import BackendError, BackendStatus, backends
from ._version import __version__
from .clusters import cluster
from .config import Config
from .epsilon import EpsilonChoice, choose_epsilon
from .layout import Layout, layout, trajectory_ids
from .pipeline import advantage
from .result import AdvantageResult
from .returns import discounted_returns
from .schema import Branch
from .tokens import to_tokens
from .value_r2 import ValueR2

__all__ = [
    "AdvantageResult",
    "BackendError",
    "BackendStatus",
    "Branch",
    "Config",
    "EpsilonChoice",
    "Layout",
    "ValueR2",
    "__version__",
    "advantage",
    "backends",
    "choose_epsilon",
    "cluster",
    "discounted_returns",
    "layout",
    "to_tokens",
    "trajectory_ids",
]
