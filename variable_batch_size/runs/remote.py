"""RemoteDirectory: a local directory mirrored to an fsspec URL such as ``s3://bucket/run``."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from variable_batch_size.runs.async_writer import call_at_exit

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_BROKEN_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]", re.IGNORECASE)
_OF_THIS_MACHINE = ("file", "local")

_EXTRAS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
"""The drivers that most people need; fsspec names those of other addresses."""


def is_address(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the address of objects, and not of files of this machine.

    >>> is_address("s3://bucket/run"), is_address("runs/a"), is_address("file:///runs/a")
    (True, False, False)
    """
    text = os.fspath(path)
    if not isinstance(path, str) and _BROKEN_ADDRESS.match(text):
        raise ValueError(f"an address must be a text, as a path has lost a slash of it, got {path!r}")
    if isinstance(path, str) and "::" in text.partition("://")[0] and "://" in text:
        raise ValueError(f"an address must begin with the protocol of the objects, as s3://bucket/run, got {path!r}")
    match = _ADDRESS.match(text)
    return match is not None and match[1].lower() not in _OF_THIS_MACHINE


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path of this machine, which may be written as ``file:///…``."""
    text = os.fspath(path)
    match = _ADDRESS.match(text)
    return Path(text[match.end() :] if match else text)


class ObjectStore:
    """Objects under an address, through fsspec, which knows S3, GCS, Azure and others by their drivers.

    An object is written by one upload of a file. Object stores show it when all of it is there: so none is renamed, and
    none is found that is cut short. Listings are asked for each time.

    Args:
        address: that the names of the objects are appended to.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._files, self._root = _filesystem(self.address)

    def names(self) -> list[str]:
        """Of the objects right under the address."""
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:  # of many kinds, depending on the driver
            raise OSError(f"{self.address} could not be listed: {_in_words(error)}") from error
        return sorted(PurePosixPath(entry["name"]).name for entry in found if entry["type"] == "file")

    def upload(self, path: Path, name: str) -> None:
        """Let an object be what a file is."""
        try:
            self._files.put_file(str(path), f"{self._root}/{name}")
        except Exception as error:
            raise OSError(f"{self.address}/{name} could not be written: {_in_words(error)}") from error

    def download(self, name: str, path: Path) -> None:
        """Let a file be what an object is."""
        try:
            self._files.get_file(f"{self._root}/{name}", str(path))
        except Exception as error:
            raise OSError(f"{self.address}/{name} could not be read: {_in_words(error)}") from error

    def remove(self, name: str) -> None:
        try:
            self._files.rm_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return
        except Exception as error:
            raise OSError(f"{self.address}/{name} could not be removed: {_in_words(error)}") from error


def _filesystem(address: str) -> tuple[Any, str]:
    """What reads and writes under an address, and how it calls that."""
    import fsspec

    protocol = address.partition("://")[0].lower()
    try:
        files, root = fsspec.core.url_to_fs(address, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        needed = f"needs {_EXTRAS[protocol]}: pip install {_EXTRAS[protocol]}" if protocol in _EXTRAS else str(error)
        raise ImportError(f"{address} {needed}") from None
    except ValueError as error:
        raise ValueError(f"{address} is no address that fsspec knows: {error}") from None
    return files, root.rstrip("/")


def _in_words(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


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
