"""Cost of a step in traces of a thousand to ten million steps, on 1 to 4096 cores.

The schedule and sampler of one core, without devices, with 60 thousand samples and minibatches of 32. The late epoch is
the last complete one, looked up in a new schedule, as when a run resumes: all earlier starts have to be found. The µs
are averages over the 20 epochs before it: of looking up a step's batch size and this core's minibatches in the
schedule, and of assigning them. The minimum of 5 runs, in CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product

from measure import print_machine, print_row
from sampler import MINIBATCH, random_trace

import variable_batch_size as vbs

DATASET_SIZE = 60_000
REPEATS = 5
NUM_EPOCHS = 20
WIDTHS = (12, 7, 9, 10, 11, 15, 11, 13, 19, 14)


def main() -> None:
    print_machine()
    header = (
        "steps,cores,epochs,build ms,ns a step,late epoch ms,ns a step,schedule µs,sampler µs a step,µs a minibatch"
    )
    print_row(*header.split(","), widths=WIDTHS)
    traces = [random_trace(10**exponent) for exponent in range(3, 8)]
    for trace, cores in product(traces, (1, 64, 4096)):
        print_case(trace, cores)


def print_case(trace: vbs.Trace, cores: int) -> None:
    rank = cores // 2

    def new() -> vbs.CustomSampler:
        return vbs.CustomSampler(
            dataset_size=DATASET_SIZE, trace=trace, num_replicas=cores, rank=rank, minibatch_size=MINIBATCH
        )

    def find_late_epoch() -> None:
        fresh.pop().schedule.steps(last)

    def ask() -> None:
        for step in steps:
            schedule.batch_size(step)
            schedule.minibatches(step, rank)

    def deal() -> None:
        for epoch in epochs:
            sampler.set_epoch(epoch)
            for _ in sampler:
                pass

    sampler = new()
    schedule = sampler.schedule
    assert schedule.num_epochs is not None
    last = schedule.num_epochs - 2  # the last epoch ends with the trace
    epochs = range(last - NUM_EPOCHS + 1, last + 1)
    steps = range(schedule.steps(epochs[0]).start, schedule.steps(last).stop)
    num_minibatches = sum(schedule.num_minibatches_for(epoch, rank) for epoch in epochs)
    build = least_seconds(new)
    fresh = [new() for _ in range(REPEATS)]
    late = least_seconds(find_late_epoch)
    dealt = least_seconds(deal)
    print_row(
        f"{len(trace):_}",
        str(cores),
        str(schedule.num_epochs),
        f"{build * 1e3:.2f}",
        f"{build / len(trace) * 1e9:.1f}",
        f"{late * 1e3:.2f}",
        f"{late / len(trace) * 1e9:.0f}",
        f"{least_seconds(ask) / len(steps) * 1e6:.2f}",
        f"{dealt / len(steps) * 1e6:.1f}",
        f"{dealt / num_minibatches * 1e6:.1f}",
        widths=WIDTHS,
    )


def least_seconds(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
