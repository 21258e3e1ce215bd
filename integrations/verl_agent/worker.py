"""verl-agent's FSDP workers, whose compute_log_prob() also gives hidden states.  Imports verl-agent."""

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.workers import fsdp_workers

from .capture import log_prob


class _GivesStates:
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: Any) -> Any:
        return log_prob(self, super().compute_log_prob, data)  # type: ignore[misc]  # of the worker behind it


class ActorRolloutRefWorker(_GivesStates, fsdp_workers.ActorRolloutRefWorker): ...


class AsyncActorRolloutRefWorker(_GivesStates, fsdp_workers.AsyncActorRolloutRefWorker): ...


def install() -> None:
    """Registers these classes in fsdp_workers, where main looks them up.  Ray sends them to the workers."""
    for cls in (ActorRolloutRefWorker, AsyncActorRolloutRefWorker):
        setattr(fsdp_workers, cls.__name__, cls)
