"""The paper's configuration keys, under `algorithm.gigpo`, and the corresponding configuration of the estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ...config import Config, check_fields
from ...features.embedders import EMBEDDERS, find
from ...settings import EPSILON, NOT_NEGATIVE, SIMILARITY, Range, Setting, setting, settings_of
from .._settings import FOLDER, LAYER, METHOD, OWN, OwnFields, Settings as Shared, is_embedder
from .._states import States

WHERE = "algorithm.gigpo."
NAMES = ", ".join(row.written for row in EMBEDDERS.values())
EMBEDDER = Range(f"one of {NAMES}", lambda value: value != "auto" and is_embedder(value), str)
RECORD_DIR, RECORD_EVERY = (settings_of(OwnFields)[name] for name in ("record_dir", "record_every"))
NOT_OURS = "step_weight", "reward_beyond_steps", "text_turns"  # it has step_advantage_w, rewards of steps, anchor_obs
#: Keys bipace_NAME of method gae.
OF_GAE = {
    "method": Setting(
        "gae: Config.gae(); the paper's methods are the keys above", Range(f"gae, or {OWN}", METHOD.holds, str)
    ),
    **{
        name: row
        for name, row in settings_of(Shared).items()
        if name in ("gamma", "step_norm")
        or (name not in NOT_OURS and any("gae" in one.get("estimator", ()) for one in row.read_by))
    },
}
BIPACE = tuple(f"bipace_{name}" for name in OF_GAE)


@dataclass(frozen=True)
class Settings:
    """verl-agent's configuration: fields are the keys of docs/verl_agent.md, and ValueError names them.

    hgpo      algorithm.hgpo with env.history_length, if that is the estimator
    gae       of the keys bipace_…, if bipace_method is gae
    penalty   of an invalid action, in r_t of gae
    """

    bisim_grouping: bool = setting(False, "partition cosine; of embedder identity exact", bool)
    bisim_embedder: str = setting(
        "actor_hidden", "hidden states of the log-prob forward, or n-grams, vectors or equality of anchor_obs", EMBEDDER
    )
    bisim_layer: int | str = setting(-8, "layer of the actor, as in bk.hidden.tap()", LAYER)
    bisim_eps: float | str | None = setting(
        None,
        "radius ε; null: the embedder's default; auto: chosen on the first batch; follow: chosen there, adapted at "
        "each",
        EPSILON,
        "ε",
        also=("auto", "follow"),
    )
    bisim_duplicates: str = setting(
        "once", "copies that pad the batch count once in every mean, or each, as in verl-agent", ("once", "count")
    )
    bisim_on_invalid: str = setting(
        "singleton", "rows that are not finite are set aside, or an error", ("singleton", "raise")
    )
    cacb_enabled: bool = setting(False, "PACE: estimator q_style or diff_peer, else mean", bool)
    cacb_n_action_tokens: int = setting(8, "tokens of an action key in mode first_n", 1)
    cacb_action_key_mode: str = setting(
        "action_tag", "how actions are recognized in the response, also for gae", ("action_tag", "first_n")
    )
    cacb_estimator: str = setting("q_style", "counterfactual is diff_peer", ("q_style", "counterfactual"))
    step_advantage_w: float = setting(1.0, "weight of the step term (verl-agent's own key)", NOT_NEGATIVE, "W")
    bipace_episode_scope: str = setting(
        "step", "what mean and σ of the episode term are over; not for HGPO", ("step", "trajectory")
    )
    bipace_record_dir: str | None = setting(None, RECORD_DIR.help, FOLDER, "DIR")
    bipace_record_every: int = setting(50, RECORD_EVERY.help, 1)
    mode: str = setting("mean_norm", "verl-agent's own normalisation", ("mean_norm", "mean_std_norm"))
    enable_similarity: bool = setting(False, "with only cacb_enabled: partition similar (verl-agent's own key)", bool)
    similarity_thresh: float = setting(0.95, "least difflib ratio there (verl-agent's own key)", SIMILARITY, "S")
    hgpo: Mapping[str, Any] | None = None
    gae: Shared | None = None
    penalty: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, WHERE)
        if self.chooses_epsilon and not (self.bisim_grouping and self.bisim_embedder == "actor_hidden"):
            raise ValueError(
                f"{WHERE}bisim_eps={self.bisim_eps} needs bisim_grouping=True and bisim_embedder=actor_hidden, got "
                f"{self.bisim_grouping} and {self.bisim_embedder}."
            )
        if self.bisim_grouping and self.enable_similarity:
            raise ValueError(f"{WHERE}enable_similarity and {WHERE}bisim_grouping group differently; set one to False.")
        if self.hgpo is not None and (self.cacb_enabled or self.bisim_embedder != "identity" or self.enable_similarity):
            raise ValueError(
                "algorithm.adv_estimator=hgpo groups equal histories, without action keys or hidden states: set "
                f"{WHERE}bisim_embedder=identity and {WHERE}cacb_enabled=False, or use gigpo."
            )
        others = self.bisim_grouping, self.cacb_enabled, self.enable_similarity, self.hgpo is not None
        if self.gae is not None and any(others):
            raise ValueError(
                f"{WHERE}bipace_method=gae has no clusters and does not use PACE: set {WHERE}bisim_grouping, "
                f"{WHERE}cacb_enabled and {WHERE}enable_similarity to False, and algorithm.adv_estimator to gigpo."
            )
        try:
            config = self.config()
        except ValueError as error:
            raise ValueError(f"{WHERE[:-1]} or algorithm.hgpo: {error}") from error
        if config.estimator_row.whole and self.bipace_episode_scope != "step":  # also of a Config of the user's
            raise ValueError(f"{WHERE}bipace_episode_scope has no effect on HGPO's own episode term: leave it out.")
        if self.gae is not None and self.bipace_episode_scope != "step" and not config.episode_weight:
            raise ValueError(f"{WHERE}bipace_episode_scope has no effect where bipace_episode_weight is 0: set that.")

    @classmethod
    def of(cls, config: Any) -> Settings | None:
        """From verl-agent's whole configuration; None if it requests neither clusters nor action keys."""
        algorithm, env, actor = config["algorithm"], config["env"], config["actor_rollout_ref"]["actor"]
        name, ours = algorithm["adv_estimator"], ("bisim_", "cacb_", "bipace_")
        # null counts as not given.
        values = {k: v for k, v in algorithm.get("gigpo", {}).items() if v is not None or not str(k).startswith(ours)}
        known = list(settings_of(cls))
        for key in values:
            if key not in (*known, *BIPACE) and str(key).startswith(ours):
                raise ValueError(f"{WHERE}{key} is not a BiPACE setting; they are {', '.join([*known, *BIPACE])}.")
        gae = gae_of(values, algorithm["gamma"])
        if not (values.get("bisim_grouping") or values.get("cacb_enabled") or gae):
            if values.get("bipace_episode_scope", "step") != "step":
                raise ValueError(
                    f"{WHERE}bipace_episode_scope is read where BiPACE computes the advantages: for GiGPO set "
                    f"{WHERE}bisim_grouping=True and {WHERE}bisim_embedder=identity."
                )
            return None
        if name not in ("gigpo", "hgpo"):
            raise ValueError(
                f"algorithm.adv_estimator must be gigpo or hgpo for {WHERE}bisim_grouping, cacb_enabled and "
                f"bipace_method, got {name!r}; set it, or the keys to False and null."
            )
        if (size := env["rollout"]["n"]) < 2:
            raise ValueError(f"env.rollout.n must be at least 2, got {size}: a single rollout has no peers; raise it.")
        hgpo = {**algorithm.get("hgpo", {}), "history_length": env.get("history_length", 2)} if name == "hgpo" else None
        penalised = gae is not None and actor.get("use_invalid_action_penalty", True)
        penalty = float(actor["invalid_action_penalty_coef"]) if penalised else 0.0
        settings = cls(**{k: v for k, v in values.items() if k in known}, hgpo=hgpo, gae=gae, penalty=penalty)
        differing = actor.get("use_invalid_action_penalty", True) or algorithm.get("use_kl_in_reward", False)
        if differing and hgpo is not None and hgpo.get("base_group", False):
            raise ValueError(
                "algorithm.hgpo.base_group=True needs one score per trajectory: turn it off, or set actor_rollout_ref."
                "actor.use_invalid_action_penalty=False and algorithm.use_kl_in_reward=False."
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
        return isinstance(self.bisim_eps, str)

    def states(self) -> States | None:
        """State of a run between batches: a chosen ε, the memory of gae, the name of an own method; None: nothing."""
        kind: dict[str, Any] = {"embedder": self.bisim_embedder, "layer": self.bisim_layer}
        if self.chooses_epsilon:
            return States(Shared(method="bigpo", epsilon=self.bisim_eps, **kind), f"{WHERE}bisim_eps: ")
        if self.gae is not None and (self.gae.own is not None or self.gae.config().needs_memory):
            return States(replace(self.gae, **kind), f"{WHERE}bipace_")
        return None

    def config(self, chosen: float | None = None) -> Config:
        """The configuration at the chosen ε, if any.  Norms follow verl-agent's mode; PACE's step term is undivided."""
        own: dict[str, Any] = {"on_invalid": self.bisim_on_invalid, "duplicates": self.bisim_duplicates}
        if self.hgpo is not None:
            own |= {k: self.hgpo[k] for k in ("history_length", "length_weight_alpha", "base_group") if k in self.hgpo}
            norms = Config.gigpo(self.hgpo.get("mode", "mean_std_norm"))
            return replace(norms, partition="history", estimator="hgpo", **own)
        if self.gae is not None:
            config, norms = self.gae.config(embedder=find(self.bisim_embedder)[0].name), Config.gigpo(self.mode)
            if self.gae.own is None:  # verl-agent's episode term
                own |= {name: getattr(norms, name) for name in ("episode_norm", "episode_scope", "lone_trajectory")}
            own |= {} if self.step_advantage_w == 1.0 else {"step_weight": self.step_advantage_w}
            own |= {"epsilon": self.bisim_eps} if config.has_epsilon and self.bisim_eps is not None else {}
            return replace(config, **own)
        if self.bisim_grouping and self.bisim_embedder != "identity":
            eps = chosen if self.chooses_epsilon else self.bisim_eps
            own |= {"partition": "cosine", "epsilon": find(self.bisim_embedder)[0].epsilon if eps is None else eps}
        elif self.enable_similarity:
            # verl-agent compares texts of any length: 2**31 − 1 is the most that the kernel takes.
            own |= {"partition": "similar", "similarity": self.similarity_thresh, "longest_text": 2**31 - 1}
        if self.cacb_enabled:
            own |= {"estimator": "q_style" if self.cacb_estimator == "q_style" else "diff_peer", "step_norm": "none"}
        return Config.gigpo(self.mode, step_weight=self.step_advantage_w, **own)


def keys() -> dict[str, Any]:
    """BiPACE's keys under algorithm.gigpo, at their defaults: everything off."""
    own = {f.name: f.default for f in fields(Settings) if f.name.startswith(("bisim_", "cacb_", "bipace_"))}
    return own | dict.fromkeys(BIPACE)


def gae_of(values: Mapping[str, Any], gamma: float) -> Shared | None:
    """The settings of method gae among verl-agent's keys, named as in the other adapters; None without the method."""
    own = {name: values[f"bipace_{name}"] for name in OF_GAE if values.get(f"bipace_{name}") is not None}
    if own.get("method") == "gae" or ":" in str(own.get("method")):
        return Shared.of({"gamma": gamma, **own}, f"{WHERE}bipace_")
    if own:
        raise ValueError(
            f"{WHERE}bipace_method must be gae, or {OWN}, if there are keys bipace_…, got {own.get('method')!r}: set "
            f"it, or leave out {', '.join(f'bipace_{name}' for name in own)}."
        )
    return None
