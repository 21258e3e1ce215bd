"""Obvious float64 loops that read like the paper; a backend that may be selected, and the truth the others are tested against.

What each stage takes and gives: stages.py.
"""

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
