"""BiPACE in verl-agent: the paper's configuration keys, adv_estimator=gigpo as it is (docs/verl_agent.md)."""

from .launch import attach
from .settings import Settings

__all__ = ["Settings", "attach"]
