"""launch: runs a function on every core: TPU cores, virtual XLA cores, or torch.distributed processes."""

import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, NamedTuple, NoReturn

import torch.distributed as dist

from variable_batch_size.checks import check_positive, check_positive_number, install, is_integer
from variable_batch_size.cores import devices, live, signals, xla

logger = logging.getLogger(__name__)

_START_METHOD: Final = "spawn"  # a forked process would inherit locks held by other threads
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_BETWEEN_LOOKS_AT_CORES = 0.02
_MOST_FAILURES = 3  # in a row, of processes that end before they have joined an elastic run
_RESULT, _FAILURE, _EXIT, _INTERRUPT, _LEFT = "result", "failure", "exit", "interrupt", "left"
_send_one_at_a_time = threading.Lock()


class Process(NamedTuple):
    main: Callable[..., None]
    args: tuple[Any, ...]
    environment: Mapping[str, str]


def run_processes(processes: list[Process], work: bytes, elastic: "_Elastic | None" = None) -> list[Any]:
    """Start the processes, receive the results of their cores, and leave no process running.

    SIGTERM is forwarded to them, unless the user has set a handler, and ends this process after them unless they exit.
    So is the first Ctrl-C, and the second one ends all at once.
    """
    started: list[tuple[Any, Any]] = []
    results: dict[int, Any] = {}
    forwards = threading.current_thread() is threading.main_thread() and signals.ends_process()
    with signals.listening(on_interrupt=lambda: None) if forwards else nullcontext():
        try:
            _start(processes, work, started)
            if elastic is None:
                _receive(dict(started), results, forwards)
            else:
                elastic.receive(started, work, results, forwards)
        except SystemExit as ended:
            if forwards:
                signals.acknowledge(is_exiting=ended.code == signals.EXIT_STOPPED)
            raise
        except KeyboardInterrupt:
            if forwards:
                signals.acknowledge(is_exiting=False)
            raise
        finally:
            for receiver, child in started:
                if child.is_alive():
                    child.kill()
                child.join()
                receiver.close()
    return [results[rank] for rank in sorted(results)]


def _start(processes: list[Process], work: bytes, started: list[tuple[Any, Any]]) -> None:
    """Start the processes, and append each with its pipe as soon as it runs."""
    context = multiprocessing.get_context(_START_METHOD)
    for process in processes:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=process.main, args=(*process.args, work, sender))
        with environment(process.environment):
            child.start()
        sender.close()  # only the child holds it: EOF now means that the child has ended
        started.append((receiver, child))


def _receive(running: dict[Any, Any], results: dict[int, Any], forwards: bool) -> None:
    """Receive results until all processes have ended or one has failed; forward a stop request once."""
    while running:
        if forwards and signals.is_stop_requested():
            forwards = False
            for child in running.values():
                child.terminate()
        for pipe in multiprocessing.connection.wait(list(running), _SECONDS_BETWEEN_LOOKS if forwards else None):
            try:
                rank, outcome, payload = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                child = running.pop(pipe)
                child.join()
                if child.exitcode == -signal.SIGTERM:
                    _raise_interrupt()
                if child.exitcode != 0:
                    _raise_died(child.exitcode)
                continue
            _raise_unless_result(rank, outcome, payload)
            results[rank] = payload


def _raise_died(exit_code: int) -> NoReturn:
    guard = ': see its output, and call launch() under `if __name__ == "__main__":` in a script'
    hint = guard if exit_code == 1 else ""  # a script without it fails when it is imported
    raise RuntimeError(f"a process of the launch died with exit code {exit_code}{hint}") from None


def _raise_unless_result(rank: int, outcome: str, payload: Any) -> None:
    if outcome == _EXIT:
        if payload == signals.EXIT_STOPPED:
            _raise_interrupt()
        sys.exit(payload)
    if outcome == _INTERRUPT:
        raise KeyboardInterrupt
    if outcome == _FAILURE:
        raise RuntimeError(f"core {rank} failed:\n{payload}")


def _raise_interrupt() -> None:
    """Raise what Ctrl-C raises, if the cores have ended because of it."""
    if signals.was_interrupted():
        raise KeyboardInterrupt


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which processes started here have before their imports, and restore them."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


def run_and_send(work: bytes, pipe: Any, rank: int) -> None:
    """Run the function as a core, and send its result, traceback or exit code to the launching process."""
    try:
        fn, args = pickle.loads(work)  # a copy for each core, even if cores are threads of one process
        message = pickle.dumps((rank, _RESULT, fn(*args)))
    except live.LeftRunError as error:
        message = pickle.dumps((rank, _LEFT, str(error)))
    except SystemExit as exit:
        message = pickle.dumps((rank, _EXIT, exit.code))
    except KeyboardInterrupt:
        message = pickle.dumps((rank, _INTERRUPT, None))
    except BaseException:
        message = pickle.dumps((rank, _FAILURE, traceback.format_exc()))
    with _send_one_at_a_time:
        pipe.send_bytes(message)


def end_with_parent() -> None:
    """Exit immediately when the parent process ends."""

    def wait() -> None:
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    cores: int | None = None,
    backend: str | None = None,
    spmd: bool = False,
    elastic: tuple[int, int] | None = None,
    store: str | None = None,
    timeout: float = 10.0,
) -> list[Any]:
    """Run ``fn(*args)`` on every core and return the results in the order of their ranks.

    `fn`, `args` and the results are pickled, so `fn` must be a module-level function, and a script must call ``launch``
    under ``if __name__ == "__main__":``. The first exception on any core ends the others and is raised with that core's
    traceback; ``sys.exit`` on a core ends all of them and the launch with that code. SIGTERM is forwarded to the cores:
    without a :class:`Checkpoint` it ends them and then this process. So is Ctrl-C; the second one ends all at once.
    Under ``torchrun`` it only initializes the process group and runs `fn` in this process.

    Args:
        fn: the function to run.
        args: its arguments; each core gets a copy.
        cores: number of cores; all TPU cores, all GPUs, or one core per CPU if None.
        backend: ``"xla"`` for TPU cores, or virtual XLA cores on the CPU if there is no TPU; or a backend of
            torch.distributed such as ``"gloo"``, ``"nccl"`` or ``"tpu_dist"``. By default XLA if torch_xla is
            installed and there is a TPU or the environment has ``PJRT_DEVICE``; else, and under ``torchrun``, that of
            the accelerator: nccl for GPUs, and gloo if there is none.
        spmd: on XLA, run `fn` once, in one process that drives all devices of this host as one core (SPMD mode).
            `cores` is then the number of devices, and `fn` shards tensors over them.
        elastic: the smallest and the largest number of cores of a run that continues when cores die, and to which
            others can be added while it runs, over gloo; see the page on cores that come and go. A process that dies is
            replaced. The results are those of the cores that are there at the end.
        store: for an elastic run on several machines, the address of ``deploy/store.py``, such as ``"10.0.0.1:29400"``,
            with the same value on each; None for a store of its own, on one machine.
        timeout: in an elastic run, the seconds without a sign of life after which a core counts as dead although its
            process has not ended, because it hangs or its machine has failed.
    """
    if cores is not None:
        check_positive(cores=cores)
    if not callable(fn):
        raise ValueError(f"`fn` must be a function, got {fn!r}: pass main, not main()")
    if not isinstance(args, tuple | list):
        raise ValueError(f"`args` must be a tuple, got {args!r}: write ({args!r},) for one argument")
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if elastic is not None:
        return _launch_elastic(fn, args, cores, backend, spmd, _Bounds.checked(elastic, timeout), store)
    if store is not None:
        raise ValueError(f"`store` must be None without `elastic`, got {store!r}")
    if spmd and (backend not in (None, "xla") or is_under_torchrun):
        where = f'backend="{backend}"' if backend not in (None, "xla") else "torchrun"
        raise ValueError(f'`spmd` must be False with {where}: only backend="xla" has this mode')
    if is_under_torchrun:
        return [_run_under_torchrun(fn, args, backend)]
    backend = backend or ("xla" if spmd or xla.is_default() else devices.default_backend())
    work = _pickled(fn, args)
    if backend == "xla":
        return run_processes(_xla_processes(cores, spmd), work)
    num_devices = devices.num_devices(backend)
    devices.check_backend(backend, num_devices)
    if num_devices and cores is not None and cores > num_devices:
        rule = f"`cores` must be at most {num_devices}, the number of devices for {backend}"
        raise ValueError(f'{rule}, got {cores}: launch with backend="gloo" for processes on the CPU')
    num_cores = cores or num_devices or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as directory:
        group = (backend, f"file://{directory}/store", num_cores, multiprocessing.get_start_method(allow_none=True))
        processes = [
            Process(_distributed_main, (rank, *group), _threads(num_cores) | own)
            for rank, own in enumerate(devices.process_environments(backend, num_cores))
        ]
        return run_processes(processes, work)


def _threads(num_processes: int) -> dict[str, str]:
    """The environment in which each of the processes has its share of the CPUs, unless the user has set one."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))}


def _pickled(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        needs = "`fn` must be a function at the top level of a module, and `args` must be picklable"
        advice = "make the model and the loader in `fn`"
        raise ValueError(f"{needs}, to be sent to other processes, got {error}: {advice}") from error


def _xla_processes(cores: int | None, spmd: bool) -> list[Process]:
    """The processes of this host's TPU cores, or one with virtual cores if there is no TPU."""
    if not xla.is_installed():
        raise ValueError(f'backend="xla" needs torch_xla: {install("xla")}')
    device = os.environ.get("PJRT_DEVICE") or ("TPU" if xla.has_tpu() else "CPU")
    if device == "TPU":
        if cores not in (None, xla.num_tpu_cores()):
            raise ValueError(f"`cores` must be None or all {xla.num_tpu_cores()} TPU cores of this host, got {cores}")
        number, variables = xla.num_tpu_processes(), {"PJRT_DEVICE": "TPU"}
    else:
        num_cores = cores or int(os.environ.get("CPU_NUM_DEVICES", 0)) or os.cpu_count() or 1
        number, variables = 1, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(num_cores)}
        # a collective blocks one thread per core until all cores have joined: fewer threads would deadlock
        num_threads = str(max(xla.NUM_THREADS, 2 * num_cores))
        variables |= {"XLA_THREAD_POOL_SIZE": num_threads, "PJRT_NPROC": num_threads}
        # freeing a donated buffer would wait for a collective that waits for this core
        variables["XLA_ENABLE_PARAM_ALIASING"] = "0"
    if spmd:
        return [Process(_spmd_main, (), variables)]
    return [Process(_xla_main, (rank, number), variables) for rank in range(number)]


def _xla_main(local_rank: int, num_processes: int, work: bytes, pipe: Any) -> None:
    end_with_parent()
    signals.note_signals()  # possible only in the main thread; the cores are other threads
    if os.environ["PJRT_DEVICE"] == "CPU":
        xla.patch_rendezvous(int(os.environ["CPU_NUM_DEVICES"]))
    xla.run_on_devices(local_rank, num_processes, lambda rank: run_and_send(work, pipe, rank))


def _spmd_main(work: bytes, pipe: Any) -> None:
    end_with_parent()
    xla.use_spmd()
    run_and_send(work, pipe, 0)


def _distributed_main(
    rank: int, backend: str, store: str, num_cores: int, start_method: str | None, work: bytes, pipe: Any
) -> None:
    end_with_parent()
    # DataLoaders start workers as without launch(); otherwise they would use spawn, which is slow
    multiprocessing.set_start_method(start_method, force=True)
    with _process_group(backend, rank, init_method=store, rank=rank, world_size=num_cores):
        run_and_send(work, pipe, rank)


def _run_under_torchrun(fn: Callable[..., Any], args: tuple[Any, ...], backend: str | None) -> Any:
    if backend == "xla":
        raise ValueError('`backend` must be "gloo" or "nccl" under torchrun, got "xla"')
    backend, local_rank = backend or devices.default_backend(), int(os.environ["LOCAL_RANK"])
    if dist.is_initialized():
        devices.use_device(local_rank, backend)
        return fn(*args)
    with devices.completed_environment(backend), _process_group(backend, local_rank):
        return fn(*args)


@contextmanager
def _process_group(backend: str, local_rank: int, **options: Any) -> Iterator[None]:
    """Initialize torch.distributed and the device of this process."""
    devices.use_device(local_rank, backend)
    # with a barrier: otherwise a rank that exits early breaks the rendezvous of the others
    with environment({"TORCH_DIST_INIT_BARRIER": "1"}):
        dist.init_process_group(backend, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Bounds(NamedTuple):
    """The values of `elastic` and `timeout`."""

    least: int
    most: int
    timeout: float

    @classmethod
    def checked(cls, elastic: Any, timeout: float) -> "_Bounds":
        if not isinstance(elastic, tuple | list) or len(elastic) != 2:
            raise ValueError(f"`elastic` must be the smallest and largest number of cores, as (1, 4), got {elastic!r}")
        check_positive(elastic=elastic[0])
        check_positive_number(timeout=timeout)
        if not is_integer(elastic[1]) or elastic[1] < elastic[0]:
            raise ValueError(f"`elastic` must be two integers, the smaller one first, got {elastic!r}")
        return cls(elastic[0], elastic[1], timeout)


def _launch_elastic(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    cores: int | None,
    backend: str | None,
    spmd: bool,
    bounds: _Bounds,
    address: str | None,
) -> list[Any]:
    if spmd or backend not in (None, "gloo"):
        rule = '`backend` must be None or "gloo" with `elastic`: other backends cannot leave a collective'
        raise ValueError(f"{rule} in which a core has died, got {'spmd=True' if spmd else backend!r}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if address is None:
            rule = "`store` must be the address of deploy/store.py under torchrun with `elastic`"
            raise ValueError(f"{rule}, as the store of torchrun ends with one of its processes, got None")
        core = live.new_core(live.connect(address))
        _report_own_death(address, core)
        membership = live.Membership(address, core, first=bounds.least, **bounds._asdict())
        devices.use_device(int(os.environ["LOCAL_RANK"]), "gloo")
        with live.taking_part(membership):
            return [fn(*args)]
    number = bounds.most if cores is None else cores
    if number > bounds.most:
        raise ValueError(f"`cores` must be at most {bounds.most}, the largest number of `elastic`, got {number}")
    work, first = _pickled(fn, args), number if address is None else bounds.least
    with _store_process() if address is None else nullcontext(address) as address:
        elastic = _Elastic(address, first, bounds, num_processes=number)
        try:
            return run_processes([elastic.new_process() for _ in range(number)], work, elastic)
        finally:
            elastic.report_end()


def _report_own_death(address: str, core: int) -> None:
    """Start a process that reports to the store when this one has ended, as there is no launching process that does."""
    parent = os.getpid()
    if not hasattr(os, "fork"):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the process uses nothing of theirs
        if os.fork():
            return
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while os.getppid() == parent:
            time.sleep(_SECONDS_BETWEEN_LOOKS_AT_CORES)
        live.report_death(live.connect(address), core)
    finally:
        os._exit(0)


@contextmanager
def _store_process() -> Iterator[str]:
    """The address of a store in a process of its own, which ends with the launch."""
    context = multiprocessing.get_context(_START_METHOD)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_store_main, args=(sender,), daemon=True)
    process.start()
    sender.close()
    try:
        yield f"127.0.0.1:{receiver.recv()}"
    finally:
        process.kill()
        process.join()


def _store_main(pipe: Any) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipe.send(server.port)
    threading.Event().wait()


class _Elastic:
    """Starts the cores of a run on this machine, reports those that die to the others, and replaces them."""

    def __init__(self, address: str, first: int, bounds: _Bounds, *, num_processes: int) -> None:
        self._address, self._first, self._bounds, self._num_processes = address, first, bounds, num_processes
        self._store = live.connect(address)
        self._cores: list[int] = []  # by the place of their process
        self._num_failed = 0  # processes in a row that have ended before they joined the run
        self._is_stopping = False

    def new_process(self) -> Process:
        """A core with a number of its own."""
        core, place = live.new_core(self._store), len(self._cores)
        self._cores.append(core)
        method = multiprocessing.get_start_method(allow_none=True)
        own = (core, place, self._address, self._first, self._bounds, method)
        return Process(_live_main, own, _threads(self._num_processes))

    def receive(self, started: list[tuple[Any, Any]], work: bytes, results: dict[int, Any], forwards: bool) -> None:
        """Receive results until all processes have ended; one that dies is replaced, unless the run has ended."""
        running = set(range(len(started)))
        while any(map(self._is_awaited, running)) if results else running:
            if forwards and signals.is_stop_requested() and not self._is_stopping:
                self._is_stopping = True
                for place in running:
                    started[place][1].terminate()
            pipes = [started[place][0] for place in running]
            multiprocessing.connection.wait(pipes, _SECONDS_BETWEEN_LOOKS_AT_CORES)
            for place in sorted(running):
                receiver, child = started[place]
                # not EOF: loader workers of the process that has ended may still hold its pipe
                has_ended, has_left = not child.is_alive(), False
                with suppress(EOFError):
                    while receiver.poll():
                        core, outcome, payload = pickle.loads(receiver.recv_bytes())
                        _raise_unless_result(core, outcome, payload)
                        has_left = outcome == _LEFT
                        if not has_left:
                            results[core] = payload
                if has_ended or has_left:
                    running.discard(place)
                    if self._is_to_be_replaced(place, child, results):
                        running.add(len(started))
                        _start([self.new_process()], work, started)
        if not results and not self._store.check(["finished"]):
            raise RuntimeError("all cores of the run have died: resume from a checkpoint, if there is one")

    def report_end(self) -> None:
        """Report to cores on other machines that those of this one have ended, as they do if one of them fails."""
        with suppress(RuntimeError):  # the store may have ended, too
            for core in self._cores:
                live.report_death(self._store, core)

    def _is_awaited(self, place: int) -> bool:
        """Whether a process may still have a result, once others have one: not if it was started too late to join."""
        return place < self._num_processes or self._has_joined(place)

    def _has_joined(self, place: int) -> bool:
        return bool(self._store.check([f"joined/{self._cores[place]}"]))

    def _is_to_be_replaced(self, place: int, child: Any, results: dict[int, Any]) -> bool:
        """Report a core that has died or was removed; returns whether the run needs another one."""
        core = self._cores[place]
        if core in results:
            return False
        was_removed = self._store.check([f"dead/{core}"])
        live.report_death(self._store, core)
        if child.exitcode == -signal.SIGTERM:
            _raise_interrupt()
        if self._is_stopping or not self._store.check(["0/decision"]):
            _raise_died(child.exitcode)
        logger.warning("core %d has ended with exit code %s", core, child.exitcode)
        if self._has_joined(place):
            self._num_failed = 0
        elif was_removed or child.exitcode:
            self._num_failed += 1
        else:  # it came too late
            return False
        return not results and self._num_failed < _MOST_FAILURES


def _live_main(
    core: int, place: int, address: str, first: int, bounds: _Bounds, start_method: str | None, work: bytes, pipe: Any
) -> None:
    end_with_parent()
    multiprocessing.set_start_method(start_method, force=True)
    devices.use_device(place, "gloo")
    membership = live.Membership(address, core, first=first, **bounds._asdict())
    with live.taking_part(membership):
        run_and_send(work, pipe, core)
    if membership.is_stuck:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
