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
# Methods that are given a batch before the loss's forward, when it has no advantages yet.
SEE_BATCHES = ("training_step", "_prepare_inputs", "_generate_and_score_completions", "compute_loss", "_compute_loss")


@dataclass
class _Watched:
    """What TRL does while it makes one batch.  Each method takes the place of the trainer's, also of a subclass's."""

    trainer: Any
    loop: ToolLoop = field(default_factory=ToolLoop)
    tool_mask: Any = None  # B lists, or None
    starts: Any = None  # B lists, or None
    rewards: Any = None  # [B of all processes, F]
    hidden: Tensor | None = None  # [n, D]
    begins: bool = False  # TRL's own forwards, of which the first is tapped: those between generation and rewards

    def _generate(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        generated = run(*args, **kwargs)
        extras: dict[str, Any] = next(part for part in generated if isinstance(part, dict))
        self.begins, self.tool_mask, self.starts = True, generated[2], extras.get("turn_starts")
        self.loop.fields = set(extras)
        if self.loop.logged:
            self.loop.begin_turn(getattr(self.trainer, "environments", None))
        return generated

    def _generate_single_turn(self, run: Any, *args: Any, **kwargs: Any) -> Any:
        self.loop.begin_turn(getattr(self.trainer, "environments", None))
        return run(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, run: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        run = partial(run, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        prompt_length = input_ids.shape[1] - logits_to_keep
        of_policy = model is self.trainer.model and model.training
        if not (self.begins and of_policy and attention_mask[:, :prompt_length].any(1).all()):
            return run()  # also if a row has no prompt: prepare() raises that error, on all processes
        self.begins = False
        try:
            turns = turns_of(attention_mask[:, prompt_length:], self.tool_mask, self.starts)
        except Exception:  # of a rollout_func's turn_starts: prepare() raises it, on all processes
            return run()
        logps, self.hidden = _tapped(model, self.trainer._bipace.settings.layer, turns.positions(prompt_length), run)
        return logps

    def _calculate_rewards(
        self, run: Any, inputs: Any, prompts: Any, completions: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.begins = False
        self.loop.end_rollouts(completions)
        self.rewards = run(inputs, prompts, completions, *args, **kwargs)
        return self.rewards


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
        why = no_hidden_states(self.model, self._bipace) if self._bipace.may_be_hidden else ""
        self._bipace.require_hidden(why)
        # TRL's own forwards run in training mode, in which dropout or NEFTune would add noise to the states.
        self._bipace_dropout = self._bipace.may_be_hidden and not why and is_noisy(self.model, self.args)
        self._bipace_taps = self._bipace.may_be_hidden and not why and not self._bipace_dropout
        # A batch that is used once, as a whole and without old log-probs has its states from the loss's own forward,
        # unless that is of a model that accelerate compiles as a whole.
        vllm = self.use_vllm and getattr(self, "vllm_importance_sampling_correction", True)
        compiler = self.accelerator.state.dynamo_plugin
        whole = compiler.backend.value != "NO" and not getattr(compiler, "use_regional_compilation", False)
        self._bipace_once = self.args.steps_per_generation * self.num_iterations == 1 and not vllm and not whole
        self._bipace_waiting: Prepared | None = None  # the batch whose hidden states are still missing

    def _bipace_overrides(self, *names: str) -> bool:
        """Whether a subclass, a class between this one and GRPOTrainer, or this object has such methods of its own."""
        owners = [self, *(set(type(self).__mro__) - set(BiPACEGRPOTrainer.__mro__))]
        return any(name in vars(owner) for owner in owners for name in names)

    def _generate_and_score_completions(self, inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        states = self._bipace
        if states.settings.keeps_own_advantages:
            scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return scored
        watched = _Watched(self)
        watched.loop.begin_rollouts(self)
        methods = [watched._generate, watched._generate_single_turn, watched._calculate_rewards]
        taps = self._bipace_taps and not self._bipace_overrides("_get_per_token_logps_and_entropies")
        waits = taps and self._bipace_once and not self._bipace_overrides(*SEE_BATCHES)
        if taps and not waits:
            methods.append(watched._get_per_token_logps_and_entropies)
        with replaced(self, *methods):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:  # watched for its use of the environments alone
            return output
        # The first forward was the policy's only if there are old log-probs: else it was a reference's, which PEFT runs
        # through the same model.
        hidden = watched.hidden if "old_per_token_logps" in output else None
        batch = prepare(self, inputs, output, watched.rewards, states, hidden=hidden, loop=watched.loop, later=waits)
        if waits and not batch.reads:
            shape, device = batch.rows.turns.shape, output["completion_ids"].device
            self._bipace_waiting, output[ROW] = batch, torch.arange(shape[0], device=device)
            output["advantages"] = torch.full(shape, torch.nan, device=device)  # not to be read yet
            return output
        if batch.reads:
            hidden = None if batch.why else early_exit(self, output, batch.rows.turns, states.settings.layer)
        output["advantages"] = self._bipace_credit(batch, hidden)
        return output

    def _bipace_credit(self, batch: Prepared, hidden: Tensor | None) -> Tensor:
        """Advantages [B, T]; their metrics are logged."""
        credit = batch.credit(self._bipace, hidden)
        for name, value in credit.metrics.items():
            self._metrics["train"][name].append(value)
        return credit.advantages

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        batch = self._bipace_waiting
        if batch is None or ROW not in inputs:
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(
            run: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kw: Any
        ) -> Any:
            run = partial(run, model, input_ids, attention_mask, logits_to_keep, *args, **kw)
            if self._bipace_waiting is None:
                return run()
            order, places = batch.rows.turns.positions_of(inputs[ROW], input_ids.shape[1] - logits_to_keep)
            logps, states = _tapped(model, self._bipace.settings.layer, places, run)
            hidden = torch.empty_like(states).index_copy_(0, order.to(states.device), states)
            inputs["advantages"].copy_(self._bipace_credit(batch, hidden)[inputs[ROW]])
            self._bipace_waiting = None
            return logps

        with replaced(self, _get_per_token_logps_and_entropies):
            loss = super()._compute_loss(model, inputs)
        if self._bipace_waiting is not None:
            what = "the batch got no advantages, since TRL's loss ran no forward of its own"
            raise RuntimeError(f"{what}: set bipace_embedder to ngram, or gradient_accumulation_steps above 1.")
        return loss


def _tapped(model: Any, layer: Any, places: Positions, run: Any) -> tuple[Any, Tensor]:
    """The result of a forward, and the hidden states [n, D] before each turn."""
    with bk.hidden.tap(model, layer, positions=places) as tapped:
        output = run()
    return output, tapped.rows()
