"""Nested batches, their split over devices, datasets and prefetching."""
