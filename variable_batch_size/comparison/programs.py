"""The programs that torch_xla compiles in a user's training, dumped on virtual cores and compiled for a TPU."""

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from variable_batch_size.comparison.workload import load_function
from variable_batch_size.cores.launch import environment, launch
from variable_batch_size.planning import tpu_compiler
from variable_batch_size.planning.tpu import Programs, compile_programs


class _Enough(BaseException):
    """Ends a training, also in a loop that handles every Exception."""


def programs_of(
    function: str,
    arguments: tuple[Any, ...] = (),
    *,
    topology: str,
    python: str,
    cache: Path,
    cores: int,
    steps: int,
    spmd: bool = False,
) -> Programs:
    """Run a few steps of ``file.py:function`` on virtual cores, and compile their programs for a topology."""
    with tempfile.TemporaryDirectory() as directory:
        files = dump(function, arguments, Path(directory), cores=cores, steps=steps, spmd=spmd)
        donating: list[Path] = []
        if cores > 1 and not spmd:
            donating = dump(function, arguments, Path(directory, "donating"), cores=1, steps=steps)
        return compile_programs(files, topology, python=python, cache=cache, is_spmd=spmd, donating=donating)


def dump(
    function: str, arguments: tuple[Any, ...], directory: Path, *, cores: int, steps: int, spmd: bool = False
) -> list[Path]:
    """Run a few steps of a function on virtual XLA cores; returns the files with the programs that were compiled."""
    variables = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": tpu_compiler.dump_flags(directory)}
    with environment(variables):
        try:
            donates = spmd or cores == 1
            launch(_train, (function, arguments, steps, donates), cores=cores, backend="xla", spmd=spmd)
        except RuntimeError as error:
            raise ValueError(f"{function} failed on virtual XLA cores: {error}") from None
    files = tpu_compiler.dumped_in(directory)
    if not files:
        raise ValueError(f"{function} compiled no program: it must train on torch_xla.device()")
    return files


def _train(function: str, arguments: tuple[Any, ...], steps: int, donates: bool) -> None:
    if donates:
        os.environ["XLA_ENABLE_PARAM_ALIASING"] = "1"  # as on a TPU; launch() disables it, which several cores need
    file = function.rpartition(":")[0]
    if file.endswith(".py"):
        sys.path.insert(0, str(Path(file).resolve().parent))  # as Python does for a script
    with ended_after(steps):
        load_function(function)(*arguments)


@contextmanager
def ended_after(steps: int) -> Iterator[None]:
    """End the block before an inner optimizer makes another step in this thread, which is a core."""
    thread, counts = threading.get_ident(), Counter[int]()

    def count(optimizer: Optimizer, *_: Any) -> None:
        counts[id(optimizer)] += threading.get_ident() == thread
        if counts[id(optimizer)] > steps:
            raise _Enough

    hook = register_optimizer_step_pre_hook(count)
    try:
        yield
    except _Enough:
        pass
    finally:
        hook.remove()
