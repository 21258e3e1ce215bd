"""Obvious float64 loops that read like the paper; a backend that may be selected, and the truth the others are tested against."""

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
