"""Simple float64 loops that follow the paper: a backend, and the reference for tests of the others.

For the stages' inputs and outputs see contract.py.
"""
