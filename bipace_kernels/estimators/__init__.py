"""What `advantage()` can compute: partitions, estimators and values, and the parts of the chain above the stages."""
