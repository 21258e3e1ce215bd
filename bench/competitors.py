"""Tuned versions of common or easily written alternatives.

Buffers are allocated once, products use BLAS and all threads of the run, and data that a trainer already has
(sorted rows, group offsets) is not timed. The package uses none of this; each result is compared
with the package's before anything is timed.
"""

import difflib
import importlib
import re
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import bipace_kernels as bk

from .measure import blas_threads
from .workloads import EPSILON, GAMMA, Floats, Ints, Objects

DELTA = 1e-6


def numpy_values(
    fingerprint: Floats, offsets: Sequence[int], returns: Floats, time: Ints, config: bk.Config
) -> npt.NDArray[np.float64]:
    """A Gaussian process per group by BLAS and LAPACK: mean + K (K + noise I)⁻¹ (R − mean), products in float32."""
    width, horizon, noise = config.kernel_width, config.kernel_time or np.inf, config.kernel_noise
    out = np.empty(len(returns))
    for start, end in pairwise(offsets):
        x, r, t = fingerprint[start:end], returns[start:end].astype(np.float64), time[start:end]
        z = x / np.sqrt(np.einsum("nd,nd->n", x, x))[:, None]
        z -= z.mean(axis=0)
        z /= np.sqrt(np.einsum("nd,nd->n", z, z))[:, None]
        k = np.exp(((z @ z.T).astype(np.float64) - 1) / width - ((t[:, None] - t) / horizon) ** 2 / 2)
        y = r - r.mean()
        out[start:end] = r.mean() + y - noise * np.linalg.solve(k + noise * np.eye(len(k)), y)
    return out


def numpy_clusters(fingerprint: Floats, offsets: Sequence[int], *, threads: int = 0) -> Ints:
    """The paper's Algorithm 1: one BLAS product of the open centroids with each record, centroids in one buffer.

    fingerprint  [N, D] float32, rows of any length, in processing order
    offsets      [G + 1]
    threads      that groups are distributed over (BLAS, then single-threaded, runs without the GIL); 0: those of BLAS
    """
    longest = max(b - a for a, b in pairwise(offsets))
    labels = np.empty(len(fingerprint), np.int64)
    buffers = threading.local()

    def group(g: int) -> int:
        start, end = offsets[g], offsets[g + 1]
        if not hasattr(buffers, "unit"):
            buffers.unit = _aligned(longest, fingerprint.shape[1])
            buffers.room = _aligned(longest, fingerprint.shape[1])
        return _numpy_group(fingerprint[start:end], labels[start:end], buffers.unit, buffers.room)

    with blas_threads(1) if threads else nullcontext(), ThreadPoolExecutor(threads or 1) as pool:
        counts = list(pool.map(group, range(len(offsets) - 1)))
    first = 0
    for g, count in enumerate(counts):
        labels[offsets[g] : offsets[g + 1]] += first
        first += count
    return labels


def _aligned(rows: int, columns: int) -> Floats:
    """[rows, columns] float32 that begins on a cache line: else each load of BLAS touches two, up to 1.6 × slower."""
    bytes_ = np.empty(4 * rows * columns + 64, np.uint8)
    start = -bytes_.ctypes.data % 64
    return bytes_[start : start + 4 * rows * columns].view(np.float32).reshape(rows, columns)


def _numpy_group(rows: Floats, labels: Ints, unit: Floats, centroids: Floats) -> int:
    """Clusters one group's rows into `labels`, numbered from 0, by two buffers. Returns their number."""
    norm = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    unit = np.divide(rows, norm[:, None], out=unit[: len(rows)])
    similarity = np.empty(len(centroids), np.float32)
    scaled = np.empty_like(unit[0])
    count = np.zeros(len(centroids), np.int64)
    limit = np.float32(1.0 - EPSILON)
    found = 0
    for i, x in enumerate(unit):
        best = -1
        if found:
            np.dot(centroids[:found], x, out=similarity[:found])
            best = int(similarity[:found].argmax())
        if best < 0 or similarity[best] < limit:
            best = found
            centroids[found] = x
            count[found] = 1
            found += 1
        else:
            count[best] += 1
            c = centroids[best]
            c *= np.float32((count[best] - 1) / count[best])
            c += np.multiply(x, np.float32(1.0 / count[best]), out=scaled)
            c *= np.float32(1.0 / np.sqrt(np.dot(c, c)))
        labels[i] = best
    return found


def torch_clusters(fingerprint: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """The per-record loop a user would write in torch, on any device, with the centroids of a group in one tensor."""
    labels = torch.empty(len(fingerprint), dtype=torch.int64)
    unit = torch.nn.functional.normalize(fingerprint.float(), dim=1)
    first = 0
    for start, end in pairwise(offsets):
        centroids = torch.empty(end - start, fingerprint.shape[1], device=fingerprint.device)
        count = [0] * (end - start)
        found = 0
        for i in range(start, end):
            x = unit[i]
            best = -1
            if found:
                value, index = torch.mv(centroids[:found], x).max(dim=0)
                best = int(index) if float(value) >= 1.0 - EPSILON else -1
            if best < 0:
                best = found
                centroids[best] = x
                found += 1
            else:
                c = centroids[best]
                c.lerp_(x, 1.0 / (count[best] + 1)).div_(c.norm())
            count[best] += 1
            labels[i] = first + best
        first += found
    return labels


def community_detection() -> Callable[..., Any]:
    """sentence_transformers.util.community_detection; ImportError says why it is not available."""
    detect: Callable[..., Any] = importlib.import_module("sentence_transformers.util").community_detection
    return detect


def communities(fingerprint: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """community_detection group by group at threshold 1 − ε; it drops no record when communities of one are allowed."""
    detect = community_detection()
    labels = torch.empty(len(fingerprint), dtype=torch.int64)
    first = 0
    for start, end in pairwise(offsets):
        for members in detect(fingerprint[start:end], threshold=1.0 - EPSILON, min_community_size=1):
            labels[torch.as_tensor(members) + start] = first
            first += 1
    return labels


def gigpo_pipeline(
    rewards: Floats,  # [N]
    score: torch.Tensor,  # [N] return of the record's trajectory
    group: Any,  # [N] object array of uuid strings, or integers
    trajectory: Any,  # [N] likewise
    observation: Objects,  # [N] object array of strings
    *,
    divide: bool = False,
) -> torch.Tensor:
    """GiGPO as trainers compute it: a list per group, torch.tensor of it, one np.where per record for the returns.

    What it computes is `Config.gigpo(mode="mean_std_norm" if divide else "mean_norm")`. The copies over response tokens
    and the prints of the real ones are left out.
    """
    returns = _returns_by_search(rewards, trajectory)
    episode = _normalise_by_lists(score, group, divide=divide, lone_mean_zero=True)
    state = _name_states(observation, group)
    step = _normalise_by_lists(returns, state, divide=divide, lone_mean_zero=False)
    return episode + step


def _returns_by_search(rewards: Floats, trajectory: Any) -> torch.Tensor:
    by_name: dict[Any, Floats] = {}
    for name in np.unique(trajectory):
        own = rewards[np.where(trajectory == name)[0]]
        out = np.zeros_like(own)
        ahead = 0.0
        for t in range(len(own) - 1, -1, -1):
            ahead = own[t] + GAMMA * ahead
            out[t] = ahead
        by_name[name] = out
    all_returns = np.zeros_like(rewards)
    for row, name in enumerate(trajectory):
        rows = np.where(trajectory == name)[0]
        all_returns[row] = by_name[name][np.where(rows == row)[0][0]]
    return torch.tensor(all_returns, dtype=torch.float32)


def _name_states(observation: Objects, group: Any) -> Objects:
    names = np.empty(len(observation), object)
    for g in np.unique(group):
        rows = np.where(group == g)[0]
        members = defaultdict(list)
        for row, text in zip(rows, observation[rows], strict=True):
            members[text].append(row)
        for together in members.values():
            name = str(uuid.uuid4())
            for row in together:
                names[row] = name
    return names


def _normalise_by_lists(values: torch.Tensor, names: Any, *, divide: bool, lone_mean_zero: bool) -> torch.Tensor:
    out = values.clone()
    members = defaultdict(list)
    for row in range(len(out)):
        members[names[row]].append(out[row])
    mean, deviation = {}, {}
    for name, items in members.items():
        if len(items) == 1:
            mean[name] = torch.tensor(0.0) if lone_mean_zero else torch.mean(torch.tensor(items))
            deviation[name] = torch.tensor(1.0)
        else:
            mean[name] = torch.mean(torch.tensor(items))
            deviation[name] = torch.std(torch.tensor([items]))
    for row in range(len(out)):
        name = names[row]
        out[row] = (out[row] - mean[name]) / (deviation[name] + DELTA) if divide else out[row] - mean[name]
    return out


def bipace_loop(
    fingerprint: torch.Tensor, offsets: Sequence[int], rewards: Floats, trajectory_length: int, action_key: Ints
) -> torch.Tensor:
    """BiPACE (q_style, the paper's episode term) by the torch clustering loop and dictionaries of lists.

    Rows are in processing order and all trajectories have one length, so returns and episode term are vectorised.
    """
    label = torch_clusters(fingerprint, offsets).tolist()
    table = rewards.reshape(-1, trajectory_length).astype(np.float64)
    back = np.zeros_like(table)
    ahead = np.zeros(len(table))
    for t in range(trajectory_length - 1, -1, -1):
        ahead = table[:, t] + GAMMA * ahead
        back[:, t] = ahead
    value = back.reshape(-1).astype(np.float32).tolist()
    key = action_key.tolist()
    in_cluster, in_action = defaultdict(list), defaultdict(list)
    for i, r in enumerate(value):
        in_cluster[label[i]].append(r)
        in_action[label[i], key[i]].append(r)
    step = []
    for i, r in enumerate(value):
        peers, same = in_cluster[label[i]], in_action[label[i], key[i]]
        if len(peers) == 1:
            step.append(0.0)
        elif len(same) == 1:
            step.append(r - (sum(peers) - r) / (len(peers) - 1))
        else:
            step.append(sum(same) / len(same) - sum(peers) / len(peers))
    score = torch.from_numpy(table.sum(1))
    episode = torch.empty(len(value), dtype=torch.float64)
    for start, end in pairwise(offsets):
        own = score[start // trajectory_length : end // trajectory_length]
        episode[start:end] = ((own - own.mean()) / (own.std() + DELTA)).repeat_interleave(trajectory_length)
    return (episode + torch.tensor(step, dtype=torch.float64)).float()


_TAG = re.compile(r"<action>(.*?)</action>", re.DOTALL)


def keys_of_texts(texts: Sequence[str]) -> tuple[list[int], list[bool]]:
    """re + hash. Rows without a tag get the hash of the first 64 characters."""
    keys, parsed = [], []
    for text in texts:
        match = _TAG.search(text)
        parsed.append(match is not None)
        keys.append(hash(match.group(1).strip().lower()) if match else hash(text[:64]))
    return keys, parsed


def decoded_keys(
    tokenizer: Any, ids: torch.Tensor, first: int, *, in_rust: bool = False
) -> tuple[list[int], list[bool]]:
    """batch_decode + re + hash; rows without a tag get the hash of their first `first` tokens.

    in_rust  by the tokenizers library's own decode_batch, which decodes rows in parallel outside Python
    """
    decode, rows = tokenizer.batch_decode, ids
    if in_rust:
        decode, rows = tokenizer.backend_tokenizer.decode_batch, ids.tolist()
    keys, parsed = keys_of_texts(decode(rows, skip_special_tokens=True))
    for row, found in enumerate(parsed):
        if not found:
            keys[row] = hash(tuple(ids[row, :first].tolist()))
    return keys, parsed


def similar_loop(texts: Sequence[str], offsets: Sequence[int], threshold: float) -> Ints:
    """First fit by SequenceMatcher(None, text, first member).ratio(), as trainers write it."""

    def similar(text: str, other: str) -> bool:
        return difflib.SequenceMatcher(None, text, other).ratio() >= threshold

    return _first_fit(texts, offsets, str, similar)


def similar_loop_best(texts: Sequence[str], offsets: Sequence[int], threshold: float) -> Ints:
    """difflib as its documentation recommends: one indexed matcher per representative, cheap bounds first."""

    def similar(text: str, matcher: difflib.SequenceMatcher[str]) -> bool:
        matcher.set_seq1(text)
        return all(r() >= threshold for r in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio))

    return _first_fit(texts, offsets, lambda text: difflib.SequenceMatcher(None, b=text), similar)


def _first_fit(
    texts: Sequence[str], offsets: Sequence[int], represent: Callable[[str], Any], similar: Callable[[str, Any], bool]
) -> Ints:
    labels = np.empty(len(texts), np.int64)
    first = 0
    for start, end in pairwise(offsets):
        representatives: list[Any] = []
        for i in range(start, end):
            for k, other in enumerate(representatives):
                if similar(texts[i], other):
                    labels[i] = first + k
                    break
            else:
                labels[i] = first + len(representatives)
                representatives.append(represent(texts[i]))
        first += len(representatives)
    return labels


def ngram_loop(texts: Sequence[str], n: int, dim: int) -> Floats:
    """Hashed n-gram counts with the xxhash library and np.bincount, one text at a time."""
    import xxhash

    digest = xxhash.xxh64_intdigest
    out = np.empty((len(texts), dim), np.float32)
    for row, text in enumerate(texts):
        data = b"\x02" * (n - 1) + text.encode() + b"\x03" * (n - 1)
        h = np.array([digest(data[i : i + n], 5) for i in range(len(data) - n + 1)], np.uint64)
        sign = np.where(h & np.uint64(1), -1.0, 1.0)
        counts = np.bincount(((h >> np.uint64(1)) % np.uint64(dim)).astype(np.int64), sign, dim)
        norm = np.sqrt(counts @ counts)
        if norm == 0.0:
            counts[0] = norm = 1.0
        out[row] = counts / norm
    return out
