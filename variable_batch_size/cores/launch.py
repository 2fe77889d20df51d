"""Runs a function once on every core: TPU cores, virtual XLA cores on a CPU, or torch.distributed processes."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import variable_batch_size.cores.stopping as stopping
from variable_batch_size.checks import check_positive

_GOOGLE_PCI_VENDOR = "0x1ae0"


def launch(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), *, cores: int | None = None, backend: str | None = None
) -> list[Any]:
    """Run ``fn(*args)`` once on every core and return what each returned, in the order of their ranks.

    Each core gets a copy of `args` of its own. `fn`, `args` and what `fn` returns are pickled on their way, so `fn` is
    a function at the top level of a module, and a script calls ``launch`` under ``if __name__ == "__main__":``.

    The first exception on any core ends the others and is raised here, with that core's traceback; a core that calls
    ``sys.exit`` ends them and the launch with that code. SIGTERM is passed on to the cores: without a
    :class:`Checkpoint` that listens for it, it ends them and then this process. Under ``torchrun``, which has started
    the processes already, ``launch`` joins the process group and just runs `fn` in this one.

    Args:
        fn: what to run.
        args: its arguments.
        cores: how many cores; all TPU cores, all GPUs, or one core for each CPU if None.
        backend: ``"xla"`` for TPU cores where there is a TPU and virtual XLA cores on the CPU otherwise, or a backend
            of torch.distributed such as ``"gloo"`` or ``"nccl"``. By default XLA where torch_xla is installed, else
            gloo; under ``torchrun`` nccl where there is a GPU, else gloo.
    """
    if cores is not None:
        check_positive(cores=cores)
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
    started: list[tuple[Any, Any]] = []
    results: dict[int, Any] = {}
    with _passing_on_sigterm(started) as was_told:
        try:
            _start(processes, work, started)
            if was_told.is_set():  # perhaps while one was being started, which does not know of it yet
                _terminate(started)
            _receive(dict(started), results)
        finally:
            for receiver, child in started:
                if child.is_alive():
                    child.kill()
                child.join()
                receiver.close()
    return [results[rank] for rank in sorted(results)]


def _start(processes: list[_Process], work: bytes, started: list[tuple[Any, Any]]) -> None:
    """Start the processes, noting each with the end of its pipe as soon as it runs."""
    context = multiprocessing.get_context("spawn")
    for process in processes:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=process.main, args=(*process.args, work, sender))
        with _environment(process.environment):
            child.start()
        sender.close()  # the child holds the other end: a pipe at its end now means that the child is gone
        started.append((receiver, child))


def _receive(running: dict[Any, Any], results: dict[int, Any]) -> None:
    """Take in what the cores send until all processes have ended, or the first of them did not end well."""
    while running:
        for pipe in multiprocessing.connection.wait(list(running)):
            try:
                rank, outcome, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                child = running.pop(pipe)
                child.join()
                if child.exitcode != 0:
                    raise RuntimeError(f"a process of the launch died with exit code {child.exitcode}") from None
                continue
            if outcome == _EXIT:
                sys.exit(payload)
            if outcome == _FAILURE:
                raise RuntimeError(f"core {rank} failed:\n{payload}")
            results[rank] = payload


@contextmanager
def _passing_on_sigterm(started: list[tuple[Any, Any]]) -> Iterator[threading.Event]:
    """Within, SIGTERM goes on to the started processes, and the event that this yields is set.

    When they have ended, the signal ends this process, too, unless they end the launch with an exit code of their own.
    A handler that the user has set is left alone.
    """
    was_told = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield was_told
        return

    def pass_on(number: int, frame: Any) -> None:
        was_told.set()
        _terminate(started)

    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield was_told
    except SystemExit:
        was_told.clear()
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if was_told.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


def _terminate(started: list[tuple[Any, Any]]) -> None:
    for _, child in started:
        child.terminate()


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
    end_with_parent()
    stopping.note_sigterm()  # in the main thread, which this is; the cores are others
    from torch_xla import runtime as xr
    from torch_xla._internal import pjrt

    def run() -> None:
        _run_and_send(work, pipe, xr.global_ordinal())

    # what torch_xla.launch does in the processes it starts; starting them ourselves tells us at once when one fails
    pjrt._run_thread_per_device(local_rank, num_processes, run, pjrt.initialize_multiprocess)


def _distributed_main(backend: str, meeting_point: str, rank: int, num_cores: int, work: bytes, pipe: Any) -> None:
    end_with_parent()
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=num_cores)
    _run_and_send(work, pipe, rank)
    dist.destroy_process_group()


_send_one_at_a_time = threading.Lock()

_RESULT, _FAILURE, _EXIT = "result", "failure", "exit"


def _run_and_send(work: bytes, pipe: Any, rank: int) -> None:
    try:
        fn, args = pickle.loads(work)  # each core its own copy, also where cores are threads of one process
        message = pickle.dumps((rank, _RESULT, fn(*args)))
    except SystemExit as exit:
        message = pickle.dumps((rank, _EXIT, exit.code))
    except BaseException:
        message = pickle.dumps((rank, _FAILURE, traceback.format_exc()))
    with _send_one_at_a_time:
        pipe.send_bytes(message)


def end_with_parent() -> None:
    """End this process, at once, when the process that started it has ended."""
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
