"""What a result can tell: metrics and value R²."""
