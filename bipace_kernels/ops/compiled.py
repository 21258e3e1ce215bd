"""advantage() inside torch.compile: one opaque op, and a result that reads its values on demand."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..diagnostics.records import Records, Unread
from ..inputs.checks import LateCheck
from ..inputs.columns import check_config, check_inputs, check_present
from ..inputs.layout import Layout
from ..result import AdvantageResult

#: Of the op: its tensor arguments, and the columns of an AdvantageResult that it returns before V̂, flags and checks.
_GIVEN = ("rewards", "returns", "episode_return", "fingerprint", "observation")
TENSORS = (*_GIVEN, "action_key", "action_parsed", "valid", "truncated")
ROWS = ("advantage", "step_advantage", "episode_advantage", "returns", "cluster", "branch")
FLAGS = ("state", "episode_differs", "copy_differs")  # of each row, as in Unread
LATE = 4  # checks of masks, at most
_untraced: dict[Callable[..., Any], Callable[..., Any]] = {}
_FIELDS = tuple(field.name for field in fields(Config))


def advantage(
    arguments: dict[str, Any],
    layout: Layout | None,
    config: Config | str | None,
    backend: str,
    check: str,
    num_threads: int | None,
) -> AdvantageResult:
    """What torch.compile traces instead of pipeline.run(): all of this can be traced, and the op is opaque."""
    if layout is None:
        raise ValueError("layout is missing; torch.compile needs one, made by bipace_kernels.layout() outside.")
    cfg = check_config(config)
    check_present(arguments, cfg, layout)
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be a tensor under torch.compile, got {type(value).__name__}; make one outside."
            )
    handle = cfg._handle
    # A Config made outside is passed by its handle, so another ε does not recompile; one made inside is a constant.
    if not handle and (callable(cfg.estimator) or callable(cfg.value)):
        name = f"estimator={cfg.estimator_name}" if callable(cfg.estimator) else f"value={cfg.value_name}"
        raise ValueError(f"config with {name} must be made outside the compiled function: a graph holds no function.")
    spelled = "" if handle else "{" + ", ".join([f"{name!r}: {getattr(cfg, name)!r}" for name in _FIELDS]) + "}"
    tensors, options = [arguments[name] for name in TENSORS], {"check": check, "num_threads": num_threads or 0}
    total, step, episode, returns, cluster, branch, value, flags, late = torch.ops.bipace.advantage(
        *tensors, layout=layout._handle, config=handle, fields=spelled, backend=backend, **options
    )
    # Copies of what metrics read, as the caller may write into it; of fingerprints only that they were given counts.
    x, read = arguments["fingerprint"], {name: arguments[name] for name in ("action_key", "action_parsed")}
    read["fingerprint"] = None if x is None else x[..., :1]
    kept = {**arguments, **{name: None if x is None else x.clone() for name, x in read.items()}}
    value, records = value if cfg.estimator_row.has_value else None, CompiledRecords(kept, layout, cfg, flags, late)
    return AdvantageResult(total, step, episode, returns, cluster, branch, records, value=value)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, disabled for the compiler: a call it cannot trace runs eagerly as a whole, not in pieces."""
    disable = getattr(sys.modules["torch._dynamo"], "disable", None)  # None while it is being imported
    if disable is not None and function not in _untraced:
        _untraced[function] = disable(function)
    return _untraced.get(function, function)


@dataclass(frozen=True, eq=False)
class CompiledRecords:
    """What a result of a compiled graph also needs to give its records and its errors."""

    arguments: dict[str, Any]
    layout: Layout
    config: Config
    flags: Tensor  # [FLAGS, N] uint8, by row
    late: Tensor  # [LATE] bool

    def read(self, rows: AdvantageResult) -> Records:
        return self._unread().read(rows)

    def check(self, rows: AdvantageResult) -> None:
        self._unread().check(rows)

    def _unread(self) -> Unread:
        """The flags from the graph, the texts of errors from the arguments."""
        x, everyone = check_inputs(self.arguments, self.layout, self.config, self.flags.device, deferred=True)
        lay = everyone.once() if self.config.duplicates == "once" else everyone
        state, episode_differs, copy_differs = self.flags
        order, every = lay.on(x.device).order, everyone.on(x.device).order
        late = [LateCheck(self.late[i], late.error, late.text) for i, late in enumerate(x.late)]
        differs = episode_differs[order] != 0, copy_differs[every] != 0
        return Unread(everyone, lay, replace(x, late=late), state[order], *differs)


def flags_of(result: AdvantageResult) -> tuple[Tensor, Tensor]:
    """[FLAGS, N] uint8 and [LATE] bool of a result; reads nothing.  On the CPU, errors were raised at the call."""
    n, device = result.advantage.shape[0], result.advantage.device
    flags = torch.zeros(len(FLAGS), n, dtype=torch.uint8, device=device)
    late = torch.zeros(LATE, dtype=torch.bool, device=device)
    records = result.records
    if isinstance(records, Unread):
        order, every = records.layout.on(device).order, records.everyone.on(device).order
        planes = ((records.state, order), (records.episode_differs, order), (records.copy_differs, every))
        for plane, (flag, rows) in zip(flags, planes, strict=True):
            if flag is not None:
                plane[rows] = flag.to(torch.uint8)
        for i, question in enumerate(records.inputs.late):
            late[i] = question.failed
    return flags, late
