"""Compiled C++ kernels (csrc/cpu): the default on CPUs.  What each stage takes and gives: stages.py."""

from . import action_keys, clusters, combine, critic, episode, ngrams, observations, returns, similar, values

__all__ = [
    "action_keys",
    "clusters",
    "combine",
    "critic",
    "episode",
    "ngrams",
    "observations",
    "returns",
    "similar",
    "values",
]
