"""Traces: the batch size of every step, and where it comes from."""
