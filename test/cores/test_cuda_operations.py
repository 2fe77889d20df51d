"""Formulas as one kernel of CUDA: the same results as from tensors. ``tools/on_gpu.py`` compiles it on a GPU."""

import torch
from every_operator import results
from kernel_in_numpy import as_operation

from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.cores.cuda_operations import source_of


def test_statements_have_the_results_of_tensors():
    found = results(as_operation, "cpu", torch.float64)
    expected = results(SingleProcess().as_operation, "cpu", torch.float64)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-15, atol=0)


def test_all_statements_are_in_the_kernel_whose_parameters_are_the_vectors():
    source = source_of(lambda numbers, others: ([numbers[0] * others[1]], [numbers[1] > 2.0]), [2, 3])
    (head, *lines) = source.text[source.text.index("extern") :].splitlines()
    assert head.endswith("formula(const double* from0, const double* from1, double* to0, bool* to1) {")
    assert [line.strip("; ") for line in lines[:-1]] == source.statements
    assert source.results == [(1, torch.float64), (1, torch.bool)]
