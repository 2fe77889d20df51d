"""How long a run stands still when a core dies: from SIGKILL to the next update of all other cores, on this machine.

PYTHONPATH=test/support python bench/live.py [--deaths 5]
"""

import argparse
import statistics

import torch
from live_runs import Settings, disturbed

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=5)
    deaths = parser.parse_args().deaths
    torch.set_num_threads(1)
    for cores in (2, 3, 4):
        for width, size in ((16, "250"), (100_000, "1 M")):
            settings = Settings(steps=400, seconds=0.01, width=width)
            done = disturbed(settings, cores=cores, seed=cores, events=["kill", "add"] * deaths)
            times = sorted(done["seconds"])
            print(
                f"{cores} cores, {size} parameters: {done['kills']} deaths, next update after "
                f"{statistics.median(times):.2f} s in the median, {times[-1]:.2f} s at most",
                flush=True,
            )
