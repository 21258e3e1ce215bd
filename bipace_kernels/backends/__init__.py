"""The stages: their contract, how a backend is chosen, and a package for each backend."""
