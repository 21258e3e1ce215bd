"""Arguments for every op of torch.ops.bipace: ragged groups, rows set aside, optional tensors there and not there."""

from typing import Any

import numpy as np
import torch
from batches import make_batch

import bipace_kernels as bk
from bipace_kernels.ops import registry

BATCH = make_batch(3, groups=3, trajectories=3, longest=5)
LAYOUT = bk.layout(BATCH.group, BATCH.trajectory, BATCH.step)
CONFIG = bk.Config.bipace(0.2)  # kept alive: ops know them by their handles
M = LAYOUT.n_records

OPS = sorted([*registry.OPS, "advantage"])  # each has a case below

Case = tuple[tuple[Any, ...], dict[str, Any]]


def op_cases(name: str, device: str) -> list[Case]:
    """(args, kwargs) of each case, tensors on the device."""

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return [(tuple(map(there, args)), {k: there(v) for k, v in kwargs.items()}) for args, kwargs in _cases()[name]]


def _pairs(taken: torch.Tensor) -> torch.Tensor:
    """[M] int64 clusters of two neighbours of a group each, by first appearance; −1 for records not taken [M]."""
    group = LAYOUT.group_of_record()
    pair = group * M + (torch.arange(M) - LAYOUT.group_offsets[group]) // 2
    labels = torch.full((M,), -1)
    labels[taken] = torch.unique(pair[taken], return_inverse=True)[1]
    return labels


def _cases() -> dict[str, list[Case]]:
    rng = np.random.default_rng(5)
    lay = LAYOUT
    groups = {"n_groups": lay.n_groups, "longest_group": lay.longest_group}
    trajectories = {"n_trajectories": lay.n_trajectories}
    spoilt = torch.arange(lay.n_trajectories) % 4 == 1
    taken = ~spoilt[lay.trajectory_of_record()]
    usable = torch.arange(M) % 5 != 2
    rewards = torch.from_numpy(BATCH.rewards)[lay.order]
    fingerprint = torch.from_numpy(BATCH.fingerprint)
    keys = torch.from_numpy(BATCH.action_key)[lay.order]
    step_return = torch.from_numpy(rng.normal(size=M).astype(np.float32))
    trajectory_return = torch.from_numpy(rng.normal(size=lay.n_trajectories).astype(np.float32))
    labels = _pairs(taken)
    depths = torch.stack([labels, _pairs(taken & (torch.arange(M) % 3 > 0))])
    cosine = (fingerprint, lay.order, lay.group_offsets)
    terms = {"estimator": "q_style", "step_norm": "none", "delta": 1e-6}
    hgpo = {"step_norm": "std", "delta": 1e-6, "alpha": 1.0, "base_group": True}
    episode = {"norm": "std", "lone": "zero", "delta": 1e-6, "n_groups": lay.n_groups, "n_records": M}
    own = torch.where(taken, trajectory_return[lay.trajectory_of_record()], 0.0)  # as the episode term leaves it
    ids = torch.tensor([[1, 0, 2, 3], [2, 2, 0, 1], [0, 0, 0, 0]])
    table = (
        torch.tensor([0, 8, 17, 18, 20]),
        torch.frombuffer(bytearray(b"<action></action>Ab c"), dtype=torch.uint8)[:20],
    )
    first = {"mode": "first_n", "n": 3, "longest_row": 4}
    tag = {**first, "mode": "action_tag"}
    chain = {"layout": lay._handle, "config": CONFIG._handle, "fields": "", "backend": "auto", "check": "auto",
             "num_threads": 0}  # fmt: skip
    by_row = (torch.from_numpy(BATCH.rewards), None, None, fingerprint, None, torch.from_numpy(BATCH.action_key))
    return {
        "discounted_returns": [
            ((rewards, lay.step, lay.trajectory_offsets, 0.9), trajectories),
            ((rewards, None, lay.trajectory_offsets, 1.0), trajectories),
        ],
        "episode_advantage": [
            ((trajectory_return, lay.trajectory_offsets, lay.group_trajectories),
             {**episode, "scope": s, "spoilt": bad})
            for s, bad in (("trajectory", spoilt), ("step", None))
        ],
        "cluster_cosine": [
            ((*cosine, usable, 0.2), {**groups, "taken": taken}),
            ((*cosine, None, 0.0), {**groups, "taken": None}),
        ],
        "cluster_sweep": [((*cosine, usable, [0.1, 0.0, 0.4]), {**groups, "taken": taken})],
        "step_advantage": [
            ((step_return, labels, keys, lay.group_offsets), {**groups, **terms}),
            ((step_return, labels, None, lay.group_offsets),
             {**groups, **terms, "estimator": "mean", "step_norm": "std"}),
        ],
        "hgpo_advantage": [((step_return, depths, own, lay.group_offsets), {**groups, **hgpo})],
        "kernel_values": [
            (
                (fingerprint, lay.order, step_return, lay.time(), lay.group_offsets, some, chosen),
                {**groups, "taken": kept, "share": share, "width": 0.3, "horizon": horizon, "noise": 2.0, "same": 0.3},
            )
            for some, kept, horizon, share, chosen in (
                (usable, taken, 4.0, "group", None), (None, None, 0.0, "batch", torch.tensor([0, 2, -1])),
            )
        ],
        "gae_advantage": [
            (
                (rewards, step_return.double(), at, lay.trajectory_offsets, cut, 0.9, 0.5),
                {**trajectories, "taken": kept},
            )
            for at, cut, kept in ((lay.step, ~usable, taken), (None, None, None))
        ],
        "hash_token_ids": [
            ((ids, None, None, None, None), first),
            ((ids.int(), None, ids >= 0, *table), tag),
            ((ids.flatten(), torch.tensor([0, 4, 4, 12]), None, *table), {**tag, "longest_row": 8}),
        ],
        "advantage": [
            ((*by_row, None, None, None), chain),
            ((*by_row[:3], None, None, None, torch.ones(BATCH.n, dtype=torch.bool), None, None), {
                **chain, "config": 0, "fields": "{'partition': 'none', 'estimator': 'none'}",
            }),
        ],
    }  # fmt: skip
