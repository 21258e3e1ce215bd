"""The paper's configuration keys, below `algorithm.gigpo`, and the estimator's configuration that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from ...config import Config
from .._settings import NGRAM_EPSILON

WHERE = "algorithm.gigpo."
VERL_AGENT: dict[str, Any] = {"episode_scope": "step", "lone_trajectory": "raw"}  # its populations hold a row per step


@dataclass(frozen=True)
class Settings:
    """What verl-agent's configuration says; fields are keys below algorithm.gigpo, and ValueError names them.

    bisim_grouping        clusters of states that are alike, in place of equal observations
    bisim_embedder        what they are alike in; "identity" is equality
    bisim_layer           of the actor, as in bipace_kernels.hidden.tap()
    bisim_eps             ε of the clusters; None: 0.10 for hidden states, 0.25 for n-grams
    bisim_duplicates      copies of a row that fill up the batch: "once" in every mean, or "count" as verl-agent does
    bisim_on_invalid      rows that are not finite: "singleton" sets them aside, "raise" stops the run
    cacb_*                the action-conditioned baseline (PACE), its keys, and its estimator; "counterfactual" is diff_peer
    step_advantage_w, mode, enable_similarity, similarity_thresh   verl-agent's own
    hgpo                  algorithm.hgpo with env.history_length, where that is the estimator
    """

    bisim_grouping: bool = False
    bisim_embedder: Literal["actor_hidden", "ngram", "identity"] = "actor_hidden"
    bisim_layer: int | str = -8
    bisim_eps: float | None = None
    bisim_duplicates: Literal["once", "count"] = "once"
    bisim_on_invalid: Literal["singleton", "raise"] = "singleton"
    cacb_enabled: bool = False
    cacb_n_action_tokens: int = 8
    cacb_action_key_mode: Literal["action_tag", "first_n"] = "action_tag"
    cacb_estimator: Literal["q_style", "counterfactual"] = "q_style"
    step_advantage_w: float = 1.0
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    enable_similarity: bool = False
    similarity_thresh: float = 0.95
    hgpo: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            allowed = (True, False) if hint is bool else tuple(a for a in get_args(hint) if isinstance(a, str))
            value = getattr(self, name)
            if allowed and (value not in allowed or (hint is bool) != isinstance(value, bool)):
                raise ValueError(f"{WHERE}{name} must be one of {', '.join(map(str, allowed))}, got {value!r}.")
        n = self.cacb_n_action_tokens
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"{WHERE}cacb_n_action_tokens must be an int of at least 1, got {n!r}.")
        if self.bisim_grouping and self.enable_similarity:
            raise ValueError(f"{WHERE}enable_similarity groups otherwise than {WHERE}bisim_grouping; set one to False.")
        if self.hgpo is not None and (self.cacb_enabled or self.bisim_embedder != "identity" or self.enable_similarity):
            raise ValueError(
                "algorithm.adv_estimator=hgpo groups equal histories, knows no action keys, and computes advantages before "
                f"log-probabilities: set {WHERE}bisim_embedder=identity and {WHERE}cacb_enabled=False, or use gigpo."
            )
        try:
            self.config()
        except ValueError as error:
            raise ValueError(
                f"{WHERE}bisim_eps, step_advantage_w, similarity_thresh or algorithm.hgpo: {error}"
            ) from error

    @classmethod
    def of(cls, config: Any) -> Settings | None:
        """Of verl-agent's whole configuration; None where it asks for neither clusters nor action keys."""
        algorithm, size = config["algorithm"], config["env"]["rollout"]["n"]
        given, name = dict(algorithm.get("gigpo", {})), algorithm["adv_estimator"]
        known = [f.name for f in fields(cls) if f.name != "hgpo"]
        for key in given:
            if key not in known and str(key).startswith(("bisim_", "cacb_")):
                raise ValueError(f"{WHERE}{key} is no key of BiPACE; there are {', '.join(known)}.")
        if not (given.get("bisim_grouping") or given.get("cacb_enabled")):
            return None
        if name not in ("gigpo", "hgpo"):
            raise ValueError(
                f"algorithm.adv_estimator must be gigpo (or hgpo, in its recipe) for {WHERE}bisim_grouping and "
                f"{WHERE}cacb_enabled, got {name!r}; set it, or both keys to False."
            )
        if size < 2:
            raise ValueError(f"env.rollout.n must be at least 2, got {size}: a lone rollout has no peers; raise it.")
        history = {"history_length": config["env"].get("history_length", 2)}
        hgpo = {**algorithm.get("hgpo", {}), **history} if name == "hgpo" else None
        settings = cls(**{k: v for k, v in given.items() if k in known}, hgpo=hgpo)
        strategy = config["actor_rollout_ref"]["actor"].get("strategy", "fsdp")
        if settings.needs_hidden and strategy not in ("fsdp", "fsdp2"):
            raise ValueError(
                f"{WHERE}bisim_embedder=actor_hidden reads the log-prob forward of FSDP actors, and "
                f"actor_rollout_ref.actor.strategy is {strategy!r}; use bisim_embedder=ngram, or strategy=fsdp."
            )
        return settings

    @property
    def needs_hidden(self) -> bool:
        return self.bisim_grouping and self.bisim_embedder == "actor_hidden"

    @property
    def base_group(self) -> bool:
        return self.hgpo is not None and bool(self.hgpo.get("base_group", False))

    def config(self) -> Config:
        """The step term's configuration, or HGPO's aggregate's; the episode term has one of its own."""
        common: dict[str, Any] = {
            **VERL_AGENT, "on_invalid": self.bisim_on_invalid, "step_weight": self.step_advantage_w,
            "duplicates": "count" if self.bisim_duplicates == "count" else "raise",
        }  # fmt: skip
        if self.hgpo is not None:
            norms = Config.gigpo(self.hgpo.get("mode", "mean_std_norm"))
            common |= {k: self.hgpo[k] for k in ("length_weight_alpha", "base_group") if k in self.hgpo}
            length = self.hgpo["history_length"]
            return Config.hgpo(length, episode_norm=norms.episode_norm, step_norm=norms.step_norm, **common)
        if self.bisim_grouping and self.bisim_embedder != "identity":
            own = NGRAM_EPSILON if self.bisim_embedder == "ngram" else 0.10
            common |= {"partition": "cosine", "epsilon": own if self.bisim_eps is None else self.bisim_eps}
        elif self.enable_similarity:
            common |= {"partition": "similar", "similarity": self.similarity_thresh}
        if self.cacb_enabled:
            estimator = "q_style" if self.cacb_estimator == "q_style" else "diff_peer"
            common |= {"estimator": estimator, "step_norm": "none"}
        return Config.gigpo(self.mode, **common)

    def episode_config(self) -> Config:
        """A_ep over the rows of a prompt group, divided by their σ or not, as verl-agent's mode says."""
        step = self.config()
        own: dict[str, Any] = {"duplicates": step.duplicates, "on_invalid": step.on_invalid, **VERL_AGENT}
        return Config.grpo(episode_norm=step.episode_norm, **own)
