"""Losses, initializers, metrics, small models and functions for networks
without a framework's layers: formulas that both backends share."""
