"""Schedules: assign the samples of every step to cores."""
