"""The MXNet engine: `backend.MXNetBackend` is its front door."""
