"""TracedAccumulator in fixed point, which XLA needs: its bits, and the graphs a device would compile, without XLA."""

import random

import pytest
import torch
from accumulators import ExactTracedAccumulator
from noted_programs import Noting, Programs
from threaded_cores import run_on
from torch import nn

from variable_batch_size.cores.communicator import SingleProcess
from variable_batch_size.optim.gradients.accumulator import StepPlan

SHAPES = [(3, 2), (4,), ()]
STEPS = [3, 1, 2, 5, 1, 4]  # minibatches: uneven shares and idle cores
LATER = [7, 2, 1, 8, 6, 9]


def gradient(step, place, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + place))


def run_steps(core, steps, *, weighted=False, on_minibatch=lambda: None):
    """The gradients and norms of every step."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    inner = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=1.0)
    gradients, found = ExactTracedAccumulator(inner, core, measures=True), []
    gradients.communicator.flush()
    for step, num_minibatches in enumerate(steps):
        mean = StepPlan(num_minibatches)
        own = range(core.rank, num_minibatches, core.num_replicas)
        for place in own or [0]:  # a padding minibatch
            for p in parameters:
                p.grad = gradient(step, place, p.shape)
            on_minibatch()
            is_last = not own or place == own[-1]
            gradients.accumulate(mean._replace(is_last=is_last), float(place % 3) if weighted else None)
            if not is_last:
                core.flush()
        step = gradients.reduce(mean._replace(is_idle=not own))
        found.append(([p.grad.clone() for p in parameters], step.measure()))
        gradients.reset()
        core.flush()
    return found


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("cores", [2, 3, 4])
def test_gradients_and_norms_have_the_same_bits_on_any_number_of_cores(cores, weighted):
    steps = [*STEPS, *LATER]
    if weighted:
        steps = [max(2, num) for num in steps]  # the first minibatch of each step has weight 0
    expected = run_steps(SingleProcess(), steps, weighted=weighted)
    for found in run_on(cores, lambda core: run_steps(core, steps, weighted=weighted), is_one_program=True):
        for (one, measured), (other, of_one_core) in zip(found, expected, strict=True):
            assert [a.numpy().tobytes() for a in one] == [b.numpy().tobytes() for b in other]
            assert measured == of_one_core


@pytest.mark.parametrize("weighted", [False, True])
def test_later_steps_need_no_new_graphs(weighted):
    def programs_of(steps):
        with Programs() as programs:
            run_steps(Noting(programs), steps, weighted=weighted)
        return set(programs.found)

    programs = programs_of(STEPS)
    assert programs_of([*STEPS, *LATER]) == programs
    assert len(programs) < 10


def test_gradients_are_assigned_in_the_same_order_on_all_cores():
    """Otherwise the graphs of the cores differ, and their collectives deadlock."""
    kept, orders = [], []
    for _ in range(2):
        parameters = [nn.Parameter(torch.zeros(size)) for size in range(1, 20)]
        gradients = ExactTracedAccumulator(torch.optim.SGD(parameters, lr=1.0), SingleProcess())
        kept.append(gradients)  # so that the others have different addresses
        for p in parameters:
            p.grad = torch.ones_like(p)
        with Programs() as programs:
            gradients.accumulate(StepPlan(1))
            gradients.reduce(StepPlan(1))
        orders.append(programs.current)
    assert orders[0] == orders[1]
    assert len(orders[0]) > 19


def test_every_minibatch_is_a_separate_graph():
    """Otherwise the compiler might fuse operations and round the gradient differently."""
    programs = Programs()
    of_user = []

    def on_minibatch():
        of_user.append(len(programs.found))
        programs.current = ["of the user"]

    with programs:
        run_steps(Noting(programs), STEPS, on_minibatch=on_minibatch)
    assert len(of_user) == sum(STEPS)
    assert {programs.found[place] for place in of_user} == {("of the user",)}
    # and so is the rounding of the accumulation
    adding = {programs.found[place + 1] for place in of_user[1:]}
    assert len(adding) == 1
    assert programs.found[of_user[0] + 3] in adding  # after those that measure and broadcast the first units


def test_gradients_scaled_by_a_power_of_two_have_the_same_bits():
    rng = random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(3)]
    found = []
    for scale in (1.0, 1024.0):
        p = nn.Parameter(torch.zeros(3))
        gradients = ExactTracedAccumulator(torch.optim.SGD([p], lr=1.0), SingleProcess())
        p.grad = torch.tensor(values) * scale
        gradients.accumulate(StepPlan(1))
        gradients.reduce(StepPlan(1))
        found.append((p.grad / scale).tolist())
    assert found[0] == found[1] == pytest.approx(values)


def test_gradient_below_its_unit_recovers_in_the_next_steps():
    p = torch.nn.Parameter(torch.zeros(2))
    gradients = ExactTracedAccumulator(torch.optim.SGD([p], lr=0.1), SingleProcess())
    found = []
    for size in (1.0, *[2.0**-58] * 4, 0.0, 2.0**-58):
        p.grad = torch.full((2,), size)
        gradients.accumulate(StepPlan(1))
        gradients.reduce(StepPlan(1))
        found.append(p.grad[0].item())
        gradients.reset()
    assert found == [1.0, 0.0, *[2.0**-58] * 3, 0.0, 2.0**-58]
