"""CountReads: how often the host would wait for a device."""

from torch import Tensor
from torch.overrides import TorchFunctionMode


class CountReads(TorchFunctionMode):
    """Counts the calls that synchronize and copy values to the host."""

    READS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__)

    def __init__(self):
        super().__init__()
        self.num_reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.num_reads += func in self.READS
        return func(*args, **(kwargs or {}))
