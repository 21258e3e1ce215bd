"""`advantage()` and `cluster()` over several processes, equal to one process bit for bit."""

from .pipeline import advantage, cluster, plan_owners

__all__ = ["advantage", "cluster", "plan_owners"]
