"""Objects under an address such as ``s3://bucket/run``, each of which is whole or not there."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

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
