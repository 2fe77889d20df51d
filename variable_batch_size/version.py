"""The version of the package, in a file that imports nothing."""

__version__ = "0.2.0"
