"""The long form of the tests of stopped runs; ends with a line for each, or at the first that fails.

python test/soak.py --stops 200
"""

import argparse
import random
import tempfile
from pathlib import Path

import stoppable_run
import test_stopped_is_never_stopped as stopped
import torch
from stoppable_run import Settings


def stop_anywhere(directory: Path, number: int, rng: random.Random) -> None:
    ways = [*stopped.WAYS, Settings(dropout=0.5, num_workers=2)]
    expected = [stoppable_run.run(directory / f"whole-{i}", settings) for i, settings in enumerate(ways)]
    for count, stop_at in enumerate(stopped.stop_points(number, rng)):
        way = rng.randrange(len(ways))
        print(f"stop {count}: after {stop_at[0]} steps and {stop_at[1]} minibatches, {ways[way]}", flush=True)
        result = stoppable_run.run_and_stop(directory / f"stop-{count}", stop_at, ways[way])
        stopped.check_same(result, expected[way])
    print(f"{number} runs were stopped and went on to the last bit of those that were not")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        stop_anywhere(Path(directory), flags.stops, random.Random(flags.seed))


if __name__ == "__main__":
    main()
