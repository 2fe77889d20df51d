"""RunLock: a directory or a URL has one run at a time, as two would overwrite each other's checkpoints.

A run holds a file with its host, process and time, and renews it regularly. On the same machine, the next run replaces
the file at once if that process has ended; on another machine, once it has not been renewed for a while. If runs start
at the same moment on one machine, the first one gets the lock. On several machines, the last one does, and the others
raise before they save a checkpoint.
"""

import fcntl
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from variable_batch_size.cores.messages import show
from variable_batch_size.files import write_text
from variable_batch_size.runs.remote import RemoteDirectory, call_at_exit

logger = logging.getLogger(__name__)

LOCK = "run.lock"
_SECONDS_BETWEEN_RENEWALS = {"directory": 5.0, "URL": 20.0}
_SECONDS_UNTIL_ABANDONED = {"directory": 30.0, "URL": 100.0}  # without a renewal
_SECONDS_BETWEEN_LOOKS = 1.0

Owner = dict[str, Any]


class RunLock:
    """Held by core 0 of a run between :meth:`acquire` and :meth:`release`; this process may acquire it again."""

    def __init__(self, directory: Path, remote: RemoteDirectory | None) -> None:
        self._path, self._remote = directory / LOCK, remote
        self._kind = "directory" if remote is None else "URL"
        self._place = str(directory) if remote is None else remote.url
        self._ended: threading.Event | None = None  # set to end the thread that renews it
        release = weakref.WeakMethod(self.release)
        call_at_exit(lambda: method() if (method := release()) else None)

    def is_held_elsewhere(self) -> bool:
        """Whether another process holds it, or may hold it on another machine."""
        with suppress(OSError):  # the first write raises
            owner = self._read()[0]
            return owner is not None and _may_run(owner)
        return False

    def acquire(self) -> None:
        """Take it, or raise if another run holds it; waits to see whether a run on another machine renews it."""
        abandoned, version = self._read()
        if abandoned is not None and abandoned["machine"] != _machine():
            self._wait(abandoned, version)
        with _alone(self._path.parent):
            owner = self._read()[0]
            if owner is not None and _may_run(owner) and (owner["machine"] == _machine() or owner != abandoned):
                raise self._refusal(owner)
            self._write(number=0)
        self._ended = threading.Event()
        threading.Thread(target=self._renew, args=(self._ended,), daemon=True).start()

    def check(self) -> None:
        """Raise if another run holds it, or has replaced it; called before each write."""
        owner = self._read()[0]
        if owner is not None and _may_run(owner):
            raise self._refusal(owner)
        if owner is None and self._ended is not None:  # its directory was removed
            self._write(number=0)

    def release(self) -> None:
        """Release it for other runs."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None
            with suppress(OSError):
                owner = self._read()[0]
                if owner is not None and _is_own(owner):
                    self._remove()

    def _wait(self, owner: Owner, version: object) -> None:
        seconds = _SECONDS_UNTIL_ABANDONED[self._kind]
        show(logger, "%s belongs to %s: waiting %g s for it to end", self._place, _described(owner), seconds)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(_SECONDS_BETWEEN_LOOKS, seconds))
            found, now = self._read()
            if found is None:
                return
            if now != version:
                raise self._refusal(found)

    def _renew(self, ended: threading.Event) -> None:
        number = 0
        while not ended.wait(_SECONDS_BETWEEN_RENEWALS[self._kind]):
            number += 1
            with suppress(OSError):  # the next one may succeed
                owner = self._read()[0]
                if owner is None or not _is_own(owner):
                    continue  # check() raises
                if self._remote is None:
                    os.utime(self._path)
                else:
                    self._write(number=number)

    def _refusal(self, owner: Owner) -> RuntimeError:
        advice = "end that run, or use another directory for this one"
        return RuntimeError(f"{self._place} belongs to {_described(owner)}, which is still running: {advice}")

    def _read(self) -> tuple[Owner | None, object]:
        """The owner, if there is one, and something that changes with each renewal."""
        try:
            if self._remote is not None:
                text = self._remote.read_text(LOCK)
                version: object = text
            else:
                text, version = self._path.read_text(), self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None, None
        try:
            owner = json.loads(text or "")
            return (owner, version) if {"host", "machine", "process", "started"} <= set(owner) else (None, None)
        except (ValueError, TypeError):  # truncated when its machine failed
            return None, None

    def _write(self, *, number: int) -> None:
        text = json.dumps({**_this_process(), "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "renewed": number})
        if self._remote is not None:
            self._remote.write_text(LOCK, text)
        else:
            write_text(self._path, text)  # which another run may read at the same time

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True) if self._remote is None else self._remote.remove(LOCK)


def is_alive(lock: str, *, seconds_since_renewal: float, is_remote: bool) -> bool:
    """Whether the run of a lock file with this text is alive: by its process, or by renewals on another machine."""
    try:
        owner = json.loads(lock)
        if owner["machine"] == _machine():
            return bool(owner["started"] == _started(owner["process"]))
        return seconds_since_renewal < _SECONDS_UNTIL_ABANDONED["URL" if is_remote else "directory"]
    except (ValueError, TypeError, KeyError):  # truncated when its machine failed
        return False


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Exclude other processes of this machine, if the file system supports such locks."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _described(owner: Mapping[str, Any]) -> str:
    return f"process {owner['process']} on {owner['host']} since {owner.get('since', 'an unknown time')}"


def _this_process() -> Owner:
    process = os.getpid()
    return {"host": socket.gethostname(), "machine": _machine(), "process": process, "started": _started(process)}


def _is_own(owner: Mapping[str, Any]) -> bool:
    return all(owner[name] == value for name, value in _this_process().items())


def _may_run(owner: Mapping[str, Any]) -> bool:
    """Whether a process other than this one may hold a lock: one that is running, or on another machine."""
    if owner["machine"] != _machine():
        return True
    return not _is_own(owner) and owner["started"] == _started(owner["process"])


def _machine() -> str:
    """Distinguishes machines, their restarts, and containers with their own process numbers."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _started(process: int) -> str | None:
    """When a process was started, as another may reuse its number; None if it has ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    try:  # without /proc, as on macOS
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"
