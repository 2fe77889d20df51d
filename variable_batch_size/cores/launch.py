"""launch: runs a function on every core: TPU cores, virtual XLA cores, or torch.distributed processes."""

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
from pathlib import Path
from typing import Any, Final

from variable_batch_size.checks import check_positive, install
from variable_batch_size.cores import signals, xla

# ------------------------------------------------------------------------------------------ in the launching process


@dataclass(frozen=True)
class Process:
    """A process to start: its main function, what that needs to know, and its environment."""

    main: Callable[..., None]
    args: tuple[Any, ...]
    environment: Mapping[str, str]


def run_processes(processes: list[Process], work: bytes) -> list[Any]:
    """Start the processes, wait for what their cores send, and leave none behind."""
    started: list[tuple[Any, Any]] = []
    results: dict[int, Any] = {}
    with _passing_on_sigterm(started) as order:
        try:
            _start(processes, work, started)
            if order.is_given:  # perhaps while one was being started, which does not know of it yet
                _terminate(started)
            _receive(dict(started), results)
        finally:
            for receiver, child in started:
                if child.is_alive():
                    child.kill()
                child.join()
                receiver.close()
    return [results[rank] for rank in sorted(results)]


_START_METHOD: Final = "spawn"  # a forked process would have the threads' locks of this one


def _start(processes: list[Process], work: bytes, started: list[tuple[Any, Any]]) -> None:
    """Start the processes, noting each with the end of its pipe as soon as it runs."""
    context = multiprocessing.get_context(_START_METHOD)
    for process in processes:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=process.main, args=(*process.args, work, sender))
        with environment(process.environment):
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


@dataclass
class _Order:
    """Whether SIGTERM has come: without a lock, as one signal may interrupt what another one does."""

    is_given: bool = False


@contextmanager
def _passing_on_sigterm(started: list[tuple[Any, Any]]) -> Iterator[_Order]:
    """Within, SIGTERM goes on to the started processes, and is noted in the order that this yields.

    When they have ended, the signal ends this process, too, unless they end the launch with an exit code of their own.
    If that says that they have saved and stopped, the signal may come again while this process ends with it.
    A handler that the user has set is left alone.
    """
    order = _Order()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not signals.ends_process():
        yield order
        return

    def pass_on(number: int, frame: Any) -> None:
        order.is_given = True
        _terminate(started)

    signal.signal(signal.SIGTERM, pass_on)
    has_stopped = False
    try:
        yield order
    except SystemExit as ended:
        has_stopped = ended.code == signals.EXIT_STOPPED
        if has_stopped:
            signals.obey()
            signals.note_sigterm()
        order.is_given = False
        raise
    finally:
        if not has_stopped:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if order.is_given:
            os.kill(os.getpid(), signal.SIGTERM)


def _terminate(started: list[tuple[Any, Any]]) -> None:
    for _, child in started:
        child.terminate()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
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


# ------------------------------------------------------------------------------------------ in the started processes


_send_one_at_a_time = threading.Lock()

_RESULT, _FAILURE, _EXIT = "result", "failure", "exit"


def run_and_send(work: bytes, pipe: Any, rank: int) -> None:
    """Do the work as a core, and send its result, its failure or its exit code to the launching process."""
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


_GOOGLE_PCI_VENDOR = "0x1ae0"

# when cores meet; else one that has little to do would be gone before the others have met it, and they would fail
_ALL_ARE_WAITED_FOR = {"TORCH_DIST_INIT_BARRIER": "1"}


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    cores: int | None = None,
    backend: str | None = None,
    spmd: bool = False,
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
            of torch.distributed such as ``"gloo"``, ``"nccl"`` or ``"tpu_dist"``. By default XLA where torch_xla is
            installed, else gloo; under ``torchrun`` that of the accelerator, nccl for GPUs, else gloo.
        spmd: on XLA, whether to run `fn` once, in one process that drives all devices of this host as one core: XLA's
            SPMD mode. `cores` are then the devices, and `fn` lays out tensors over them.
    """
    if cores is not None:
        check_positive(cores=cores)
    if spmd and (backend not in (None, "xla") or "TORCHELASTIC_RUN_ID" in os.environ):
        where = f'backend="{backend}"' if backend not in (None, "xla") else "torchrun"
        raise ValueError(f'`spmd` must be False with {where}: it is a mode of backend="xla"')
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return [_run_under_torchrun(fn, args, backend)]
    backend = backend or ("xla" if spmd or xla.is_installed() else "gloo")
    work = pickle.dumps((fn, args))
    if backend == "xla":
        if not xla.is_installed():
            raise ValueError(f'backend="xla" needs torch_xla: {install("xla")}')
        if _has_tpu():
            return run_processes(_tpu_processes(cores, spmd), work)
        num_cores = cores or int(os.environ.get("CPU_NUM_DEVICES", 0)) or os.cpu_count() or 1
        main, ranks = (_spmd_main, ()) if spmd else (_xla_main, (0, 1))
        return run_processes([Process(main, ranks, _virtual_core_environment(num_cores))], work)
    num_cores = cores or _num_devices(backend) or os.cpu_count() or 1
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_cores)))}
    with tempfile.TemporaryDirectory() as directory:
        meeting_point = f"file://{directory}/store"
        group = (backend, meeting_point, num_cores, multiprocessing.get_start_method(allow_none=True))
        processes = [Process(_distributed_main, (rank, *group), threads) for rank in range(num_cores)]
        return run_processes(processes, work)


# ------------------------------------------------------------------------------------------ in the launching process


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


def _tpu_processes(cores: int | None, spmd: bool) -> list[Process]:
    num_processes = xla.num_tpu_processes()
    if cores not in (None, xla.num_tpu_cores()):
        raise ValueError(f"`cores` must be None or all {xla.num_tpu_cores()} TPU cores of this host, got {cores}")
    if spmd:
        return [Process(_spmd_main, (), {"PJRT_DEVICE": "TPU"})]
    return [Process(_xla_main, (rank, num_processes), {"PJRT_DEVICE": "TPU"}) for rank in range(num_processes)]


def _num_devices(backend: str) -> int:
    from variable_batch_size.cores import devices  # which loads torch

    return devices.num_devices(backend)


# ------------------------------------------------------------------------------------------ in the started processes


def _xla_main(local_rank: int, num_processes: int, work: bytes, pipe: Any) -> None:
    """Run the work in a thread for each XLA device of this process."""
    end_with_parent()
    signals.note_sigterm()  # in the main thread, which this is; the cores are others
    if os.environ["PJRT_DEVICE"] == "CPU":
        xla.patch_rendezvous(int(os.environ["CPU_NUM_DEVICES"]))
    xla.run_on_devices(local_rank, num_processes, lambda rank: run_and_send(work, pipe, rank))


def _spmd_main(work: bytes, pipe: Any) -> None:
    """Run the work once, on all devices of this process."""
    end_with_parent()
    xla.use_spmd()
    xla.init_hosts_process_group()
    run_and_send(work, pipe, 0)


def _distributed_main(
    rank: int, backend: str, meeting_point: str, num_cores: int, start_method: str | None, work: bytes, pipe: Any
) -> None:
    end_with_parent()
    # loaders start their workers as they do without a launch; else as this process was started, which takes long
    multiprocessing.set_start_method(start_method, force=True)
    import torch.distributed as dist

    from variable_batch_size.cores import devices

    devices.use_device(rank, backend)
    with environment(_ALL_ARE_WAITED_FOR):
        dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=num_cores)
    run_and_send(work, pipe, rank)
    dist.destroy_process_group()


def _run_under_torchrun(fn: Callable[..., Any], args: tuple[Any, ...], backend: str | None) -> Any:
    import torch.distributed as dist

    from variable_batch_size.cores import devices

    if backend == "xla":
        raise ValueError(
            'torchrun starts processes of torch.distributed: `backend` must be "gloo" or "nccl", got "xla"'
        )
    backend = backend or devices.default_backend()
    devices.use_device(int(os.environ["LOCAL_RANK"]), backend)
    if dist.is_initialized():
        return fn(*args)
    with environment(_ALL_ARE_WAITED_FOR):
        dist.init_process_group(backend)
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()
