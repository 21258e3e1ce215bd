"""How fast the estimator is, against what people would write without it, on this machine (`python -m bench`)."""
