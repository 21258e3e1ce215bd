"""States: the fingerprints of a training run's steps, their embedder, its ε, and the memory."""

import contextlib
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import pipeline
from ..backends.records import out_of_range
from ..clustering.controller import EpsilonController
from ..clustering.epsilon import choose_epsilon
from ..config import Config
from ..estimators.memory import ValueMemory
from ..features import embedders
from ..hidden.layers import find_decoder, layer_of
from ..hidden.tap import Tap, tap
from ..inputs.layout import Layout, layout
from ..result import AdvantageResult
from ..settings import EPSILON, is_number, settings_of
from ..support.files import atomic_file
from ..support.warnings import warn_once
from ._recorder import Recorder
from ._settings import Settings
from ._turns import KINDS, windows

Columns = Mapping[str, Any]  # arguments of advantage(), a row for each record
Gather = Callable[[Columns], Columns]  # from the columns of this process to those of all
_log = logging.getLogger(__name__)
FEW_PROMPTS = 8  # fewer, and what gae shares between them is a warning
MEMORY_FILE = "bipace_memory.pt"  # next to the file of States.save()


class Radius:
    """ε of a run's clusters: that of the settings, or chosen from the run's states and kept in its checkpoints.

    epsilon     of the configured embedder, of hidden states under embedder=auto; None until it is chosen, or without ε
    controller  of epsilon="follow", once there is an ε; else None
    """

    def __init__(self, settings: Settings, where: str) -> None:
        self.settings, self.where = settings, where
        used = "actor_hidden" if settings.embedder == "auto" else embedders.find(settings.embedder)[0].name
        self.has_effect = settings.config().has_epsilon
        self.epsilon = settings.epsilon_of(used) if self.has_effect else None
        self.controller: EpsilonController | None = None

    @property
    def moves(self) -> dict[str, float]:
        """Metrics of epsilon="follow" in addition to its ε."""
        name = "bipace/epsilon_moves"
        return {} if self.controller is None else {name: self.controller.metrics()[name]}

    def of(self, used: str, records: Columns, gather: Gather) -> float:
        """ε of the embedder in use.  "auto" chooses it here, once; "follow" also adapts it at each call."""
        epsilon = self.settings.epsilon_of(used)
        if epsilon is not None:
            return epsilon
        follows = self.settings.epsilon == "follow"
        if self.epsilon is not None and not follows:
            return self.epsilon
        states, once = _distinct(records, gather)
        if self.epsilon is None:
            chosen = choose_epsilon(states, layout=once)
            self.epsilon = chosen.epsilon
            _log.info("%sepsilon=%s chose %g: %s.", self.where, self.settings.epsilon, chosen.epsilon, chosen.reason)
        if follows:
            self.controller = self.controller or EpsilonController(self.epsilon)
            own = self.controller.update(states, layout=once)
            # With several processes the first one's value is used: other CPUs may round a decision differently.
            of_all = gather({"epsilon": torch.tensor([own], dtype=torch.float64)})["epsilon"]
            self.controller.epsilon = self.epsilon = float(of_all[0])
        return self.epsilon

    def state_dict(self) -> dict[str, Any]:
        state = {"epsilon": self.epsilon}
        return state if self.controller is None else {**state, "controller": self.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the ε of the resumed run, if this run would choose one."""
        if not (self.has_effect and isinstance(self.settings.epsilon, str)):
            return
        epsilon, controller = state["epsilon"], None
        if epsilon is not None and not (is_number(epsilon) and EPSILON.holds(epsilon)):
            raise ValueError(f"state['epsilon'] must be None or a number {EPSILON.text}, got {epsilon!r}.")
        if self.settings.epsilon == "follow" and "controller" in state:
            controller = EpsilonController()
            controller.load_state_dict(state["controller"])
        self.epsilon, self.controller = epsilon, controller


def _distinct(records: Columns, gather: Gather) -> tuple[Tensor, Layout]:
    """Fingerprints of all processes, and the records among them that have a direction, each step once."""
    names = ("fingerprint", "group", "trajectory", "step", "valid")
    rows = {k: v.cpu() for k, v in gather({k: records[k] for k in names if k in records}).items()}
    states = rows["fingerprint"]
    usable = states.isfinite().all(1) & (states != 0).any(1) & rows.get("valid", torch.tensor(True))
    return states, layout(rows["group"], rows["trajectory"], rows["step"], usable).once()


class States:
    """What a training run keeps between batches: embedder, radius and memory of its states, and what it records.

    where       prefix of the settings' names in messages, such as "algorithm.bipace."
    recorder    of record_dir, else None
    memory      of share="memory", else None; with several processes only rank 0's holds records
    """

    def __init__(self, settings: Settings, where: str = "") -> None:
        self.settings, self.where, self.radius = settings, where, Radius(settings, where)
        layer = settings.layer if isinstance(settings.layer, str) else int(settings.layer)  # also NumPy's, for a file
        self._kind = {"embedder": settings.embedder, "layer": layer}
        self._embedder: Any = None  # of texts, once one is used
        self._remembered = ""  # embedder of the states in memory, if known
        self.memory = ValueMemory(settings.memory_rows) if settings.config().needs_memory else None
        self.recorder = Recorder(settings.record_dir, settings.record_every, where) if settings.record_dir else None
        self.fitted = False  # whether any rollout's entries have matched its turns
        self._warned: set[str] = set()  # of what this run was warned already

    def warn(self, about: str, text: str) -> None:
        """A warning, once in a run."""
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    @property
    def epsilon(self) -> float | None:
        """ε of the configured embedder; None until it is chosen, and for a method without ε."""
        return self.radius.epsilon

    @property
    def may_be_hidden(self) -> bool:
        """Whether the settings use hidden states if available."""
        return self.settings.config().needs_fingerprint and self.settings.embedder in ("auto", "actor_hidden")

    def require_hidden(self, why: str) -> None:
        """An error if there is a reason `why` there are no hidden states, and the settings insist on them."""
        if why and self.may_be_hidden and self.settings.embedder == "actor_hidden":
            raise no_hidden(self.where, why)

    def _fingerprint(self, hidden: Tensor | None, texts: Callable[[], Sequence[Any]], why: str) -> tuple[str, Tensor]:
        """The embedder in use, and its fingerprints [n, D]; arguments as in advantage()."""
        name = self.settings.embedder
        if self.may_be_hidden:
            if hidden is not None:
                return "actor_hidden", hidden
            self.require_hidden(why or "none were given")
            name = "ngram"
            if self._embedder is None:
                n, has_epsilon = self.settings.turns_of_text, self.settings.config().has_epsilon
                of_turns = "observations" if n == 1 else f"last {n} observations"
                radius = f" with ngram_epsilon = {self.settings.epsilon_of('ngram'):g}," if has_epsilon else ""
                text = f"embedder=auto uses n-grams of the {of_turns},{radius} instead of hidden states: {why}."
                warnings.warn(self.where + text, RuntimeWarning, stacklevel=2)
        if self._embedder is None:
            self._embedder = embedders.named(name)
        return embedders.find(name)[0].name, self._embedder.embed(texts())

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
        gather: Gather = dict,
        agree: Callable[..., Any] = lambda make, *_: make(),
    ) -> tuple[AdvantageResult, dict[str, float]]:
        """The result over the records, with the states of the settings, and the metrics for the trainer.

        records   ids, rewards and keys of n records, as for advantage()
        texts     returns the observations [n], if the settings need them
        actions   returns the actions' texts [n], if a text state holds several turns; None: it holds one
        hidden    [n, D] hidden states, or None
        labels    [n] int64 clusters c of hidden states made elsewhere, −1 − c for bad states; or None
        why       reason if there are no hidden states, for the error of "actor_hidden" and the warning of "auto"
        run       advantage(), or its version for several processes; then gather(columns) gives those of all processes,
                  and agree(make, kind) make(), or on all the error of one, or of kind(make()) that differ
        """
        columns, used, epsilon, config = dict(records), "", None, self.settings.config()
        kinds = gather({"kind": columns.pop("action_kind")})["kind"] if "action_kind" in columns else None
        bad: Tensor | None = None
        if labels is not None:
            bad, used, epsilon = columns["valid"] & (labels < 0), "actor_hidden", self.epsilon
            columns["observation"] = labels.where(~bad, -1 - labels)
        elif config.needs_fingerprint:
            n = 1 if actions is None else self.settings.turns_of_text

            def states() -> Sequence[Any]:
                return texts() if n == 1 or actions is None else windows(records, texts(), actions(), n)

            made_here = partial(self._fingerprint, hidden, states, why)
            used, fingerprint = agree(made_here, lambda made: [made[0], made[1].shape[1], str(made[1].dtype)])
            columns["fingerprint"] = fingerprint.to(columns["group"].device)
            if self.memory is not None and len(self.memory) and self._remembered not in ("", used):
                text = f"{self.where}share=memory begins anew: its states are of {self._remembered}, and now of {used}."
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                self.memory.restore(None)
            self._remembered = used
            epsilon = self.radius.of(used, columns, gather) if config.has_epsilon else None
        elif config.needs_observation:
            columns["observation"] = agree(texts)
        config = self.settings.config(epsilon, used)
        if bad is not None:
            config = replace(config, partition="exact")  # of labels: the same bits as with the clusters themselves
        result = run(**columns, memory=self.memory, config=config, check="now")
        if self.recorder is not None:
            self.recorder.write(columns if gather is dict else records, result, config)
        if bad is not None:
            result = result.with_bad_states(bad)
        metrics = metrics_of(result, used, epsilon, config.has_clusters, self.settings) | self.radius.moves
        metrics |= batch_metrics(result, columns, config, gather)
        counted = result._records().layout
        self._warn_of_few_prompts(counted)
        if kinds is not None:
            shares = torch.bincount(kinds.cpu()[counted.order].long(), minlength=len(KINDS)) / max(1, counted.n_records)
            named = zip(KINDS, shares.tolist(), strict=True)
            metrics |= {f"bipace/action_key/{kind}": share for kind, share in named}
        return result, metrics

    def _warn_of_few_prompts(self, lay: Layout) -> None:
        """A warning where a batch has few prompts for what gae shares between them."""
        config = self.settings.config()
        shares = settings_of(Config)["share"].has_effect(config) and config.share != "group"
        shared = [f"share={config.share}"] if shares else []
        shared += ["step_norm=batch"] if config.step_norm == "batch" else []
        if shared and lay.n_groups < FEW_PROMPTS:
            kept = shared[0] == "share=batch" and config.value == "kernel"
            memory = f", or set {self.where}share=memory" if kept else ""
            self.warn(
                "few prompts",
                f"a batch has {lay.n_groups} prompts ({lay.n_trajectories} rollouts, {lay.n_records} turns). With "
                f"fewer than {FEW_PROMPTS} the estimates of {' and '.join(self.where + one for one in shared)} are "
                f"noisy. Let the trainer hand over more at once (docs/gae.md says how){memory}.",
            )

    def set_aside(self, misfits: Mapping[int, str], valid: Tensor, must_fit: bool = True) -> Tensor:
        """[B] bool: rows whose entries cannot be put to turns.  They take part in nothing and are counted as invalid.

        misfits    {row: why}; the first of a run is a warning
        valid      [B] bool; False: padding, which fits nothing
        must_fit   where no row of a run has ever fitted it is an error: of the user's code
        """
        fits = len(misfits) < int(valid.sum())
        if misfits:
            why = misfits[min(misfits)]
            if self.settings.on_invalid == "raise" or (must_fit and not fits and not self.fitted):
                raise ValueError(f"{why}.")
            self.warn("aside", f"{why}: such rows are set aside, and counted in bipace/invalid_row_fraction.")
        self.fitted |= fits
        return torch.tensor([row in misfits for row in range(len(valid))])

    def beyond(self, total: Tensor, of_steps: Tensor) -> Tensor:
        """float64 what the last step's reward is to have besides its own: R(τ) − Σ step_rewards, or 0 where only method
        gae's rewards would have it, they are asked to ignore it, it is within the rounding of float32, or the sum is
        too large for a reward.

        total, of_steps   float64 R(τ), and sums of step_rewards, of equal shape
        """
        rest = total - of_steps
        rest = rest.where((rest.abs() > 1e-5 * (1 + total.abs())) & ~out_of_range(of_steps), 0.0)
        if self.settings.config().estimator != "gae" or not rest.any():
            return torch.zeros_like(rest)
        ignored = self.settings.reward_beyond_steps == "ignore"
        does = "is ignored" if ignored else "is added to the last step"
        by = f"{self.where}reward_beyond_steps={self.settings.reward_beyond_steps}"
        most = f"{float(rest.abs().max()):g}"
        self.warn("beyond", f"rewards hold up to {most} beyond their step_rewards, which {does} ({by}).")
        return torch.zeros_like(rest) if ignored else rest

    def save(self, path: Path) -> None:
        """Writes the choices next to a checkpoint, and next to that rank 0's memory if it has records."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:  # a run may end during the write
            file.write_text(json.dumps(self.state_dict()))
        if self.memory is not None and len(self.memory):
            kept = {**self._in_memory(), "used": self._remembered, "memory": self.memory.state_dict()}
            with atomic_file(path.with_name(MEMORY_FILE)) as file:
                torch.save(kept, file)
        else:
            path.with_name(MEMORY_FILE).unlink(missing_ok=True)  # of an earlier run in this folder

    def load(self, path: Path) -> None:
        """Loads what save() wrote, if anything.  Of several processes rank 0 does, the others load_state_dict()."""
        if not path.exists():
            if path.parent.exists() and (self.memory is not None or isinstance(self.settings.epsilon, str)):
                self.warn("no file", f"{path} does not exist: what a run keeps of its states (ε, memory) begins anew.")
                self.radius = Radius(self.settings, self.where)  # of a training that went before in this process
                if self.memory is not None:
                    self.memory.restore(None)
            return
        with _naming(path):
            self.load_state_dict(json.loads(path.read_text()))
        file = path.with_name(MEMORY_FILE)
        if self.memory is None:
            return
        wanted = self._in_memory()
        with _naming(file):
            saved = _whole(file) if file.exists() else {}
            kind = {name: saved.get(name) for name in wanted}
            if kind == wanted:
                self.memory.load_state_dict(saved["memory"])
                self._remembered = saved.get("used", "")
        if kind != wanted:
            why = f"holds states and returns of {kind}, but this run has {wanted}" if saved else "does not exist"
            text = f"{self.where}share=memory begins with an empty memory: {file} {why}."
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            self.memory.restore(None)

    def _in_memory(self) -> dict[str, Any]:
        """What states and returns in a memory must have in common with this run's."""
        own, turns = self.settings, self.settings.text_turns
        return {
            **self._kind,
            "text_turns": None if turns is None else int(turns),  # also NumPy's
            "gamma": float(own.config().gamma),
            "reward_beyond_steps": own.reward_beyond_steps,
        }

    def state_dict(self) -> dict[str, Any]:
        """The choices, for a checkpoint: plain values, without the memory's records."""
        own = {} if self.settings.own is None else {"method": self.settings.method}
        return {**self.radius.state_dict(), **self._kind, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what a run with the same kind of states has chosen.

        ValueError for the state of something else, which changes nothing.
        """
        absent = [name for name in ("epsilon", *self._kind) if name not in state]
        if absent:
            raise ValueError(f"state must come from state_dict(), but it lacks {', '.join(absent)}: {dict(state)!r}.")
        if {name: state[name] for name in self._kind} == self._kind:
            self.radius.load_state_dict(state)


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Around the loading of a file: its error names it."""
    try:
        yield
    except Exception as error:  # of any kind: a damaged file has many
        cure = "resume from another checkpoint, or remove it to begin without it"
        raise ValueError(f"{file} cannot be loaded: {error}; {cure}.") from error


def _whole(file: Path) -> Any:
    """What torch.save() wrote: torch.load() by itself reads numbers of damaged files."""
    with zipfile.ZipFile(file) as archive:
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"{damaged} in it is damaged")
    return torch.load(file, map_location="cpu", weights_only=True)


def file_of(trainer: Any, *, resumed: bool = False) -> Path:
    """In the folder of a verl trainer's checkpoint of this step, for save(), or that it resumed from, for load()."""
    where = trainer.config.trainer
    resumed_from = where.resume_from_path if resumed and where.resume_mode == "resume_path" else None
    return Path(resumed_from or Path(where.default_local_dir, f"global_step_{trainer.global_steps}")) / "bipace.json"


def no_hidden(where: str, why: str) -> ValueError:
    """The error of embedder=actor_hidden without hidden states."""
    return ValueError(
        f"{where}embedder=actor_hidden has no hidden states: {why}; use {where}embedder=auto, which falls back to "
        "n-grams of the observations, or embedder=ngram."
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


def is_noisy(model: torch.nn.Module, args: Any) -> bool:
    """Whether a forward in training mode has noise: NEFTune's, a router's jitter, or by modules of dropout or a
    probability of it, as in attention."""
    if args.neftune_noise_alpha:
        return True
    for module in model.modules():
        size = [x for name, x in vars(module).items() if ("drop" in name or "jitter" in name) and isinstance(x, float)]
        if max(size, default=0) > 0 or (isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0):
            return True
    return False


def metrics_of(
    result: AdvantageResult, embedder: str, epsilon: float | None, clusters: bool, settings: Settings | None
) -> dict[str, float]:
    """Metrics for the trainer's log: those of the result, an own method, embedder, ε, value R² (NaN: undefined)."""
    metrics = result.metrics()
    if share := metrics["bipace/invalid_row_fraction"]:
        why = "a reward of None, not finite or beyond ±1e37, entries that match no turns, or a state that is no vector"
        warn_once("invalid turns", f"{share:.1%} of a batch's turns are invalid: {why}; on_invalid=raise names one.")
    if settings is not None and settings.own is not None:
        metrics[f"bipace/method/{settings.method.rpartition('/')[2]}"] = 1.0
    if embedder:
        metrics[f"bipace/embedder/{embedder}"] = 1.0
    if epsilon is not None:
        metrics["bipace/epsilon"] = epsilon
    if clusters:
        value = result.value_r2()
        metrics["bipace/value_r2"] = float("nan") if value.r2 is None else value.r2
        metrics["bipace/value_r2_coverage"] = value.coverage
    return metrics


def batch_metrics(result: AdvantageResult, columns: Columns, config: Config, gather: Gather = dict) -> dict[str, float]:
    """Metrics of what a batch is, over all processes; arguments as those of advantage()."""
    records = result._records()
    lay = records.layout
    metrics = {"prompts": float(lay.n_groups), "turns_per_rollout": lay.n_records / max(1, lay.n_trajectories)}
    if records.raw_rms is not None:
        metrics["advantage_rms"] = records.raw_rms
    if config.needs_truncated:
        rows = {"truncated": columns.get("truncated", torch.zeros_like(result.cluster, dtype=torch.bool))}
        ended = lay.order[lay.trajectory_offsets[1:] - 1]  # where alone a flag is read
        metrics["truncated_fraction"] = float(gather(rows)["truncated"].cpu()[ended].sum()) / max(1, len(ended))
    return {f"bipace/{name}": value for name, value in metrics.items()}
