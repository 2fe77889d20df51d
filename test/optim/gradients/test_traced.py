"""TracedAccumulator, which XLA needs, equals BucketAccumulator; tested without XLA."""

import pytest
import torch
from noted_programs import Noting, Programs
from threaded_cores import run_on
from torch import nn

from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.optim.gradients.accumulator import StepPlan
from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.gradients.traced import TracedAccumulator

ONE = StepPlan(1)


def layer():
    """A matrix, a vector, a scalar and a parameter without a gradient, in two groups."""
    generator = torch.Generator().manual_seed(0)  # not the one that all threads share
    shapes = [(3, 2), (4,), (), (2,)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    return parameters, torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)


def run_step(kind, core, *, poison=None):
    """Two minibatches on each core; returns gradients and norms."""
    parameters, inner = layer()
    gradients = kind(inner, core, measures=True)
    mean = StepPlan(4 if poison is None else 2)
    for number in range(2):
        generator = torch.Generator().manual_seed(2 * core.rank + number)
        for p in parameters[:3]:
            p.grad = torch.randn(p.shape, generator=generator)
            if core.rank == poison:
                p.grad.fill_(torch.nan)
        gradients.accumulate(mean._replace(is_last=number == 1))
        assert all(p.grad is None for p in parameters)
    step = gradients.reduce(mean._replace(is_idle=core.rank == poison))
    measured = step.measure()
    assert measured.is_finite
    return [p.grad if p.grad is None else p.grad.clone() for p in parameters], measured.norms


@pytest.mark.parametrize("poison", [None, 1])
def test_sums_and_norms_equal_those_of_buckets(poison):
    def run(core):
        kinds = (TracedAccumulator, BucketAccumulator)
        return [run_step(kind, core, poison=poison) for kind in kinds]

    for (separate, norms), (flat, expected) in run_on(2, run):
        assert separate[3] is flat[3] is None
        torch.testing.assert_close(separate[:3], flat[:3])
        torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)


def test_a_step_starts_from_nothing():
    parameters, inner = layer()
    gradients = TracedAccumulator(inner, SingleProcess(), measures=True)
    for value in (5.0, 2.0):
        parameters[2].grad = torch.tensor(value)
        gradients.accumulate(ONE)
        step = gradients.reduce(ONE)
        assert parameters[2].grad.item() == value
        assert parameters[0].grad is None  # which this step does not have
        assert step.measure().norms[1] == (value**2, value**2)
        gradients.reset()
        assert parameters[2].grad is None


def test_where_the_host_reads_a_step_its_gradient_takes_the_memory_of_the_sums():
    """The graph ends there: it would return both."""
    parameters, inner = layer()
    gradients = TracedAccumulator(inner, SingleProcess(), measures=True)
    places = []
    for value in (5.0, 2.0):
        for p in parameters[:3]:
            p.grad = torch.full(p.shape, value)
        gradients.accumulate(ONE)
        gradients.reduce(ONE).measure()
        assert [p.grad.unique().item() for p in parameters[:3]] == [value] * 3
        places.append([p.grad.data_ptr() for p in parameters[:3]])
        gradients.reset()
    assert places[0] == places[1] == [gradients._sums[p].data_ptr() for p in parameters[:3]]


def test_gradient_without_a_divisor_is_left_out_by_the_same_graph():
    parameters, inner = layer()
    divisors = {}
    gradients = TracedAccumulator(inner, SingleProcess(), measures=True, divisors=divisors)

    def run():
        for p in parameters[:3]:
            p.grad = torch.full(p.shape, 6.0)
        with Programs() as programs:
            gradients.accumulate(ONE)
            step = gradients.reduce(ONE)
            measured = step.measure()
            gradients.reset()
        assert measured.is_finite
        return measured.norms, programs.current

    without, first = run()
    divisors[parameters[1]] = torch.full((4,), 2.0)
    of_one, second = run()
    divisors |= {p: torch.ones(p.shape) for p in parameters}
    of_all, third = run()
    divisors.clear()
    gradients.begin_epoch(0)  # as when the initial state is loaded
    assert run() == (without, first)
    assert without == [None, None]
    assert of_one == [(36.0, 36.0), None]
    assert of_all == [(360.0, 360.0), (36.0, 36.0)]
    assert first == second == third
    assert len(first) > 20


def test_new_tensors_are_on_the_device_before_they_are_used():
    parameters, inner = layer()
    programs = Programs()
    gradients = TracedAccumulator(inner, Noting(programs), measures=True)
    parameters[0].grad = torch.ones(3, 2)
    gradients.accumulate(ONE._replace(is_last=False))
    assert len(programs.found) == 0
    added = nn.Parameter(torch.ones(2))
    inner.add_param_group({"params": [added]})
    added.grad = torch.ones(2)
    gradients.accumulate(ONE._replace(is_last=False))
    assert len(programs.found) == 1
    gradients.accumulate(ONE)
    assert len(programs.found) == 1
    gradients.reduce(ONE)
    assert added.grad.tolist() == [1, 1]


@pytest.mark.parametrize("changes", ["weights", "unfreezing", "group", "loop"])
def test_cores_with_one_and_two_minibatches_sum_with_the_same_graph(changes):
    """Also with the first weights, with gradients of another parameter, or if the loop sums values on the device."""

    def last_program(num_minibatches):
        parameters, inner = layer()
        parameters[0].requires_grad_(changes != "unfreezing")
        programs = Programs()
        core = Noting(programs)
        gradients = TracedAccumulator(inner, core, measures=True)
        parameters[0].requires_grad_(True)
        added = [nn.Parameter(torch.ones(2))] if changes == "group" else []
        if added:
            inner.add_param_group({"params": added})
        with programs:
            for number in range(num_minibatches):
                core.flush()
                if number and changes == "loop":
                    torch.ones(1).add_(torch.ones(1))  # losses of the minibatches so far
                for p in (*parameters[:3], *added):
                    p.grad = torch.ones_like(p)
                gradients.accumulate(StepPlan(3, is_last=False), 2.0 if changes == "weights" else None)
            gradients.reduce(StepPlan(3))
        return programs.current

    assert last_program(1) == last_program(2)
    assert len(last_program(1)) > 20


def test_a_parameter_may_be_converted_within_a_step():
    parameters, inner = layer()
    gradients = TracedAccumulator(inner, SingleProcess(), measures=True)
    parameters[1].grad = torch.ones(4)
    gradients.accumulate(ONE._replace(is_last=False))
    parameters[1].data = parameters[1].data.double()
    parameters[1].grad = torch.ones(4, dtype=torch.float64)
    gradients.accumulate(ONE)
    gradients.reduce(ONE)
    assert parameters[1].grad.tolist() == [2, 2, 2, 2]
    assert parameters[1].grad.dtype == torch.float64


def test_square_of_a_complex_gradient_is_its_squared_magnitude():
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    gradients = TracedAccumulator(torch.optim.SGD([p], lr=0.1), SingleProcess(), measures=True)
    p.grad = torch.tensor([3 + 4j, 0])
    gradients.accumulate(ONE)
    step = gradients.reduce(ONE)
    assert step.measure().norms == [(25.0, 25.0)]
