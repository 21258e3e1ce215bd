"""Warnings for untested releases of a trainer."""

import importlib.metadata

from packaging.version import InvalidVersion, Version

from ..support.warnings import warn_once

# Oldest and newest release of each trainer that the adapters were run with; integrations/README.md has the dates.
RUN_WITH = {
    "trl": ("1.0.0", "1.16.0"),
    "verl": ("0.9.0", "0.9.1"),
    "trinity-rft": ("0.6.0", "0.6.0"),
    "ms-swift": ("4.6.0", "4.6.0"),
}


def check_version(trainer: str) -> None:
    """Warns, once per process, if the installed release is outside the tested range."""
    oldest, newest = RUN_WITH[trainer]
    try:
        version = importlib.metadata.version(trainer)
        if Version(oldest) <= Version(Version(version).public) <= Version(newest):  # without a suffix, such as +cu1
            return
    except importlib.metadata.PackageNotFoundError:
        version = "a checkout without a version"
    except InvalidVersion:
        pass
    text = (
        f"bipace_kernels.integrations was run with {trainer} {oldest} to {newest}, but this is {version}: compare the "
        f"advantages of the first batch with bipace_kernels.advantage(), or install {trainer}=={newest}."
    )
    warn_once(f"release of {trainer}", text, stacklevel=3)
