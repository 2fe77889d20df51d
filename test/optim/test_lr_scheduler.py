"""Schedulers that follow a run: equal to torch's after the same number of steps, and constant after their end."""

import functools
import math
import random
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import variable_batch_size as vbs
from variable_batch_size.optim.attachments import Follower


@dataclass
class Run:
    """An optimizer stub with progress."""

    late_progress: float = 0.0


def new_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.8, momentum=0.9)


def linear(optimizer):
    return schedulers.LinearLR(optimizer, 0.25, total_iters=4)


def cosine(optimizer):
    return schedulers.CosineAnnealingLR(optimizer, T_max=6, eta_min=0.01)


# constructor, and the number of steps after which it is constant
ENDING = {
    "cosine": (cosine, 6),
    "one cycle": (lambda optimizer: schedulers.OneCycleLR(optimizer, 0.5, total_steps=9), 8),
    "one cycle in three": (lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=9, three_phase=True), 8),
    "linear": (linear, 4),
    "polynomial": (lambda optimizer: schedulers.PolynomialLR(optimizer, total_iters=5, power=2), 5),
    "warm-up, then cosine": (lambda o: schedulers.SequentialLR(o, [linear(o), cosine(o)], milestones=[4]), 10),
    "a sequence of three": (
        lambda o: schedulers.SequentialLR(
            o, [linear(o), schedulers.ConstantLR(o, 0.5, 3), cosine(o)], milestones=[4, 7]
        ),
        13,
    ),
    "a sequence of one": (lambda o: schedulers.SequentialLR(o, [cosine(o)], milestones=[]), 6),
    "warm-up with cosine": (lambda o: schedulers.ChainedScheduler([linear(o), cosine(o)]), 6),
    "SWA": (lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=5), 5),
}
ENDLESS = {
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "exponential": lambda optimizer: schedulers.ExponentialLR(optimizer, 0.9),
    "warm restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 0.5, step_size_up=3),
    "warm-up, stable, decay": lambda o: schedulers.LambdaLR(
        o, lambda step: min(1.0, (step + 1) / 4, max(0.0, (12 - step) / 5))
    ),
    "steps": lambda optimizer: schedulers.MultiStepLR(optimizer, [3, 3, 7], gamma=0.3),
    "products": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda step: 0.9 + 0.01 * (step % 7)),
    "cosine, then exponential": lambda o: schedulers.SequentialLR(
        o, [cosine(o), schedulers.ExponentialLR(o, 0.9)], milestones=[6]
    ),
}


def settings(optimizer):
    (group,) = optimizer.param_groups
    return group["lr"], group["momentum"]


def by_steps(make, number):
    """Torch's learning rate and momentum at each position."""
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
    for run.late_progress in positions:
        Follower.checked(scheduler, "progress", 1).follow(run)
        assert scheduler.get_last_lr() == [settings(optimizer)[0]]
        yield settings(optimizer)


@pytest.mark.parametrize("name", ENDING)
@pytest.mark.parametrize("stride", [1, 0.3, 3.7])
def test_schedule_equals_that_of_torch_and_stays_at_its_final_value(name, stride):
    make, end = ENDING[name]
    expected = by_steps(make, end)
    positions = [number * stride for number in range(math.ceil(40 / stride))]
    for position, found in zip(positions, by_progress(make, positions), strict=True):
        assert found == expected[min(math.floor(position + 1e-9), end)], position


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_schedule_continues(name):
    expected = by_steps(ENDLESS[name], 40)
    assert list(by_progress(ENDLESS[name], range(41))) == expected


def test_part_of_a_chain_stays_at_its_final_value_while_others_continue():
    def make(optimizer):
        return schedulers.ChainedScheduler([cosine(optimizer), schedulers.ExponentialLR(optimizer, 0.9)])

    (*_, at_the_end, _, two_later) = by_progress(make, range(9))
    assert two_later[0] == pytest.approx(at_the_end[0] * 0.9**2)


def test_metric_based_scheduler_raises():
    with pytest.raises(ValueError, match=r"^a scheduler that is attached must depend on its steps only, got Red"):
        Follower.checked(schedulers.ReduceLROnPlateau(new_optimizer()), "progress", 1).follow(Run(1.0))


# ------------------------------------------------------------------------------------- by samples, whatever the trace

KINDS = {name: make for name, (make, _) in ENDING.items()} | ENDLESS
NUM_SAMPLES = 192
PICK = random.Random(3)
TRACES = {
    "constant": [8] * 24,
    "ramped": [2, 2, 4, 4, 6, 8, 10, 12, 16, 16, 16, 20, 24, 26, 26],
    "shrinking": [48, 40, 32, 24, 16, 12, 8, 6, 4, 2],
    "one large step": [2, 188, 2],
    **{f"random {number}": [2 * PICK.randint(1, 12) for _ in range(12)] for number in range(3)},
}


def optimizer_of(trace):
    sampler = vbs.CustomSampler(dataset_size=1000, trace=trace, minibatch_size=2)
    return vbs.ConstantOptimizer(new_optimizer(), sampler)


def steps_of(optimizer, **options):
    """Run all minibatches, and yield after each call of step() with these options."""
    parameter = optimizer.param_groups[0]["params"][0]
    for indices in optimizer.sampler:
        parameter.grad = torch.full_like(parameter, len(indices))
        optimizer.step(**options)
        yield


@functools.cache
def by_samples(name, trace, per, unit="samples", **options):
    """The learning rate and momentum at each number of samples."""
    optimizer = optimizer_of(TRACES[trace])
    scheduler = KINDS[name](optimizer)
    found = {}
    for _ in steps_of(optimizer, **options):
        Follower.checked(scheduler, unit, per).follow(optimizer.run)
        found[optimizer.samples_done] = settings(optimizer)
    return found


def by_units():
    """All kinds with a step in 8 samples, and every second one in 2 or 15; all with each in the long form."""
    for number, name in enumerate(KINDS):
        for per in (2, 8, 15):
            is_long = per == (15 if number % 2 else 2)
            yield pytest.param(name, per, marks=pytest.mark.long if is_long else ())


@pytest.mark.parametrize(("name", "per"), [*by_units()])
def test_learning_rate_at_the_same_samples_is_bitwise_equal_under_any_trace(name, per):
    end = ENDING[name][1] if name in ENDING else NUM_SAMPLES
    expected = by_steps(KINDS[name], min(end, NUM_SAMPLES // per))
    for trace in TRACES:
        for samples, found in by_samples(name, trace, per).items():
            assert found == expected[min(samples // per, len(expected) - 1)], (trace, samples)


@pytest.mark.parametrize("name", KINDS)
def test_learning_rate_at_the_same_weight_is_bitwise_equal_under_any_trace(name):
    for trace in TRACES:
        by_weight = by_samples(name, trace, 7 * 8, "tokens", weight=7 * 2)
        assert by_weight == by_samples(name, trace, 8)


def test_fractional_weights_may_sum_to_slightly_less_than_a_step():
    optimizer = optimizer_of([2] * 10)
    scheduler = linear(optimizer)
    for _ in steps_of(optimizer, weight=0.1):
        Follower.checked(scheduler, "tokens", 0.5).follow(optimizer.run)
    assert optimizer.weight_done < 1
    assert scheduler.last_epoch == 2


def test_scheduler_of_the_inner_optimizer_follows():
    optimizer = optimizer_of([4, 8, 4])
    scheduler = linear(optimizer.inner)
    for _ in steps_of(optimizer):
        Follower.checked(scheduler, "samples", 4).follow(optimizer.run)
    assert settings(optimizer) == by_steps(linear, 4)[-1]


def test_following_before_the_first_update_changes_nothing_and_does_not_warn():
    optimizer = optimizer_of([4, 8])
    scheduler = linear(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Follower.checked(scheduler, "samples", 2).follow(optimizer.run)
        assert scheduler.last_epoch == 0
        next(steps_of(optimizer))  # one of the two minibatches of the first step
        Follower.checked(scheduler, "samples", 2).follow(optimizer.run)
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("per", [0, -8, True, "64"])
def test_samples_per_step_must_be_a_positive_number(per):
    optimizer = optimizer_of([4])
    with pytest.raises(ValueError, match=r"^`every` must be a positive number, got"):
        Follower.checked(linear(optimizer), "samples", per).follow(optimizer.run)


@pytest.mark.parametrize("per", [0, -1.5, math.inf, math.nan])
def test_weight_per_step_must_be_a_positive_number(per):
    optimizer = optimizer_of([4])
    with pytest.raises(ValueError, match=r"^`every` must be a positive number, got (0|-1\.5|inf|nan)$"):
        Follower.checked(linear(optimizer), "tokens", per).follow(optimizer.run)


def test_scheduler_that_is_also_stepped_elsewhere_raises():
    optimizer = optimizer_of([4, 4])
    scheduler = linear(optimizer)
    for _ in steps_of(optimizer):
        if optimizer.samples_done:
            break
    scheduler.step()
    scheduler.step()
    message = "^LinearLR has made 2 steps, but the run has reached only 1: don't call its step"
    with pytest.raises(RuntimeError, match=message):
        Follower.checked(scheduler, "samples", 4).follow(optimizer.run)
