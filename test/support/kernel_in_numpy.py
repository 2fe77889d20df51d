"""The kernel of a formula, run by NumPy: its statements mean the same in Python."""

import re

import numpy as np
import torch

from variable_batch_size.cores.cuda_operations import source_of

FUNCTIONS = {
    "infinity": np.float64(np.inf),
    "power": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "select": lambda condition, one, other: one if condition else other,
    "floor": np.floor,
    "sqrt": np.sqrt,
}


def as_operation(formula):
    """An operation that runs the statements of the kernel."""

    def operation(*vectors):
        source = source_of(formula, [len(vector) for vector in vectors])
        found = [np.zeros(size, bool if dtype == torch.bool else np.float64) for size, dtype in source.results]
        names = {f"from{number}": vector.numpy() for number, vector in enumerate(vectors)}
        names |= {f"to{number}": array for number, array in enumerate(found)}
        with np.errstate(all="ignore"):
            exec("\n".join(re.sub(r"^(double|bool) ", "", one) for one in source.statements), FUNCTIONS | names)
        return [torch.from_numpy(array) for array in found]

    return operation
