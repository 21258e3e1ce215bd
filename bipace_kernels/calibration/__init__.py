"""The choice of a layer, a pooling and ε for a model: `calibrate()` and its result."""
