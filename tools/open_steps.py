"""Run random programs of open steps on 1 to 4 processes, and compare each with plain PyTorch.

PYTHONPATH=test/support python tools/open_steps.py --steps 10000

A step is a random shape: how many minibatches of which length each core has. Programs of 8 steps run as they are, with
DDP, in fully_shard, with weights and without. A hang ends in a time-out that names the core.
"""

import argparse

import open_runs
import torch

import variable_batch_size as vbs

NUM_STEPS = 8
WAYS = [{}, {"wrap": "ddp"}, {"by_hand": True}, {"wrap": "fully_shard"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    for cores in range(1, 5):
        seeds = range(cores * 100_000, cores * 100_000 + -(-steps // 4 // NUM_STEPS))
        worst = max(vbs.launch(run, (seeds,), cores=cores, backend="gloo"))
        print(f"{cores} cores: {len(seeds) * NUM_STEPS} steps, largest difference {worst:.1e}", flush=True)
        if not worst < 1e-9:
            raise SystemExit(f"the weights differ by {worst}")


def run(seeds: range) -> float:
    """The largest difference of this core's weights from those of plain PyTorch."""
    worst = 0.0
    cores = open_runs.rank_and_cores()[1]
    for seed in seeds:
        steps, is_weighted = open_runs.program(seed, cores, NUM_STEPS), bool(seed % 2)
        how = WAYS[seed // 2 % len(WAYS)] if cores > 1 else {}
        how = {"is_weighted": is_weighted, "dtype": torch.float64, **how}
        found = open_runs.run(steps, **how)["weights"]
        expected = open_runs.plainly(steps, is_weighted=is_weighted, dtype=torch.float64)
        differences = [float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)]
        worst = max(worst, *differences)
    return worst


if __name__ == "__main__":
    main()
