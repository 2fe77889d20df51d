"""Runs a function once on every core: TPU cores, virtual XLA cores on a CPU, or torch.distributed processes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from variable_batch_size.schedule import is_integer

_GOOGLE_PCI_VENDOR = "0x1ae0"


def launch(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), *, cores: int | None = None, backend: str | None = None
) -> list[Any]:
    """Run ``fn(*args)`` once on every core and return what each returned, in the order of their ranks.

    Each core gets a copy of `args` of its own. `fn`, `args` and what `fn` returns are pickled on their way, so `fn` is
    a function at the top level of a module, and a script calls ``launch`` under ``if __name__ == "__main__":``.

    The first exception on any core ends the others and is raised here, with that core's traceback. Under ``torchrun``,
    which has started the processes already, ``launch`` joins the process group and just runs `fn` in this one.

    Args:
        fn: what to run.
        args: its arguments.
        cores: how many cores; all TPU cores, all GPUs, or one core for each CPU if None.
        backend: ``"xla"`` for TPU cores where there is a TPU and virtual XLA cores on the CPU otherwise, or a backend
            of torch.distributed such as ``"gloo"`` or ``"nccl"``. By default XLA where torch_xla is installed, else
            gloo; under ``torchrun`` nccl where there is a GPU, else gloo.
    """
    if cores is not None and (not is_integer(cores) or cores <= 0):
        raise ValueError(f"`cores` must be a positive integer, got {cores!r}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return [_run_under_torchrun(fn, args, backend)]
    backend = backend or ("xla" if find_spec("torch_xla") else "gloo")
    work = pickle.dumps((fn, args))
    if backend == "xla":
        if find_spec("torch_xla") is None:
            raise ValueError('backend="xla" needs torch_xla: pip install "variable_batch_size[xla]"')
        if _has_tpu():
            return _run_processes(_tpu_processes(cores), work)
        num_cores = cores or int(os.environ.get("CPU_NUM_DEVICES", 0)) or os.cpu_count() or 1
        return _run_processes([_Process(_xla_main, (0, 1), _virtual_core_environment(num_cores))], work)
    num_cores = cores or _num_gpus(backend) or os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_cores)))}
    with tempfile.TemporaryDirectory() as directory:
        meeting_point = f"file://{directory}/store"
        processes = [
            _Process(_distributed_main, (backend, meeting_point, rank, num_cores), threads) for rank in range(num_cores)
        ]
        return _run_processes(processes, work)


# ------------------------------------------------------------------------------------------ in the launching process


@dataclass(frozen=True)
class _Process:
    """A process to start: its main function, what that needs to know, and its environment."""

    main: Callable[..., None]
    args: tuple[Any, ...]
    environment: Mapping[str, str]


def _run_processes(processes: list[_Process], work: bytes) -> list[Any]:
    """Start the processes, wait for what their cores send, and leave none behind."""
    context = multiprocessing.get_context("spawn")
    started = []
    results: dict[int, Any] = {}
    try:
        for process in processes:
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=process.main, args=(*process.args, work, sender))
            with _environment(process.environment):
                child.start()
            sender.close()  # the child holds the other end: a pipe at its end now means that the child is gone
            started.append((receiver, child))
        running: dict[Any, Any] = dict(started)
        while running:
            for pipe in multiprocessing.connection.wait(list(running)):
                try:
                    rank, has_succeeded, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    child = running.pop(pipe)
                    child.join()
                    if child.exitcode != 0:
                        raise RuntimeError(f"a process of the launch died with exit code {child.exitcode}") from None
                    continue
                if not has_succeeded:
                    raise RuntimeError(f"core {rank} failed:\n{payload}")
                results[rank] = payload
    finally:
        for receiver, child in started:
            if child.is_alive():
                child.kill()
            child.join()
            receiver.close()
    return [results[rank] for rank in sorted(results)]


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Within, these environment variables are set: a process started here has them before it imports anything."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _virtual_core_environment(num_cores: int) -> dict[str, str]:
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(num_cores),
        # a collective holds a thread of each core until all cores have come: fewer threads than that would starve it
        "XLA_THREAD_POOL_SIZE": str(2 * num_cores),
        "PJRT_NPROC": str(2 * num_cores),
        # freeing a donated buffer would wait for a collective that waits for the core that frees it
        "XLA_ENABLE_PARAM_ALIASING": "0",
    }


def _has_tpu() -> bool:
    device = os.environ.get("PJRT_DEVICE")
    if device is not None:
        return device == "TPU"
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == _GOOGLE_PCI_VENDOR for vendor in vendors)


def _tpu_processes(cores: int | None) -> list[_Process]:
    from torch_xla._internal import tpu

    num_processes = tpu.num_local_processes()
    if cores not in (None, tpu.num_available_devices()):
        raise ValueError(
            f"`cores` must be None or all {tpu.num_available_devices()} TPU cores of this host, got {cores}"
        )
    return [_Process(_xla_main, (rank, num_processes), {"PJRT_DEVICE": "TPU"}) for rank in range(num_processes)]


def _num_gpus(backend: str) -> int:
    import torch

    return torch.cuda.device_count() if backend == "nccl" else 0


# ------------------------------------------------------------------------------------------ in the started processes


def _xla_main(local_rank: int, num_processes: int, work: bytes, pipe: Any) -> None:
    """Run the work in a thread for each XLA device of this process."""
    _end_with_parent()
    from torch_xla import runtime as xr
    from torch_xla._internal import pjrt

    def run() -> None:
        _run_and_send(work, pipe, xr.global_ordinal())

    # what torch_xla.launch does in the processes it starts; starting them ourselves tells us at once when one fails
    pjrt._run_thread_per_device(local_rank, num_processes, run, pjrt.initialize_multiprocess)


def _distributed_main(backend: str, meeting_point: str, rank: int, num_cores: int, work: bytes, pipe: Any) -> None:
    _end_with_parent()
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=num_cores)
    _run_and_send(work, pipe, rank)
    dist.destroy_process_group()


_send_one_at_a_time = threading.Lock()


def _run_and_send(work: bytes, pipe: Any, rank: int) -> None:
    try:
        fn, args = pickle.loads(work)  # each core its own copy, also where cores are threads of one process
        message = pickle.dumps((rank, True, fn(*args)))
    except BaseException:
        message = pickle.dumps((rank, False, traceback.format_exc()))
    with _send_one_at_a_time:
        pipe.send_bytes(message)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run_under_torchrun(fn: Callable[..., Any], args: tuple[Any, ...], backend: str | None) -> Any:
    import torch
    import torch.distributed as dist

    if backend == "xla":
        raise ValueError(
            'torchrun starts processes of torch.distributed: `backend` must be "gloo" or "nccl", got "xla"'
        )
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if dist.is_initialized():
        return fn(*args)
    dist.init_process_group(backend)
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()
