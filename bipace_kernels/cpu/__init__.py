"""Compiled C++ kernels (csrc/cpu): the default on CPUs."""

from . import action_keys, clusters, combine, critic, episode, ngrams, observations, pooling, returns, similar, values

__all__ = [
    "action_keys",
    "clusters",
    "combine",
    "critic",
    "episode",
    "ngrams",
    "observations",
    "pooling",
    "returns",
    "similar",
    "values",
]
