"""Adapters for trainers, installed as bipace_kernels.integrations."""
