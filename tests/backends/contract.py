"""Every backend's module against the Protocol of its stage: only for mypy (`make lint`), never executed."""

# ruff: noqa: F401  # what is named by its package is imported by its own name: mypy sees no other
import bipace_kernels.backends.cpu.action_keys
import bipace_kernels.backends.cpu.clusters
import bipace_kernels.backends.cpu.critic
import bipace_kernels.backends.cpu.episode
import bipace_kernels.backends.cpu.ngrams
import bipace_kernels.backends.cpu.observations
import bipace_kernels.backends.cpu.returns
import bipace_kernels.backends.cpu.similar
import bipace_kernels.backends.cpu.values
import bipace_kernels.backends.cuda.action_keys
import bipace_kernels.backends.cuda.clusters
import bipace_kernels.backends.cuda.values
import bipace_kernels.backends.reference.action_keys
import bipace_kernels.backends.reference.clusters
import bipace_kernels.backends.reference.combine
import bipace_kernels.backends.reference.critic
import bipace_kernels.backends.reference.episode
import bipace_kernels.backends.reference.ngrams
import bipace_kernels.backends.reference.observations
import bipace_kernels.backends.reference.returns
import bipace_kernels.backends.reference.similar
import bipace_kernels.backends.reference.values
import bipace_kernels.backends.triton.action_keys
import bipace_kernels.backends.triton.clusters
import bipace_kernels.backends.triton.combine
import bipace_kernels.backends.triton.critic
import bipace_kernels.backends.triton.episode
import bipace_kernels.backends.triton.observations
import bipace_kernels.backends.triton.returns
import bipace_kernels.backends.triton.values
from bipace_kernels.backends import contract as stages, cpu, cuda, reference, triton

RETURNS: list[stages.Returns] = [reference.returns, cpu.returns, triton.returns]
EPISODE: list[stages.Episode] = [reference.episode, cpu.episode, triton.episode]
CLUSTERS: list[stages.Clusters] = [reference.clusters, cpu.clusters, triton.clusters, cuda.clusters]
OBSERVATIONS: list[stages.Observations] = [reference.observations, cpu.observations, triton.observations]
SIMILAR: list[stages.Similar] = [reference.similar, cpu.similar]
VALUES: list[stages.Values] = [reference.values, cpu.values, triton.values, cuda.values]
CRITIC: list[stages.Critic] = [reference.critic, cpu.critic, triton.critic]
COMBINE: list[stages.Combine] = [reference.combine, triton.combine]
ACTION_KEYS: list[stages.ActionKeys] = [reference.action_keys, cpu.action_keys, triton.action_keys, cuda.action_keys]
NGRAMS: list[stages.Ngrams] = [reference.ngrams, cpu.ngrams]
TEXTS: list[stages.Texts] = [reference.action_keys, cpu.action_keys]
