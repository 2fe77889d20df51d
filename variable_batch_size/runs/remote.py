"""RemoteDirectory: a local directory whose files are uploaded to an fsspec URL such as ``s3://bucket/run``."""

import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from variable_batch_size.files import TEMPORARY
from variable_batch_size.urls import as_os_error, filesystem_of

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_UPLOADS = 30.0


def call_at_exit(finish: Callable[[], Any]) -> None:
    """Call a function, which must not raise, when this process ends, but not in processes forked from it."""
    process = os.getpid()  # atexit would be too late, as asyncio cannot look up host names by then
    threading._register_atexit(lambda: finish() if os.getpid() == process else None)  # type: ignore[attr-defined]


class RemoteDirectory:
    """A temporary local folder, and the remote directory to which its files are uploaded.

    Each file is one object, which is complete once it is visible. A file that is only needed remotely has an empty
    placeholder here. A file that did not change is not uploaded again, as another run may have appended to it.
    """

    def __init__(self, url: str, *, upload_at_exit: bool = False) -> None:
        self.url = url.rstrip("/")
        self._filesystem, root = filesystem_of(self.url)
        self._root = root.rstrip("/")
        self._put = partial(_put, self._filesystem, self._root, self.url)
        self.folder = Path(tempfile.mkdtemp(prefix="variable_batch_size-"))
        self._versions: dict[str, tuple[int, int]] = {}
        self._uploaded_at = time.monotonic()
        weakref.finalize(self, _remove, self.folder, process=os.getpid())
        if upload_at_exit:
            finish = weakref.finalize(self, _upload_last, self.folder, self._versions, self._put)
            finish.atexit = False  # that is too late, and would run in forked processes
            call_at_exit(finish)

    def check_writable(self) -> None:
        probe = self.folder / "writable"
        probe.touch()
        try:
            self._put(probe)
            self.remove(probe.name)
        except OSError as error:
            raise ValueError(f"`directory` must be writable, got {self.url}: {error}") from error
        finally:
            probe.unlink()

    def names(self) -> list[str]:
        found = []
        with as_os_error(f"{self.url} could not be listed"), suppress(FileNotFoundError):
            found = self._filesystem.ls(self._root, detail=True)
        return sorted(PurePosixPath(entry["name"]).name for entry in found if entry["type"] == "file")

    def truncate_local(self, path: Path) -> None:
        """Replace a local file with a placeholder, or create one."""
        path.write_bytes(b"")
        self._versions[path.name] = _version(path)

    def download(self, path: Path) -> None:
        with as_os_error(f"{self.url}/{path.name} could not be read"):
            self._filesystem.get_file(f"{self._root}/{path.name}", str(path))
        self._versions[path.name] = _version(path)

    def upload(self) -> None:
        """Upload the files that have changed since they were uploaded or downloaded."""
        try:
            _upload_changed(self.folder, self._versions, self._put)
        finally:
            self._uploaded_at = time.monotonic()

    def maybe_upload(self) -> None:
        """Upload if it is time. A failure is logged, and the next upload tries again."""
        if time.monotonic() - self._uploaded_at >= _SECONDS_BETWEEN_UPLOADS:
            try:
                self.upload()
            except OSError as error:
                logger.warning("records are not uploaded yet: %s", error)

    def upload_and_truncate(self, path: Path) -> None:
        """Upload a file and keep a placeholder, or remove the file if the upload fails."""
        try:
            self._put(path)
        except BaseException:
            path.unlink()
            raise
        self.truncate_local(path)

    def read_text(self, name: str) -> str | None:
        """The contents of a small remote file; None if there is none."""
        with as_os_error(f"{self.url}/{name} could not be read"), suppress(FileNotFoundError):
            return str(self._filesystem.cat_file(f"{self._root}/{name}").decode())
        return None

    def write_text(self, name: str, text: str) -> None:
        with as_os_error(f"{self.url}/{name} could not be written"):
            self._filesystem.pipe_file(f"{self._root}/{name}", text.encode())

    def rename(self, name: str, new_name: str) -> None:
        """Rename a remote file, if it exists."""
        with as_os_error(f"{self.url}/{name} could not be renamed"), suppress(FileNotFoundError):
            self._filesystem.mv(f"{self._root}/{name}", f"{self._root}/{new_name}")

    def remove(self, name: str) -> None:
        """Remove a remote file, if it exists."""
        with as_os_error(f"{self.url}/{name} could not be removed"), suppress(FileNotFoundError):
            self._filesystem.rm_file(f"{self._root}/{name}")


def _put(filesystem: Any, root: str, url: str, path: Path) -> None:
    with as_os_error(f"{url}/{path.name} could not be written"):
        filesystem.put_file(str(path), f"{root}/{path.name}")


def _version(path: Path) -> tuple[int, int]:
    """Changes whenever the file is written to."""
    state = path.stat()
    return state.st_mtime_ns, state.st_size


def _upload_changed(folder: Path, versions: dict[str, tuple[int, int]], put: Callable[[Path], None]) -> None:
    for path in sorted(folder.iterdir()):
        if not path.name.endswith(TEMPORARY) and versions.get(path.name) != (version := _version(path)):
            put(path)
            versions[path.name] = version


def _upload_last(folder: Path, versions: dict[str, tuple[int, int]], put: Callable[[Path], None]) -> None:
    try:
        _upload_changed(folder, versions, put)
    except Exception as error:
        logger.warning("the last records are lost: %s", error)


def _remove(folder: Path, *, process: int) -> None:
    """Remove a folder, but not in a process that was forked from its owner."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
