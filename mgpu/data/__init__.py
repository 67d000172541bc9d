"""Batches: how they are split and joined."""
