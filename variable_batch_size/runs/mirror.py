"""Mirror: a folder of this machine whose files are the objects under an address, too."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from variable_batch_size.runs.object_store import ObjectStore

WRITABLE = "writable"


class Mirror:
    """Files are written here as anywhere, and uploaded when they are whole.

    Of large files that need not be here, the name alone is: an empty file.

    Args:
        address: of the objects, as ``s3://bucket/run``.
    """

    def __init__(self, address: str) -> None:
        self.store = ObjectStore(address)
        self.folder = Path(tempfile.mkdtemp(prefix="variable_batch_size-"))
        weakref.finalize(self, _remove, self.folder, process=os.getpid())

    @property
    def address(self) -> str:
        return self.store.address

    def prepare(self) -> None:
        """See that objects can be written."""
        (self.folder / WRITABLE).touch()
        try:
            self.store.upload(self.folder / WRITABLE, WRITABLE)
            self.store.remove(WRITABLE)
        except OSError as error:
            raise ValueError(f"`directory` must be one that can be written to, got {self.address}: {error}") from error
        finally:
            (self.folder / WRITABLE).unlink()

    def name_all(self) -> None:
        """Let every object have a file of its name, which is empty."""
        for name in self.store.names():
            (self.folder / name).touch()

    def fetch(self, path: Path) -> None:
        """Let a file be what its object is."""
        self.store.download(path.name, path)

    def forget(self, path: Path) -> None:
        """Keep no more than the name of a file."""
        path.write_bytes(b"")

    def move(self, path: Path) -> None:
        """Let an object be what a file is, and keep no more than its name; not even that if it cannot be uploaded."""
        try:
            self.store.upload(path, path.name)
        except BaseException:
            path.unlink()
            raise
        self.forget(path)

    def upload(self, paths: Sequence[Path]) -> None:
        """Let objects be what those files are that are there."""
        for path in paths:
            if path.exists():
                self.store.upload(path, path.name)

    def remove_gone(self, names: Sequence[str]) -> None:
        """Remove those objects whose files are gone."""
        for name in names:
            if not (self.folder / name).exists():
                self.store.remove(name)

    @contextmanager
    def naming_objects(self) -> Iterator[None]:
        """Within, an error that is about a file names its object."""
        try:
            yield
        except ValueError as error:
            raise ValueError(str(error).replace(str(self.folder), self.address)) from error


def _remove(folder: Path, *, process: int) -> None:
    """Remove a folder, but not in a process that was forked from its owner."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
