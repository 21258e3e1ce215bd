"""States: the fingerprints of a training run's steps, which embedder makes them, and the ε that goes with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import embedders
from ..epsilon import choose_epsilon
from ..result import AdvantageResult
from ._settings import Settings

Tensor = torch.Tensor


class States:
    """Of one training run; keeps what was chosen on its way.

    where     what goes before the settings' names in messages, such as "algorithm.bipace."
    epsilon   ε of the hidden states; None until "auto" has chosen it
    """

    def __init__(self, settings: Settings, where: str = "") -> None:
        self.settings, self.where = settings, where
        self.epsilon = None if settings.epsilon == "auto" else float(settings.epsilon)
        self._embedder: Any = None

    @property
    def may_be_hidden(self) -> bool:
        """Whether the settings take hidden states where there are some."""
        return self.settings.needs_fingerprint and self.settings.embedder in ("auto", "actor_hidden")

    def no_hidden(self, why: str) -> ValueError:
        """The error of embedder=actor_hidden without hidden states."""
        return ValueError(
            f"{self.where}embedder=actor_hidden has no hidden states: {why}; take {self.where}embedder=auto, which falls back to "
            "n-grams of the observations, or embedder=ngram."
        )

    def fingerprint(
        self, hidden: Tensor | None, observations: Callable[[], Sequence[Any]], why: str
    ) -> tuple[str, Tensor]:
        """The embedder in use, and its fingerprints [n, D].

        hidden         [n, D] hidden states, or None
        observations   called where texts [n] are needed
        why            there are no hidden states, for the error of "actor_hidden" and the one warning of "auto"
        """
        kind = self.settings.embedder
        if self.may_be_hidden:
            if hidden is not None:
                return "actor_hidden", hidden
            if kind == "actor_hidden":
                raise self.no_hidden(why)
            if self._embedder is None:
                warnings.warn(
                    f"{self.where}embedder=auto takes n-grams of the observations, with ngram_epsilon = "
                    f"{self.settings.ngram_epsilon:g}, in place of hidden states: {why}.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            kind = "ngram"
        if self._embedder is None:
            self._embedder = embedders.named(kind)
        return kind.partition(":")[0], self._embedder.embed(observations())

    def radius(
        self, used: str, fingerprint: Tensor, group: Tensor, trajectory: Tensor, step: Tensor, valid: Tensor
    ) -> float:
        """ε of the embedder in use; "auto" is chosen here once, from steps that have a direction, copies counted once."""
        if used == "ngram":
            return self.settings.ngram_epsilon
        if used == "identity":
            return 0.0
        if self.epsilon is None:
            fine = valid.to(fingerprint.device) & fingerprint.isfinite().all(1) & (fingerprint != 0).any(1)
            at = torch.nonzero(fine).flatten().cpu()
            ids = torch.stack([group, trajectory, step], 1)[at].cpu().numpy()
            at = at[torch.from_numpy(np.sort(np.unique(ids, axis=0, return_index=True)[1]))]
            rows = fingerprint[at.to(fingerprint.device)].cpu()
            chosen = choose_epsilon(rows, group[at], trajectory=trajectory[at], step=step[at])
            self.epsilon = chosen.epsilon
            warnings.warn(f"{self.where}epsilon=auto chose {chosen.epsilon:g}: {chosen.reason}.", stacklevel=2)
        return self.epsilon

    def metrics(self, result: AdvantageResult, used: str = "", epsilon: float | None = None) -> dict[str, float]:
        """What a trainer logs of a step: the result's metrics, the embedder in use and its ε, and value R² (NaN: undefined)."""
        found = result.metrics()
        if used:
            found[f"bipace/embedder/{used}"] = 1.0
        if epsilon is not None:
            found["bipace/epsilon"] = epsilon
        if self.settings.method != "grpo":
            value = result.value_r2()
            found["bipace/value_r2"] = float("nan") if value.r2 is None else value.r2
            found["bipace/value_r2_coverage"] = value.coverage
        return found

    def state_dict(self) -> dict[str, Any]:
        """What was chosen, for a checkpoint: plain values."""
        return {"epsilon": self.epsilon, "embedder": self.settings.embedder, "layer": self.settings.layer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the ε of the run that goes on, where this one would choose one for the same states."""
        same = all(state[name] == getattr(self.settings, name) for name in ("embedder", "layer"))
        if self.settings.epsilon == "auto" and same:
            self.epsilon = state["epsilon"]
