"""Time to read and validate a trace of 2 million steps, compared with pandas reading the same file without validation.

In CPU time, which excludes the time of other programs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from measure import in_turn, print_comparison, print_machine

import variable_batch_size as vbs

NUM_STEPS = 2_000_000


def main() -> None:
    print_machine()
    sizes = 32 * np.random.default_rng(0).integers(1, 512, NUM_STEPS)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trace.csv")
        vbs.Trace.from_sequence(sizes).write(path)
        print(f"reading {NUM_STEPS} rows, {path.stat().st_size / 2**20:.0f} MiB")
        sides = {"pandas.read_csv": timed(pd.read_csv, path), "vbs.Trace.read": timed(vbs.Trace.read, path)}
        print_comparison(in_turn(sides, repeats=15), peer="pandas.read_csv")


def timed(read: Callable[[Path], object], path: Path) -> Callable[[], float]:
    def run() -> float:
        start = time.process_time()
        read(path)
        return time.process_time() - start

    return run


if __name__ == "__main__":
    main()
