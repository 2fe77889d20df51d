"""Operations that stand for many on XLA: the same results as from tensors, in one graph of all cores."""

import pytest
import torch

from variable_batch_size.cores import xla, xla_operations
from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.rules.numbers import at_least, at_most, sqrt, where

VALUES = [0.0, 1.0, -2.5, 3.0, float("inf"), float("nan")]
TENSORS = [(3, 4), (), (5,)]


def formula(numbers, others):
    """With every operator and choice that rules use."""
    first, second = numbers
    (other,) = others
    is_more, is_known = first > other, second != 0
    return [
        first + second + 1 - other,
        2 - first * second / 4,
        1 / other + True * other,
        (other * 4) // 1.5,
        first**1 + first**2 + at_least(other, 0.5) ** at_most(other, 2.0),
        sqrt(at_least(first, 0.0)),
        at_most(at_least(second, -1.0), other),
        where(is_more, first, 7.0),
        where(is_more & is_known, 7.0, first),
        where(is_more | False, first, second),
        3 + is_known * 2.0 + (first >= 1),
        (where(is_more, is_known, True)) * 1.0,
    ], [is_more, True & is_known, is_more | (first < other), is_more.logical_not(), (second == other) & True]


def each_pair(communicator, device):
    operation = communicator.as_operation(formula)
    found = []
    for number in VALUES:
        for other in (0.5, 2.0, 3.0):
            rows = operation(torch.tensor([number, 1 - other]).to(device), torch.tensor([other]).to(device))
            communicator.flush()
            found += [row.cpu() for row in rows]
    return found


def operations_of_a_core():
    cores, device = xla.XlaDevices(), xla.device()
    found = each_pair(cores, device)
    generator = torch.Generator().manual_seed(0)
    ones, others = ([torch.randn(shape, generator=generator) for shape in TENSORS] for _ in range(2))
    chosen = []
    for is_first in (True, False):
        condition = torch.tensor([is_first]).to(device).view(())
        on_device = [[tensor.to(device) for tensor in tensors] for tensors in (ones, others)]
        chosen.append(cores.where(condition, *on_device))
    square = cores.squared_norm([tensor.to(device) for tensor in (*ones, others[0].bfloat16())])
    cores.flush()
    chosen = [[tensor.cpu() for tensor in tensors] for tensors in chosen]
    return found, ones, others, chosen, square.cpu(), xla.num_programs()


@pytest.mark.xla
def test_operations_have_the_results_of_tensors_and_formulas_of_several_cores_one_graph(on_xla):
    expected = each_pair(SingleProcess(), "cpu")
    results = on_xla(2, operations_of_a_core)
    for found, ones, others, chosen, square, _ in results:
        torch.testing.assert_close(found, expected, equal_nan=True)
        torch.testing.assert_close(chosen, [ones, others], rtol=0, atol=0)
        squares = [tensor.float().square().sum() for tensor in (*ones, others[0].bfloat16())]
        torch.testing.assert_close(square, sum(squares))
    assert max(num_programs for *_, num_programs in results) == 2  # of the formula, and of the rest


def test_nothing_is_chosen_if_no_parameter_has_a_gradient():
    """A step of minibatches that are all left out has none."""
    assert xla_operations.where(torch.tensor(True), [], []) == []


def test_formula_cannot_branch_on_a_number_that_is_traced():
    """It would always take the first branch, as objects are true."""
    with pytest.raises(TypeError, match="`where`"):
        bool(xla_operations.Scalar(None))
