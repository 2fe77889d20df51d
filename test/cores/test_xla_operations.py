"""Operations that stand for many on XLA: the same results as from tensors, in one graph of all cores."""

import pytest
import torch
from every_operator import results

from variable_batch_size.cores import xla, xla_operations
from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.cores.formulas import Scalar

TENSORS = [(3, 4), (), (5,)]
FACTORS = [0.0, 0.5, 0.25, 2.0]


def operations_of_a_core():
    cores, device = xla.XlaDevices(), xla.device()
    found = results(cores.as_operation, device, flush=cores.flush)
    generator = torch.Generator().manual_seed(0)
    ones, others = ([torch.randn(shape, generator=generator) for shape in TENSORS] for _ in range(2))
    chosen = []
    for is_first in (True, False):
        condition = torch.tensor([is_first]).to(device).view(())
        on_device = [on_core(tensors, device) for tensors in (ones, others)]
        chosen.append(cores.where(condition, *on_device))
    scaled = [cores.scaled(on_core(to_scale(), device), torch.tensor(FACTORS).to(device))]
    squares = cores.squared_norms([on_core(ones, device), on_core([others[0].bfloat16()], device)])
    cores.flush()
    chosen, scaled = ([[tensor.cpu() for tensor in tensors] for tensors in lists] for lists in (chosen, scaled))
    return found, ones, others, chosen, scaled[0], squares.cpu(), xla.num_programs()


def on_core(tensors, device):
    return [tensor.to(device) for tensor in tensors]


def to_scale():
    """The gradients of an idle core do not count, not even NaN."""
    nan = float("nan")
    return [torch.tensor([[1.0, nan]]), torch.tensor([nan, 2.0]), torch.tensor(3.0), torch.tensor([1.0 + 2.0j])]


@pytest.mark.xla
def test_operations_have_the_results_of_tensors_and_formulas_of_several_cores_one_graph(on_xla):
    expected = results(SingleProcess().as_operation, "cpu")
    of_cores = on_xla(2, operations_of_a_core)
    expected_scaled = SingleProcess().scaled(to_scale(), torch.tensor(FACTORS))
    for found, ones, others, chosen, scaled, squares, _ in of_cores:
        torch.testing.assert_close(found, expected, equal_nan=True)
        torch.testing.assert_close(chosen, [ones, others], rtol=0, atol=0)
        torch.testing.assert_close(scaled, expected_scaled, equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(squares, SingleProcess().squared_norms([ones, [others[0].bfloat16()]]))
    assert max(num_programs for *_, num_programs in of_cores) == 2  # of the formula, and of the rest


def test_tensors_with_the_factor_0_are_0_even_of_nan_and_keep_their_type():
    nan, double = float("nan"), torch.tensor(2.0, dtype=torch.float64)
    tensors = [torch.tensor([[1.0, nan]]), torch.tensor([nan, 2.0]), double, torch.tensor([1.0 + 2.0j])]
    scaled = SingleProcess().scaled(tensors, torch.tensor(FACTORS))
    expected = [torch.zeros(1, 2), torch.tensor([nan, 1.0]), double / 4, torch.tensor([2.0 + 4.0j])]
    torch.testing.assert_close(scaled, expected, equal_nan=True, rtol=0, atol=0)


def test_nothing_is_chosen_if_no_parameter_has_a_gradient():
    """A step of minibatches that are all left out has none."""
    assert xla_operations.where(torch.tensor(True), [], []) == []


def test_formula_cannot_branch_on_a_number_that_is_traced():
    """It would always take the first branch, as objects are true."""
    with pytest.raises(TypeError, match="`where`"):
        bool(Scalar(None))
