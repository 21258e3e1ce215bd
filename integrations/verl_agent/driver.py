"""The trainer's own functions that give way to BiPACE's, while fit() runs."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from ...token_bytes import token_bytes
from .batch import mark, write_advantages
from .settings import Settings


def attach(trainer: Any, settings: Settings | None) -> None:
    """Lets `trainer.fit()` use BiPACE: a RayPPOTrainer class of verl-agent, in the process that will run it.

    settings   Settings.of(config); None (nothing is asked for) leaves the trainer as it is
    """
    if settings is None:
        return
    inner = trainer.fit

    @functools.wraps(inner)
    def fit(self: Any) -> Any:
        with attached(sys.modules[trainer.__module__], settings, self.tokenizer):
            return inner(self)

    trainer.fit = fit


@contextlib.contextmanager
def attached(module: Any, settings: Settings, tokenizer: Any) -> Iterator[None]:
    """Replaces what the trainer's module looks up by name: returns (rows are numbered there), advantages, metrics."""
    reads_text = settings.cacb_enabled and settings.cacb_action_key_mode == "action_tag"
    table = token_bytes(tokenizer) if reads_text else None
    metrics: dict[str, float] = {}

    def compute_step_discounted_returns(inner: Any, batch: Any, gamma: float) -> Any:
        returns = inner(batch=batch, gamma=gamma)
        mark(batch, settings)
        return returns

    def compute_advantage(inner: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        metrics.clear()
        metrics.update(write_advantages(data, settings, table))
        return data

    def compute_data_metrics(inner: Any, *args: Any, **kwargs: Any) -> Any:
        return {**inner(*args, **kwargs), **metrics}

    core = module.core_gigpo if settings.hgpo is None else module.core_hgpo
    with contextlib.ExitStack() as stack:
        for owner, new in (
            (core, compute_step_discounted_returns),
            (module, compute_advantage),
            (module, compute_data_metrics),
        ):
            old = getattr(owner, new.__name__)
            stack.callback(setattr, owner, new.__name__, old)
            setattr(owner, new.__name__, functools.partial(new, old))
        yield
