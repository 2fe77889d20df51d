"""A scheduler that follows progress: where torch has it after as many steps, and no further than its end."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import variable_batch_size as vbs


@dataclass
class Run:
    """What has progress."""

    progress: float = 0.0


def new_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.8, momentum=0.9)


def linear(optimizer):
    return schedulers.LinearLR(optimizer, 0.25, total_iters=4)


def cosine(optimizer):
    return schedulers.CosineAnnealingLR(optimizer, T_max=6, eta_min=0.01)


# how to make it, and after how many steps it stays as it is
ENDING = {
    "cosine": (cosine, 6),
    "one cycle": (lambda optimizer: schedulers.OneCycleLR(optimizer, 0.5, total_steps=9), 8),
    "one cycle in three": (lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=9, three_phase=True), 8),
    "linear": (linear, 4),
    "polynomial": (lambda optimizer: schedulers.PolynomialLR(optimizer, total_iters=5, power=2), 5),
    "warm-up, then cosine": (lambda o: schedulers.SequentialLR(o, [linear(o), cosine(o)], milestones=[4]), 10),
    "a sequence of one": (lambda o: schedulers.SequentialLR(o, [cosine(o)], milestones=[]), 6),
    "warm-up with cosine": (lambda o: schedulers.ChainedScheduler([linear(o), cosine(o)]), 6),
    "SWA": (lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=5), 5),
}
ENDLESS = {
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "exponential": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "warm restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 0.5, step_size_up=3),
    "cosine, then exponential": lambda o: schedulers.SequentialLR(
        o, [cosine(o), schedulers.ExponentialLR(o, 0.9)], milestones=[6]
    ),
}


def settings(optimizer):
    (group,) = optimizer.param_groups
    return group["lr"], group["momentum"]


def by_steps(make, number):
    """The learning rate and momentum of each position, as torch makes them."""
    optimizer = new_optimizer()
    scheduler = make(optimizer)
    found = [settings(optimizer)]
    for _ in range(number):
        optimizer.step()
        scheduler.step()
        found.append(settings(optimizer))
    return found


def by_progress(make, positions):
    optimizer, run = new_optimizer(), Run()
    scheduler = make(optimizer)
    optimizer.step()
    for run.progress in positions:
        vbs.follow_progress(scheduler, run)
        assert scheduler.get_last_lr() == [settings(optimizer)[0]]
        yield settings(optimizer)


@pytest.mark.parametrize("name", ENDING)
@pytest.mark.parametrize("stride", [1, 0.3, 3.7])
def test_it_is_where_torch_has_it_and_stays_at_its_end(name, stride):
    make, end = ENDING[name]
    expected = by_steps(make, end)
    positions = [number * stride for number in range(math.ceil(40 / stride))]
    for position, found in zip(positions, by_progress(make, positions), strict=True):
        assert found == expected[min(math.floor(position + 1e-9), end)], position


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_goes_on(name):
    expected = by_steps(ENDLESS[name], 40)
    assert list(by_progress(ENDLESS[name], range(41))) == expected


def test_a_part_of_a_chain_stays_at_its_end_while_the_others_go_on():
    def make(optimizer):
        return schedulers.ChainedScheduler([cosine(optimizer), schedulers.ExponentialLR(optimizer, 0.9)])

    (*_, at_the_end, _, two_later) = by_progress(make, range(9))
    assert two_later[0] == pytest.approx(at_the_end[0] * 0.9**2)


def test_a_scheduler_that_goes_by_a_metric_is_refused():
    with pytest.raises(ValueError, match="`scheduler` must go by its steps alone, got ReduceLROnPlateau"):
        vbs.follow_progress(schedulers.ReduceLROnPlateau(new_optimizer()), Run(1.0))
