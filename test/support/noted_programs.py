"""The graphs that a device with lazy tracing would compile, recorded without such a device."""

import torch
from threaded_cores import Threads
from torch.utils._python_dispatch import TorchDispatchMode

from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.cores.xla import XlaDevices


class Programs(TorchDispatchMode):
    """The operations between two calls of mark_step, with the scalars that XLA compiles as constants."""

    def __init__(self):
        super().__init__()
        self.current = []
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.lift_fresh.default:  # made on the host, so not a constant
            values = (*args, *(kwargs or {}).values())
            leaves = [leaf for value in values for leaf in (value if isinstance(value, list | tuple) else (value,))]
            shapes = tuple(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor))
            constants = [leaf for leaf in leaves if isinstance(leaf, int | float) and leaf in (0, 1, -1)]
            self.current.append((function, shapes, str(constants)))
        return function(*args, **(kwargs or {}))

    def end(self, *, is_extra=False):
        self.found.append(tuple(self.current))
        self.current = []


class Noting(SingleProcess):
    """Records the calls of mark_step."""

    def __init__(self, programs):
        self.flush = programs.end


class NotingCore(Threads):
    """One of several threads that behaves like an XLA core and records the calls of mark_step."""

    is_one_program = True
    keeps_flat_gradients = False
    traced_scalar, traced_beta, broadcast = XlaDevices.traced_scalar, XlaDevices.traced_beta, XlaDevices.broadcast

    def __init__(self, core, programs):
        self.__dict__ |= core.__dict__ | {"is_one_program": True}
        self.flush = programs.end
