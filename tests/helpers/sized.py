"""Stages by hand: a module whose functions take records' offsets, places and masks one by one, as the torch ops do.

`Sized(module).cluster_cosine(fingerprint, order, group_offsets, usable, epsilon, taken=…)` makes `Records` of what it
is given; masks left out are None, and sizes are read off the offsets.
"""

import functools
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType
from typing import Any

from bipace_kernels.backends.records import Records
from bipace_kernels.backends.schema import Kernel, Terms
from bipace_kernels.ops.registry import without_masks

#: Positional arguments of each stage.
POSITIONAL = {
    "discounted_returns": "rewards step trajectory_offsets gamma",
    "trajectory_returns": "rewards step trajectory_offsets",
    "spoilt_trajectories": "step_return trajectory_return bad_record trajectory_offsets",
    "all_returns": "rewards step bad_record trajectory_offsets gamma",
    "episode_advantage": "episode_return trajectory_offsets group_trajectories",
    "scan_rows": "fingerprint order",
    "cluster_cosine": "fingerprint order group_offsets usable epsilon",
    "cluster_sweep": "fingerprint order group_offsets usable epsilons",
    "cluster_exact": "codes group_offsets",
    "cluster_history": "codes step trajectory_offsets group_offsets depth",
    "step_advantage": "returns labels action_key group_offsets",
    "hgpo_advantage": "returns depth_labels episode_advantage group_offsets",
    "cluster_values": "returns labels group_offsets",
    "kernel_values": "fingerprint order returns time group_offsets usable landmarks",
    "gae_advantage": "rewards value step trajectory_offsets truncated gamma gae_lambda",
    "same_action_advantage": "fingerprint order advantage time action_key group_offsets usable parsed",
    "normed_advantage": "advantage returns group_offsets",
    "combine": "episode step_term returns labels branch source taken",
}
OF_RECORDS = {field.name for field in fields(Records)} | {"time"}
OF_KERNEL = {field.name for field in fields(Kernel)}
#: Columns [M] of stages that are no ops.
BY_RECORD = {"codes", "advantage", "parsed"}


def records_of(**given: Any) -> Records:
    """Records of offsets, places and masks, with the sizes that are left out."""
    if "time" in given:
        given["step"] = given.pop("time")
    for sizes, offsets in (("n_groups", "group_offsets"), ("n_trajectories", "trajectory_offsets")):
        if offsets in given:
            given.setdefault(sizes, given[offsets].numel() - 1)
    if "group_trajectories" in given:
        given.setdefault("n_groups", given["group_trajectories"].numel() - 1)
    if "group_offsets" in given and "longest_group" not in given:
        given["longest_group"] = int(given["group_offsets"].diff().max()) if given["n_groups"] else 0
    if "source" in given:
        given.setdefault("n_rows", given["source"].numel())
    return Records(**given)


class Sized:
    """A backend's module of a stage, by flat arguments; everything else is the module's own."""

    __slots__ = ("_module",)  # no __dict__ either: what a test patches is the module's

    def __init__(self, module: ModuleType) -> None:
        object.__setattr__(self, "_module", module)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name not in POSITIONAL:
            return found
        if name in ("kernel_values", "same_action_advantage"):
            found = _of_fingerprints(self._module, name)
        return _flat(name, found, on_host=self._module.__name__.split(".")[-2] in ("reference", "cpu"))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)


def _of_fingerprints(module: ModuleType, name: str) -> Callable[..., Any]:
    """A stage of the critic on the rows that it makes of fingerprints."""

    @functools.wraps(getattr(module, name))
    def run(
        records: Records, fingerprint: Any, kernel: Kernel, landmarks: Any = None, directions: int = 0, **rest: Any
    ) -> Any:
        rows = module.unit_rows(records, fingerprint, 512 if directions else 0)
        if directions:
            rows = module.whitened_rows(records, rows, landmarks, directions)
        shared, own = (module.centred_rows(records, rows, share) for share in (kernel.share, "group"))
        if name == "kernel_values":
            rest |= {"landmarks": landmarks, "inside": own if kernel.inside else None}
        return getattr(module, name)(records, rows=shared, kernel=kernel, **rest)

    return run


def _flat(name: str, function: Callable[..., Any], *, on_host: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(POSITIONAL[name].split(), args, strict=False)) | kwargs
        of_records = {key: given.pop(key) for key in list(given) if key in OF_RECORDS}
        if name in ("kernel_values", "same_action_advantage"):  # other stages have a γ too
            of_kernel = {key: given.pop(key) for key in list(given) if key in OF_KERNEL}
            given["kernel"] = Kernel(**of_kernel)
        if name == "combine":
            weight, episode_weight = given.pop("weight"), given.pop("episode_weight", 1.0)
            given["weights"] = None if given.pop("total_is_step") else (episode_weight, weight)
            given["terms"] = Terms(given.pop("labels"), given.pop("step_term"), given.pop("branch"))
        first = given[POSITIONAL[name].split()[0]]
        if name == "episode_advantage":
            n_records = int(of_records["trajectory_offsets"][-1])
        else:
            n_records = of_records.get("order", first).shape[0]
        records = records_of(**{"n_records": n_records, "device": first.device, **of_records})
        if on_host:
            return without_masks(function, records, given, BY_RECORD)
        return function(records, **given)

    return run
