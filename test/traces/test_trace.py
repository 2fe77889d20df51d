import re
import resource
import tracemalloc

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size import Trace

BATCH_SIZES = st.lists(st.integers(1, 2**63 - 1), min_size=1, max_size=30)

# ------------------------------------------------------------------------------------------------------- from sequences


@settings(deadline=None, max_examples=100)
@given(sizes=BATCH_SIZES)
def test_trace_from_any_type_of_sequence(sizes):
    for holder in (list, tuple, np.array, pd.Series, pd.Index):
        trace = Trace.from_sequence(holder(sizes))
        assert list(trace) == sizes
        assert trace.sizes.dtype == np.int64


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, np.uint64])
def test_integers_of_every_width(dtype):
    assert list(Trace.from_sequence(np.array([64, 96], dtype=dtype))) == [64, 96]
    assert list(Trace.from_sequence([dtype(64), dtype(96)])) == [64, 96]


def test_column_of_a_filtered_frame():
    frame = pd.DataFrame({"batchsize": [64, 1, 96]})
    assert list(Trace.from_sequence(frame[frame.batchsize > 1].batchsize)) == [64, 96]
    assert list(Trace.from_sequence(pd.Series([64, 96], dtype="Int64"))) == [64, 96]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([64, 96.0], "trace[1]: batchsize must be a positive integer, got 96.0"),
        (np.array([64.0, 96.0]), "trace[0]: batchsize must be a positive integer, got 64.0"),
        ([64, float("nan")], "trace[1]: batchsize must be a positive integer, got nan"),
        (pd.Series([64, None]), "trace[0]: batchsize must be a positive integer, got 64.0"),
        (pd.Series([64, None], dtype="Int64"), "trace[1]: batchsize must be a positive integer, got <NA>"),
        ([64, None], "trace[1]: batchsize must be a positive integer, got None"),
        ([64, True], "trace[1]: batchsize must be a positive integer, got True"),
        (np.array([True, False]), "trace[0]: batchsize must be a positive integer, got True"),
        ([64, "96"], "trace[1]: batchsize must be a positive integer, got 96"),
        ([64, [96]], "trace[1]: batchsize must be a positive integer, got [96]"),
        ([64, 0], "trace[1]: batchsize must be a positive integer, got 0"),
        ((64, 32, -32), "trace[2]: batchsize must be a positive integer, got -32"),
        (np.array([64, -32]), "trace[1]: batchsize must be a positive integer, got -32"),
        ([64, 2**63], f"trace[1]: batchsize must be a positive integer, got {2**63}"),
        (np.array([64, 2**63], np.uint64), f"trace[1]: batchsize must be a positive integer, got {2**63}"),
        ([2**70], f"trace[0]: batchsize must be a positive integer, got {2**70}"),
        ([[64, 96], [32, 64]], "`trace` must be one-dimensional, got the shape (2, 2)"),
        (np.ones((3, 1), int), "`trace` must be one-dimensional, got the shape (3, 1)"),
        (np.array(64), "`trace` must be one-dimensional, got the shape ()"),
        ([], "`trace` must hold at least one batch size, got an empty sequence"),
        (np.array([], dtype=int), "`trace` must hold at least one batch size, got an empty sequence"),
    ],
)
def test_invalid_sequence_is_rejected(sizes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Trace.from_sequence(sizes)


# ------------------------------------------------------------------------------------------------------------ constant


@settings(deadline=None)
@given(size=st.integers(1, 2**63 - 1), row=st.integers(0, 10**30))
def test_constant_trace_has_the_same_size_at_every_step(size, row):
    assert Trace.constant(size)[row] == size


def test_a_constant_trace_is_endless():
    trace = Trace.constant(64)
    assert trace.is_endless
    assert trace.sizes.nbytes == 8
    assert [size for size, _ in zip(trace, range(5), strict=False)] == [64] * 5
    with pytest.raises(TypeError, match=r"^a constant trace is endless and has no length$"):
        len(trace)
    with pytest.raises(ValueError, match=r"^a constant trace is endless and has no slices$"):
        trace[:3]
    with pytest.raises(IndexError, match=r"^the trace has no step -1$"):
        trace[-1]


def test_constant_traces_are_equal_if_their_sizes_are():
    assert Trace.constant(64) == Trace.constant(64)
    assert hash(Trace.constant(64)) == hash(Trace.constant(64))
    assert Trace.constant(64) != Trace.constant(96)
    assert Trace.constant(64) != Trace.from_sequence([64])


@pytest.mark.parametrize("size", [0, -64, 64.0, True, 2**63, "64", None])
def test_constant_size_must_be_a_positive_integer(size):
    with pytest.raises(ValueError, match=f"^trace: batchsize must be a positive integer, got {size}$"):
        Trace.constant(size)


def test_constant_trace_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"^a constant trace is endless and cannot be written to a file$"):
        Trace.constant(64).write(tmp_path / "trace.csv")
    assert not (tmp_path / "trace.csv").exists()


# ------------------------------------------------------------------------------------------------------ like a sequence


@settings(deadline=None, max_examples=100)
@given(sizes=BATCH_SIZES, data=st.data())
def test_a_trace_is_indexed_like_a_list(sizes, data):
    trace = Trace.from_sequence(sizes)
    row = data.draw(st.integers(-len(sizes), len(sizes) - 1))
    assert len(trace) == len(sizes)
    assert trace[row] == sizes[row]
    assert type(trace[row]) is int
    part = data.draw(st.slices(len(sizes)))
    if sizes[part]:
        assert trace[part] == Trace.from_sequence(sizes[part])


@pytest.mark.parametrize("row", [3, -4, 10**12])
def test_step_outside_the_trace_raises(row):
    with pytest.raises(IndexError, match=f"^the trace has no step {row}$"):
        Trace.from_sequence([64, 96, 32])[row]


def test_empty_slice_is_rejected():
    with pytest.raises(ValueError, match=r"^`trace` must hold at least one batch size, got an empty sequence$"):
        Trace.from_sequence([64, 96])[2:]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 2), min_size=1, max_size=3), others=st.lists(st.integers(1, 2), min_size=1))
def test_traces_are_equal_if_their_sizes_are(sizes, others):
    trace, other = Trace.from_sequence(sizes), Trace.from_sequence(others)
    assert (trace == other) == (sizes == others)
    assert trace == Trace.from_sequence(np.array(sizes))
    assert hash(trace) == hash(Trace.from_sequence(np.array(sizes)))
    assert len({trace, other}) == (1 if sizes == others else 2)


def test_trace_is_not_equal_to_other_types():
    assert Trace.from_sequence([64]) != [64]


def test_repr_shows_the_first_steps():
    assert repr(Trace.from_sequence([64, 96])) == "<Trace of 2 steps: 64, 96>"
    assert repr(Trace.from_sequence(range(1, 9))) == "<Trace of 8 steps: 1, 2, 3, 4, 5, 6, …>"
    assert repr(Trace.constant(64)) == "Trace.constant(64)"


def test_trace_is_immutable(save):
    read = Trace.read(save("step,batchsize\n0,64\n1,96\n"))
    for trace in (Trace.from_sequence(np.array([64, 96])), read, read[:1], Trace.constant(64)):
        with pytest.raises(ValueError, match="read-only"):
            trace.sizes[0] = 32
        with pytest.raises(TypeError, match="does not support item assignment"):
            trace[0] = 32


def test_trace_copies_its_source():
    sizes = np.array([64, 96])
    trace = Trace.from_sequence(sizes)
    sizes[0] = 32
    assert list(trace) == [64, 96]


def test_two_million_steps_take_sixteen_megabytes(tmp_path):
    Trace.from_sequence(np.arange(1, 2_000_001)).write(tmp_path / "long.csv")
    tracemalloc.start()
    try:
        trace = Trace.read(tmp_path / "long.csv")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert trace.sizes.nbytes == 16_000_000
    assert held < 17_000_000
    assert trace == Trace.from_sequence(np.arange(1, 2_000_001))


# ------------------------------------------------------------------------------------------------------- accepted types


def test_trace_of_every_accepted_type(save):
    path = save("step,batchsize\n0,64\n1,96\n")
    expected = Trace.from_sequence([64, 96])
    for source in (path, str(path), [64, 96], (64, 96), np.array([64, 96]), pd.Series([64, 96]), range(64, 97, 32)):
        assert Trace.of(source) == expected
    assert Trace.of(expected) is expected
    for source in (64, np.int32(64)):
        assert Trace.of(source) == Trace.constant(64)


@pytest.mark.parametrize("source", [None, True, 64.0, b"trace.csv", {64}, iter([64, 96])])
def test_other_types_are_rejected(source):
    message = f"`trace` must be a path, stages, a sequence of batch sizes or an integer, got {source!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Trace.of(source)


def test_trace_of_checks_its_argument(tmp_path):
    with pytest.raises(ValueError, match=r"^trace: batchsize must be a positive integer, got -64$"):
        Trace.of(-64)
    with pytest.raises(ValueError, match=re.escape("`trace` must be one-dimensional, got the shape (1, 2)")):
        Trace.of(pd.DataFrame({"step": [0], "batchsize": [64]}))
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "no.csv"))):
        Trace.of(str(tmp_path / "no.csv"))


def test_place_of_a_row(save):
    path = save("# one\nstep,batchsize\n0,64\n\n# two\n1,96\n")
    trace = Trace.read(path)
    assert (trace.name, trace.place(0), trace.place(1)) == (str(path), f"{path}:3", f"{path}:6")
    trace = Trace.from_sequence([64, 96])
    assert (trace.name, trace.place(1)) == ("trace", "trace[1]")
    trace = Trace.constant(64)
    assert (trace.name, trace.place(0)) == ("trace", "trace")


@pytest.fixture
def full_disk():
    """Files of 1000 bytes at most."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_failed_write_keeps_the_existing_file(tmp_path, full_disk):
    path = tmp_path / "trace.csv"
    Trace.from_sequence([64, 96]).write(path)
    with pytest.raises(OSError, match="File too large"):
        Trace.from_sequence([32] * 1000).write(path)
    assert list(Trace.read(path)) == [64, 96]
    assert list(tmp_path.iterdir()) == [path]


def test_write_through_a_link_with_a_comment_that_is_not_unicode(tmp_path):
    path, link = tmp_path / "trace.csv", tmp_path / "link.csv"
    link.symlink_to(path)
    Trace.from_sequence([64]).write(link, comment="made by: vbs make --out caf\udce9.csv")
    assert link.is_symlink()
    assert list(Trace.read(path)) == [64]
