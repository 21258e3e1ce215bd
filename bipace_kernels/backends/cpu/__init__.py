"""Compiled C++ kernels (csrc/cpu): the default on CPUs.  For the stages' inputs and outputs see stages.py."""

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
