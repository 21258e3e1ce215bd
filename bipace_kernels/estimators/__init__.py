"""What `advantage()` can compute: tables of partitions, estimators and values, and the parts of the chain above the stages."""
