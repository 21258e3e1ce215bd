"""verl's estimator "bipace", and what a training run keeps of it.

verl gives an estimator token rewards, a mask and uids.  The rows behind them the trainer hands over for the time of the
call, and verl does all that stands around it as ever: KL in the reward, rollout correction, writing the results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from .._rows import Rows, Tokenizer
from .._settings import Settings
from .._states import States
from .._versions import check_version

Tensor = torch.Tensor
Job = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
NAME, WHERE = "bipace", "algorithm.bipace."
# What goes with a batch to compute_log_prob, and what comes back.
LAYER, EARLY_EXIT, CLUSTER, IDS = "bipace_layer", "bipace_early_exit", "bipace_cluster", "bipace_ids"
HIDDEN, LABELS = "bipace_hidden", "bipace_labels"
EXTRA = ("observation", "step_rewards")  # what agent loops may tell of each turn, in extra_fields
FILE = "bipace.json"  # in the folder of a checkpoint

_job: ContextVar[Job | None] = ContextVar(NAME, default=None)


def estimate(token_level_rewards: Tensor, response_mask: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """What stands in verl's registry under NAME."""
    job = _job.get()
    if job is None:
        raise RuntimeError(
            "algorithm.adv_estimator=bipace needs turns and states, and this trainer hands none over: take trainer.v1.trainer_mode "
            "sync, colocate_async or separate_async, or put bipace_kernels.integrations.verl.trainer_v1.Trainer before your own."
        )
    return job(token_level_rewards, response_mask)


def is_handed_over() -> bool:
    return _job.get() is not None


def join() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    if NAME not in ADV_ESTIMATOR_REGISTRY:
        register_adv_est(NAME)(estimate)


def settings_of(algorithm: Any) -> Settings:
    """From algorithm.bipace.  Its gamma, else algorithm.gamma where that is not verl's default 1.0, else the paper's."""
    given = {key: value for key, value in (algorithm.get(NAME) or {}).items() if key != "cluster_on"}
    if "gamma" not in given and algorithm.get("gamma", 1.0) != 1.0:
        given["gamma"] = algorithm.gamma
    try:
        return Settings.of(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{WHERE}{error}") from error


class Bipace:
    """The estimator of one training run: settings, states, and the metrics of its last batch.

    why       there are no hidden states; empty: the log-prob forward gives them
    bypass    verl runs no log-prob forward; one that ends early takes its place
    on_workers   states stay on the workers, which cluster them; else they come to the driver
    """

    def __init__(self, config: Any) -> None:
        check_version("verl")
        self.settings = settings_of(config.algorithm)
        self.states = States(self.settings, WHERE)
        self.metrics: dict[str, float] = {}
        self._rollout_n = config.actor_rollout_ref.rollout.n
        self._tokenizer: Tokenizer | None = None
        self.bypass = bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False))
        strategy = str(config.actor_rollout_ref.actor.strategy)
        place = (config.algorithm.get(NAME) or {}).get("cluster_on", "driver")
        if place not in ("driver", "workers") or (place == "workers" and not config.trainer.use_v1):
            raise ValueError(f"{WHERE}cluster_on must be driver, or workers with trainer.use_v1=True, got {place!r}.")
        self.on_workers = place == "workers"
        self.why = ""
        if strategy not in ("fsdp", "fsdp2"):
            self.why = f"actor_rollout_ref.actor.strategy={strategy} gives none, fsdp and fsdp2 do"
            if self.states.may_be_hidden and self.settings.embedder == "actor_hidden":
                raise self.states.no_hidden(self.why)
        elif self.bypass and self.settings.embedder == "auto":
            self.why = "rollout_correction.bypass_mode runs no log-prob forward (embedder=actor_hidden runs one that ends early)"

    @classmethod
    def of(cls, config: Any) -> Bipace | None:
        return cls(config) if config.algorithm.adv_estimator == NAME else None

    @property
    def request(self) -> dict[str, Any]:
        """What goes with a batch to compute_log_prob, so that states come back; nothing where none are wanted."""
        if self.why or not self.states.may_be_hidden:
            return {}
        request: dict[str, Any] = {LAYER: self.settings.layer, EARLY_EXIT: self.bypass}
        if self.on_workers and self.states.epsilon is not None:  # "auto" chooses on the driver, from the first batch
            request[CLUSTER] = {"epsilon": self.states.epsilon, "on_invalid": self.settings.on_invalid}
        return request

    @contextmanager
    def handed_over(self, rows: Rows, tokenizer: Any) -> Iterator[None]:
        """Inside, the estimator works on these rows."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(tokenizer)
        token = _job.set(partial(self._run, rows, self._tokenizer))
        try:
            yield
        finally:
            _job.reset(token)

    def _run(self, rows: Rows, tokenizer: Tokenizer, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns [B, T] float32: each turn's on its tokens."""
        real = {pair for i, pair in enumerate(zip(rows.group, rows.trajectory, strict=True)) if rows.valid[i]}
        if self._rollout_n == 1 and len(real) == len({group for group, _ in real}):
            raise ValueError(
                "actor_rollout_ref.rollout.n must be at least 2 for algorithm.adv_estimator=bipace, got 1: a prompt's only rollout "
                "has nothing to be compared with."
            )
        missing = f"compute_log_prob gave no {HIDDEN}; bipace-kernels must be installed on every node, and verl.plugins not be off"
        result, self.metrics = rows.advantage(self.states, tokenizer, rewards, self.why or missing)
        kept = mask != 0  # rollout correction may have rejected tokens
        advantage, returns = (rows.turns.spread(x).to(mask.device) * kept for x in (result.advantage, result.returns))
        return advantage, returns

    def save(self, trainer: Any, step: int) -> None:
        """What the run chose, into the folder of the checkpoint that verl is about to write; config.trainer is given."""
        folder = os.path.join(trainer.default_local_dir, f"global_step_{step}")
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, FILE), "w") as file:
            json.dump(self.states.state_dict(), file)

    def load(self, trainer: Any, step: int) -> None:
        """The same back from where verl has resumed; step 0 is a beginning."""
        folder = os.path.join(trainer.default_local_dir, f"global_step_{step}")
        path = os.path.join(trainer.resume_from_path if trainer.resume_mode == "resume_path" else folder, FILE)
        if step and os.path.exists(path):
            with open(path) as file:
                self.states.load_state_dict(json.load(file))
