"""The stages of the cpu backend in the place of a GPU's.

They let the chain be tested as a GPU runs it, without Triton and without one: what it does around its stages, whatever
the stages are.  `Watched` makes every reading of a tensor outside a stage an error, as a GPU's would be that waits.
"""

import contextlib
import functools
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sized import BY_RECORD, POSITIONAL
from torch.utils._python_dispatch import TorchDispatchMode

from bipace_kernels.backends import dispatch
from bipace_kernels.estimators import table
from bipace_kernels.inputs import layout
from bipace_kernels.ops.registry import without_masks

_OF_ROWS = ("unit_rows", "whitened_rows", "centred_rows")
_AT = torch.ops.aten
_READING = {
    _AT._local_scalar_dense, _AT.nonzero, _AT.equal, _AT.is_nonzero, _AT.masked_select, _AT.unique_dim, _AT._unique2,
    _AT.unique_consecutive,
}  # fmt: skip


class Watched(dispatch.Backend):
    """Stages of the cpu backend under the name of one that defers its checks.

    Inside watch() a tensor may be read in a stage and nowhere else.
    """

    def __init__(self) -> None:
        super().__init__("triton")
        self.inside = 0
        self.calls: list[str] = []
        host = dispatch.choose("cpu")
        for stage in ("returns", "episode", "clusters", "observations", "values", "critic", "combine"):
            module = getattr(host, stage)
            names = [name for name in (*POSITIONAL, *_OF_ROWS) if hasattr(module, name)]
            setattr(self, stage, SimpleNamespace(**{name: self._watched(getattr(module, name)) for name in names}))

    def _watched(self, function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            self.calls.append(function.__name__)
            with self.stage():
                given = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
                records = given.pop("records")
                self.check(records)
                return self._on_host(function, records, given)

        return run

    def check(self, records):
        """Sizes are those of the offsets, of all records."""
        groups = records.group_offsets.diff()
        assert records.n_records == records.order.shape[0] and records.n_groups == groups.shape[0]
        assert records.longest_group == (int(groups.max()) if groups.numel() else 0)

    def _on_host(self, function, records, columns):
        """The masks of a GPU's records are not for the stages of a CPU."""
        name = function.__name__
        if name == "combine":
            source, taken = records.source, records.taken
            if taken is not None and records.n_records:
                source = source.masked_fill(~taken[source.clamp(min=0)], -1)
            return function(replace(records, source=source), **columns)
        if name == "episode_advantage":
            return without_masks(function, replace(records, taken=None), columns)
        if name in ("step_advantage", "hgpo_advantage"):  # labels say who takes part
            return function(records, **columns)
        if name == "cluster_cosine" and records.state is not None:
            records.state.copy_(dispatch.choose("cpu").clusters.scan_rows(records, columns["fingerprint"]))
            records = replace(records, usable=records.state == 0)
        if name == "scan_rows":
            records = replace(records, taken=None)
        if name in _OF_ROWS:  # a row of each record, NaN for those that are not usable
            usable = records.usable if records.taken is None else records.usable & records.taken
            return function(replace(records, usable=usable, taken=None, spoilt=None), **columns)
        for rows in ("rows", "inside") if records.taken is not None else ():
            if columns.get(rows) is not None:
                columns[rows] = columns[rows][records.taken]
        return without_masks(function, replace(records, spoilt=None), columns, BY_RECORD)

    @contextlib.contextmanager
    def stage(self):
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @contextlib.contextmanager
    def watch(self):
        """Every reading of a tensor on the host raises, outside a stage."""
        with pytest.MonkeyPatch.context() as patch, _Reading(self):
            for name in ("tolist", "numpy", "cpu", "__array__"):  # no operator of torch is called for these on the CPU
                patch.setattr(torch.Tensor, name, self._refusing(name, getattr(torch.Tensor, name)))
            for name in ("check_offsets", "check_places"):  # of a layout's own tensors, which are on the host
                patch.setattr(layout, name, self._of_host(getattr(layout, name)))
            patch.setattr(table, "check_kernel_steps", self._of_host(table.check_kernel_steps))
            yield

    def _of_host(self, function):
        @functools.wraps(function)
        def run(*args):
            with self.stage():
                return function(*args)

        return run

    def _refusing(self, name, function):
        @functools.wraps(function)
        def read(*args, **kwargs):
            if not self.inside:
                raise AssertionError(f"{name} reads a tensor and waits for the device")
            return function(*args, **kwargs)

        return read


class _Reading(TorchDispatchMode):
    """Refuses the operators that would wait for a GPU: those that read values, or whose shape depends on them."""

    def __init__(self, stages: Watched) -> None:
        super().__init__()
        self.stages = stages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        op = func.overloadpacket
        masked = op in (_AT.index, _AT.index_put, _AT.index_put_) and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        repeated = op is _AT.repeat_interleave and kwargs.get("output_size") is None
        if not self.stages.inside and (op in _READING or masked or repeated):
            raise AssertionError(f"{func} reads a tensor and waits for the device")
        return func(*args, **kwargs)


def install(patch: pytest.MonkeyPatch) -> Watched:
    """backend="triton" runs the stand-ins."""
    package = Watched()
    choose = dispatch.choose
    patch.setattr(dispatch, "choose", lambda name, where=None: package if name == "triton" else choose(name, where))
    return package
