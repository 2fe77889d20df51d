"""Processes: those of a job on one node, as torchrun would start them; and a pool of this machine's cores."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from variable_batch_size.checks import check_positive

STOPPED = 75  # vbs.EXIT_STOPPED, which imports torch
# a process that outlives its parent would continue to write checkpoints; exec keeps the setting
_WRAPPER = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except AttributeError:
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
# ends the process groups that it has read, one in a line, after an empty line or when its parent has died
_GUARD = """
import os, signal, sys, time

def send(number):
    found = []
    for group in groups:
        try:
            os.killpg(group, number)
            found.append(group)
        except OSError:
            pass
    return found

groups = []
while line := sys.stdin.readline().strip():
    groups.append(int(line))
for number in (signal.SIGTERM, signal.SIGKILL):
    groups, end = send(number), time.monotonic() + float(sys.argv[1])
    while groups and time.monotonic() < end:
        time.sleep(0.01)
        groups = send(0)
"""
SECONDS_TO_END = 5.0  # between SIGTERM and SIGKILL, for what the processes of a job have started


class Command(NamedTuple):
    """What each core of a job runs: a Python script with arguments."""

    arguments: Sequence[str]  # the script first
    directory: str  # in which it runs
    environment: Mapping[str, str] = {}


class Polled(NamedTuple):
    """The state of a job's processes."""

    codes: tuple[int, ...] | None  # exit codes, negative for signals, without those that were killed after an error
    output: bytes = b""  # new since the last poll
    is_lost: bool = False  # whether their node or worker has gone


class Processes:
    """The processes of a job on one node. When one ends with an error, the others are killed.

    Each leads a session and process group of its own. What they have started ends with them: another process, which
    survives this one, ends all groups.
    """

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._read = 0

    def free_port(self) -> int:
        with socket.socket() as free:
            free.bind(("", 0))
            return int(free.getsockname()[1])

    def start(self, command: Command, *, cores: int, first_rank: int, world_size: int, host: str, port: int) -> None:
        """Start a process for each core of this node; ``vbs.launch`` in the script then joins them."""
        guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(SECONDS_TO_END)]
        self._guard = subprocess.Popen(guard, bufsize=0, stdin=subprocess.PIPE, start_new_session=True)
        assert self._guard.stdin is not None
        for local_rank in range(cores):
            variables = {
                "RANK": str(first_rank + local_rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(cores),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "vbs-cluster",
            }
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _WRAPPER, str(os.getpid()), *command.arguments],
                    cwd=command.directory,
                    env={"OMP_NUM_THREADS": "1", **os.environ, **command.environment, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            self._guard.stdin.write(f"{self._processes[-1].pid}\n".encode())

    def poll(self) -> Polled:
        codes = [code for process in self._processes if (code := _exit_code(process)) is not None]
        # a core that was stopped waits for the others, which end too; after an error they would wait for ever
        has_failed = any(code not in (0, STOPPED) for code in codes)
        if has_failed:
            self._end_all()
        self._output.seek(self._read)
        output = self._output.read()
        self._read += len(output)
        return Polled(tuple(codes) if has_failed or len(codes) == len(self._processes) else None, output)

    def stop(self) -> None:
        """Ask all processes to save and exit."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes, and end what they have started. `poll` must not be called afterwards."""
        self._end_all()
        self._output.close()

    def _end_all(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        if self._guard is not None:
            self._guard.communicate(b"\n")
            self._guard = None

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if _exit_code(process) is None]


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code of a process if it has ended. Its number then still names its group, which others might get."""
    if not hasattr(os, "waitid"):  # on macOS before Python 3.13
        return process.poll()
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the code was collected when all were ended
        return process.poll()
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class Group(Protocol):
    """A running job."""

    def poll(self) -> Polled: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class Pool(Protocol):
    """Cores on nodes."""

    def nodes(self) -> dict[str, int]:
        """The cores of each node that is available now, by its name."""
        ...

    def start(self, command: Command, where: Mapping[str, int]) -> Group:
        """Start a job on these numbers of cores, by the names of the nodes."""
        ...

    def request(self, num_nodes: int, node_cores: int) -> None:
        """Request this many nodes in total."""
        ...

    def close(self) -> None: ...


class LocalPool:
    """Cores of this machine, without Ray."""

    def __init__(self, cores: int) -> None:
        check_positive(cores=cores)
        self._cores = cores

    def nodes(self) -> dict[str, int]:
        return {"local": self._cores}

    def start(self, command: Command, where: Mapping[str, int]) -> Group:
        processes, (cores,) = Processes(), where.values()
        options: dict[str, Any] = {"cores": cores, "first_rank": 0, "world_size": cores}
        processes.start(command, host="127.0.0.1", port=processes.free_port(), **options)
        return processes

    def request(self, num_nodes: int, node_cores: int) -> None:
        pass

    def close(self) -> None:
        pass


def kill_quietly(group: Group) -> None:
    """Kill a job that may have ended already."""
    with contextlib.suppress(Exception):
        group.kill()
