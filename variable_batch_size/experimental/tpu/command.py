"""``vbs tpu``: compile a training for a TPU without having one: whether it compiles and fits, and its least time."""

import argparse
import json
import os
import sys
from pathlib import Path

from variable_batch_size.experimental.tpu.report import programs_summary, programs_table
from variable_batch_size.experimental.tpu.tpu import CHIPS, GIB, Programs, largest_that_fits, parse_topology
from variable_batch_size.files import write_text
from variable_batch_size.lab.command.options import add_minibatch, positive, print_text
from variable_batch_size.lab.planning.reports import as_text, table_page

_ENVIRONMENT = Path(".venv-tpu/bin/python")


def add_tpu(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help = "what to pass to vbs.launch: it trains on a core; its only argument, if any, is the minibatch size"
    add("function", metavar="FILE.py:FUNCTION", help=help)
    help = f"the TPU, one of {', '.join(CHIPS)} with its mesh, such as v5e:2x4"
    add("--topology", required=True, metavar="CHIP:MESH", help=help)
    add("--steps", type=positive, default=8, metavar="N", help="optimizer steps to run on this CPU (default: 8)")
    add("--spmd", action="store_true", help="all devices are one core, in XLA's SPMD mode")
    add_minibatch(parser, required=False)
    help = "also find the largest minibatch that fits, up to this one, in multiples of --minibatch-size (default: 8)"
    add("--largest-minibatch", type=positive, metavar="LIMIT", help=help)
    help = f"the Python of an environment with jax and libtpu (default: {_ENVIRONMENT} if it exists, else this one)"
    add("--python", metavar="FILE", help=help)
    add("--cache", metavar="DIR", help="for what was compiled (default: ~/.cache/variable_batch_size)")
    add("--json", action="store_true", help="print all numbers as JSON")
    add("--out", metavar="FILE", help="also write the table as an HTML page")


def run_tpu(options: argparse.Namespace) -> None:
    parse_topology(options.topology)
    if ":" not in options.function:
        raise ValueError(f"expected FILE.py:FUNCTION, got {options.function!r}")
    size, largest = options.minibatch_size, None
    if options.largest_minibatch:
        size = size or 8
        largest = _largest(options, size)
    found = _compiled(options, largest or size)
    if options.json:
        print_text(json.dumps({**found.as_dict(), "largest_minibatch": largest}))
    else:
        print_text(f"{as_text(programs_table(found))}\n\n{programs_summary(found)}")
        if largest is not None:
            print_text(f"the largest minibatch that fits: {largest or 'none'}, in multiples of {size}")
    if options.out is not None:
        write_text(Path(options.out), _page(found, options.command))
    if found.problems:
        raise ValueError("; ".join(found.problems))


def _page(found: Programs, command: str) -> str:
    chip = found.chip
    facts = {
        "result": programs_summary(found).replace("\n", "; "),
        "chip": f"{chip.memory / GIB:g} GiB, {chip.flops / 1e12:g} TFLOP/s, {chip.bandwidth / 1e9:g} GB/s of memory, "
        f"{chip.interconnect / 1e9:.4g} GB/s to other chips",
        "source": chip.source,
        "times": "a lower bound from these numbers",
        "compiler": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }
    return table_page(f"Programs on {found.topology}", programs_table(found), facts=facts, command=command)


def _largest(options: argparse.Namespace, multiple_of: int) -> int:
    def fits(size: int) -> bool:
        problems = _compiled(options, size).problems
        sys.stderr.write(f"minibatches of {size}: {problems[0] if problems else 'fit'}\n")
        return not problems

    return largest_that_fits(fits, multiple_of=multiple_of, limit=options.largest_minibatch)


def _compiled(options: argparse.Namespace, minibatch_size: int | None) -> Programs:
    # this imports torch, which takes seconds, and so comes after the options are parsed
    from variable_batch_size.experimental.tpu.programs import programs_of

    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return programs_of(
        options.function,
        () if minibatch_size is None else (minibatch_size,),
        topology=options.topology,
        python=options.python or (str(_ENVIRONMENT) if _ENVIRONMENT.exists() else sys.executable),
        cache=Path(options.cache or Path(home) / "variable_batch_size"),
        steps=options.steps,
        is_spmd=options.spmd,
    )
