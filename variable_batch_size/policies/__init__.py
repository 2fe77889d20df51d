"""Policies: choose batch sizes during a run; numbers in, a batch size out."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
