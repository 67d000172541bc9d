"""The MXNet backend: `backend.MXNetBackend` is its front door."""
