"""States: the fingerprints of a training run's steps, their embedder, its ε, and the memory."""

from __future__ import annotations

import json
import logging
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import pipeline
from ..clustering.controller import EpsilonController
from ..clustering.epsilon import choose_epsilon
from ..diagnostics.records import Unread
from ..estimators.memory import ValueMemory
from ..features import embedders
from ..hidden.layers import find_decoder, layer_of
from ..hidden.tap import Tap, tap
from ..result import AdvantageResult
from ..settings import EPSILON
from ..support.files import atomic_file
from ._recorder import Recorder
from ._settings import Settings
from ._turns import KINDS, windows

Tensor = torch.Tensor
Columns = Mapping[str, Any]  # arguments of advantage(), a row for each record
_log = logging.getLogger(__name__)
MEMORY_FILE = "bipace_memory.pt"  # next to the file of States.save()


class States:
    """The states of one training run, and the choices made during it.

    where       prefix of the settings' names in messages, such as "algorithm.bipace."
    epsilon     ε of the configured embedder, of hidden states under embedder=auto; None until "auto" or "follow" has chosen it,
                and for a method without ε
    controller  of epsilon="follow", once there is an ε; else None
    recorder    of record_dir, else None
    memory      of share="memory", else None; with several processes only rank 0's holds records
    """

    def __init__(self, settings: Settings, where: str = "") -> None:
        self.settings, self.where = settings, where
        used = "actor_hidden" if settings.embedder == "auto" else embedders.find(settings.embedder)[0].name
        self.epsilon = settings.epsilon_of(used) if settings.config().has_epsilon else None
        self.controller: EpsilonController | None = None
        self.memory = ValueMemory(settings.memory_rows) if settings.config().needs_memory else None
        self.fitted = False  # whether any rollout's entries have matched its turns
        self.recorder = Recorder(settings.record_dir, settings.record_every, where) if settings.record_dir else None
        self._set_aside = False  # whether a row has been
        self._embedder: Any = None

    @property
    def may_be_hidden(self) -> bool:
        """Whether the settings use hidden states if available."""
        return self.settings.config().needs_fingerprint and self.settings.embedder in ("auto", "actor_hidden")

    @property
    def moves(self) -> dict[str, float]:
        """Metrics of epsilon="follow" in addition to its ε."""
        name = "bipace/epsilon_moves"
        return {} if self.controller is None else {name: self.controller.metrics()[name]}

    def no_hidden(self, why: str) -> ValueError:
        return no_hidden(self.where, why)

    def advantage(
        self,
        records: Columns,
        texts: Callable[[], Sequence[Any]],
        *,
        actions: Callable[[], Sequence[Any]] | None = None,
        hidden: Tensor | None = None,
        labels: Tensor | None = None,
        why: str = "",
        run: Callable[..., AdvantageResult] = pipeline.advantage,
        gather: Callable[[Columns], Columns] = dict,
    ) -> tuple[AdvantageResult, dict[str, float]]:
        """The result over the records, with the states of the settings, and the metrics for the trainer.

        records   ids, rewards and keys of n records, as for advantage()
        texts     returns the observations [n], if the settings need them
        actions   returns the actions' texts [n], if a text state holds several turns; None: it holds one
        hidden    [n, D] hidden states, or None
        labels    [n] int64 clusters c of the hidden states made elsewhere, used instead of these, −1 − c for bad states; or None
        why       reason if there are no hidden states, for the error of "actor_hidden" and the warning of "auto"
        run       advantage(), or its version for several processes; then gather(columns) gives those of all processes
        """
        given, used, epsilon = dict(records), "", None
        kinds = gather({"kind": given.pop("action_kind")})["kind"] if "action_kind" in given else None
        if labels is not None:
            bad = given["valid"] & (labels < 0)
            given["observation"], used, epsilon = labels.where(~bad, -1 - labels), "actor_hidden", self.epsilon
        elif self.settings.config().needs_fingerprint:
            n = 1 if actions is None else self.settings.turns_of_text

            def states() -> Sequence[Any]:
                return texts() if n == 1 or actions is None else windows(records, texts(), actions(), n)

            used, found = self.fingerprint(hidden, states, why)
            given["fingerprint"] = found.to(given["group"].device)
            epsilon = self.radius(used, given, gather) if self.settings.config().has_epsilon else None
        elif self.settings.config().needs_observation:
            given["observation"] = texts()
        config = self.settings.config(epsilon)
        if labels is not None:
            config = replace(config, partition="exact")  # of labels: the same bits as with the clusters themselves
        result = run(**given, memory=self.memory, config=config, check="now")
        if self.recorder is not None:
            self.recorder.write(records, result)
        unread = result.records
        if labels is not None and isinstance(unread, Unread):
            state = bad[unread.layout.on(bad.device).order].to(torch.uint8)
            result = replace(result, records=replace(unread, state=state, checked=True))
        metrics = metrics_of(result, used, epsilon, config.has_clusters)
        metrics |= self.moves
        if kinds is not None:
            shares = torch.bincount(kinds.cpu().long(), minlength=len(KINDS)) / max(1, len(kinds))
            metrics |= {
                f"bipace/action_key/{kind}": share for kind, share in zip(KINDS, shares.tolist(), strict=True) if share
            }
        return result, metrics

    def set_aside(self, misfits: Mapping[int, str], b: int, must_fit: bool = True) -> Tensor:
        """[b] bool: rows whose entries cannot be put to turns.  They take part in nothing and are counted as invalid.

        misfits    {row: why}; the first of a run is a warning
        must_fit   an error where no row of a run has ever fitted, for that is the user's code; under on_invalid="raise" any is
        """
        if misfits:
            why = misfits[min(misfits)]
            if self.settings.on_invalid == "raise" or (must_fit and len(misfits) == b and not self.fitted):
                raise ValueError(f"{why}.")
            if not self._set_aside:
                text = f"{why}: such rows are set aside, and counted in bipace/invalid_row_fraction."
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            self._set_aside = True
        self.fitted |= len(misfits) < b
        return torch.tensor([row in misfits for row in range(b)])

    def fingerprint(self, hidden: Tensor | None, texts: Callable[[], Sequence[Any]], why: str) -> tuple[str, Tensor]:
        """The embedder in use, and its fingerprints [n, D]; arguments as in advantage()."""
        kind = self.settings.embedder
        if self.may_be_hidden:
            if hidden is not None:
                return "actor_hidden", hidden
            if kind == "actor_hidden":
                raise self.no_hidden(why)
            if self._embedder is None:
                radius = (
                    f" with ngram_epsilon = {self.settings.ngram_epsilon:g},"
                    if self.settings.config().has_epsilon
                    else ""
                )
                of_turns = "observations" if (n := self.settings.turns_of_text) == 1 else f"last {n} observations"
                warnings.warn(
                    f"{self.where}embedder=auto uses n-grams of the {of_turns},{radius} instead of hidden states: {why}.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            kind = "ngram"
        if self._embedder is None:
            self._embedder = embedders.named(kind)
        return embedders.find(kind)[0].name, self._embedder.embed(texts())

    def radius(self, used: str, records: Columns, gather: Callable[[Columns], Columns]) -> float:
        """ε of the embedder in use, chosen here from data if so configured, from steps that have a direction, copies counted once.

        "auto" chooses once, "follow" adapts it at each call.
        """
        epsilon = self.settings.epsilon_of(used)
        if epsilon is not None:
            return epsilon
        follows = self.settings.epsilon == "follow"
        if self.epsilon is None or follows:
            names = ("fingerprint", "group", "trajectory", "step", "valid")
            rows = {k: v.cpu() for k, v in gather({k: records[k] for k in names if k in records}).items()}
            fingerprint = rows["fingerprint"]
            fine = fingerprint.isfinite().all(1) & (fingerprint != 0).any(1) & rows.get("valid", torch.tensor(True))
            at = torch.nonzero(fine).flatten()
            ids = torch.stack([rows[k] for k in ("group", "trajectory", "step")], 1)
            at = at[torch.from_numpy(np.sort(np.unique(ids[at].numpy(), axis=0, return_index=True)[1]))]
            found, (group, trajectory, step) = fingerprint[at], ids[at].unbind(1)
        if self.epsilon is None:
            chosen = choose_epsilon(found, group, trajectory=trajectory, step=step)
            self.epsilon = chosen.epsilon
            _log.info("%sepsilon=%s chose %g: %s.", self.where, self.settings.epsilon, chosen.epsilon, chosen.reason)
        if follows:
            if self.controller is None:
                self.controller = EpsilonController(self.epsilon)
            mine = self.controller.update(found, group, trajectory=trajectory, step=step)
            # With several processes the first one's value is used: other CPUs may round a decision differently.
            self.controller.epsilon = self.epsilon = float(
                gather({"ε": torch.tensor([mine], dtype=torch.float64)})["ε"][0]
            )
        return self.epsilon

    def save(self, path: Path) -> None:
        """Writes the choices next to a checkpoint, and next to that rank 0's memory if it has records."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:  # a run may end during the write
            file.write_text(json.dumps(self.state_dict()))
        if self.memory is not None and len(self.memory):
            found = {**self._kind, "memory": self.memory.state_dict()}
            with atomic_file(path.with_name(MEMORY_FILE)) as file:
                torch.save(found, file)
        elif self.memory is not None:
            path.with_name(MEMORY_FILE).unlink(missing_ok=True)  # of an earlier run in this folder

    def load(self, path: Path) -> None:
        """Loads what save() wrote, if anything.  With several processes rank 0 calls this, and the others load_state_dict()."""
        if path.exists():
            self.load_state_dict(json.loads(path.read_text()))
        file = path.with_name(MEMORY_FILE)
        if self.memory is None or not file.exists():
            return
        found = torch.load(file, map_location="cpu", weights_only=True)
        kind = {name: found[name] for name in self._kind}
        if kind == self._kind:
            self.memory.load_state_dict(found["memory"])
        else:
            warnings.warn(
                f"{self.where}share=memory begins with an empty memory: {file} holds states of {kind}, but this run reads "
                f"{self._kind}.",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def _kind(self) -> dict[str, Any]:
        """The kind of states of a checkpoint."""
        return {"embedder": self.settings.embedder, "layer": self.settings.layer}

    def state_dict(self) -> dict[str, Any]:
        """The choices, for a checkpoint: plain values, without the memory's records."""
        state = {"epsilon": self.epsilon, **self._kind}
        return state if self.controller is None else {**state, "controller": self.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the ε of the resumed run, if this run would choose one for the same states.

        ValueError for the state of something else, which changes nothing.
        """
        absent = [name for name in ("epsilon", *self._kind) if name not in state]
        if absent:
            raise ValueError(f"state must come from state_dict(), but it lacks {', '.join(absent)}: {dict(state)!r}.")
        same = {name: state[name] for name in self._kind} == self._kind
        if not (self.settings.config().has_epsilon and self.settings.epsilon in ("auto", "follow") and same):
            return
        epsilon, controller = state["epsilon"], None
        number = isinstance(epsilon, numbers.Real) and not isinstance(epsilon, bool) and EPSILON.holds(epsilon)
        if epsilon is not None and not number:
            raise ValueError(f"state['epsilon'] must be None or a number {EPSILON.text}, got {epsilon!r}.")
        if self.settings.epsilon == "follow" and "controller" in state:
            controller = EpsilonController()
            controller.load_state_dict(state["controller"])
        self.epsilon, self.controller = epsilon, controller


def file_of(trainer: Any, *, resumed: bool = False) -> Path:
    """For save(), in the folder of a verl trainer's own checkpoint of this step; for load(), of the one it resumed from."""
    where = trainer.config.trainer
    given = where.resume_from_path if resumed and where.resume_mode == "resume_path" else None
    return Path(given or Path(where.default_local_dir, f"global_step_{trainer.global_steps}")) / "bipace.json"


def no_hidden(where: str, why: str) -> ValueError:
    """The error of embedder=actor_hidden without hidden states."""
    return ValueError(
        f"{where}embedder=actor_hidden has no hidden states: {why}; use {where}embedder=auto, which falls back to n-grams of "
        "the observations, or embedder=ngram."
    )


def tap_of(model: Any, layer: int | str, key: str) -> Tap:
    """hidden.tap() of the layer that the trainer's configuration names under this key; errors name it."""
    try:
        return tap(model, layer)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{key}={layer}: {error}") from error


def no_hidden_states(model: Any, states: States) -> str:
    """Why the model gives no hidden states; empty if it does.  Raises an error if it lacks the requested layer."""
    try:
        decoder = find_decoder(model)
    except (TypeError, ValueError) as error:
        return str(error)
    if decoder.compiled:
        return f"{decoder.compiled} is compiled as a whole and calls no hooks"
    try:
        layer_of(states.settings.layer, len(decoder.blocks))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{states.where}{error}") from error
    return ""


def metrics_of(
    result: AdvantageResult, embedder: str = "", epsilon: float | None = None, clusters: bool = True
) -> dict[str, float]:
    """A step's metrics for the trainer's log: the result's, the embedder in use and its ε, and value R² (NaN: undefined)."""
    found = result.metrics()
    if embedder:
        found[f"bipace/embedder/{embedder}"] = 1.0
    if epsilon is not None:
        found["bipace/epsilon"] = epsilon
    if clusters:
        value = result.value_r2()
        found["bipace/value_r2"] = float("nan") if value.r2 is None else value.r2
        found["bipace/value_r2_coverage"] = value.coverage
    return found
