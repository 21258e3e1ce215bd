"""Every backend's module against the Protocol of its stage: only for mypy (`make lint`), never executed."""

from bipace_kernels.backends import contract as stages
from bipace_kernels.backends.cpu import (
    action_keys as cpu_action_keys,
    clusters as cpu_clusters,
    critic as cpu_critic,
    episode as cpu_episode,
    ngrams as cpu_ngrams,
    observations as cpu_observations,
    returns as cpu_returns,
    similar as cpu_similar,
    values as cpu_values,
)
from bipace_kernels.backends.cuda import (
    action_keys as cuda_action_keys,
    clusters as cuda_clusters,
    values as cuda_values,
)
from bipace_kernels.backends.reference import (
    action_keys as reference_action_keys,
    clusters as reference_clusters,
    combine as reference_combine,
    critic as reference_critic,
    episode as reference_episode,
    ngrams as reference_ngrams,
    observations as reference_observations,
    returns as reference_returns,
    similar as reference_similar,
    values as reference_values,
)
from bipace_kernels.backends.triton import (
    action_keys as triton_action_keys,
    clusters as triton_clusters,
    combine as triton_combine,
    critic as triton_critic,
    episode as triton_episode,
    observations as triton_observations,
    returns as triton_returns,
    values as triton_values,
)

RETURNS: list[stages.Returns] = [reference_returns, cpu_returns, triton_returns]
EPISODE: list[stages.Episode] = [reference_episode, cpu_episode, triton_episode]
CLUSTERS: list[stages.Clusters] = [reference_clusters, cpu_clusters, triton_clusters, cuda_clusters]
OBSERVATIONS: list[stages.Observations] = [reference_observations, cpu_observations, triton_observations]
SIMILAR: list[stages.Similar] = [reference_similar, cpu_similar]
VALUES: list[stages.Values] = [reference_values, cpu_values, triton_values, cuda_values]
CRITIC: list[stages.Critic] = [reference_critic, cpu_critic, triton_critic]
COMBINE: list[stages.Combine] = [reference_combine, triton_combine]
ACTION_KEYS: list[stages.ActionKeys] = [reference_action_keys, cpu_action_keys, triton_action_keys, cuda_action_keys]
NGRAMS: list[stages.Ngrams] = [reference_ngrams, cpu_ngrams]
TEXTS: list[stages.Texts] = [reference_action_keys, cpu_action_keys]
