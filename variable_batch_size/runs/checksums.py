"""Checksums of the files of a checkpoint: those in a file of ``torch.save``, and those of shards."""

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import torch

_HEADER_SIZE, _LENGTHS_AT = 30, 26  # of the header before each record: its fixed part, and the lengths of two fields
_IS_DIRECTORY = 0x10  # of the attributes of a record
_BYTES_AT_ONCE = 2**20


class DamagedFileError(ValueError):
    """The content of a file is not what was written."""


@contextmanager
def crcs_written() -> Iterator[None]:
    """In this context, ``torch.save`` writes CRCs, which a user may have switched off since torch 2.6."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        yield
        return
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class CheckedFile:
    """A file of ``torch.save`` to be read by ``torch.load``, which does not compare the CRCs in it.

    Everything but the contents of tensors is compared first, as ``torch.load`` relies on it. The contents are compared
    in :meth:`finish`, with the CRCs of the bytes that were read: no file is read twice.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._archive = file, ZipFile(file)
        self._crcs: dict[tuple[int, int], int] = {}  # of what was read, by place and size
        self._contents: list[tuple[ZipInfo, int]] = []  # of tensors: the records and their places
        for record in self._archive.infolist():
            with self._archive.open(record):  # compares its name with the name in its header
                pass
            is_stored = record.compress_type == ZIP_STORED and record.file_size == record.compress_size
            if not is_stored or record.external_attr & _IS_DIRECTORY:  # of which torch would read nothing
                raise BadZipFile(f"the entry of {record.filename!r} is not as it was written")
            if "/data/" in record.filename:
                self._contents.append((record, self._place_of(record)))
            else:
                self._archive.read(record)  # compares the CRC
        file.seek(0)

    def _place_of(self, record: ZipInfo) -> int:
        self._file.seek(record.header_offset)
        of_name, of_extra = struct.unpack_from("<HH", self._file.read(_HEADER_SIZE), _LENGTHS_AT)
        return int(record.header_offset + _HEADER_SIZE + of_name + of_extra)

    def finish(self) -> None:
        """Raise if the contents of a tensor were not those that were written."""
        for record, place in self._contents:
            crc = self._crcs.get((place, record.file_size))
            if crc is None:  # it is empty, or a version of torch reads it in pieces
                self._archive.read(record)
            elif crc != record.CRC:
                raise BadZipFile(f"Bad CRC-32 for file {record.filename!r}")  # in the words of zipfile

    def readinto(self, buffer: Any) -> int:
        place, number = self._file.tell(), self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._crcs[place, number] = zlib.crc32(memoryview(buffer)[:number])
        return int(number)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def readline(self, size: int = -1) -> bytes:
        return self._file.readline(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def checksum_of(path: Path) -> int:
    """The CRC of a file."""
    crc, buffer = 0, memoryview(bytearray(_BYTES_AT_ONCE))
    with open(path, "rb", buffering=0) as file:
        while number := file.readinto(buffer):
            crc = zlib.crc32(buffer[:number], crc)
    return crc


class SummedFile:
    """A file that is written, with the CRC of what was written to it."""

    def __init__(self, file: Any) -> None:
        self._file, self.crc = file, 0

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class SummedFiles:
    """A file system of ``torch.distributed.checkpoint``, with the CRC of each file that was written, by its name."""

    def __init__(self, files: Any) -> None:
        self._files, self.crcs = files, dict[str, int]()

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[SummedFile]:
        with self._files.create_stream(path, mode) as stream:
            summed = SummedFile(stream)
            yield summed
        self.crcs[path.name] = summed.crc

    def rename(self, path: Path, new_path: Path) -> None:
        self._files.rename(path, new_path)
        self.crcs[new_path.name] = self.crcs.pop(path.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)
