"""Every backend's module against the Protocol of its stage: only for mypy (`make lint`), never executed."""

from __future__ import annotations

from bipace_kernels import stages
from bipace_kernels.cpu import action_keys as cpu_action_keys
from bipace_kernels.cpu import clusters as cpu_clusters
from bipace_kernels.cpu import combine as cpu_combine
from bipace_kernels.cpu import critic as cpu_critic
from bipace_kernels.cpu import episode as cpu_episode
from bipace_kernels.cpu import ngrams as cpu_ngrams
from bipace_kernels.cpu import observations as cpu_observations
from bipace_kernels.cpu import returns as cpu_returns
from bipace_kernels.cpu import similar as cpu_similar
from bipace_kernels.cpu import values as cpu_values
from bipace_kernels.cuda import action_keys as cuda_action_keys
from bipace_kernels.cuda import clusters as cuda_clusters
from bipace_kernels.cuda import values as cuda_values
from bipace_kernels.reference import action_keys as reference_action_keys
from bipace_kernels.reference import clusters as reference_clusters
from bipace_kernels.reference import combine as reference_combine
from bipace_kernels.reference import critic as reference_critic
from bipace_kernels.reference import episode as reference_episode
from bipace_kernels.reference import ngrams as reference_ngrams
from bipace_kernels.reference import observations as reference_observations
from bipace_kernels.reference import returns as reference_returns
from bipace_kernels.reference import similar as reference_similar
from bipace_kernels.reference import values as reference_values
from bipace_kernels.triton_kernels import action_keys as triton_kernels_action_keys
from bipace_kernels.triton_kernels import clusters as triton_kernels_clusters
from bipace_kernels.triton_kernels import combine as triton_kernels_combine
from bipace_kernels.triton_kernels import critic as triton_kernels_critic
from bipace_kernels.triton_kernels import episode as triton_kernels_episode
from bipace_kernels.triton_kernels import ngrams as triton_kernels_ngrams
from bipace_kernels.triton_kernels import observations as triton_kernels_observations
from bipace_kernels.triton_kernels import returns as triton_kernels_returns
from bipace_kernels.triton_kernels import values as triton_kernels_values

RETURNS: list[stages.Returns] = [reference_returns, cpu_returns, triton_kernels_returns]
EPISODE: list[stages.Episode] = [reference_episode, cpu_episode, triton_kernels_episode]
CLUSTERS: list[stages.Clusters] = [reference_clusters, cpu_clusters, triton_kernels_clusters, cuda_clusters]
OBSERVATIONS: list[stages.Observations] = [reference_observations, cpu_observations, triton_kernels_observations]
SIMILAR: list[stages.Similar] = [reference_similar, cpu_similar]
VALUES: list[stages.Values] = [reference_values, cpu_values, triton_kernels_values, cuda_values]
CRITIC: list[stages.Critic] = [reference_critic, cpu_critic, triton_kernels_critic]
COMBINE: list[stages.Combine] = [reference_combine, cpu_combine, triton_kernels_combine]
ACTION_KEYS: list[stages.ActionKeys] = [
    reference_action_keys,
    cpu_action_keys,
    triton_kernels_action_keys,
    cuda_action_keys,
]
NGRAMS: list[stages.Ngrams] = [reference_ngrams, cpu_ngrams, triton_kernels_ngrams]
TEXTS: list[stages.Texts] = [reference_action_keys, cpu_action_keys]
