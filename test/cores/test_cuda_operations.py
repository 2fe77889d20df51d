"""Formulas as one kernel of CUDA: the same results as from tensors. Its statements mean the same in Python, with NumPy.

``tools/on_gpu.py`` compiles the same kernel and trains with it.
"""

import re

import numpy as np
import torch
from every_operator import results

from variable_batch_size.cores.communicator import SingleProcess
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


def in_numpy(formula):
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


def test_statements_have_the_results_of_tensors():
    found = results(in_numpy, "cpu", torch.float64)
    expected = results(SingleProcess().as_operation, "cpu", torch.float64)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-15, atol=0)


def test_all_statements_are_in_the_kernel_whose_parameters_are_the_vectors():
    source = source_of(lambda numbers, others: ([numbers[0] * others[1]], [numbers[1] > 2.0]), [2, 3])
    (head, *lines) = source.text[source.text.index("extern") :].splitlines()
    assert head.endswith("formula(const double* from0, const double* from1, double* to0, bool* to1) {")
    assert [line.strip("; ") for line in lines[:-1]] == source.statements
    assert source.results == [(1, torch.float64), (1, torch.bool)]
