"""The long form of the tests of stopped and killed runs; ends with a line for each, or at the first that fails.

python test/soak.py --stops 200 --kills 20
"""

import argparse
import random
import tempfile
from pathlib import Path

import runs
import test_killed_runs_go_on as killed
import test_stopped_is_never_stopped as stopped
import torch


def stop_anywhere(directory: Path, number: int, rng: random.Random) -> None:
    ways = [*stopped.WAYS, {"dropout": 0.5, "num_workers": 2}]
    expected = [runs.run(directory / f"whole-{i}", **how) for i, how in enumerate(ways)]
    for count, stop_at in enumerate(stopped.stop_points(number, rng)):
        way = rng.randrange(len(ways))
        print(f"stop {count}: after {stop_at[0]} steps and {stop_at[1]} minibatches, {ways[way]}", flush=True)
        stopped.check_same(runs.run_and_stop(directory / f"stop-{count}", stop_at, **ways[way]), expected[way])
    print(f"{number} runs were stopped and went on to the last bit of those that were not")


def kill_anytime(directory: Path, number: int, rng: random.Random) -> None:
    weights, expected = killed.kill_again_and_again(directory, number, rng)
    assert runs.same(weights, expected)
    print(f"a group of workers was killed {number} times in a row and ended with the same weights to the last bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        stop_anywhere(Path(directory), flags.stops, random.Random(flags.seed))
        kill_anytime(Path(directory), flags.kills, random.Random(flags.seed))


if __name__ == "__main__":
    main()
