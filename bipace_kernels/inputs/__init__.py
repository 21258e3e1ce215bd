"""Arguments of `advantage()`: arrays to tensors, ids to a layout, checks."""
