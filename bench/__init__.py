"""Benchmarks of the estimator, compared with code that people would write without it (`python -m bench`)."""
