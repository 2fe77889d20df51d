"""Measures a workload: the times of its minibatches on several numbers of cores, and its critical batch size."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from variable_batch_size.checks import check_positive
from variable_batch_size.comparison.train import Training, device_of, on_cores
from variable_batch_size.comparison.workload import Workload, load_workload
from variable_batch_size.planning.profile import Measured
from variable_batch_size.policies.timing import StepTimes

_DEPTHS = (1, 3)
_WARM_UP = 5


def measure(
    workload: str,
    *,
    cores: Sequence[int],
    minibatch_sizes: Sequence[int],
    device: str,
    threads: int,
    rule: str,
    steps: int,
    datadir: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Measured]:
    """Train for a few steps on each number of cores with each minibatch size, and yield the measured times.

    Steps of one and three minibatches per core alternate. On a busy machine ``time.process_time`` is a better clock.
    """
    if steps < 5:
        raise ValueError(f"`steps` must be at least 5, for a meaningful median, got {steps}")
    for number, size in itertools.product(cores, minibatch_sizes):
        args = (workload, datadir, device, threads, rule, number, size, steps, clock)
        accumulating, updating = on_cores(_measure_on_this_core, args, cores=number, device=device)
        if accumulating <= 0:  # checked here, because the clocks of cores other than the first don't matter
            longer = f"steps of {_DEPTHS[-1]} minibatches of {size} took no longer than those of {_DEPTHS[0]}"
            raise ValueError(f"{longer}: the machine is busy with other work, or more than {steps} `steps` are needed")
        yield Measured(1, number, size, accumulating, updating)


def _measure_on_this_core(
    name: str, datadir: str | None, device: str, threads: int, rule: str, cores: int, size: int, steps: int, clock: Any
) -> tuple[float, float]:
    """The times of an accumulating and of an updating minibatch."""
    torch.set_num_threads(threads)
    workload, trace = load_workload(name, datadir), [size * cores * depth for depth in _DEPTHS]
    # skip_nonfinite waits for the device in every step; otherwise the end of a step could not be timed
    options = {"ref_batchsize": trace[0], "skip_nonfinite": True}
    sampler = {"trace": trace, "minibatch_size": size, "on_end": "cycle"}
    training = Training(workload, workload.model().to(device_of(device)), rule, sampler, **options)
    optimizer, times, steps_done, began = training.optimizer, StepTimes(), 0, clock()
    for _ in training.losses():
        if optimizer.steps_done == steps_done:
            continue
        now, steps_done = clock(), optimizer.steps_done
        if steps_done > _WARM_UP * len(_DEPTHS):
            times.add(optimizer.batch_size // trace[0], now - began)
        if steps_done >= (_WARM_UP + steps) * len(_DEPTHS):
            break
        began = clock()
    assert times.seconds is not None
    return times.seconds


class Branch(NamedTuple):
    """The batch size of a branch, its number of updates, and its mean test loss, averaged over seeds."""

    batch_size: int
    updates: int
    loss: float


def branches(
    workload: Workload, sizes: Sequence[int], *, samples_before: int, samples: int, rule: str, seeds: int
) -> list[Branch]:
    """Train at the first of some batch sizes, branch off at each, and compare the losses after equally many samples.

    Their number is rounded up to a multiple of all batch sizes, and the losses are averaged over several seeds.
    """
    check_positive(samples_before=samples_before, samples=samples, seeds=seeds)
    multiple = math.lcm(*sizes)
    if samples < multiple:  # rounding up would multiply the work
        raise ValueError(f"`samples` must be at least {multiple}, a multiple of all batch sizes {sizes}, got {samples}")
    rounded_up = -(-samples // multiple) * multiple
    losses = [_branch_losses(workload, sizes, samples_before, rounded_up, rule, seed) for seed in range(seeds)]
    of_sizes = zip(sizes, zip(*losses, strict=True), strict=True)
    return [Branch(size, rounded_up // size, sum(of_size) / seeds) for size, of_size in of_sizes]


def _branch_losses(
    workload: Workload, sizes: Sequence[int], samples_before: int, samples: int, rule: str, seed: int
) -> list[float]:
    """The test loss at the end of each branch."""
    torch.manual_seed(seed)
    model = workload.model()
    run = Training(workload, model, rule, {"trace": sizes[0], "seed": seed})
    _train_on(run, samples_before)
    states = [copy.deepcopy(part.state_dict()) for part in run.parts]
    found = []
    for size in sizes:
        # the same order of samples for all branches, different from that of the run before
        branch = Training(workload, model, rule, {"trace": size, "seed": seed + 1_000_000})
        for part, state in zip(branch.parts, states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        _train_on(branch, samples)
        found.append(branch.test()[0])
    return found


def _train_on(training: Training, samples: int) -> None:
    next(loss for loss in training.losses() if training.optimizer.samples_done >= samples)


def critical_batch_size(found: Sequence[Branch], *, tolerance: float) -> int:
    """The largest batch size up to which no branch increases the loss of the first by more than this fraction."""
    size, _, loss = found[0]
    if not math.isfinite(loss):
        raise ValueError(f"the loss of the first branch, with batch size {size}, is {loss}")
    bound = loss + tolerance * abs(loss)
    return list(itertools.takewhile(lambda branch: branch.loss <= bound, found))[-1].batch_size
