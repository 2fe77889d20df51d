"""Runs a function once on every core: TPU cores, virtual XLA cores on a CPU, or torch.distributed processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from variable_batch_size.checks import check_positive, install
from variable_batch_size.cores import stopping, xla
from variable_batch_size.cores.processes import Process, end_with_parent, environment, run_and_send, run_processes

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
    from variable_batch_size.cores import accelerators  # which loads torch

    return accelerators.num_devices(backend)


# ------------------------------------------------------------------------------------------ in the started processes


def _xla_main(local_rank: int, num_processes: int, work: bytes, pipe: Any) -> None:
    """Run the work in a thread for each XLA device of this process."""
    end_with_parent()
    stopping.note_sigterm()  # in the main thread, which this is; the cores are others
    if os.environ["PJRT_DEVICE"] == "CPU":
        xla.let_virtual_cores_meet(int(os.environ["CPU_NUM_DEVICES"]))
    xla.run_on_devices(local_rank, num_processes, lambda rank: run_and_send(work, pipe, rank))


def _spmd_main(work: bytes, pipe: Any) -> None:
    """Run the work once, on all devices of this process."""
    end_with_parent()
    xla.use_spmd()
    xla.meet_other_hosts()
    run_and_send(work, pipe, 0)


def _distributed_main(
    rank: int, backend: str, meeting_point: str, num_cores: int, start_method: str | None, work: bytes, pipe: Any
) -> None:
    end_with_parent()
    # loaders start their workers as they do without a launch; else as this process was started, which takes long
    multiprocessing.set_start_method(start_method, force=True)
    import torch.distributed as dist

    from variable_batch_size.cores import accelerators

    accelerators.use_device(rank, backend)
    with environment(_ALL_ARE_WAITED_FOR):
        dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=num_cores)
    run_and_send(work, pipe, rank)
    dist.destroy_process_group()


def _run_under_torchrun(fn: Callable[..., Any], args: tuple[Any, ...], backend: str | None) -> Any:
    import torch.distributed as dist

    from variable_batch_size.cores import accelerators

    if backend == "xla":
        raise ValueError(
            'torchrun starts processes of torch.distributed: `backend` must be "gloo" or "nccl", got "xla"'
        )
    backend = backend or accelerators.default_backend()
    accelerators.use_device(int(os.environ["LOCAL_RANK"]), backend)
    if dist.is_initialized():
        return fn(*args)
    with environment(_ALL_ARE_WAITED_FOR):
        dist.init_process_group(backend)
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()
