"""Losses, initializers, metrics, small models and functions for networks
written by hand: formulas that are written once for both backends."""
