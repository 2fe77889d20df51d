"""Schedulers in a checkpoint: every torch scheduler resumes as if never stopped."""

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import variable_batch_size as vbs
from variable_batch_size.optim.attachments import Follower


def sequence(optimizer):
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.MultiStepLR(optimizer, [1, 2, 2])]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3])


def chain(optimizer):
    return schedulers.ChainedScheduler(
        [schedulers.MultiStepLR(optimizer, [2, 5]), schedulers.ExponentialLR(optimizer, 0.9)]
    )


KINDS = {
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 4, 4]),
    "SequentialLR with MultiStepLR": sequence,
    "ChainedScheduler": chain,
    "SWALR": lambda optimizer: SWALR(optimizer, 0.01, anneal_epochs=6),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.5, total_steps=8),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 8),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 0.5, step_size_up=3),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "PolynomialLR": lambda optimizer: schedulers.PolynomialLR(optimizer, 6),
}
NUM_STEPS = 8
RAMP = [2, 2, 4, 2, 6, 8, 4, 2]


def step(scheduler, optimizer):
    if optimizer.steps_done < NUM_STEPS:
        scheduler.step()


def follow(scheduler, optimizer):
    Follower.checked(scheduler, "samples", 3).follow(optimizer.run)


def learning_rates(directory, make, stop_after=NUM_STEPS, *, move=step, trace=2):
    """The learning rates of each step of a run that resumes from a directory, up to some step."""
    model = torch.nn.Linear(2, 1)
    sampler = vbs.CustomSampler(
        dataset_size=sum(RAMP) if trace is RAMP else 2 * NUM_STEPS, trace=trace, minibatch_size=2
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.9)
    optimizer = vbs.ConstantOptimizer(inner, sampler)
    scheduler = make(optimizer)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, schedulers=[scheduler], every_steps=1)
    found = []
    for _ in checkpoint.epochs(1):
        for _ in sampler:
            lr = inner.param_groups[0]["lr"]
            model(torch.ones(2, 2)).sum().backward()
            if not optimizer.step():
                continue
            found.append(lr)
            move(scheduler, optimizer)
            checkpoint.step()
            if optimizer.steps_done == stop_after:
                return found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_scheduler_resumes_as_if_never_stopped(tmp_path, kind):
    expected = learning_rates(None, KINDS[kind])
    assert len(set(expected)) > 2
    for stop_after in range(1, NUM_STEPS):
        directory = tmp_path / str(stop_after)
        first = learning_rates(directory, KINDS[kind], stop_after)
        assert first + learning_rates(directory, KINDS[kind]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_scheduler_that_follows_samples_resumes_as_if_never_stopped(tmp_path, kind):
    how = {"move": follow, "trace": RAMP}
    expected = learning_rates(None, KINDS[kind], **how)
    assert len(expected) == NUM_STEPS
    assert len(set(expected)) > 2
    for stop_after in range(1, NUM_STEPS):
        directory = tmp_path / str(stop_after)
        first = learning_rates(directory, KINDS[kind], stop_after, **how)
        assert first + learning_rates(directory, KINDS[kind], **how) == expected
