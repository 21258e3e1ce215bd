"""verl's estimator "bipace", and its state during a training run.

verl gives an estimator token rewards, a mask and uids.  The trainer provides the rows for the duration of the call;
everything else is done by verl as usual: KL in the reward, rollout correction, writing the results.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor

from ...config import PRESETS
from .._rollout_rows import RolloutRows
from .._settings import Settings
from .._states import States, file_of
from .._versions import check_version

Job = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
NAME, WHERE = "bipace", "algorithm.bipace."
HIDDEN, LABELS, IDS = "bipace_hidden", "bipace_labels", "bipace_ids"  # additional outputs and inputs of workers
EXTRA = {name: name for name in ("observation", "step_rewards", "truncated")}  # agent loops may return in extra_fields
NO_STATES = f"compute_log_prob gave no {HIDDEN}; install bipace-kernels on every node, and enable verl.plugins"

job: ContextVar[Job | None] = ContextVar(NAME, default=None)


def estimate(token_level_rewards: Tensor, response_mask: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """The entry NAME of verl's registry."""
    run = job.get()
    if run is None:
        raise RuntimeError(
            "algorithm.adv_estimator=bipace needs turns and states, which this trainer does not provide: use one of "
            "trainer.v1.trainer_mode, or bipace_kernels.integrations.verl.trainer_v1.Trainer before your own."
        )
    return run(token_level_rewards, response_mask)


def join() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    if NAME not in ADV_ESTIMATOR_REGISTRY:
        register_adv_est(NAME)(estimate)


def settings_of(algorithm: Any) -> Settings:
    """From algorithm.bipace.  Its gamma, else algorithm.gamma unless that is verl's default 1.0, else the paper's; its
    gae_lambda, for the estimator gae, else algorithm.lam likewise."""
    values = {k: v for k, v in (algorithm.get(NAME) or {}).items() if k != "cluster_on" and v is not None}
    if algorithm.get("gamma", 1.0) != 1.0:
        values.setdefault("gamma", algorithm.gamma)
    method = values.get("method")
    if method in PRESETS and not PRESETS[method]().has_epsilon:
        values.pop("epsilon", None)  # the paper's recipes set it, and another method may follow one (docs/verl.md)
    settings = Settings.of(values, WHERE)
    if settings.config().estimator == "gae" and algorithm.get("lam", 1.0) != 1.0:
        settings = Settings.of({"gae_lambda": algorithm.lam, **values}, WHERE)
    return settings


class Bipace:
    """The estimator of one training run: settings, states, and the metrics of its last batch.

    why          reason if there are no hidden states; empty: the log-prob forward gives them
    bypass       verl runs no log-prob forward; one that ends early replaces it
    on_workers   states stay on the workers, which cluster them; else they come to the driver
    """

    def __init__(self, config: Any) -> None:
        check_version("verl")
        actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
        self.settings = settings_of(config.algorithm)
        self.states = States(self.settings, WHERE)
        self.metrics: dict[str, float] = {}
        if n < 2:
            raise ValueError(
                f"actor_rollout_ref.rollout.n must be at least 2 for adv_estimator=bipace, got {n}: one has no peers."
            )
        given = (config.algorithm.get(NAME) or {}).get("cluster_on")
        place = "driver" if given is None else given
        if place not in ("driver", "workers") or (place == "workers" and not config.trainer.use_v1):
            raise ValueError(f"{WHERE}cluster_on must be driver, or workers with trainer.use_v1=True, got {place!r}.")
        own = self.settings
        if place == "workers" and (own.config().value_row is not None or not self.states.may_be_hidden):
            text = f"{WHERE}cluster_on must be driver for method={own.method} with embedder={own.embedder}"
            raise ValueError(f"{text}: workers cluster hidden states alone, as in method=bipace with embedder=auto.")
        if place == "workers" and self.settings.epsilon == "follow":
            raise ValueError(
                f"{WHERE}cluster_on=workers leaves states on the workers, but epsilon=follow reads them on the driver "
                "at each step: set cluster_on=driver, or epsilon=auto."
            )
        self.on_workers = place == "workers"
        self.why = ""
        self.bypass = bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False))
        if actor.strategy not in ("fsdp", "fsdp2"):
            self.why = f"actor_rollout_ref.actor.strategy={actor.strategy} gives none, only fsdp and fsdp2 do"
            self.states.require_hidden(self.why)
        elif self.bypass and self.settings.embedder == "auto":
            self.why = "rollout_correction.bypass_mode runs no log-prob forward (embedder=actor_hidden runs one)"

    @property
    def request(self) -> dict[str, Any]:
        """The request for states, sent with a batch to compute_log_prob under NAME; empty if none are needed."""
        if self.why or not self.states.may_be_hidden:
            return {}
        request: dict[str, Any] = {"layer": self.settings.layer, "early_exit": self.bypass}
        if self.on_workers and self.states.epsilon is not None:  # "auto" chooses on the driver, from the first batch
            own, epsilon = self.settings, self.states.epsilon
            request["cluster"] = {"epsilon": epsilon, "on_invalid": own.on_invalid, "duplicates": own.duplicates}
        return request

    @contextmanager
    def handed_over(self, rows: RolloutRows, tokenizer: Any, update: int = 0) -> Iterator[None]:
        """Inside this block, the estimator works on these rows of an update, given its number in the run."""
        token = job.set(partial(self._run, rows, tokenizer, update))
        try:
            yield
        finally:
            job.reset(token)

    def _run(
        self, rows: RolloutRows, tokenizer: Any, update: int, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns [B, T] float32 on the tokens of turns that rollout correction has not rejected."""
        rows = rows.fitted(self.states)
        result, self.metrics = rows.advantage(self.states, tokenizer, rewards, self.why or NO_STATES, update)
        on_tokens = [rows.turns.spread(x).to(mask.device) * (mask != 0) for x in (result.advantage, result.returns)]
        return on_tokens[0], on_tokens[1]


class TrainerMixin:
    """Mixin before a trainer of verl.  bipace: the run's; None for any other adv_estimator, which is left alone."""

    config: Any
    tokenizer: Any
    actor_rollout_wg: Any
    global_steps: int = 0
    bipace: Bipace | None

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.bipace = Bipace(config) if config.algorithm.adv_estimator == NAME else None
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # of the trainer behind it

    def _save_checkpoint(self) -> None:
        if self.bipace is not None:
            self.bipace.states.save(file_of(self))
        super()._save_checkpoint()  # type: ignore[misc]

    def _load_checkpoint(self) -> Any:
        loaded = super()._load_checkpoint()  # type: ignore[misc]
        if self.bipace is not None:
            self.bipace.states.load(file_of(self, resumed=True))
        return loaded
