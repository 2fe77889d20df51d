"""Cost of assigning minibatches, from 60 thousand to 10 billion samples.

The peer is torch's DistributedSampler with a BatchSampler, which shuffles a list of all samples. Its memory is counted
without the shuffled tensor, 8 bytes per sample, because only Python and numpy report their memory. The floor slices
minibatches from a precomputed permutation; it has no first-minibatch time and cannot be faster.

The time to the first minibatch is that of a new sampler, as when a run resumes: the start of its epoch is not known
yet. Averages are over a full later pass, including its first minibatch, but over at most 20 000 minibatches. All times
are CPU times, which exclude the time of other programs.
"""

from __future__ import annotations

import argparse
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import NamedTuple

import numpy as np
from measure import Numbers, print_machine, print_row, spread
from torch.utils.data import BatchSampler, DistributedSampler

import variable_batch_size as vbs

MINIBATCH = 32
RANK = 3
REPEATS = 5
MOST_MINIBATCHES = 20_000
WIDTHS = (16, 11, 7, 7, 21, 18, 21, 9, 9, 22, 25, 8)

Pass = Callable[[], Iterator[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-at-100m", action="store_true", help="the peer once at 100 M samples: a minute, 5 GB")
    options = parser.parse_args()
    print_machine()
    print("median (quartiles)")
    header = "samples,steps,cores,epoch,build ms,first ms,µs each,x floor,peak MB,peer first ms,peer µs each,peer MB"
    print_row(*header.split(","), widths=WIDTHS)
    traces = [random_trace(num_steps) for num_steps in (1_000, 2_000_000)]
    ready = np.random.default_rng(0).permutation(1_280_000)
    for num_samples, trace, cores, epoch in product(
        (60_000, 1_280_000, 100_000_000, 10_000_000_000), traces, (8, 256), (0, 50)
    ):
        print_case(num_samples, trace, cores, epoch, ready[:num_samples], has_peer=num_samples <= len(ready))
    if options.peer_at_100m:
        print_peer_at_100m()


def print_case(
    num_samples: int, trace: vbs.Trace, cores: int, epoch: int, ready: np.ndarray, *, has_peer: bool
) -> None:
    def new() -> vbs.CustomSampler:
        return vbs.CustomSampler(
            dataset_size=num_samples,
            trace=trace,
            num_replicas=cores,
            rank=RANK,
            minibatch_size=MINIBATCH,
            on_end="cycle",
        )

    def ours(sampler: vbs.CustomSampler) -> Iterator[list[int]]:
        sampler.set_epoch(epoch)
        return iter(sampler)

    builds, firsts, passes, floors, peers = [], [], [], [], []
    for _ in range(1 + REPEATS):
        start = time.process_time()
        sampler = new()
        builds.append(time.process_time() - start)
        firsts.append(timed(lambda sampler=sampler: ours(sampler), most=1))
        passes.append(timed(lambda sampler=sampler: ours(sampler)))
        floors.append(timed(lambda: floor(ready, cores), most=passes[-1].num_minibatches))
        if has_peer:
            peers.append(timed(lambda: peer(num_samples, cores, epoch)))
    of_peer = ["-", "-", "-"]
    if has_peer:
        of_peer = [
            spread(to_first(peers), scale=1e3, digits=1),
            spread(each(peers), scale=1e6, digits=1),
            f"{peak_megabytes(lambda: peer(num_samples, cores, epoch)):.1f}",
        ]
    print_row(
        f"{num_samples:_}",
        f"{len(trace):_}",
        str(cores),
        str(epoch),
        spread(np.array(builds[1:]), scale=1e3),
        spread(to_first(firsts), scale=1e3),
        spread(each(passes), scale=1e6),
        f"{np.median(each(passes) / each(floors)):.1f}",
        f"{peak_megabytes(lambda: ours(new())):.1f}",
        *of_peer,
        widths=WIDTHS,
    )


def floor(ready: np.ndarray, cores: int) -> Iterator[list[int]]:
    start = 0
    while True:
        yield ready[start : start + MINIBATCH].tolist()
        start = (start + cores * MINIBATCH) % (len(ready) - MINIBATCH)


def peer(num_samples: int, cores: int, epoch: int) -> Iterator[list[int]]:
    sampler = DistributedSampler(range(num_samples), num_replicas=cores, rank=RANK)
    sampler.set_epoch(epoch)
    return iter(BatchSampler(sampler, MINIBATCH, drop_last=True))


def print_peer_at_100m() -> None:
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = timed(lambda: peer(100_000_000, 8, 0))
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kilobytes
    print(f"\npeer at 100 M samples: {run.to_first:.1f} s to the first minibatch, {kilobytes / 1e3:.0f} MB")


class Run(NamedTuple):
    to_first: float
    to_last: float
    num_minibatches: int


def timed(start_pass: Pass, *, most: int = MOST_MINIBATCHES) -> Run:
    """The seconds to the first and to the last minibatch of a pass, and the number of minibatches."""
    start = time.process_time()
    minibatches = start_pass()
    next(minibatches)
    first = time.process_time()
    num_minibatches = 1 + sum(1 for _ in islice(minibatches, most - 1))
    return Run(first - start, time.process_time() - start, num_minibatches)


def to_first(runs: list[Run]) -> Numbers:
    return np.array([run.to_first for run in runs[1:]])


def each(runs: list[Run]) -> Numbers:
    return np.array([run.to_last / run.num_minibatches for run in runs[1:]])


def peak_megabytes(start_pass: Pass) -> float:
    tracemalloc.start()
    for _ in islice(start_pass(), 1_000):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def random_trace(num_steps: int) -> vbs.Trace:
    """Steps of 1 to 512 minibatches, log-uniform: some leave cores idle, in others all cores accumulate."""
    num_minibatches = np.exp2(np.random.default_rng(0).uniform(0, 9, num_steps)).astype(np.int64)
    return vbs.Trace.from_sequence(MINIBATCH * num_minibatches)


if __name__ == "__main__":
    main()
