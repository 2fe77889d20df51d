"""Run random programs with two optimizers on 1, 2 and 3 cores, and print those that differ from a run by hand.

PYTHONPATH=.:test/support python tools/random_programs.py --first 1000 --number 300
"""

import argparse
import dataclasses
import tempfile

import standing_cores
import torch
import two_optimizer_programs as programs
import two_optimizers_by_hand as by_hand


class Cores:
    """Standing processes for each number of cores; an error ends them, and others are started."""

    def __init__(self):
        self._standing = {}

    def run(self, cores, program):
        if cores == 1:
            return [programs.run(program)]
        if cores not in self._standing or self._standing[cores].is_broken:
            self._standing[cores] = standing_cores.StandingCores(cores, tempfile.mkdtemp())
        return self._standing[cores].run(programs.run, program)

    def close(self):
        for one in self._standing.values():
            if not one.is_broken:
                one.kill()


def differences(run, program, numbers_of_cores):
    """What is different on which number of cores; `run(cores, program)` returns the results of each core."""
    alone = None
    for cores in numbers_of_cores:
        try:
            expected = by_hand.run(program, cores)
            results = run(cores, program)
        except Exception as error:
            yield cores, f"{type(error).__name__}: {str(error).strip()[-600:]}"
            continue
        found = [by_hand.first_difference(program, expected, own, rank) for rank, own in enumerate(results)]
        yield from ((cores, f"core {rank}: {text}") for rank, text in enumerate(found) if text)
        alone = results[0] if alone is None else alone
        if program.is_exact:
            for turn, (one, *others) in enumerate(zip(alone, *results, strict=True)):
                if not all(torch.equal(one["weights"], other["weights"]) for other in others):
                    yield cores, f"other bits after turn {turn}"
                    break


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--describe", action="store_true", help="print the programs, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    standing_cores.MOST_SECONDS = 60  # cores that wait for each other
    cores, num_wrong = Cores(), 0
    for seed in range(arguments.first, arguments.first + arguments.number):
        program = programs.draw(seed)
        found = list(differences(cores.run, program, arguments.cores))
        num_wrong += bool(found)
        for number, text in found:
            print(f"{seed} on {number} cores: {text}", flush=True)
        if arguments.describe:
            print(*(f"    {name}: {value}" for name, value in dataclasses.asdict(program).items()), sep="\n")
    cores.close()
    print(f"{num_wrong} of {arguments.number} programs differ")
    return num_wrong > 0


if __name__ == "__main__":
    raise SystemExit(main())
