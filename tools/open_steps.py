"""Run random programs of open steps on 1 to 4 processes, and compare each with plain PyTorch.

PYTHONPATH=test/support python tools/open_steps.py --steps 10000      # 37 minutes on two busy processor cores

A step is a random shape: how many minibatches of which length each core has. Programs of 40 steps run as they are, with
a GradScaler, in DDP and in fully_shard, with weights and without; some have a step that is not finite. Weights,
BatchNorm statistics and gradient noise are compared. A hang ends in a time-out that names the core.
"""

import argparse
import logging
import time
from typing import Any

import open_runs
import torch
import torch.distributed as dist

import variable_batch_size as vbs

NUM_STEPS = 40
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # rounding grows with the steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    for cores in range(1, 5):
        seeds = range(cores * 100_000, cores * 100_000 + -(-steps // 4 // NUM_STEPS))
        start = time.monotonic()
        results = vbs.launch(run, (seeds,), cores=cores, backend="gloo")
        worst = {name: max(result[name] for result in results) for name in results[0]}
        shown = ", ".join(f"{value:.1e} in {name}" for name, value in worst.items())
        took = time.monotonic() - start
        print(f"{cores} cores: {len(seeds) * NUM_STEPS} steps in {took:.0f} s, largest difference {shown}", flush=True)


def run(seeds: range) -> dict[str, float]:
    """The largest difference from plain PyTorch in the programs that this core compares, for each dtype."""
    torch.set_num_threads(1)
    logging.disable()
    (rank, cores), worst = open_runs.rank_and_cores(), {str(dtype): 0.0 for dtype in TOLERANCE}
    for first in seeds[::cores]:  # as many as there are cores, each of which compares one
        cases: list[Any] = []
        for seed in seeds[first - seeds.start :][:cores]:
            how = open_runs.ways()[seed // 2 % len(open_runs.ways())]
            steps, is_weighted = open_runs.random_case(seed, NUM_STEPS)
            result = open_runs.run(steps, is_weighted=is_weighted, **how)
            cases.append((seed, how, steps, is_weighted, gathered(result, place=len(cases))))
        for seed, how, steps, is_weighted, results in cases[rank : rank + 1]:
            expected, dtype = open_runs.expected_of(steps, is_weighted, how), how.get("dtype", torch.float64)
            for place, result in enumerate(results):
                difference = open_runs.largest_difference(result, expected, place)
                if not difference < TOLERANCE[dtype]:
                    raise ValueError(f"program {seed} differs by {difference} on core {place} of {cores}: {how}")
                worst[str(dtype)] = max(worst[str(dtype)], difference)
    return worst


def gathered(result: Any, place: int) -> Any:
    """The results of all cores, on the core at this place."""
    rank, cores = open_runs.rank_and_cores()
    if cores == 1:
        return [result]
    results = [None] * cores if rank == place else None
    dist.gather_object(result, results, dst=place)
    return results


if __name__ == "__main__":
    main()
