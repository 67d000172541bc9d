"""The PyTorch backend: `backend.TorchBackend` is its front door."""
