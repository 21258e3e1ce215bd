"""BiPACEAdvantage: Trinity's advantage function over the experiences of one explore step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from trinity.algorithm.advantage_fn import AdvantageFn
from trinity.buffer.operators import ExperienceOperatorV1

from .._rollout_rows import RolloutRows, at_front, extra_of
from .._settings import Settings
from .._states import States
from .._turns import Turns
from .._versions import check_version

WHERE = "algorithm.advantage_fn_args."
WHY = "Trinity-RFT computes advantages where rollouts are gathered, before any forward of its trainer"
# What a workflow may write into Experience.info, one entry per turn; of `truncated` one bool.
INFO = {"step_rewards": "step_reward", "observation": "observation", "truncated": "truncated"}


class BiPACEAdvantage(AdvantageFn, ExperienceOperatorV1):  # type: ignore[misc]  # Trinity has no types
    """algorithm.advantage_fn: bipace_kernels.integrations.trinity.BiPACEAdvantage; settings: advantage_fn_args.

    tokenizer   of the model: a path, such as ${model.model_path}, or the tokenizer itself
    The others are the fields of integrations' `Settings`; ValueError names the one that is wrong.

    Gives the same experiences with `advantages` and `returns` [response] float32, and metrics.  docs/trinity.md
    """

    def __init__(self, tokenizer: Any = None, **values: Any) -> None:
        check_version("trinity-rft")
        self.states = States(Settings.of(values, WHERE), WHERE)
        self.states.require_hidden(WHY)
        if tokenizer is None:
            raise ValueError(f"{WHERE}tokenizer must be given, got None: set it to ${{model.model_path}}.")
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.tokenizer = tokenizer
        self.update = 0

    def __call__(self, exps: Sequence[Any], **_: Any) -> tuple[list[Any], dict[str, float]]:
        if not exps:
            return [], {}
        rows = rows_of(exps, self.states)
        result, metrics = rows.advantage(self.states, self.tokenizer, rows.scores, WHY, self.update)
        self.update += 1
        of_tokens = [rows.turns.spread(x) for x in (result.advantage, result.returns)]
        for exp, advantages, returns in zip(exps, *of_tokens, strict=True):
            n = len(exp.action_mask)
            exp.advantages, exp.returns = advantages[:n].clone(), returns[:n].clone()
        return list(exps), metrics

    async def process(self, exps: Sequence[Any]) -> tuple[list[Any], dict[str, float]]:
        return self(exps)

    @classmethod
    def compute_in_trainer(cls) -> bool:
        return False

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        return {}


def rows_of(exps: Sequence[Any], states: States) -> RolloutRows:
    """Each experience as a row: of trajectory batch/task/run, in the order of eid.step and then as they stand.

    Experiences with the same eid are copies of one.
    """
    masks = [exp.action_mask.long() for exp in exps]
    mask = pad_sequence([*masks, torch.zeros(1, dtype=torch.int64)], batch_first=True)[:-1]  # at least one column
    responses = torch.zeros_like(mask)
    for row, exp in enumerate(exps):
        written = exp.tokens[exp.prompt_length :][: len(masks[row])]
        responses[row, : len(written)] = written
    rewards = [float("nan") if exp.reward is None else exp.reward for exp in exps]
    calls = {(e.eid.uid, e.eid.tid, e.eid.step, e.tokens[: e.prompt_length].numpy().tobytes()) for e in exps}
    if not any(exp.eid.run for exp in exps) and len({call[1:] for call in calls}) < len(calls):
        states.warn(
            "Trinity's runs",
            "every eid.run is 0, and experiences of one task and step have the same prompt: all those of a task count "
            "as turns of one rollout. If they are several rollouts, let your workflow set eid.run = run_id_base + i.",
        )
    places: dict[str, int] = {}  # number of each experience among those of its trajectory; copies have equal ones
    counts: dict[str, int] = {}
    for exp in sorted(exps, key=lambda exp: exp.eid.step):
        if exp.eid.uid not in places:
            places[exp.eid.uid] = counts.get(exp.eid.rid, 0)
            counts[exp.eid.rid] = places[exp.eid.uid] + 1
    infos = [exp.info for exp in exps]
    if states.settings.config().needs_observation or states.settings.embedder == "identity":
        infos = with_hashes(infos, Turns.of(mask).counts.tolist(), states)
    return RolloutRows(
        mask=mask,
        scores=at_front(torch.tensor(rewards), mask),
        responses=responses,
        prompts=lambda: [exp.tokens[: exp.prompt_length] for exp in exps],
        group=[exp.eid.tid for exp in exps],
        trajectory=[exp.eid.run for exp in exps],
        place=[places[exp.eid.uid] for exp in exps],
        valid=torch.ones(len(exps), dtype=torch.bool),
        extra=extra_of(infos, INFO),
        mask_name="action_mask",
        extra_name="info",
        keys=INFO,
    ).fitted(states)


def with_hashes(infos: Sequence[Mapping[str, Any]], counts: Sequence[int], states: States) -> list[Mapping[str, Any]]:
    """With `observation` from `env_state_hash`, which Trinity's own workflows give, where there is no text.

    counts   turns of each experience: one hash of several turns says nothing of the later ones, so then all
             observations are the texts before the turns, with one warning
    """
    hashes = [info.get("env_state_hash") if info.get("observation") is None else None for info in infos]
    if any(h is not None and n > 1 and not isinstance(h, (list, tuple)) for h, n in zip(hashes, counts, strict=True)):
        states.warn(
            "Trinity's hashes",
            "env_state_hash is one value for an experience of several turns: the text before each turn is its "
            "observation instead; let your workflow set info['observation'], one entry per turn.",
        )
        return list(infos)
    return [{**info, "observation": h} if h is not None else info for h, info in zip(hashes, infos, strict=True)]
