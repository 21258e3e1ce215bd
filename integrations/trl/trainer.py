"""BiPACEGRPOTrainer: GRPOTrainer with one advantage per turn instead of one per completion."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from trl import GRPOTrainer, __version__ as release

import bipace_kernels as bk

from ...hidden.positions import Positions
from .._accelerate import KeepsStates, states_of
from .._replace import replaced
from .._states import is_noisy, no_hidden_states
from .._versions import check_version
from .config import BiPACEGRPOConfig
from .credit import Prepared, early_exit, prepare
from .rollouts import ToolLoop
from .rows import turns_of

ROW = "bipace_row"  # [B] in a batch whose advantages wait for the loss's forward: numbers of its rows, before a shuffle


@dataclass
class _Watched:
    """Data collected while the trainer makes one batch."""

    loop: ToolLoop = field(default_factory=ToolLoop)
    tool_mask: Any = None  # B lists, or None
    starts: Any = None  # B lists, or None
    rewards: Any = None  # [B of all processes, F]
    hidden: Tensor | None = None  # [n, D]
    begins: bool = False  # TRL's own forwards, of which the first is tapped: those between generation and rewards


class BiPACEGRPOTrainer(KeepsStates, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """GRPOTrainer whose training batches have BiPACE's advantages, [B, T], on the tokens that the model generated.

    args must be a BiPACEGRPOConfig.  Everything else is as in GRPOTrainer: rewards, loss, KL, evaluation (which keeps
    TRL's advantages); with bipace_method="grpo" nothing changes.  docs/trl.md
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version("trl")
        super().__init__(*args, **kwargs)
        if not isinstance(self.args, BiPACEGRPOConfig):
            given = type(self.args).__name__
            raise TypeError(f"args must be a BiPACEGRPOConfig, got {given}; it takes GRPOConfig's arguments.")
        self._bipace = states_of(self, self.args.settings, "bipace_")
        luspo = Version(release) < Version("1.10") and self.loss_type == "luspo"  # its mean is over padding too
        liger = getattr(self, "use_liger_kernel", False)  # old TRL
        refused = {"use_liger_kernel": liger, "loss_type=luspo before TRL 1.10": luspo}
        for name, is_so in refused.items():
            if is_so and not self._bipace.settings.keeps_own_advantages:
                raise ValueError(f"{name} takes one advantage per completion: turn it off, or bipace_method=grpo.")
        self._bipace_watched: _Watched | None = None
        why = no_hidden_states(self.model, self._bipace) if self._bipace.may_be_hidden else ""
        self._bipace.require_hidden(why)
        # TRL's own forwards run in training mode, in which dropout or NEFTune would add noise to the states.
        self._bipace_dropout = self._bipace.may_be_hidden and not why and is_noisy(self.model, self.args)
        self._bipace_taps = self._bipace.may_be_hidden and not why and not self._bipace_dropout
        # A batch that is used once, as a whole, has its states from the loss's forward where that calls hooks.
        vllm = self.use_vllm and getattr(self, "vllm_importance_sampling_correction", True)
        compiler = self.accelerator.state.dynamo_plugin
        whole = compiler.backend.value != "NO" and not getattr(compiler, "use_regional_compilation", False)
        once = self.args.steps_per_generation * self.num_iterations == 1 and not vllm and not whole
        self._bipace_waits = self._bipace_taps and once
        self._bipace_waiting: Any = None  # the batch whose hidden states are still missing, then its advantages
        self._bipace_rows = range(0)  # the numbers of its rows
        self._bipace_loss: tuple[Any, dict[str, Any]] | None = None  # _compute_loss()'s arguments, until its forward

    def _generate_and_score_completions(self, inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        states = self._bipace
        if states.settings.keeps_own_advantages:
            scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return scored
        self._bipace_watched = watched = _Watched()
        watched.loop.begin_rollouts(self)
        try:
            with replaced(self, *self._bipace_around(watched)):
                output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self._bipace_watched = None
        if not self.model.training:  # watched for its use of the environments alone
            return output
        # Without old log-probs the first forward was a reference's, which PEFT runs through the same model.
        hidden = watched.hidden if "old_per_token_logps" in output else None
        waits = hidden is None and self._bipace_waits
        batch = prepare(self, inputs, output, watched.rewards, states, hidden=hidden, loop=watched.loop, later=waits)
        if waits:
            first, shape, device = self._bipace_rows.stop, batch.rows.turns.shape, output["completion_ids"].device
            self._bipace_waiting, self._bipace_rows = batch, range(first, first + shape[0])
            output[ROW] = torch.arange(first, first + shape[0], device=device)
            output["advantages"] = torch.full(shape, torch.nan, device=device)  # not to be read yet
            return output
        if hidden is None and states.may_be_hidden and not batch.why:
            hidden = early_exit(self, output, batch.rows.turns, states.settings.layer)
        output["advantages"] = self._bipace_credit(batch, hidden)
        return output

    def _bipace_credit(self, batch: Prepared, hidden: Tensor | None) -> Tensor:
        """Advantages [B, T]; their metrics are logged."""
        credit = batch.credit(self._bipace, hidden)
        for name, value in credit.metrics.items():
            self._metrics["train"][name].append(value)
        return credit.advantages

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        missing = ROW in inputs and self._bipace_lacks(inputs)
        self._bipace_loss = (model, inputs) if missing and isinstance(self._bipace_waiting, Prepared) else None
        if missing and self._bipace_loss is None:  # in a copy from before the first loss
            row = inputs[ROW] - self._bipace_rows.start
            inputs["advantages"][row >= 0] = self._bipace_waiting[row[row >= 0]]
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._bipace_loss = None

    def _bipace_lacks(self, inputs: dict[str, Any]) -> bool:
        """Whether rows of the last batch that waited, or copies of them, have no advantages: NaN, or made 0."""
        own = inputs["advantages"][inputs[ROW] >= self._bipace_rows.start if ROW in inputs else slice(None)]
        return len(own) > 0 and not (own.abs() > 0).any()

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        lacks = isinstance(self._bipace_waiting, Prepared) and self._bipace_lacks(inputs)
        if self._bipace_waits and model.training and (lacks or inputs["advantages"].isnan().any()):
            what = "no advantages: the loss ran no forward through super()._compute_loss(), or of an earlier batch"
            raise RuntimeError(f"{what}: let yours call it, with the column {ROW}, or set bipace_embedder to ngram.")
        return loss

    def _bipace_around(self, watched: _Watched) -> tuple[Any, Any]:
        """What stands around two methods while a batch is made: also around a subclass's, whose results TRL takes."""

        def _generate(run: Any, prompts: Any) -> Any:
            generated = run(prompts)
            extras: dict[str, Any] = next(part for part in generated if isinstance(part, dict))
            watched.begins, watched.tool_mask, watched.starts = True, generated[2], extras.get("turn_starts")
            watched.loop.fields = set(extras)
            if watched.loop.logged:
                watched.loop.begin_turn(getattr(self, "environments", None))
            return generated

        def _calculate_rewards(run: Any, inputs: Any, prompts: Any, completions: Any, *args: Any) -> Any:
            watched.begins = False
            watched.loop.end_rollouts(completions)
            watched.rewards = run(inputs, prompts, completions, *args)
            return watched.rewards

        return _generate, _calculate_rewards

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self._bipace_watched is not None:
            self._bipace_watched.loop.begin_turn(getattr(self, "environments", None))
        return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        forward = (model, input_ids, attention_mask, logits_to_keep, *args)
        run = partial(super()._get_per_token_logps_and_entropies, *forward, **kwargs)
        watched, prompt_length = self._bipace_watched, input_ids.shape[1] - logits_to_keep
        of_loss, inputs = self._bipace_loss or (None, {})
        if model is of_loss and torch.equal(input_ids, torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)):
            batch, row, self._bipace_loss = self._bipace_waiting, inputs[ROW] - self._bipace_rows.start, None
            if row.sort().values.tolist() != list(range(n := len(self._bipace_rows))):
                what = f"_compute_loss() must first be given the whole batch, {n} rows and no others, got {len(row)}"
                raise ValueError(f"{what}: set bipace_embedder to ngram, or gradient_accumulation_steps above 1.")
            order, places = batch.rows.turns.positions_of(row, prompt_length)
            logps, states = self._bipace_tapped(model, places, run)
            hidden = torch.empty_like(states).index_copy_(0, order.to(states.device), states)
            self._bipace_waiting = self._bipace_credit(batch, hidden)
            inputs["advantages"].copy_(self._bipace_waiting[row])  # also in a copy of the dict
            return logps
        taps = self._bipace_taps and not self._bipace_waits and model is self.model and model.training
        if watched is None or not (watched.begins and taps and attention_mask[:, :prompt_length].any(1).all()):
            return run()  # also if a row has no prompt: prepare() raises that error, on all processes
        watched.begins = False
        try:
            turns = turns_of(attention_mask[:, prompt_length:], watched.tool_mask, watched.starts)
        except Exception:  # of a rollout_func's turn_starts: prepare() raises it, on all processes
            return run()
        logps, watched.hidden = self._bipace_tapped(model, turns.positions(prompt_length), run)
        return logps

    def _bipace_tapped(self, model: Any, places: Positions, run: Any) -> tuple[Any, Tensor]:
        with bk.hidden.tap(model, self._bipace.settings.layer, positions=places) as tapped:
            output = run()
        return output, tapped.rows()
