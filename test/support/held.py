"""Hold: a process waits at a moment of its work until it is killed or released; polling could miss the moment."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 900  # exceeded only by a hang, even on a busy machine
PAUSE = 0.01


@dataclass(frozen=True)
class Hold:
    """A place to wait, known by a folder, so that it can be passed to any process.

    Attributes:
        folder: has a file for each process that waits or has waited, and one once they are released.
    """

    folder: Path

    # -------------------------------------------------------------------------------------------------- in the process

    def here(self, until=lambda: False):
        """Wait until this process is killed, the hold is released, or the condition is true."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / str(os.getpid())).touch()
        while not self.is_released() and not until():
            time.sleep(PAUSE)

    def is_released(self):
        return (self.folder / "released").exists()

    def at_rename(self, suffix, *, number=1):
        """Wait when this process is about to rename a file or directory with this suffix for the n-th time.

        A file is cut in half, as if the moment were within the write. Only for processes that are to be killed.
        """
        seen = 0

        def look(event, args):
            nonlocal seen
            if event == "os.rename" and str(args[0]).endswith(suffix):
                seen += 1
                if seen == number:
                    if os.path.isfile(args[0]):
                        os.truncate(args[0], os.path.getsize(args[0]) // 2)
                    self.here()

        sys.addaudithook(look)

    # ----------------------------------------------------------------------------------------------------- in the test

    def wait(self, problem=lambda: None, *, number=1):
        """Wait until N processes are held; returns their ids. `problem` returns why none can come any more."""
        end = time.monotonic() + MOST_SECONDS
        while len(pids := self._pids()) < number:
            # looked at again, as the last one may have come meanwhile
            if (found := problem()) is not None and len(self._pids()) < number:
                raise AssertionError(found)
            assert time.monotonic() < end, f"{len(pids)} of {number} processes are held after {MOST_SECONDS} s"
            time.sleep(PAUSE)
        return pids

    def again(self):
        """Hold processes again after a release."""
        for path in self.folder.iterdir():
            path.unlink()

    def release(self):
        """Let all processes continue that are held, or will be."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "released").touch()

    def _pids(self):
        names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        return sorted(int(name) for name in names if name.isdigit())
