"""Every backend's module against the Protocol of its stage: only for mypy (`make lint`), never executed."""

from __future__ import annotations

from bipace_kernels.backends import contract as stages
from bipace_kernels.backends.cpu import action_keys as cpu_action_keys
from bipace_kernels.backends.cpu import clusters as cpu_clusters
from bipace_kernels.backends.cpu import critic as cpu_critic
from bipace_kernels.backends.cpu import episode as cpu_episode
from bipace_kernels.backends.cpu import ngrams as cpu_ngrams
from bipace_kernels.backends.cpu import observations as cpu_observations
from bipace_kernels.backends.cpu import returns as cpu_returns
from bipace_kernels.backends.cpu import similar as cpu_similar
from bipace_kernels.backends.cpu import values as cpu_values
from bipace_kernels.backends.cuda import action_keys as cuda_action_keys
from bipace_kernels.backends.cuda import clusters as cuda_clusters
from bipace_kernels.backends.cuda import values as cuda_values
from bipace_kernels.backends.reference import action_keys as reference_action_keys
from bipace_kernels.backends.reference import clusters as reference_clusters
from bipace_kernels.backends.reference import combine as reference_combine
from bipace_kernels.backends.reference import critic as reference_critic
from bipace_kernels.backends.reference import episode as reference_episode
from bipace_kernels.backends.reference import ngrams as reference_ngrams
from bipace_kernels.backends.reference import observations as reference_observations
from bipace_kernels.backends.reference import returns as reference_returns
from bipace_kernels.backends.reference import similar as reference_similar
from bipace_kernels.backends.reference import values as reference_values
from bipace_kernels.backends.triton import action_keys as triton_action_keys
from bipace_kernels.backends.triton import clusters as triton_clusters
from bipace_kernels.backends.triton import combine as triton_combine
from bipace_kernels.backends.triton import critic as triton_critic
from bipace_kernels.backends.triton import episode as triton_episode
from bipace_kernels.backends.triton import observations as triton_observations
from bipace_kernels.backends.triton import returns as triton_returns
from bipace_kernels.backends.triton import values as triton_values

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
