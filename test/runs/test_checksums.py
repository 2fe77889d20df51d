"""Damaged files: every bit of a file of ``torch.save``, its length, and what other files are written with."""

import zipfile
from collections import OrderedDict
from contextlib import nullcontext
from zipfile import BadZipFile

import pytest
import torch

from variable_batch_size.runs import state_file
from variable_batch_size.runs.checksums import CheckedFile, DamagedFileError, SummedFiles, checksum_of

STATE = {
    "model": OrderedDict(weight=torch.arange(12.0).view(3, 4), bias=torch.ones(4, dtype=torch.float64)),
    "empty": torch.zeros(0),
    "position": {"epoch": 3, "starts": [1, 2.5], "name": "text"},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "file.pt"
    state_file.save(path, STATE)
    return path.read_bytes()


def are_same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(value, other[key]) for key, value in one.items())
    return one == other


def load(path, content):
    """What is in the file: None if it is refused as damaged."""
    path.write_bytes(content)
    try:
        return state_file.load(path)
    except DamagedFileError:
        return None


@pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_file_with_a_bit_flipped_anywhere_is_refused_or_holds_what_was_written(whole, tmp_path, share):
    path, right = tmp_path / "file.pt", load(tmp_path / "file.pt", whole)
    assert are_same({name: right[name] for name in STATE}, STATE)
    start_of_directory = whole.index(b"PK\x01\x02")
    refused = set()
    for number in range(8 * len(whole)):
        place, bit = divmod(number, 8)
        if (place + bit) % share and (place < start_of_directory or (place + bit) % 4):
            continue
        content = bytearray(whole)
        content[place] ^= 1 << bit
        found = load(path, content)
        assert found is None or are_same(found, right), (place, bit)
        if found is None:
            refused.add(place)
    for name, start, size in records_of(path, whole):  # fields such as a record's date may change without a loss
        assert set(range(start, start + size)) <= refused, name


def test_an_entry_that_is_marked_as_a_directory_is_refused(whole, tmp_path):
    """torch.load would read nothing, and return memory as it is."""
    places = [place for place in range(len(whole)) if whole[place : place + 4] == b"PK\x01\x02"]
    assert len(places) == 9
    for place in places:
        content = bytearray(whole)
        content[place + 38] |= 0x10
        assert load(tmp_path / "file.pt", content) is None


def records_of(path, whole):
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            start = whole.index(b"PK\x03\x04", record.header_offset) + 30
            start += int.from_bytes(whole[start - 4 : start - 2], "little")
            start += int.from_bytes(whole[record.header_offset + 28 : record.header_offset + 30], "little")
            assert whole[start : start + record.file_size] == archive.read(record)
            yield record.filename, start, record.file_size


def test_a_file_of_any_other_length_is_refused(whole, tmp_path):
    for length in range(len(whole)):
        assert load(tmp_path / "file.pt", whole[:length]) is None, length
    for zeros in (10, 100, len(whole)):  # where a system has allocated space, but has not written to it
        found = load(tmp_path / "file.pt", whole[:-zeros] + bytes(zeros))
        assert found is None or are_same({name: found[name] for name in STATE}, STATE), zeros


def test_the_record_that_differs_is_named(whole, tmp_path):
    path, content = tmp_path / "file.pt", bytearray(whole)
    content[whole.index(STATE["model"]["bias"].numpy().tobytes()) + 7] ^= 64
    path.write_bytes(content)
    said = f"^{path} is damaged, truncated or not a checkpoint: Bad CRC-32 for file 'archive/data/1'$"
    with pytest.raises(DamagedFileError, match=said):
        state_file.load(path)


def test_crcs_are_written_even_if_the_user_has_switched_them_off(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        state_file.save(tmp_path / "file.pt", STATE)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(before)
    assert are_same(state_file.load(tmp_path / "file.pt")["model"], STATE["model"])
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None


def test_contents_are_read_once(whole, tmp_path, monkeypatch):
    path, sizes = tmp_path / "file.pt", []
    path.write_bytes(whole)
    read = zipfile.ZipFile.read
    monkeypatch.setattr(
        zipfile.ZipFile, "read", lambda self, record: sizes.append(record.filename) or read(self, record)
    )
    state_file.load(path)
    assert [name for name in sizes if "/data/" in name] == ["archive/data/2"]  # which is empty
    assert "archive/data.pkl" in sizes


def test_contents_that_were_not_read_in_one_piece_are_compared_too(whole, tmp_path):
    path, place = tmp_path / "file.pt", whole.index(STATE["model"]["weight"].numpy().tobytes())
    for content in (whole, whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]):
        path.write_bytes(content)
        with open(path, "rb") as file, nullcontext() if content == whole else pytest.raises(BadZipFile, match="data/0"):
            CheckedFile(file).finish()


def test_checksum_of_a_file_is_that_of_what_was_written_to_it(tmp_path):
    from torch.distributed.checkpoint.filesystem import FileSystem

    files, path = SummedFiles(FileSystem()), tmp_path / "shard"
    with files.create_stream(path, "wb") as stream:
        for size in (1, 1000, 2_000_000):
            stream.write(bytes(range(256)) * (size // 256) + b"rest")
            assert stream.tell() == path.stat().st_size or stream.flush() is None
    files.rename(path, tmp_path / "renamed")
    assert files.crcs == {"renamed": checksum_of(tmp_path / "renamed")}
    content = bytearray((tmp_path / "renamed").read_bytes())
    content[1_500_000] ^= 1
    (tmp_path / "renamed").write_bytes(content)
    assert files.crcs["renamed"] != checksum_of(tmp_path / "renamed")


def test_the_crc_is_that_of_zlib(tmp_path):
    (tmp_path / "file").write_bytes(b"123456789")
    assert checksum_of(tmp_path / "file") == 0xCBF43926  # the check value of CRC-32
