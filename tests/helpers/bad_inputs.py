"""Arguments of bk.advantage() that it must refuse, with the error and its words."""

import math
import warnings

import numpy as np
import torch
from batches import make_batch

import bipace_kernels as bk

BATCH = make_batch(0)
N = BATCH.n
KINDS = ["reward_nan", "reward_inf", "reward_huge", "fingerprint_nan", "fingerprint_zero", "all"]


def at(values, index, value, dtype=None):
    out = np.array(values, dtype=dtype or np.asarray(values).dtype)
    out[index] = value
    return out


def bad_values(kind, rows=(2, N - 1)):
    """Rewards and fingerprints with a kind of bad value in some rows; any other kind: none."""
    rewards, fingerprint = BATCH.rewards.copy(), BATCH.fingerprint.copy()
    if kind == "all":
        rewards[:], fingerprint[:] = math.nan, math.nan
    elif kind.startswith("reward"):
        rewards[list(rows)] = {"reward_nan": math.nan, "reward_inf": -math.inf, "reward_huge": 1e300}[kind]
    elif kind.startswith("fingerprint"):
        fingerprint[list(rows)] = math.nan if kind == "fingerprint_nan" else 0.0
    return {"rewards": rewards, "fingerprint": fingerprint}


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def wrapped():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # likewise
        return torch.masked.masked_tensor(torch.ones(N), torch.arange(N) != 3)


BAD = {
    # argument: (value, exception, words of the message)
    "group": [
        (None, ValueError, "group is missing"),
        (3, TypeError, "group must be"),
        ("abc", TypeError, "group must be"),
        (torch.zeros(N, dtype=torch.int64).to_sparse(), TypeError, "group must be a dense tensor, got a torch.sparse"),
        (BATCH.group[:-1], ValueError, "trajectory must have one entry per row"),
        (at(BATCH.group, -1, 99), ValueError, r"trajectory must belong to one group.*trajectory_ids"),
        (torch.tensor(3), ValueError, "group must have one entry per row, got a scalar"),
        (np.ma.array(BATCH.group, mask=np.arange(N) == 3), TypeError, "group must not be a masked array"),
        (np.array(["NaT"] * N, "M8[s]"), ValueError, r"group\[0\] must be an id, got NaT"),
        ([*range(N - 1), np.datetime64("NaT")], ValueError, rf"group\[{N - 1}\] must be an id, got NaT"),
        ([*range(N - 1), 10**5000], ValueError, rf"group\[{N - 1}\] must fit into int64, got an integer of 16610 bits"),
    ],
    "trajectory": [
        (None, ValueError, "trajectory is missing"),
        (BATCH.trajectory[:-1], ValueError, f"trajectory must have one entry per row, N = {N}"),
        (np.zeros(N, dtype=np.int64), ValueError, "trajectory must belong to one group"),
    ],
    "step": [
        (BATCH.step[:-1], ValueError, f"step must have one entry per row, N = {N}"),
        (BATCH.step[:, None], ValueError, r"step must have shape \[N\]"),
        (BATCH.step.astype(float), TypeError, "step must have an integer dtype"),
        (at(BATCH.step, 0, -1), ValueError, r"step must be at least 0, got step\[0\] = -1"),
        (np.zeros(N, dtype=np.int64), ValueError, r"step must be unique inside a trajectory.*duplicates='once'"),
        (["a"] * N, TypeError, "step must be integers"),
    ],
    "rewards": [
        (wrapped(), TypeError, "rewards must be a plain tensor, got MaskedTensor"),
        (np.ma.array(BATCH.rewards, mask=np.arange(N) == 3), TypeError, "rewards must not be a masked array"),
        (nested(), TypeError, "rewards must be a dense tensor, got a nested one"),
        ([0.0] * (N - 1) + [10**400], ValueError, "rewards must be real numbers.* an integer of more than 64 bits"),
        (None, ValueError, "rewards is missing"),
        (BATCH.rewards[:-1], ValueError, f"rewards must have one entry per row, N = {N}"),
        (BATCH.rewards[:, None], ValueError, r"rewards must have shape \[N\]"),
        ([[1.0], [2.0, 3.0]] * N, ValueError, "rewards must have one entry per row"),
        (at(BATCH.rewards, 3, math.nan), ValueError, r"rewards must be finite.*nan at row 3.*on_invalid='singleton'"),
        (at(BATCH.rewards, 3, math.inf), ValueError, "rewards must be finite.*inf at row 3"),
        (at(BATCH.rewards, 3, 1e38), ValueError, "rewards must be finite .*1e37.*row 3"),
        (np.full(N, 9e36), ValueError, "rewards must sum to finite returns within .1e37, got other .* rows 0, 1, 2,"),
    ],
    "returns": [
        (BATCH.rewards[:-1], ValueError, "returns must have one entry per row"),
        (at(BATCH.rewards, 5, math.nan), ValueError, "returns must be finite.*row 5"),
    ],
    "episode_return": [
        (BATCH.rewards[:-1], ValueError, "episode_return must have one entry per row"),
        (np.arange(N, dtype=float), ValueError, "episode_return must be one value per trajectory, but rows"),
        (np.full(N, -math.inf), ValueError, "episode_return must be finite"),
    ],
    "fingerprint": [
        (None, ValueError, "fingerprint is missing; partition='cosine'"),
        (BATCH.fingerprint[:-1], ValueError, f"fingerprint must have one entry per row, N = {N}"),
        (BATCH.fingerprint[:, 0], ValueError, r"fingerprint must have shape \[N, D\]"),
        (BATCH.fingerprint[:, None, :], ValueError, r"fingerprint must have shape \[N, D\].*flatten"),
        (BATCH.fingerprint[:, :0], ValueError, "fingerprint must have at least one feature"),
        (BATCH.fingerprint.astype(np.int64), TypeError, "fingerprint must be float32, bfloat16, float16 or float64"),
        (torch.zeros(N, 3, dtype=torch.complex64), TypeError, "fingerprint must be float32"),
        (at(BATCH.fingerprint, (4, 2), math.nan), ValueError, "fingerprint must have finite, non-zero rows, got non-"),
        (at(BATCH.fingerprint, (4, 2), -math.inf), ValueError, r"got non-finite values \(.*\) at row 4;"),
        (at(BATCH.fingerprint, 6, 0.0), ValueError, "got zeros, which have no direction, at row 6;"),
        (["text"] * N, TypeError, "fingerprint must be real numbers"),
        (torch.ones(N, 3).to_sparse(), TypeError, "fingerprint must be a dense tensor"),
        (torch._efficientzerotensor((N, 3)), TypeError, "fingerprint must be a dense tensor, got one that has no mem"),
        ([torch.ones(3)] * (N - 1) + [torch.ones(4)], ValueError, "fingerprint must be .* got tensors of 2 shapes"),
    ],
    "action_key": [
        (None, ValueError, "action_key is missing; estimator='q_style'.*action_keys"),
        (BATCH.action_key[:-1], ValueError, "action_key must have one entry per row"),
        (BATCH.action_key.astype(float), TypeError, "action_key must have an integer dtype"),
        (["go"] * N, TypeError, "action_key must be integers"),
    ],
    "action_parsed": [
        ([True], ValueError, "action_parsed must have one entry per row"),
        (np.full(N, 0.5), TypeError, "action_parsed must be bool"),
    ],
    "valid": [([True], ValueError, "must have one entry per row"), (np.full(N, 2), TypeError, "valid must be bool")],
    "observation": [(["o"], ValueError, "observation must have one entry per row")],
    "config": [({"epsilon": 0.1}, TypeError, "config must be a bipace_kernels.Config")],
    "backend": [
        ("gpu", ValueError, "backend must be one of auto, reference, cpu, triton, cuda, got 'gpu'"),
        ("triton", bk.BackendError, "backend='triton' cannot run here"),
        ("cuda", bk.BackendError, "backend='cuda' cannot run here"),
        (None, ValueError, "backend must be one of"),
    ],
    "check": [("later", ValueError, "check must be 'auto' or 'now'")],
    "num_threads": [
        (0, ValueError, "num_threads must be None or an int of at least 1"),
        (True, ValueError, "num_threads must be"),
    ],
    "layout": [
        ("layout", TypeError, "layout must come from bipace_kernels.layout"),
        (bk.layout(BATCH.group, BATCH.trajectory, BATCH.step), ValueError, "group must be None where a layout is"),
    ],
}
