"""The older name of `mgpu.prefetching`."""
from mgpu.prefetching import Prefetched, prefetch

__all__ = ["Prefetched", "prefetch"]
