"""Small helpers without knowledge of the estimator."""
