"""Count the operations on tensors, each of which takes time of the host."""

from torch.utils._python_dispatch import TorchDispatchMode


class CountOperations(TorchDispatchMode):
    """In this context, `num` is the number of operations so far."""

    num = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        self.num += 1
        return function(*args, **(kwargs or {}))
