"""What a device that notes work down first would make programs of; looked at without one."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from variable_batch_size.cores.communicator import SingleProcess


class Programs(TorchDispatchMode):
    """What is done between two flushes, with the scalars that XLA makes part of a program."""

    def __init__(self):
        super().__init__()
        self.current = []
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves = tree_leaves(args)
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        constants = [leaf for leaf in leaves if isinstance(leaf, int | float) and leaf in (0, 1, -1)]
        if function is not torch.ops.aten.lift_fresh.default:  # made on the host, so data
            self.current.append((str(function), str(shapes), str(constants)))
        return function(*args, **(kwargs or {}))

    def end(self):
        self.found.append(tuple(self.current))
        self.current = []


class Noting(SingleProcess):
    """Says where what was noted down is started."""

    def __init__(self, programs):
        self.flush = programs.end
