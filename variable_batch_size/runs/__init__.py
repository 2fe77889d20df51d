"""Runs: what surrounds training that takes hours."""
