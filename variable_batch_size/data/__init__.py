"""Data: which samples a core runs, from a map-style or an iterable data set."""
