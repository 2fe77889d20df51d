"""Train PyTorch models with a variable global batch size, on XLA cores, torch.distributed processes or one process."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
