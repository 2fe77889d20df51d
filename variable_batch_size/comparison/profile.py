"""Measures how long the minibatches of a workload take, on some numbers of cores."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from variable_batch_size.comparison.train import device_of, inner_optimizer, minibatches_of
from variable_batch_size.comparison.workload import Workload, load_workload
from variable_batch_size.cores.launch import launch
from variable_batch_size.data.sampler import CustomSampler
from variable_batch_size.optim.optimizer import CustomOptimizer
from variable_batch_size.planning.profile import Measured
from variable_batch_size.policies.timing import StepTimes
from variable_batch_size.rules.registry import make_rule

_DEPTHS = (1, 3)
_WARM_UP = 5
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xla": "xla"}


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
    """Train a little on each number of cores with each minibatch size, and give what it took.

    Steps of one and of three minibatches a core come in turns; the medians of their seconds tell the time of an
    accumulating and of an updating minibatch apart.

    Args:
        workload: its name.
        cores: numbers of cores.
        minibatch_sizes: samples that one core runs at once.
        device: ``cpu``, ``cuda`` or ``xla``.
        threads: of the CPU for each core.
        rule: the name of the rule, some of which measure gradients.
        steps: of each kind, at least 5.
        datadir: where the workload finds its data.
        clock: in seconds; ``time.process_time`` for one core of a machine that is busy with other work.
    """
    if steps < 5:
        raise ValueError(f"`steps` must be at least 5, for their median to tell anything, got {steps}")
    for number in cores:
        args = (workload, datadir, device, threads, rule, list(minibatch_sizes), steps, clock)
        if number == 1 and device != "xla":
            found = _measure_on_this_core(*args)
        else:
            found = launch(_measure_on_this_core, args, cores=number, backend=_BACKENDS[device])[0]
        for size, (accumulating, updating) in found.items():
            if accumulating <= 0:  # seen here, as the clocks of other cores than the first do not count
                raise ValueError(
                    f"steps of {_DEPTHS[-1]} minibatches of {size} took no longer than those of {_DEPTHS[0]}: the "
                    f"machine is busy with other work, or needs more `steps` than {steps} to tell"
                )
            yield Measured(1, number, size, accumulating, updating)


def _measure_on_this_core(
    name: str,
    datadir: str | None,
    device: str,
    threads: int,
    rule: str,
    sizes: list[int],
    steps: int,
    clock: Callable[[], float],
) -> dict[int, tuple[float, float]]:
    torch.set_num_threads(threads)
    workload = load_workload(name, datadir)
    return {size: _seconds(workload, size, device_of(device), rule, steps, clock) for size in sizes}


def _seconds(
    workload: Workload, size: int, device: torch.device, rule: str, steps: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Of an accumulating and of an updating minibatch."""
    model = workload.model().to(device)
    train: Any = workload.train
    cores = CustomSampler(train, trace=size, minibatch_size=size).num_replicas
    trace = [size * cores * depth for depth in _DEPTHS]
    sampler = CustomSampler(train, trace=trace, minibatch_size=size, on_end="cycle")
    # skipping what is not finite waits for the device in every step, without which a step has no end
    optimizer = CustomOptimizer(
        inner_optimizer(workload, model, None),
        sampler,
        rule=make_rule(rule),
        ref_batchsize=trace[0],
        model=model,
        skip_nonfinite=True,
    )
    times, began = StepTimes(), clock()
    for inputs, targets in minibatches_of(workload, optimizer, device):
        workload.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        before = optimizer.steps_done
        optimizer.step()
        if optimizer.steps_done == before:
            continue
        now = clock()
        if optimizer.steps_done > _WARM_UP * len(_DEPTHS):
            times.add(optimizer.batch_size // trace[0], now - began)
        if optimizer.steps_done >= (_WARM_UP + steps) * len(_DEPTHS):
            break
        began = clock()
    found = times.seconds
    assert found is not None
    return found


def numbers_up_to(largest: int) -> list[int]:
    """1, 2, 4 … and the largest itself.

    >>> numbers_up_to(6)
    [1, 2, 4, 6]
    """
    return [*itertools.takewhile(lambda number: number < largest, (2**k for k in itertools.count())), largest]
