"""`cluster()`, and ways to choose ε."""
