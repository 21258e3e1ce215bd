"""Compiled C++ kernels (csrc/cpu): the default on CPUs.  For the stages' inputs and outputs see contract.py."""

from . import action_keys, clusters, critic, episode, ngrams, observations, returns, similar, values

__all__ = [
    "action_keys",
    "clusters",
    "critic",
    "episode",
    "ngrams",
    "observations",
    "returns",
    "similar",
    "values",
]
