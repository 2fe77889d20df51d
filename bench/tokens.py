"""Padding of minibatches that are filled to a token budget, and the cost of planning them, up to 100 million samples.

Lengths are log-normal. "fixed" is the padding of minibatches of 32 random samples, each padded to its longest; the
other columns are shares of all tokens in minibatches of at most 8,192, with a number of shapes, or packed. "held" is
what a minibatch of 32 shapes, or a packed one, holds without padding, as a share of the 8,192 that it counts as.

The planning reads the lengths from a memory-mapped file. Times are CPU times; memory is the peak that numpy allocates.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
from measure import print_machine, print_row

import variable_batch_size as vbs
from variable_batch_size.schedules.token_plan import TokenPlan

TOKENS = 8192
SHAPES = (8, 16, 32, 64)
NUM_SAMPLES = 100_000


def lengths_of(number: int, *, median: int, sigma: float) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, number)
    return lengths.clip(1, TOKENS).astype(np.int32)


def print_padding() -> None:
    print(f"{NUM_SAMPLES:,} samples")
    header = ("median", "sigma", "fixed", *(f"{number} shapes" for number in SHAPES), "held", "packed", "held")
    widths = (8, 7, 8, *[10] * len(SHAPES), 8, 8, 8)
    print_row(*header, widths=widths)
    for median, sigma in itertools.product((100, 200, 400), (0.6, 1.0)):
        lengths = lengths_of(NUM_SAMPLES, median=median, sigma=sigma)
        rows = np.random.default_rng(1).permutation(lengths)[: len(lengths) // 32 * 32].reshape(-1, 32)
        fixed = 1 - rows.sum() / (32 * rows.max(1).sum())
        plans = {number: TokenPlan(lengths, tokens=TOKENS, max_shapes=number) for number in SHAPES}
        packed = TokenPlan(lengths, tokens=TOKENS, packed=True)
        held = [plan.num_tokens / plan.num_minibatches / TOKENS for plan in (plans[32], packed)]
        shares = [fixed, *(plan.padding for plan in plans.values()), held[0], packed.padding, held[1]]
        print_row(str(median), str(sigma), *(f"{100 * share:.1f} %" for share in shares), widths=widths)


def print_costs(most: int) -> None:
    header = ("samples", "packed", "build s", "first ms", "µs a minibatch", "µs a sample", "peak MB")
    widths = (14, 8, 9, 10, 15, 12, 9)
    print_row(*header, widths=widths)
    with tempfile.TemporaryDirectory() as folder:
        for number, packed in itertools.product((10**5, 10**6, 10**7, 10**8), (False, True)):
            if number > most:
                continue
            path = Path(folder) / f"{number}.npy"
            if not path.exists():
                np.save(path, lengths_of(number, median=200, sigma=1.0))
            print_row(f"{number:,}", str(packed), *costs(path, packed=packed), widths=widths)


def costs(path: Path, *, packed: bool) -> list[str]:
    def built() -> vbs.TokenBudget:
        lengths = np.load(path, mmap_mode="r")
        return vbs.TokenBudget(lengths, 8 * TOKENS, tokens=TOKENS, packed=packed, num_replicas=8, rank=3)

    start = time.process_time()
    budget = built()
    build = time.process_time() - start
    start, minibatches = time.process_time(), iter(budget)
    num_samples = len(next(minibatches))
    first = time.process_time() - start
    start, number, num_samples = time.process_time(), 0, 0
    for samples in itertools.islice(minibatches, 1000):
        number, num_samples = number + 1, num_samples + len(samples)
    each = time.process_time() - start
    tracemalloc.start()
    budget = built()
    list(itertools.islice(budget, 100))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    times = (f"{build:.2f}", f"{1e3 * first:.1f}", f"{1e6 * each / number:.0f}", f"{1e6 * each / num_samples:.1f}")
    return [*times, f"{peak / 1e6:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--most", type=float, default=1e8, help="samples for the costs (default: 1e8, a file of 400 MB)"
    )
    options = parser.parse_args()
    print_machine()
    print_padding()
    print()
    print_costs(int(options.most))


if __name__ == "__main__":
    main()
