"""Schedules: which samples a core runs in which step."""
