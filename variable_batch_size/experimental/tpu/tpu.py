"""Programs on a TPU: what the TPU compiler reports about them, whether they fit, and their least time."""

import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from variable_batch_size.experimental.tpu import tpu_compiler

GIB = 2**30


class Chip(NamedTuple):
    """What a device has, according to Google's documentation.

    Attributes:
        memory: bytes.
        flops: floating-point operations per second in bfloat16, in which TPUs multiply float32 matrices by default.
        bandwidth: bytes per second of its memory.
        interconnect: bytes per second that it sends in an all-reduce.
        source: the page with these numbers.
    """

    memory: int
    flops: float
    bandwidth: float
    interconnect: float
    source: str


_PAGES = "https://cloud.google.com/tpu/docs"
# the interconnect is the all-reduce bandwidth of a pod per chip; for v5p, the bandwidth of the links in one direction
CHIPS = {
    "v4": Chip(32 * GIB, 275e12, 1200e9, 1.1e15 / 4096, f"{_PAGES}/v4"),
    "v5e": Chip(16 * GIB, 197e12, 819e9, 51.2e12 / 256, f"{_PAGES}/v5e"),
    "v5p": Chip(95 * GIB, 459e12, 2765e9, 4800e9 / 8, f"{_PAGES}/v5p"),
    "v6e": Chip(32 * GIB, 918e12, 1638e9, 102.4e12 / 256, f"{_PAGES}/v6e"),
}


def parse_topology(text: str) -> tuple[Chip, int]:
    """The chip of a topology and the number of its devices.

    >>> chip, devices = parse_topology("v5e:2x4")
    >>> chip.memory // GIB, devices
    (16, 8)
    """
    name, _, mesh = text.partition(":")
    if name not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", mesh):
        raise ValueError(f"a topology is one of {', '.join(CHIPS)} with a mesh, such as v5e:2x4, got {text!r}")
    return CHIPS[name], prod(map(int, mesh.split("x")))


@dataclass(frozen=True)
class Program:
    """A compiled program, as it runs on one device; or the error of the compiler.

    Attributes:
        name: the name of its dump.
        error: of the compiler; None if it compiled.
        memory: the most bytes in use while it runs.
        arguments: bytes of its inputs.
        donated: the number of inputs whose memory its outputs use.
        flops: floating-point operations.
        bytes_accessed: bytes read and written.
        collectives: kind and bytes of each.
        host_transfers: the number of transfers from or to the host while it runs.
        doubles: the number of operations on tensors of 64-bit floats, which TPUs emulate.
        seconds_compiling: how long the compiler took.
        is_cached: whether this was known from an earlier compilation.
    """

    name: str
    error: str | None = None
    memory: int = 0
    arguments: int = 0
    donated: int = 0
    flops: float = 0.0
    bytes_accessed: float = 0.0
    collectives: Sequence[tuple[str, int]] = ()
    host_transfers: int = 0
    doubles: int = 0
    seconds_compiling: float = 0.0
    is_cached: bool = False

    def count(self, kind: str) -> int:
        """The number of its collectives of a kind."""
        return sum(found == kind for found, _ in self.collectives)

    def seconds(self, chip: Chip, devices: int) -> float:
        """The least time by the chip's roofline: the longer one of computing and memory accesses, then collectives.

        An all-reduce sends each byte twice, except for the share of the device itself; other collectives send it once.
        """
        sent = sum((2 if kind == "all-reduce" else 1) * size for kind, size in self.collectives)
        communicating = sent * (devices - 1) / devices / chip.interconnect
        return max(self.flops / chip.flops, self.bytes_accessed / chip.bandwidth) + communicating


@dataclass(frozen=True)
class Programs:
    """The programs of a training, compiled for a topology.

    Attributes:
        topology: such as v5e:2x4.
        devices: the number of its devices.
        versions: of jax and libtpu.
        programs: in the order in which they were compiled.
    """

    topology: str
    devices: int
    versions: Mapping[str, str]
    programs: Sequence[Program]

    @property
    def chip(self) -> Chip:
        return parse_topology(self.topology)[0]

    def needed(self, program: Program) -> int:
        """Bytes in use while a program runs: its own, and what the program with the largest inputs keeps meanwhile."""
        held = max(other.arguments for other in self.programs)
        return program.memory + max(0, held - program.arguments)

    @property
    def problems(self) -> list[str]:
        """Each program that does not compile or does not fit, with the reason."""
        found = []
        for number, program in enumerate(self.programs, start=1):
            excess = self.needed(program) - self.chip.memory
            if program.error is not None:
                found.append(f"program {number} does not {_reason(program.error)}")
            elif excess > 0:
                more = f"{excess / GIB:.2f} GiB more than the {self.chip.memory / GIB:g} GiB of the chip"
                found.append(f"program {number} does not fit: it needs {self.needed(program) / GIB:.2f} GiB, {more}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """All numbers."""
        rows = [
            {**vars(program), "needed": self.needed(program), "seconds": program.seconds(self.chip, self.devices)}
            for program in self.programs
        ]
        head = {"topology": self.topology, "devices": self.devices, "versions": dict(self.versions)}
        return {**head, "chip": self.chip._asdict(), "programs": rows, "problems": self.problems}


def _reason(error: str) -> str:
    """The compiler's error in one line; sizes of memory in bytes per device.

    >>> _reason("RESOURCE_EXHAUSTED: Ran out of memory. Used 18.22G of 15.75G hbm. Exceeded hbm capacity by 2.47G.")
    'fit: the compiler used 18.22 GiB of 15.75 GiB, 2.47 GiB more than there are'
    >>> _reason("UNIMPLEMENTED: no such operation")
    'compile: UNIMPLEMENTED: no such operation'
    """
    memory = re.search(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm\. Exceeded hbm capacity by ([\d.]+)([KMG])", error)
    if memory is None:
        return f"compile: {error.splitlines()[0]}"
    used, all, excess = (f"{memory[i]} {memory[i + 1]}iB" for i in (1, 3, 5))
    return f"fit: the compiler used {used} of {all}, {excess} more than there are"


def compile_programs(
    files: Sequence[Path], topology: str, *, python: str, cache: Path, is_spmd: bool = False
) -> Programs:
    """Compile dumped programs with another Python, which has jax and libtpu, or take the records of a cache.

    Args:
        files: the programs.
        topology: to compile for.
        python: the Python that runs the compiler.
        cache: a directory for records.
        is_spmd: whether all devices are one core.
    """
    parse_topology(topology)
    kind = "partitions" if is_spmd else "replicas"
    command = [python, tpu_compiler.__file__, "compile", topology, str(cache), kind, *map(str, files)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"{python} is not a Python to run the TPU compiler with: {error}") from None
    if done.returncode:
        raise ValueError(f"the TPU compiler ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    head, *records = map(json.loads, done.stdout.splitlines())
    if "missing" in head:
        needed = " ".join(f"'{package}'" for package in tpu_compiler.PACKAGES)
        how = (
            f"python -m venv .venv-tpu && .venv-tpu/bin/pip install {needed} (on Linux x86-64), or make tpu in a clone"
        )
        raise ValueError(f"the TPU compiler needs {' and '.join(head['missing'])}, which {python} does not have: {how}")
    if "refused" in head:
        raise ValueError(f"libtpu does not support the topology {topology!r}: {head['refused']}")
    return Programs(topology, head["devices"], head["versions"], [Program(**record) for record in records])


def largest_that_fits(fits: Callable[[int], bool], *, multiple_of: int, limit: int) -> int:
    """The largest multiple up to a limit for which `fits` is true, assuming it is for all smaller ones; 0 for none.

    >>> largest_that_fits(lambda size: size <= 100, multiple_of=8, limit=4096)
    96
    """
    low, high, is_growing = 0, limit // multiple_of + 1, True  # in multiples: low fits, high does not or is too large
    while high - low > 1:
        trial = min(max(1, 2 * low), high - 1) if is_growing else (low + high) // 2
        if fits(trial * multiple_of):
            low = trial
        else:
            high, is_growing = trial, False
    return low * multiple_of
