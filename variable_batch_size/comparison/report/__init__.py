"""The report of a comparison, made of its results."""
