"""The operators of MXNet's NumPy interface."""
CASES = []
