"""MXNet's operators of the NumPy interface (np, npx) in PyTorch."""
