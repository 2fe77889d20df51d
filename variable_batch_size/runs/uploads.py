"""Uploads: files that grow here and are uploaded now and then, for stores in which nothing can be appended to."""

from __future__ import annotations

import logging
import time
import weakref
from pathlib import Path

from variable_batch_size.runs.mirror import Mirror

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_UPLOADS = 30.0


class Uploads:
    """A folder whose files are uploaded, each as a whole, twice a minute and at the end.

    Args:
        address: of the objects.
    """

    def __init__(self, address: str) -> None:
        self._mirror = Mirror(address)
        self._uploaded_at = time.monotonic()
        weakref.finalize(self, _upload_the_last, self._mirror)

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

    def soon(self) -> None:
        """Upload if it is time."""
        if time.monotonic() - self._uploaded_at >= _SECONDS_BETWEEN_UPLOADS:
            self.now()

    def now(self) -> None:
        self._mirror.upload(sorted(self.folder.iterdir()))
        self._uploaded_at = time.monotonic()


def _upload_the_last(mirror: Mirror) -> None:
    """What was written since, when the process ends or nobody needs the files any more."""
    try:
        mirror.upload(sorted(mirror.folder.iterdir()))
    except Exception as error:
        logger.warning("the last records are lost: %s", error)
