"""Tail: complete lines of a growing file, on this machine and at a URL."""

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.lab.watch import tail as tail_module
from variable_batch_size.lab.watch.tail import Tail


@pytest.fixture(params=["directory", "URL"])
def place(request, tmp_path, monkeypatch):
    """A directory, and a function that writes its file ``log``."""
    if request.param == "directory":
        return str(tmp_path), (tmp_path / "log").write_bytes
    monkeypatch.setattr(tail_module, "_SECONDS_BETWEEN_LOOKS", 0.0)
    files = fsspec.filesystem("memory")
    return f"memory://{tmp_path}", lambda content: files.pipe_file(f"{tmp_path}/log", content)


def test_lines_are_read_once_and_when_they_are_complete(place):
    directory, write = place
    tail = Tail(directory, "log")
    assert tail.lines() == []
    write(b"one\ntw")
    assert tail.lines() == [b"one"]
    assert tail.lines() == []
    write(b"one\ntwo\nthree\nfo")
    assert tail.lines() == [b"two", b"three"]
    assert (tail.num_restarts, tail.has_more, tail.share) == (0, False, 1.0)
    write(b"one\ntwo\nthree\nfour\n")
    assert tail.lines() == [b"four"]


@pytest.mark.parametrize("content", [b"one\n", b"one\nTWO\nthree\nfour\n", b""])
def test_a_file_that_was_replaced_is_read_again(place, content):
    directory, write = place
    write(b"one\ntwo\nthree\n")
    tail = Tail(directory, "log")
    tail.lines()
    write(content)
    assert tail.lines() == []
    assert tail.num_restarts == 1
    assert b"".join(line + b"\n" for line in tail.lines()) == content


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=9).filter(lambda text: b"\n" not in text)), st.data())
def test_any_file_that_grows_in_any_parts_is_read_line_by_line(tmp_path_factory, lines, data):
    content, path = b"".join(line + b"\n" for line in lines), tmp_path_factory.mktemp("tail") / "log"
    tail, found = Tail(str(path.parent), "log"), []
    ends = sorted(data.draw(st.lists(st.integers(0, len(content)))))
    for end in [*ends, len(content)]:
        path.write_bytes(content[:end])
        found += tail.lines()
    assert found == lines
    assert tail.num_restarts == 0


def test_a_long_file_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tail_module, "_MOST_BYTES", 10)
    (tmp_path / "log").write_bytes(b"".join(b"%04d\n" % number for number in range(10)))
    tail, found, shares = Tail(str(tmp_path), "log"), [], []
    while True:
        found += tail.lines()
        shares.append(tail.share)
        if not tail.has_more:
            break
    assert found == [b"%04d" % number for number in range(10)]
    assert shares == [0.2, 0.4, 0.6, 0.8, 1.0]


def test_a_sample_has_lines_from_the_beginning_to_the_end(tmp_path):
    (tmp_path / "log").write_bytes(b"".join(b"%d\n" % number for number in range(100_000)))
    numbers = [int(line) for line in Tail(str(tmp_path), "log").sample(5)]
    assert numbers == sorted(numbers) and len(numbers) == 5
    assert numbers[0] < 10_000 and numbers[-1] == 99_999


def test_skipping_leaves_only_what_is_appended(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthr")
    tail = Tail(str(tmp_path), "log")
    tail.skip()
    path.write_bytes(b"one\ntwo\nthree\nfour\n")
    assert tail.lines() == [b"three", b"four"]


def test_a_line_without_end_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(tail_module, "_MOST_BYTES", 100)
    path = tmp_path / "log"
    path.write_bytes(b"one\n" + b"x" * 1000 + b"\ntwo\n")
    tail, found = Tail(str(tmp_path), "log"), []
    for _ in range(20):
        found += tail.lines()
    assert (found[0], found[-1], tail.has_more, tail.num_restarts) == (b"one", b"two", False, 0)


def test_a_directory_may_be_a_link_that_later_leads_elsewhere(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_text(f"{name}\n")
    (tmp_path / "latest").symlink_to(tmp_path / "a")
    tail = Tail(str(tmp_path / "latest"), "log")
    assert tail.lines() == [b"a"]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(tmp_path / "b")
    assert (tail.lines(), tail.num_restarts, tail.lines()) == ([], 1, [b"b"])


def test_a_link_out_of_the_directory_is_not_followed(tmp_path):
    (tmp_path / "secret").write_text("secret\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/log").symlink_to(tmp_path / "secret")
    tail = Tail(str(tmp_path / "run"), "log")
    assert (tail.lines(), tail.text(), tail.sample(3)) == ([], None, [])
    assert "leads out of the directory" in tail.error
