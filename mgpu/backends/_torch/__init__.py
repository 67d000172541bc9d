"""The PyTorch engine: `backend.TorchBackend` is its front door."""
