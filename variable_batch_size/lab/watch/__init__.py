"""A page on which running trainings are watched, from the files that they write."""
