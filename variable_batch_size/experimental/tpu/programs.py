"""The programs that torch_xla compiles in a user's training, dumped on virtual cores and compiled for a TPU."""

import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from variable_batch_size.cores import xla
from variable_batch_size.cores.launch import environment, launch
from variable_batch_size.experimental.tpu import tpu_compiler
from variable_batch_size.experimental.tpu.tpu import Programs, compile_programs, parse_topology
from variable_batch_size.lab.comparison.workload import load_function
from variable_batch_size.optim import consistency


class _Enough(BaseException):
    """Ends a training, even in a loop that catches every Exception."""


def programs_of(
    function: str,
    arguments: tuple[Any, ...] = (),
    *,
    topology: str,
    python: str,
    cache: Path,
    steps: int,
    is_spmd: bool = False,
) -> Programs:
    """Run a few steps of ``file.py:function`` on a virtual core, and compile their programs for a topology."""
    compile_programs([], topology, python=python, cache=cache)  # raises if no compiler supports the topology
    with tempfile.TemporaryDirectory() as directory:
        cores = parse_topology(topology)[1]
        with environment({"PJRT_DEVICE": "CPU", "XLA_FLAGS": tpu_compiler.dump_flags(Path(directory))}):
            work = (function, arguments, steps, cores)
            (error,) = launch(_train, work, cores=cores if is_spmd else 1, backend="xla", spmd=is_spmd)
        if error:
            raise ValueError(error)
        files = tpu_compiler.dumped_in(Path(directory))
        if not files:
            raise ValueError(f"{function} compiled no program: it must train on torch_xla.device()")
        return compile_programs(files, topology, python=python, cache=cache, is_spmd=is_spmd)


def _train(function: str, arguments: tuple[Any, ...], steps: int, cores: int) -> str:
    """Train for a few steps; returns the error, or an empty string."""
    stand_for(cores)
    file = function.rpartition(":")[0]
    if file.endswith(".py"):
        sys.path.insert(0, str(Path(file).resolve().parent))  # as Python does for a script
    try:
        train = load_function(function)
    except (ValueError, ImportError) as error:
        return str(error)
    try:
        with ended_after(steps):
            train(*arguments)
    except Exception:
        return f"{function} failed on a virtual XLA core:\n{traceback.format_exc()}"
    return ""


def stand_for(cores: int) -> None:
    """On the only core here, trace what the first of several cores would on a TPU, with the buffers that it donates.

    Several virtual cores cannot donate buffers: freeing a buffer waits for a collective, and the process aborts. A
    single core can, and its all-reduce equals that of a core whose neighbors add nothing. Only the comparison of
    settings at the start would fail.
    """
    os.environ["XLA_ENABLE_PARAM_ALIASING"] = "1"  # as on a TPU; launch() disables it
    if xla.is_spmd():
        return
    xla.stand_for(cores)
    compare_ranks = consistency.compare_ranks

    def compare_without_result(*args: Any) -> Callable[[], object]:
        compared = compare_ranks(*args)  # has the tensor of the comparison, which must stay a result of the program
        return lambda: compared

    vars(consistency)["compare_ranks"] = compare_without_result


@contextmanager
def ended_after(steps: int) -> Iterator[None]:
    """End the block before an inner optimizer makes another step."""
    counts = Counter[int]()

    def count(optimizer: Optimizer, *_: Any) -> None:
        counts[id(optimizer)] += 1
        if counts[id(optimizer)] > steps:
            raise _Enough

    hook = register_optimizer_step_pre_hook(count)
    try:
        yield
    except _Enough:
        pass
    finally:
        hook.remove()
