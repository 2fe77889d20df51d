"""Startup time of the `vbs` command, compared with plain Python and with importing torch, in wall time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from measure import in_turn, print_comparison, print_machine

ROOT = Path(__file__).parent.parent
VBS = str(Path(sys.executable).with_name("vbs"))
PLAN = "plan traces/mnist.csv --dataset-size 60K --minibatch-size 32 --cores 8"
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import variable_batch_size": [sys.executable, "-c", "import variable_batch_size"],
    "vbs --help": [VBS, "--help"],
    "vbs plan": [VBS, *PLAN.split()],
    "import torch": [sys.executable, "-c", "import torch"],
}


def main() -> None:
    print_machine()
    print(f"vbs plan: vbs {PLAN}")
    sides = {name: timed(command) for name, command in COMMANDS.items()}
    print_comparison(in_turn(sides, repeats=15), peer="python -c pass")


def timed(command: list[str]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    main()
