"""Cores: the processes and devices that train together."""
