"""Foundations: checks of arguments, environment variables, files."""
