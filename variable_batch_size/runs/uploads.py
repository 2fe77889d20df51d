"""Uploads: files that grow here and are uploaded now and then, for stores in which nothing can be appended to."""

from __future__ import annotations

import logging
import time
import weakref
from pathlib import Path

from variable_batch_size.runs.at_exit import call_at_exit
from variable_batch_size.runs.mirror import Mirror

Versions = dict[str, tuple[int, int]]
"""Of the files that were uploaded, by their names."""

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_UPLOADS = 30.0


class Uploads:
    """A folder whose files are uploaded, each as a whole, twice a minute and at the end.

    A file that has not changed since is not uploaded again: its object may have grown by what another run has added.

    Args:
        address: of the objects.
    """

    def __init__(self, address: str) -> None:
        self._mirror = Mirror(address)
        self._uploaded_at = time.monotonic()
        self._versions: Versions = {}
        upload_the_last = weakref.finalize(self, _upload_the_last, self._mirror, self._versions)
        upload_the_last.atexit = False  # which would be too late, and in forked processes, too
        call_at_exit(upload_the_last)

    @property
    def folder(self) -> Path:
        return self._mirror.folder

    @property
    def has_any(self) -> bool:
        """Whether there are objects already."""
        return bool(self._mirror.store.names())

    def fetch(self, path: Path) -> None:
        """Begin with what was uploaded before, if anything was."""
        if path.name in self._mirror.store.names():
            self._mirror.fetch(path)
            self._versions[path.name] = _version(path)

    def soon(self) -> None:
        """Upload if it is time; what could not be uploaded, which should not end a run, goes with the next time."""
        if time.monotonic() - self._uploaded_at < _SECONDS_BETWEEN_UPLOADS:
            return
        self._uploaded_at = time.monotonic()
        try:
            self.now()
        except OSError as error:
            logger.warning("records are not uploaded yet: %s", error)

    def now(self) -> None:
        _upload_changed(self._mirror, self._versions)
        self._uploaded_at = time.monotonic()


def _upload_changed(mirror: Mirror, versions: Versions) -> None:
    for path in sorted(mirror.folder.iterdir()):
        version = _version(path)
        if versions.get(path.name) != version:
            mirror.upload([path])
            versions[path.name] = version


def _version(path: Path) -> tuple[int, int]:
    """What tells a file from the same one after it was written to."""
    state = path.stat()
    return state.st_mtime_ns, state.st_size


def _upload_the_last(mirror: Mirror, versions: Versions) -> None:
    """What was written since, when the process ends or nobody needs the files any more."""
    try:
        _upload_changed(mirror, versions)
    except Exception as error:
        logger.warning("the last records are lost: %s", error)
