"""Compiled programs in words and as a table."""

from collections import Counter

from variable_batch_size.experimental.tpu.tpu import GIB, Program, Programs
from variable_batch_size.lab.planning.reports import Table, counted, duration


def programs_table(found: Programs) -> Table:
    """One row per compiled program of a training."""
    table = [["program", "needs (GiB)", "donated", "GFLOP", "GB accessed", "collectives", "at least"]]
    for number, program in enumerate(found.programs, start=1):
        cells = ["–"] * 6
        if program.error is None:
            costs = [f"{program.flops / 1e9:,.4g}", f"{program.bytes_accessed / 1e9:,.4g}", _collectives(program)]
            least = duration(program.seconds(found.chip, found.devices))
            cells = [f"{found.needed(program) / GIB:,.3f}", str(program.donated), *costs, least]
        table.append([str(number), *cells])
    return table


def _collectives(program: Program) -> str:
    """How many there are of each kind, and their bytes."""
    sizes = Counter[str]()
    for kind, size in program.collectives:
        sizes[kind] += size
    return ", ".join(f"{program.count(kind)} {kind} of {_size(size)}" for kind, size in sizes.items()) or "none"


def _size(num_bytes: int) -> str:
    """
    >>> _size(640), _size(98304), _size(3 * 2**30)
    ('640 B', '96 KiB', '3 GiB')
    """
    for unit, divisor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= divisor:
            return f"{num_bytes / divisor:.4g} {unit}"
    return f"{num_bytes} B"


def programs_summary(found: Programs) -> str:
    """Whether all programs compile and fit, and which use slow 64-bit floats, for exact mode or in other code."""
    chip, number = found.topology.partition(":")[0], counted(len(found.programs), "program")
    of_chip = f"{counted(found.devices, 'device')} with {found.chip.memory / GIB:g} GiB each"
    lines = [f"{number} for {found.topology}, {of_chip}"]
    if found.problems:
        lines += found.problems
    else:
        most = max(map(found.needed, found.programs))
        share = 100 * most / found.chip.memory
        lines.append(f"all compile and fit: at most {most / GIB:,.3f} GiB, {share:.1f} % of a {chip}")
    emulated = [str(place) for place, program in enumerate(found.programs, start=1) if program.doubles]
    if emulated:
        lines.append(f"64-bit floats, which TPUs emulate, in program {', '.join(emulated)}")
    return "\n".join(lines)
