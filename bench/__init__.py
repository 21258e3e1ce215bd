"""Benchmarks of the estimator on this machine, compared with code that people would write without it (`python -m bench`)."""
