"""BiPACE in verl-agent: the paper's configuration keys under adv_estimator=gigpo (docs/verl_agent.md)."""

from .launch import attach
from .settings import Settings

__all__ = ["Settings", "attach"]
