"""Partition "similar": verl-agent's similarity mode, as a plain loop over difflib."""

from difflib import SequenceMatcher
from itertools import pairwise

import torch
from torch import Tensor


def cluster_similar(texts: list[str], group_offsets: Tensor, similarity: float) -> Tensor:
    labels: list[int] = []
    n_clusters = 0
    offsets = group_offsets.tolist()
    for low, high in pairwise(offsets):
        first_members: list[str] = []
        for text in texts[low:high]:
            k = 0
            while k < len(first_members) and SequenceMatcher(None, text, first_members[k]).ratio() < similarity:
                k += 1
            if k == len(first_members):
                first_members.append(text)
            labels.append(n_clusters + k)
        n_clusters += len(first_members)
    return torch.tensor(labels, dtype=torch.int64)
