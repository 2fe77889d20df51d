"""Kill cores of runs and add others, at random moments: each run must end as if it had not been disturbed.

PYTHONPATH=test/support python tools/live_soak.py --kills 500 --seconds 3600

Runs of 1 to 4 cores, plain models and DDP, samplers, loader workers and streams, AdaScale and AdamW, with and without
exact mode. Weights must be those of the undisturbed run, within 1e-6, and to the last bit in exact mode; each sample
must be used once in its step; only minibatches of dead cores may be run again. Cores are forked, which takes a
twentieth of the time of launch().
"""

import argparse
import itertools
import time

import torch
from live_runs import Settings, disturbed

SETTINGS = [
    Settings(),
    Settings(rule="adamw", exact=True),
    Settings(ddp=True, weighted=True),
    Settings(stream=True, exact=True),
    Settings(num_workers=2),
    Settings(rule="adamw", ddp=True, bare=True),
    Settings(exact=True, num_workers=1),
    Settings(rule="adamw", stream=True, weighted=True),
    Settings(exact=True, ddp=True, bare=True, weighted=True),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=7200.0, help="after which no further run begins")
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    begin, kills, joins, times, errors = time.time(), 0, 0, [], {True: [], False: []}
    for number, settings in enumerate(itertools.cycle(SETTINGS), start=given.seed):
        if kills >= given.kills or time.time() - begin > given.seconds:
            break
        settings = Settings(**{**vars(settings), "steps": given.steps})
        done = disturbed(settings, cores=1 + number % 4, seed=number)
        kills, joins, times = kills + done["kills"], joins + done["joins"], times + done["seconds"]
        errors[settings.exact].append(done["error"])
        print(f"{time.time() - begin:6.0f} s  {kills:4} kills  {joins:4} joins  {settings}", flush=True)
    times.sort()
    num_runs, exact = sum(map(len, errors.values())), errors[True]
    print(f"{kills} kills and {joins} joins in {num_runs} runs, each sample once in its step")
    print(f"largest error {max(errors[False], default=0):.1e}, in {len(exact)} exact runs {max(exact, default=0)}")
    if times:
        spread = ", ".join(
            f"{times[int(share * (len(times) - 1))]:.2f} s at {share:.0%}" for share in (0.5, 0.9, 0.99, 1)
        )
        print(f"death to the next update of all others: {spread}")


if __name__ == "__main__":
    main()
