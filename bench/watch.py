"""How long a record takes to reach the pixels of vbs watch in Chromium, and how fast a long log loads.

PYTHONPATH=test/support python bench/watch.py [--records 20] [--long 1000000]

`vbs watch` runs in a separate process on this machine. A record is drawn when Plotly has drawn the line that ends
with it; the page is polled every 10 ms.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chromium import browser
from measure import print_machine
from watched_runs import line, write_log

SIZES = {"1280 pixels": (1280, 900), "400 pixels": (400, 850)}
DRAWN = """
const chart = document.querySelector("#chart"), lines = chart && chart.querySelectorAll(".scatterlayer .js-line");
const known = chart && chart.data && lines.length ? chart.data.flatMap(line => line.x || []) : [];
return Math.max(...known.filter(x => x !== null))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=20)
    parser.add_argument("--long", type=int, default=1_000_000, help="records of the long log")
    args = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as directory:
        for name, size in SIZES.items():
            waited = from_record_to_pixels(Path(directory, name), size, args.records)
            print(f"{name}: {statistics.median(waited):.2f} s in the median, {max(waited):.2f} s at most", flush=True)
        for num in (100, args.long):
            serving, drawn, memory = of_log(Path(directory, "log"), num)
            print(
                f"{num:,} records: served {serving:.2f} s after the start, drawn {drawn:.2f} s later, {memory:.0f} MB"
            )


def from_record_to_pixels(directory: Path, size: tuple[int, int], num: int) -> list[float]:
    """The seconds for each record that is written to a run's log, two seconds after the previous one."""
    write_log(directory, range(1, 101))
    waited = []
    with watching(directory) as (url, _), browser(size) as driver:
        driver.get(url)
        until(lambda: driver.execute_script(DRAWN) == 64 * 100)
        for step in range(101, 101 + num):
            time.sleep(2)
            began = time.monotonic()
            with (directory / "log.jsonl").open("a") as file:
                file.write(line(step))
            until(lambda step=step: driver.execute_script(DRAWN) == 64 * step)
            waited.append(time.monotonic() - began)
    return waited


def of_log(directory: Path, num: int) -> tuple[float, float, float]:
    """Seconds from the start of vbs watch until it serves, and until a browser has drawn all; and its memory."""
    write_log(directory, range(1, num + 1))
    with browser(SIZES["1280 pixels"]) as driver:
        began = time.monotonic()
        with watching(directory) as (url, process):
            serving = time.monotonic() - began
            driver.get(url)
            until(lambda: driver.execute_script(DRAWN) == 64 * num)
            drawn = time.monotonic() - began - serving
            status = Path(f"/proc/{process.pid}/status").read_text()
    return serving, drawn, int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024


@contextmanager
def watching(directory: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "variable_batch_size", "watch", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(match[0] for text in process.stdout if (match := re.search(r"http://[^\s,]+", text))), process
        finally:
            process.terminate()


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.01)


if __name__ == "__main__":
    main()
