"""Shared by all launches of the package."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING = nullcontext()


def device_guard(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU current, so that a kernel runs there and on its current stream; nothing on the CPU."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.device)


def ceil_div(n: int, size: int) -> int:
    """⌈n / size⌉; triton.cdiv takes the host ten times as long."""
    return -(-n // size)


def _each(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


#: Triton's types of the kernels' arguments on the main path, by name, for compiling ahead of time; a kernel whose
#: argument has another type says so in its main_path().
TYPES: dict[str, str] = {
    "x": "*bf16",
    "rewards": "*fp64",
    **_each("*fp32", "advantage advantage_out episode episode_advantage episode_out episode_return gram lowest_of out"),
    **_each("*fp32", "reciprocal returns returns_out scale similar step_out step_return step_term term"),
    **_each("*fp32", "trajectory_return"),
    **_each(
        "*i64", "action_key begun cluster_out deepest first group_offsets group_trajectories ids keys labels order"
    ),
    **_each("*i64", "outside rings row_hash row_offsets source step table_offsets trajectory_offsets"),
    **_each("*i32", "clusters decisions"),
    **_each("*u8", "branch branch_out company kind state table_bytes valid"),
    **_each("*u1", "bad_record spoilt taken usable"),
    "parsed": "*i1",
    "lowest": "fp32",
    **_each("fp64", "alpha delta episode_weight gamma log_gamma weight"),
    **_each("i32", "blocks depth dim first_group first_stride id_row_stride longest_row m n n_columns n_rows"),
    **_each("i32", "n_trajectories row_stride segments size units valid_row_stride vocabulary"),
}
