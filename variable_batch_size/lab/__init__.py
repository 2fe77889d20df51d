"""The lab: what surrounds a training, that is planning, comparison, watching, and the command ``vbs``.

The command line is stable; the Python interface may change in any version.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
