"""The arguments of advantage(), checked for presence, lengths, shapes and dtypes: everything but values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import PRESETS, Config
from ..estimators.memory import ValueMemory
from ..support.errors import near
from ..support.warnings import warn_of_unparsed, warn_once
from . import checks
from .checks import LateCheck
from .ids import warn_of_numbered_ids
from .layout import Layout, check_layout, layout as make_layout
from .observations import observation_codes
from .transfer import to_device


@dataclass
class Inputs:
    """The arguments of advantage() that its configuration uses, as tensors on one device."""

    config: Config
    device: torch.device
    rewards: Tensor | None  # [N] float64
    returns: Tensor | None  # [N] float64
    episode_return: Tensor | None  # [N] float64
    fingerprint: Tensor | None  # [N, D] float32 | bfloat16 | float16, any strides
    codes: Tensor | None  # [N] int64, equal where the observations are equal
    observation: Any  # unchanged: partition "similar" reads its texts on the host
    action_key: Tensor | None  # [N] int64
    action_parsed: Tensor | None  # [N] bool
    truncated: Tensor | None  # [N] bool
    value: Tensor | None  # [N] float64 V̂ computed already (distributed.py), together with raw_advantage
    raw_advantage: Tensor | None  # [N] float64 A_S before step_norm
    late: list[LateCheck]  # checks of masks that would have synchronized

    def kept(self) -> Inputs:
        """For a result: without what only the stages read, and with copies of what its metrics read."""
        keys, parsed = (None if x is None else x.clone() for x in (self.action_key, self.action_parsed))
        unread = replace(self, fingerprint=None, codes=None, observation=None, truncated=None)
        return replace(unread, action_key=keys, action_parsed=parsed)


def check_inputs(
    arguments: dict[str, Any], layout: Layout | None, config: Config, device: torch.device, *, deferred: bool
) -> tuple[Inputs, Layout]:
    """Inputs of the given arguments, and the layout of all records; host data goes to the tensors' device.

    deferred   values are not read: checks of them go into `late`
    """
    late: list[LateCheck] | None = [] if deferred else None
    columns = check_columns(arguments, layout, config, device, late)
    lay = _layout(arguments, layout, config, late)
    codes = None
    if config.partition_row.by_code:
        codes = to_device(observation_codes(arguments["observation"], lay), device, "observation")
    return Inputs(config, device, **columns, codes=codes, observation=arguments["observation"], late=late or []), lay


def check_columns(
    arguments: dict[str, Any], layout: Layout | None, config: Config, device: torch.device, late: list[LateCheck] | None
) -> dict[str, Tensor | None]:
    """The fields of Inputs that are always tensors, by name, on the device.

    late   where given, checks of values are appended there
    """
    check_present(arguments, config, layout)
    n = checks.length(arguments["group"], "group") if layout is None else layout.n_rows
    keys = arguments["action_key"]
    if isinstance(keys, tuple) and len(keys) == 2 and isinstance(keys[0], Tensor) and keys[0].ndim == 1:
        raise TypeError("action_key must be one vector, got the two of action_keys(): give the other as action_parsed.")
    for name, value in arguments.items():
        if value is not None and name != "group":
            checks.check_length(value, name, n)

    function = callable(config.estimator)  # a user's own estimator, which may read any column
    fingerprint = arguments["fingerprint"]
    if fingerprint is not None and not (config.needs_fingerprint or function):
        value = "" if config.value_row is None else f", value={config.value_name!r}"
        own = f"partition={config.partition!r}, estimator={config.estimator_name!r}{value}"
        text = f"fingerprint has no effect with {own}: leave it out, or choose one that reads it, such as Config.gae()."
        warn_once("unused fingerprint", text, stacklevel=5)
        fingerprint = None
    unused = not function and arguments["returns"] is not None and arguments["episode_return"] is not None
    unused &= "rewards" not in config.needs
    parsed, truncated = arguments["action_parsed"], arguments["truncated"] if config.needs_truncated else None
    if parsed is not None:
        parsed = checks.bool_vector(parsed, "action_parsed", n, late)
        if config.reads_keys and late is None and n and not bool(parsed.any()):  # not read on a GPU
            warn_of_unparsed(0.0, stacklevel=5)
    try:
        keys = None if keys is None else checks.integer_vector(keys, "action_key", n)
    except (TypeError, ValueError):  # where no estimator reads them they only serve the metrics, and others are ignored
        if config.reads_keys:
            raise
        keys = None
    real = {name: arguments[name] for name in ("rewards", "returns", "episode_return")}
    if unused:
        real["rewards"] = None
    columns = {
        **{name: None if value is None else checks.real_vector(value, name, n) for name, value in real.items()},
        "action_key": keys,
        "action_parsed": parsed,
        "truncated": None if truncated is None else checks.bool_vector(truncated, "truncated", n, late),
        "value": arguments.get("value"),
        "raw_advantage": arguments.get("raw_advantage"),
        "fingerprint": None if fingerprint is None else checks.fingerprint_matrix(fingerprint, n),
    }
    return {name: x if x is None or x.device == device else to_device(x, device, name) for name, x in columns.items()}


def check_config(config: Config | str | None) -> Config:
    """The configuration; a preset's name stands for the preset, and None for "bipace"."""
    if isinstance(config, Config):
        return config
    if config is None or (isinstance(config, str) and config in _OF_PRESETS):
        return _OF_PRESETS[config or "bipace"]
    got = repr(config) if isinstance(config, str) else type(config).__name__
    kind, method = ValueError if isinstance(config, str) else TypeError, getattr(config, "__name__", "")
    end = f": call it, Config.{method}()." if method in _OF_PRESETS else near(config, _OF_PRESETS)
    raise kind(f"config must be a bipace_kernels.Config or one of {', '.join(_OF_PRESETS)}, got {got}{end}")


_OF_PRESETS = {name: make() for name, make in PRESETS.items()}


def check_memory(memory: object, config: Config) -> None:
    if memory is not None and not isinstance(memory, ValueMemory):
        raise TypeError(f"memory must be a bipace_kernels.ValueMemory, got {type(memory).__name__}.")
    if memory is not None and not config.needs_memory:
        raise ValueError(
            f"memory must be None with estimator={config.estimator_name!r}, value={config.value_name!r} and "
            f"share={config.share!r}, which do not read it; use Config.gae(share='memory')."
        )


def check_present(arguments: dict[str, Any], cfg: Config, layout: Layout | None) -> None:
    """Checks that everything the configuration needs is given, and that nothing conflicts with the layout."""
    if layout is None:
        for name in ("group", "trajectory"):
            if arguments[name] is None:
                raise ValueError(f"{name} is missing; pass one id per row, or a layout from bipace_kernels.layout().")
    else:
        check_layout(layout, group=arguments["group"], trajectory=arguments["trajectory"], step=arguments["step"])
    if arguments["rewards"] is None and (arguments["returns"] is None or arguments["episode_return"] is None):
        raise ValueError("rewards is missing; it may be None only where both returns and episode_return are given.")
    if arguments["rewards"] is None and "rewards" in cfg.needs:
        raise ValueError(f"rewards is missing; estimator={cfg.estimator!r} reads the reward of each step.")
    reads = cfg.averages_actions or isinstance(cfg.value, str)  # a function may do without states
    if "fingerprint" in cfg.needs and reads and arguments["fingerprint"] is None and arguments.get("value") is None:
        raise ValueError(
            f"fingerprint is missing; estimator={cfg.estimator!r} with value={cfg.value_name!r} needs one per row: "
            "bipace_kernels.ngram_fingerprint(observation) makes them from texts.  Or take value='group' or 'cluster', "
            "or with a function action_noise=None."
        )
    argument = cfg.partition_row.argument
    if argument is not None and arguments[argument] is None:
        raise ValueError(f"{argument} is missing; partition={cfg.partition!r} needs one per row, or choose another.")
    if cfg.needs_keys and arguments["action_key"] is None:
        raise ValueError(
            f"action_key is missing; estimator={cfg.estimator!r} compares actions. Make keys with "
            "bipace_kernels.action_keys(responses), or use an estimator without keys such as Config.bigpo()."
        )


def _layout(arguments: dict[str, Any], layout: Layout | None, config: Config, late: list[LateCheck] | None) -> Layout:
    if layout is None:
        made = make_layout(arguments["group"], arguments["trajectory"], arguments["step"], arguments["valid"])
        if config.partition_row.greedy:
            warn_of_numbered_ids(arguments["trajectory"], f"clusters of partition {config.partition!r}", stacklevel=6)
        return made
    if arguments["valid"] is not None:
        valid = checks.bool_vector(arguments["valid"], "valid", layout.n_rows, late)
        own = layout.on(valid.device).valid
        differs = (~valid if own is None else valid != own).any()
        text = "valid must be None or the mask that the layout was made with; make a new layout for this one."
        checks.unless(differs, ValueError, text, late)
    return layout
