"""Shared by cluster(), choose_epsilon() and EpsilonController: fingerprints, their layout, and a backend."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..backends import dispatch, threads as _threads
from ..backends.dispatch import Backend
from ..backends.records import Records
from . import checks, interop
from .ids import warn_of_numbered_ids
from .layout import Layout, check_layout, layout as make_layout
from .transfer import to_device
from .values import check_fingerprint


@dataclass(frozen=True)
class Fingerprints:
    """Rows to be clustered, with one backend's stages for them."""

    name: str  # of the argument, for errors
    backend: Backend
    layout: Layout
    matrix: Tensor  # [N, D] float32 | bfloat16 | float16, on the stages' device
    threads: int | None  # of the cpu backend

    def row_states(self) -> Tensor:
        """[M] uint8: 0 fine, 1 not finite, 2 zero."""
        with _threads.using(self.threads):
            return self.backend.clusters.scan_rows(self._records, self.matrix)

    def usable(self, check: str, on_invalid: str = "raise") -> Tensor | None:
        """[M] which rows have a direction, None: all.  ValueError for bad rows, if they are read at the call."""
        state = self.row_states()
        if on_invalid == "singleton" or (self.backend.deferred and check == "auto"):
            return state == 0
        check_fingerprint(self.layout, state.cpu(), "correct or mask them by valid=False in the layout.", self.name)
        return None

    def labels(self, epsilon: float, usable: Tensor | None) -> Tensor:
        """[M] int64 clusters under one ε; usable [M] bool: the others are clusters of their own and affect no other."""
        with _threads.using(self.threads):
            return self.backend.clusters.cluster_cosine(replace(self._records, usable=usable), self.matrix, epsilon)

    def sweep(self, epsilons: Sequence[float], usable: Tensor | None) -> Tensor:
        """[E, M] int64 clusters under each ε."""
        records = replace(self._records, usable=usable)
        with _threads.using(self.threads):
            return self.backend.clusters.cluster_sweep(records, self.matrix, list(epsilons))

    def to_rows(self, labels: Tensor) -> Tensor:
        """[..., M] of records -> [..., N] of the caller's rows, −1 for padding."""
        source = self._records.source
        if not labels.shape[-1]:
            return torch.full((*labels.shape[:-1], self.layout.n_rows), -1, dtype=labels.dtype, device=labels.device)
        return labels.index_select(-1, source.clamp(min=0)).masked_fill_(source < 0, -1)

    @property
    def _records(self) -> Records:
        return self.layout.on(self.matrix.device)


def take_fingerprints(
    group: Any, trajectory: Any, step: Any, layout: Layout | None, backend: str, num_threads: Any, **named: Any
) -> Fingerprints:
    """Fingerprints of a call, checked for everything but values.  named: the argument that holds them."""
    ((name, fingerprint),) = named.items()
    if fingerprint is None:
        example = "hidden states or ngram_fingerprint(texts)" if name == "fingerprint" else "embeddings of the actions"
        raise ValueError(f"{name} is missing; pass [N, D] features, e.g. {example}.")
    dispatch.check_name(backend)
    arguments = {**named, "group": group, "trajectory": trajectory, "step": step}
    device, fingerprint, group, trajectory, step = interop.tensors(**arguments)
    chosen = dispatch.choose(backend, device)
    threads = _threads.checked(num_threads)
    lay = _layout(group, trajectory, step, layout)
    matrix = to_device(checks.fingerprint_matrix(fingerprint, lay.n_rows, name), device, name)
    return Fingerprints(name, chosen, lay, matrix, threads)


def _layout(group: Any, trajectory: Any, step: Any, layout: Layout | None) -> Layout:
    """The layout of a call whose trajectories are optional."""
    if layout is not None:
        return check_layout(layout, group=group, trajectory=trajectory, step=step)
    if group is None:
        raise ValueError("group is missing; pass one id per row, or a layout made by bipace_kernels.layout().")
    if trajectory is None:
        if step is not None:
            raise ValueError("trajectory is missing; step numbers need the trajectory that they count in.")
        return make_layout(group, group)  # one trajectory per group: the records in row order
    made = make_layout(group, trajectory, step)
    warn_of_numbered_ids(trajectory, "clusters", stacklevel=6)
    return made
