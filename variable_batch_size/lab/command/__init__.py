"""The command ``vbs``: a file for each of its commands."""
