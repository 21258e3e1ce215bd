"""BiPACEGRPOConfig: the settings of BiPACE among the arguments of a GRPOTrainer."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass, field, make_dataclass
from types import UnionType
from typing import Any, Literal

from trl import GRPOConfig

from ...settings import Setting, settings_of
from ...support.errors import refuse_unknown
from .._settings import Settings

PREFIX = "bipace_"
OF_TRL = {name: row for name, row in settings_of(Settings).items() if name != "duplicates"}  # TRL's rows have no copies


def _argument(name: str, row: Setting) -> tuple[str, Any, Any]:
    default, kind = getattr(Settings, name), Literal[row.accepts] if isinstance(row.accepts, tuple) else row.kind
    # HfArgumentParser takes one type beside None; of several it takes the last, str, for any value.
    hint = kind | None if default is None or isinstance(kind, UnionType) else kind
    return PREFIX + name, hint, field(default=default, metadata={"help": f"BiPACE: {row.help}."})


_Arguments: Any = make_dataclass("_Arguments", [_argument(name, row) for name, row in OF_TRL.items()])


@dataclass
class BiPACEGRPOConfig(_Arguments, GRPOConfig):  # type: ignore[misc]  # made from the table; TRL has no types
    """GRPOConfig with the settings of BiPACE, each named bipace_<name>; ValueError names a wrong setting.

    docs/settings.md has the table, `settings` gives them as `Settings`.
    """

    def __new__(cls, *args: Any, **values: Any) -> BiPACEGRPOConfig:
        known = inspect.signature(cls.__init__).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in known.values()):
            refuse_unknown(cls.__name__, values, list(known))
        made: BiPACEGRPOConfig = super().__new__(cls)
        return made

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, row in OF_TRL.items():
            value = getattr(self, PREFIX + name)
            if isinstance(value, str) and isinstance(row.kind, UnionType):  # an argument parser gives texts for these
                for kind in (int, float):
                    with contextlib.suppress(ValueError):  # "auto", "block 16", or a text that Settings refuses by name
                        value = kind(value)
                        break
            setattr(self, PREFIX + name, getattr(Settings, name) if value is None else value)
        self.settings  # noqa: B018  wrong ones are errors before a model is loaded

    @property
    def settings(self) -> Settings:
        """The same settings as in every other adapter."""
        values = {name: getattr(self, PREFIX + name) for name in OF_TRL}
        return Settings.of(values, PREFIX).scaled(self.scale_rewards, PREFIX)
