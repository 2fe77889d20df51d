"""Traces: the batch size of every step, read from files, generated or converted from recordings."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
