"""URLs of remote files and directories, such as ``s3://bucket/run``, through fsspec."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from variable_batch_size.checks import install

_URL = re.compile(r"^([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_BROKEN_URL = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]", re.IGNORECASE)
_EXTRAS = {"s3fs": "s3", "gcsfs": "gs"}  # of this package, by the package that fsspec needs


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL of a remote file or directory, such as ``s3://bucket/run``, not one on this machine."""
    text = os.fspath(path)
    if not isinstance(path, str) and _BROKEN_URL.match(text):
        raise ValueError(f'pass remote URLs as str, because pathlib turns "://" into ":/", got {path!r}')
    if isinstance(path, str) and "::" in text.partition("://")[0] and "://" in text:
        raise ValueError(f"a chained URL is not supported: pass one protocol, as in s3://bucket/run, got {path!r}")
    match = _URL.match(text)
    return match is not None and match[1].lower() not in ("file", "local")


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path on this machine, which may be written as ``file:///…``."""
    return Path(_URL.sub("", os.fspath(path)))


def filesystem_of(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path in it."""
    import fsspec
    from fsspec.registry import known_implementations

    try:
        filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        driver = known_implementations.get(url.partition("://")[0], {}).get("class", "fsspec").partition(".")[0]
        how = install(_EXTRAS[driver]) if driver in _EXTRAS else f"pip install {driver}"
        raise ImportError(f"{url}{f': {error}' if driver == 'fsspec' else f' needs {driver}: {how}'}") from error
    except ValueError as error:
        raise ValueError(f"{url} is not a URL that fsspec supports: {error}") from error
    return filesystem, path


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file on this machine or at a URL."""
    if not is_url(path):
        return local_path(path).read_bytes()
    filesystem, inner = filesystem_of(os.fspath(path))
    with as_os_error(f"{path} could not be read"):
        content: bytes = filesystem.cat_file(inner)
    return content


def file_names(directory: str | os.PathLike[str]) -> list[str]:
    """The names of what is in a directory on this machine or at a URL; none if it does not exist."""
    if not is_url(directory):
        path = local_path(directory)
        return [entry.name for entry in path.iterdir()] if path.exists() else []
    filesystem, inner = filesystem_of(os.fspath(directory))
    with as_os_error(f"{directory} could not be listed"):
        found = filesystem.ls(inner, detail=False) if filesystem.exists(inner) else []
    return [name.rstrip("/").rpartition("/")[2] for name in found]


@contextmanager
def as_os_error(message: str) -> Iterator[None]:
    """Convert the exceptions of a filesystem, of many types, to an OSError with this message and the reason."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise OSError(f"{message}: {reason}") from error
