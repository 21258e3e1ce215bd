"""The paper's configuration keys, under `algorithm.gigpo`, and the corresponding configuration of the estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ...config import Config
from ...estimators.options import OPTIONS
from ...features.embedders import find
from .._settings import Settings as Shared
from .._settings import check_fields
from .._states import States

WHERE = "algorithm.gigpo."
OF_GAE = tuple(name for name, option in OPTIONS.items() if option.choose.get("preset") == "gae")
BIPACE = tuple(f"bipace_{name}" for name in ("method", "gamma", *OF_GAE, "memory_rows", "episode_weight", "step_norm"))


@dataclass(frozen=True)
class Settings:
    """verl-agent's configuration: fields are the keys of docs/verl_agent.md, and ValueError names them."""

    bisim_grouping: bool = False
    bisim_embedder: str = "actor_hidden"  # or "ngram", "identity", "sentence:MODEL"
    bisim_layer: int | str = -8
    bisim_eps: float | Literal["auto", "follow"] | None = None  # the embedder's default
    bisim_duplicates: Literal["once", "count"] = "once"  # of rows that pad the batch, which verl-agent counts
    bisim_on_invalid: Literal["singleton", "raise"] = "singleton"
    cacb_enabled: bool = False
    cacb_n_action_tokens: int = 8
    cacb_action_key_mode: Literal["action_tag", "first_n"] = "action_tag"
    cacb_estimator: Literal["q_style", "counterfactual"] = "q_style"  # the latter is diff_peer
    step_advantage_w: float = 1.0
    bipace_episode_scope: Literal["step", "trajectory"] = "step"  # what mean and σ of the episode term are over
    bipace_record_dir: str | None = None  # folder for step records
    bipace_record_every: int = 50  # updates between recorded batches
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    enable_similarity: bool = False
    similarity_thresh: float = 0.95
    hgpo: Mapping[str, Any] | None = None  # algorithm.hgpo with env.history_length, if that is the estimator
    gae: Shared | None = None  # of the keys bipace_…, if bipace_method is gae
    penalty: float = 0.0  # of an invalid action, in r_t of gae

    def __post_init__(self) -> None:
        check_fields(self, WHERE)
        try:
            find(self.bisim_embedder)
        except ValueError as error:
            raise ValueError(f"{WHERE}bisim_embedder: {error}") from None
        if isinstance(self.bisim_eps, str) and (
            self.bisim_eps not in ("auto", "follow") or self.bisim_embedder != "actor_hidden"
        ):
            raise ValueError(
                f"{WHERE}bisim_eps must be a number, or auto or follow with {WHERE}bisim_embedder=actor_hidden, got "
                f"{self.bisim_eps!r} with {self.bisim_embedder}."
            )
        if self.bisim_grouping and self.enable_similarity:
            raise ValueError(f"{WHERE}enable_similarity and {WHERE}bisim_grouping group differently; set one to False.")
        if self.hgpo is not None and (self.cacb_enabled or self.bisim_embedder != "identity" or self.enable_similarity):
            raise ValueError(
                "algorithm.adv_estimator=hgpo groups equal histories, has no action keys, and computes advantages before "
                f"log-probabilities: set {WHERE}bisim_embedder=identity and {WHERE}cacb_enabled=False, or use gigpo."
            )
        others = self.bisim_grouping, self.cacb_enabled, self.enable_similarity, self.hgpo is not None
        if self.hgpo is not None and self.bipace_episode_scope != "step":
            raise ValueError(
                f"{WHERE}bipace_episode_scope is about the episode term, which HGPO has inside its own: set it to step, or "
                "algorithm.adv_estimator to gigpo."
            )
        if self.gae is not None and any(others):
            raise ValueError(
                f"{WHERE}bipace_method=gae has no clusters and does not use PACE: set {WHERE}bisim_grouping, "
                f"{WHERE}cacb_enabled and {WHERE}enable_similarity to False, and algorithm.adv_estimator to gigpo."
            )
        try:
            config = self.config()
        except ValueError as error:
            raise ValueError(f"{WHERE[:-1]} or algorithm.hgpo: {error}") from error
        if self.gae is not None and self.bipace_episode_scope != "step" and not config.episode_weight:
            raise ValueError(
                f"{WHERE}bipace_episode_scope is about the episode term, whose weight is 0 in bipace_method=gae: set "
                f"{WHERE}bipace_episode_weight, or leave it out."
            )

    @classmethod
    def of(cls, config: Any) -> Settings | None:
        """From verl-agent's whole configuration; None if it requests neither clusters nor action keys."""
        algorithm, env, actor = config["algorithm"], config["env"], config["actor_rollout_ref"]["actor"]
        name, ours = algorithm["adv_estimator"], ("bisim_", "cacb_", "bipace_")
        # null counts as not given.
        given = {k: v for k, v in algorithm.get("gigpo", {}).items() if v is not None or not str(k).startswith(ours)}
        known = [f.name for f in fields(cls) if f.name not in ("hgpo", "gae", "penalty")]
        for key in given:
            if key not in (*known, *BIPACE) and str(key).startswith(ours):
                raise ValueError(
                    f"{WHERE}{key} is not a BiPACE setting; the settings are {', '.join([*known, *BIPACE])}."
                )
        gae = gae_of(given, algorithm["gamma"])
        if not (given.get("bisim_grouping") or given.get("cacb_enabled") or gae):
            if given.get("bipace_episode_scope", "step") != "step":
                raise ValueError(
                    f"{WHERE}bipace_episode_scope is read where BiPACE computes the advantages: for GiGPO set "
                    f"{WHERE}bisim_grouping=True and {WHERE}bisim_embedder=identity."
                )
            return None
        if name not in ("gigpo", "hgpo"):
            raise ValueError(
                f"algorithm.adv_estimator must be gigpo or hgpo for {WHERE}bisim_grouping, cacb_enabled and bipace_method, got "
                f"{name!r}; set it, or the keys to False and null."
            )
        if (size := env["rollout"]["n"]) < 2:
            raise ValueError(f"env.rollout.n must be at least 2, got {size}: a single rollout has no peers; raise it.")
        hgpo = {**algorithm.get("hgpo", {}), "history_length": env.get("history_length", 2)} if name == "hgpo" else None
        penalised = gae is not None and actor.get("use_invalid_action_penalty", True)
        penalty = float(actor["invalid_action_penalty_coef"]) if penalised else 0.0
        settings = cls(**{k: v for k, v in given.items() if k in known}, hgpo=hgpo, gae=gae, penalty=penalty)
        differing = actor.get("use_invalid_action_penalty", True) or algorithm.get("use_kl_in_reward", False)
        if differing and hgpo is not None and hgpo.get("base_group", False):
            raise ValueError(
                "algorithm.hgpo.base_group=True needs one score per trajectory, and a penalty or KL gives its rows different ones: "
                "set actor_rollout_ref.actor.use_invalid_action_penalty=False and algorithm.use_kl_in_reward=False, or turn it off."
            )
        if settings.needs_hidden and (strategy := actor.get("strategy", "fsdp")) not in ("fsdp", "fsdp2"):
            raise ValueError(
                f"{WHERE}bisim_embedder=actor_hidden reads the log-prob forward of FSDP actors, but "
                f"actor_rollout_ref.actor.strategy is {strategy!r}; use bisim_embedder=ngram, or strategy=fsdp."
            )
        return settings

    @property
    def needs_hidden(self) -> bool:
        return self.bisim_embedder == "actor_hidden" and self.config().needs_fingerprint

    @property
    def chooses_epsilon(self) -> bool:
        """Whether ε is chosen from the states of a batch."""
        return isinstance(self.bisim_eps, str) and self.bisim_grouping and self.bisim_embedder == "actor_hidden"

    def states(self) -> States | None:
        """State of a run between batches: a chosen ε, or the memory of gae; None: nothing."""
        kind: dict[str, Any] = {"embedder": self.bisim_embedder, "layer": self.bisim_layer}
        if self.chooses_epsilon:
            return States(Shared(method="bigpo", epsilon=self.bisim_eps, **kind), f"{WHERE}bisim_eps: ")
        if self.gae is not None and self.gae.config().needs_memory:
            return States(replace(self.gae, **kind), f"{WHERE}bipace_")
        return None

    def config(self, chosen: float | None = None) -> Config:
        """The configuration at the chosen ε, if any.  Norms follow verl-agent's mode; PACE's step term is never divided."""
        own: dict[str, Any] = {"on_invalid": self.bisim_on_invalid, "duplicates": self.bisim_duplicates}
        if self.hgpo is not None:
            own |= {k: self.hgpo[k] for k in ("history_length", "length_weight_alpha", "base_group") if k in self.hgpo}
            return replace(
                Config.gigpo(self.hgpo.get("mode", "mean_std_norm")), partition="history", estimator="hgpo", **own
            )
        if self.gae is not None:
            norms = Config.gigpo(self.mode)  # of the episode term
            own |= {name: getattr(norms, name) for name in ("episode_norm", "episode_scope", "lone_trajectory")}
            return replace(self.gae.config(), step_weight=self.step_advantage_w, **own)
        if self.bisim_grouping and self.bisim_embedder != "identity":
            given = chosen if self.chooses_epsilon else self.bisim_eps
            own |= {
                "partition": "cosine",
                "epsilon": find(self.bisim_embedder)[0].epsilon if given is None else given,
            }
        elif self.enable_similarity:
            # verl-agent compares texts of any length: 2**31 − 1 is the most that the kernel takes.
            own |= {"partition": "similar", "similarity": self.similarity_thresh, "longest_text": 2**31 - 1}
        if self.cacb_enabled:
            own |= {"estimator": "q_style" if self.cacb_estimator == "q_style" else "diff_peer", "step_norm": "none"}
        return Config.gigpo(self.mode, step_weight=self.step_advantage_w, **own)


def gae_of(given: Mapping[str, Any], gamma: float) -> Shared | None:
    """The settings of method gae among verl-agent's keys, named as in the other adapters; None without the method."""
    own = {name.removeprefix("bipace_"): given[name] for name in BIPACE if given.get(name) is not None}
    if own.get("method") != "gae":
        if own:
            raise ValueError(
                f"{WHERE}bipace_method must be gae if there are keys bipace_…, got {own.get('method')!r}: set it, or leave out "
                f"{', '.join(f'bipace_{name}' for name in own)}; the paper's methods are bisim_grouping and cacb_enabled."
            )
        return None
    try:
        return Shared.of({"gamma": gamma, **own})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{WHERE}bipace_{error}") from error
