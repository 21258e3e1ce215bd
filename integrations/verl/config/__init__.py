"""Configurations of the paper's runs.  A package, since Hydra warns of a `pkg://` that has no such file."""
