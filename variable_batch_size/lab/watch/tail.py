"""Tail: the new lines of a file that another process appends to, on this machine or at a URL. It only reads."""

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from variable_batch_size.urls import as_os_error, filesystem_of, is_url, local_path

_MOST_BYTES = 4_000_000  # that are read at once
_OVERLAP = 64  # bytes before the position; if they differ, the file was replaced
_LONGEST_LINE = 4096  # of a record, in a sample of them
_SECONDS_BETWEEN_LOOKS = 5.0  # at a URL


class Tail:
    """Reads a file of a directory from the beginning, and then what is appended. A line is read when it is complete.

    A run that resumes rewrites its files: what was read is then obsolete, and `num_restarts` grows.
    """

    def __init__(self, directory: str, name: str) -> None:
        self.num_restarts = 0
        self.has_more = False  # whether there are complete lines that have not been read yet
        self.error: str | None = None  # why the file could not be read; None if it was read, or does not exist
        self._position, self._before, self._looked_at, self._size = 0, b"", 0.0, 0
        self._remote = None
        if is_url(directory):
            self._remote, root = filesystem_of(directory)
            self._path = f"{root.rstrip('/')}/{name}"
        else:
            self._path = str(local_path(directory) / name)

    @property
    def share(self) -> float:
        """How much of the file was read; 1 if only an incomplete line is left."""
        return self._position / self._size if self.has_more else 1.0

    def lines(self) -> list[bytes]:
        """The complete lines after those already read; only the first ones if there are many."""
        now = time.monotonic()
        if self._remote is not None and not self.has_more and now - self._looked_at < _SECONDS_BETWEEN_LOOKS:
            return []
        self._looked_at = now
        try:
            self._size = self._found_size()
            start = self._position - len(self._before)
            end = min(self._size, self._position + _MOST_BYTES)
            text = self._read(start, end) if end > start else b""
            self.error = None
        except FileNotFoundError:
            self._size, text, self.error = 0, b"", None
        except OSError as error:
            self.error, self.has_more = str(error), False
            return []
        if self._size < self._position or not text.startswith(self._before):
            self.num_restarts += 1
            self._position, self._before, self.has_more = 0, b"", self._size > 0
            return []
        self.has_more = self._size > self._position + _MOST_BYTES
        complete, newline, _ = text[len(self._before) :].rpartition(b"\n")
        if not newline and len(text) - len(self._before) < _MOST_BYTES:
            return []
        if not newline:  # no line of a run is that long: the rest of this one is not a record either
            self._position, self._before = end, text[-_OVERLAP:]
            return []
        self._position += len(complete) + 1
        self._before = (self._before + complete + newline)[-_OVERLAP:]
        return complete.split(b"\n")

    def skip(self) -> None:
        """Leave out all lines that are complete, and begin with the next one."""
        with suppress(OSError):
            size = self._found_size()
            start = max(0, size - _LONGEST_LINE)
            complete, newline, _ = self._read(start, size).rpartition(b"\n")
            self._position, self._before = start + len(complete + newline), (complete + newline)[-_OVERLAP:]

    def is_long(self) -> bool:
        """Whether it takes a while to read. Never for a URL, where a sample would need many requests."""
        with suppress(OSError):
            return self._remote is None and self._found_size() > _MOST_BYTES
        return False

    def sample(self, number: int) -> list[bytes]:
        """A line at each of `number` evenly spaced positions, including the last line: a quick look at a long file."""
        with suppress(OSError):
            size = self._found_size()
            places = [max(0, size - 2 * _LONGEST_LINE) * index // (number - 1) for index in range(number)]
            found = [self._read(place, place + 2 * _LONGEST_LINE).split(b"\n")[1:-1] for place in places]
            return [lines[-1] for lines in found if lines]
        return []

    def text(self) -> str | None:
        """The content of a small file; None if there is none."""
        try:
            size = self._found_size()
            return self._read(0, size).decode(errors="replace") if size else None
        except OSError:
            return None

    def age(self) -> float:
        """The seconds since the file was last written to; infinite if it does not exist."""
        with suppress(OSError):
            if self._remote is None:
                return max(0.0, time.time() - os.stat(self._path).st_mtime)
            with as_os_error(f"{self._path} could not be read"):
                return max(0.0, time.time() - float(self._remote.modified(self._path).timestamp()))
        return math.inf

    def _found_size(self) -> int:
        if self._remote is not None:
            with as_os_error(f"{self._path} could not be read"):
                try:
                    return int(self._remote.info(self._path)["size"])
                except FileNotFoundError:
                    return 0
        path = Path(self._path)
        if path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve()):
            raise PermissionError(f"{path} leads out of the directory")
        return os.stat(path).st_size

    def _read(self, start: int, end: int) -> bytes:
        if self._remote is not None:
            with as_os_error(f"{self._path} could not be read"):
                return bytes(self._remote.cat_file(self._path, start=start, end=end))
        with open(self._path, "rb") as file:
            file.seek(start)
            return file.read(end - start)
