"""What dealing minibatches costs, from 60 thousand to 10 billion samples.

The peer is torch's DistributedSampler with a BatchSampler, which shuffles a list of all samples; its memory is counted
without the tensor that is shuffled, 8 bytes a sample, as only Python and numpy tell how much they hold. The floor is
cutting minibatches out of a permutation that is ready, which has no first-minibatch time and cannot be faster.

The time to the first minibatch is that of a new sampler, as when a run resumes: where its epoch starts is not known
yet. Averages are over a whole later pass, its first minibatch included, but over no more than 20 000 minibatches.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import chain, islice, product

import numpy as np
from measure import Numbers, print_machine, print_row, spread
from torch.utils.data import BatchSampler, DistributedSampler

import variable_batch_size as vbs

MINIBATCH = 32
RANK = 3
REPEATS = 5
MOST_MINIBATCHES = 20_000
WIDTHS = (16, 11, 7, 7, 21, 18, 21, 9, 9, 22, 25, 8)

Passes = Callable[[], Iterator[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-at-100m", action="store_true", help="run the peer at 100 M samples too: minutes, 5 GB")
    largest_peer = 100_000_000 if parser.parse_args().peer_at_100m else 1_280_000
    print_machine()
    print("median (quartiles)")
    header = "samples,steps,cores,epoch,build ms,first ms,µs each,x floor,peak MB,peer first ms,peer µs each,peer MB"
    print_row(*header.split(","), widths=WIDTHS)
    traces = [random_trace(num_steps) for num_steps in (1_000, 2_000_000)]
    ready = np.random.default_rng(0).permutation(1_280_000)
    for num_samples, trace, cores, epoch in product(
        (60_000, 1_280_000, 100_000_000, 10_000_000_000), traces, (8, 256), (0, 50)
    ):
        print_case(num_samples, trace, cores, epoch, ready[:num_samples], has_peer=num_samples <= largest_peer)


def print_case(
    num_samples: int, trace: vbs.Trace, cores: int, epoch: int, ready: np.ndarray, *, has_peer: bool
) -> None:
    sampler: vbs.CustomSampler

    def build() -> Iterator[list[int]]:
        nonlocal sampler
        sampler = vbs.CustomSampler(
            dataset_size=num_samples,
            trace=trace,
            num_replicas=cores,
            rank=RANK,
            minibatch_size=MINIBATCH,
            on_end="cycle",
        )
        return iter(())

    def ours() -> Iterator[list[int]]:
        sampler.set_epoch(epoch)
        return iter(sampler)

    def floor() -> Iterator[list[int]]:
        start = 0
        while True:
            yield ready[start : start + MINIBATCH].tolist()
            start = (start + cores * MINIBATCH) % (len(ready) - MINIBATCH)

    def peer() -> Iterator[list[int]]:
        distributed = DistributedSampler(range(num_samples), num_replicas=cores, rank=RANK)
        distributed.set_epoch(epoch)
        return iter(BatchSampler(distributed, MINIBATCH, drop_last=True))

    build_s, new_s, ours_s, floor_s, peer_s = [], [], [], [], []
    for _ in range(1 + REPEATS):
        build_s.append(seconds(build)[0])
        new_s.append(seconds(ours, most=1))
        ours_s.append(seconds(ours))
        num_minibatches = int(ours_s[-1][2])
        floor_s.append(seconds(floor, most=num_minibatches))
        if has_peer:
            peer_s.append(seconds(peer))
    memory = peak_megabytes(lambda: chain(build(), ours()))
    print_row(
        f"{num_samples:_}",
        f"{len(trace):_}",
        str(cores),
        str(epoch),
        spread(np.array(build_s[1:]), scale=1e3),
        spread(first(new_s), scale=1e3),
        spread(each(ours_s), scale=1e6),
        f"{np.median(each(ours_s) / each(floor_s)):.1f}",
        f"{memory:.1f}",
        *(
            (
                spread(first(peer_s), scale=1e3, digits=1),
                spread(each(peer_s), scale=1e6, digits=1),
                f"{peak_megabytes(peer):.1f}",
            )
            if has_peer
            else "---"
        ),
        widths=WIDTHS,
    )


def seconds(passes: Passes, *, most: int = MOST_MINIBATCHES) -> tuple[float, float, float]:
    """The seconds to the first minibatch and to the last one, and how many there were."""
    start = time.perf_counter()
    minibatches = passes()
    num_minibatches = sum(1 for _ in islice(minibatches, 1))
    first = time.perf_counter()
    num_minibatches += sum(1 for _ in islice(minibatches, most - 1))
    return first - start, time.perf_counter() - start, num_minibatches


def first(runs: list[tuple[float, float, float]]) -> Numbers:
    return np.array([to_first for to_first, _, _ in runs[1:]])


def each(runs: list[tuple[float, float, float]]) -> Numbers:
    return np.array([to_last / count for _, to_last, count in runs[1:]])


def peak_megabytes(passes: Passes) -> float:
    tracemalloc.start()
    for _ in islice(passes(), 1_000):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def random_trace(num_steps: int) -> vbs.Trace:
    """Steps of 1 to 512 minibatches, all orders of magnitude alike: some leave cores idle, some make all accumulate."""
    num_minibatches = np.exp2(np.random.default_rng(0).uniform(0, 9, num_steps)).astype(np.int64)
    return vbs.Trace.from_sequence(MINIBATCH * num_minibatches)


if __name__ == "__main__":
    main()
