"""WatchedTrace: a trace file whose rows may be replaced while a run follows it."""

import hashlib
import os
import time
from dataclasses import dataclass
from typing import NamedTuple

from variable_batch_size.checks import check_positive
from variable_batch_size.traces.trace import Trace
from variable_batch_size.urls import is_url

_SECONDS = 2.0  # two writes may have the same time if that is less


@dataclass(frozen=True)
class WatchedTrace:
    """A trace file that core 0 reads again when it has changed; pass it as `trace`.

    Rows that are not fixed yet are replaced on all cores at the same step. A step is fixed `lead` to `lead + every`
    steps ahead, because loaders read ahead. If the file is invalid or half-written, a warning names the line, and the
    rows stay as they were.

    Args:
        path: a CSV file for :meth:`Trace.read`, on this machine. Replace it by renaming another, or end it with a line
            break: a last line without one counts as half-written.
        every: number of steps after which core 0 looks for changes and all cores agree on them.
        lead: number of steps that are fixed ahead; at least the DataLoader's ``num_workers * prefetch_factor``.
    """

    path: str | os.PathLike[str]
    every: int = 10
    lead: int = 16

    def __post_init__(self) -> None:
        check_positive(every=self.every, lead=self.lead)
        if is_url(self.path):
            raise ValueError(f"`path` of a watched trace must be a file on this machine, got {self.path}")


class FileStamp(NamedTuple):
    """What changes if a file is written or replaced."""

    inode: int
    size: int
    modified: int  # in nanoseconds


class WatchedFile:
    """Notices changes of a trace file, each once, after the file was left alone for a step."""

    def __init__(self, path: str | os.PathLike[str], trace: Trace) -> None:
        self._name, self._path = os.fspath(path), os.path.abspath(path)
        self.trace = trace  # as it was last, when that was valid
        self._seen = self._read = self._stamp()
        self._digest = b""  # of the content that was read last
        self._is_recent = True  # whether a later write may have the same stamp

    def look(self) -> bool:
        """Note the state of the file; returns whether it is the same as at the last look."""
        seen, self._seen = self._seen, self._stamp()
        return seen == self._seen

    def changed(self) -> Trace | None:
        """The new content, if there is one; ValueError if it is not a trace, or only a part of one."""
        if not self.look() or (self._seen == self._read and not self._is_recent):
            return None
        if self._seen is None:
            self._read, self._is_recent, self._digest = None, False, b""
            raise ValueError(f"{self._name} is missing")
        with open(self._path, "rb") as file:
            content = file.read()
        if self._stamp() != self._seen:
            return None
        self._read, digest = self._seen, hashlib.sha256(content).digest()
        self._is_recent = time.time() - self._seen.modified / 1e9 < _SECONDS
        if digest == self._digest:
            return None
        self._digest = digest
        if content and not content.endswith((b"\n", b"\r")):
            line = len(content.splitlines())
            rule = "the last line must end in a line break, without which the file counts as half-written"
            raise ValueError(f"{self._name}:{line}: {rule}")
        trace = Trace.parse(content, source=self._name)
        return None if trace == self.trace else trace

    def _stamp(self) -> FileStamp | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return FileStamp(found.st_ino, found.st_size, found.st_mtime_ns)
