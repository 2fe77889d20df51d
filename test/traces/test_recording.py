import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size import Recording

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
COUNTS = st.lists(st.integers(0, 64), min_size=1, max_size=20)


def found_in(recording):
    return recording.times.tolist(), recording.counts.tolist()


# ------------------------------------------------------------------------------------------------------------- reading


@settings(deadline=None)
@given(counts=COUNTS, gaps=st.lists(st.integers(1, 10**5), min_size=20, max_size=20), end=LINE_ENDS, data=st.data())
def test_the_three_formats_say_the_same(save, counts, gaps, end, data):
    gap = gaps[0]
    times = [index * gap for index in range(len(counts) + 1)]
    text = json.dumps({"metadata": {"gap_seconds": gap}, "data": counts}, indent=data.draw(st.sampled_from([None, 1])))
    expected = ([float(time) for time in times], counts)
    assert found_in(Recording.read(save(text))) == expected

    rows = [f"{index},{time},{count}" for index, (time, count) in enumerate(zip(times, [*counts, 9], strict=True))]
    assert found_in(Recording.read(save(end.join([",seconds,gpus", *rows])))) == expected

    nodes, events = 0, []
    for time, count in zip(times, [*counts, counts[-1] + 1], strict=True):
        ms = 1000 * time
        events += [f"{ms},add,node{n}" for n in range(nodes, count)] or [
            f"{ms},remove,node{n}" for n in range(count, nodes)
        ]
        events += [f"{ms},{what},other" for what in ("add", "remove")]
        nodes = count
    assert found_in(Recording.read(save(end.join(events)))) == expected


def test_times_may_be_irregular_and_in_any_unit(save):
    text = "hour,nodes\n0,3\n0.5,4\n4,2\n"
    assert found_in(Recording.read(save(text), time_unit="h")) == ([0, 1800, 14400], [3, 4])
    assert found_in(Recording.read(save(text), time_unit="min")) == ([0, 30, 240], [3, 4])


def test_times_may_be_dates(save):
    text = "when,nodes\n2026-03-01T12:00:00Z,3\n2026-03-01 12:00:30,4\n2026-03-01T13:00:00+00:00,2\n"
    assert found_in(Recording.read(save(text))) == ([0, 30, 3600], [3, 4])


def test_columns_may_be_chosen_by_name_and_counts_be_written_as_floats(save):
    text = "time,region,price,nodes\n0,us,1.5,3.0\n60,us,1.4,4.0\n90,us,1.4,4.0\n"
    assert found_in(Recording.read(save(text), time_column="time", count_column="nodes")) == ([0, 60, 90], [3, 4])


def test_quotes_comments_blank_lines_mixed_line_ends_and_a_byte_order_mark_are_fine(save):
    text = '\ufeff# recorded\r\n"time", "nodes"\n\r\n0, 3\r5,4 # more\n\n9,1'.encode()
    assert found_in(Recording.read(save(text))) == ([0, 5, 9], [3, 4])


def test_an_event_log_may_have_a_header(save):
    text = "milliseconds,event,node\n500,add,a\n1500,add,b\n2500,remove,a\n"
    assert found_in(Recording.read(save(text))) == ([0, 1, 2], [1, 2])


def test_a_recording_knows_its_mean_and_its_gaps():
    recording = Recording.from_counts([0, 10, 30, 40], [4, 0, 2])
    assert (recording.seconds, recording.seconds_empty, recording.mean_devices) == (40, 20, (4 * 10 + 2 * 10) / 40)


# ----------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file must have a header that names the columns, got an empty file"),
        ("\n\n", 1, "the file must have a header that names the columns, got an empty file"),
        ("time,nodes\n", 2, "expected a row below the header, got nothing"),
        ("time,nodes\n0,3\n", 2, "a recording needs two different times, got one"),
        ("0,3\n60,4\n", 1, "the first row must name the columns, got '0,3'"),
        (
            "time,a,b\n0,3,4\n",
            1,
            "two columns must have names, or else say which are the times and counts, got ['time', 'a', 'b']",
        ),
        ("time,nodes\n0,3\n60\n", 3, "a row must have 2 values, got 1"),
        ("time,nodes\n0,3\n60,4,5\n", 3, "a row must have 2 values, got 3"),
        ("time,nodes\n0,3\n\n# so\n60,-4\n", 5, "a number of devices must be from 0 to 1000000000, got -4"),
        ("time,nodes\n0,3\n60,4.5\n", 3, "a number of devices must be a whole number, got '4.5'"),
        ("time,nodes\r0,3\r60,\r", 3, "a number of devices must be a whole number, got ''"),
        ("time,nodes\n0,3\nnan,4\n", 3, "a time must be a number, got 'nan'"),
        ("time,nodes\n0,3\n1e400,4\n", 3, "a time must be a number within 1e+15 seconds, got inf"),
        ("time,nodes\n0,3\n60,4\n30,5\n", 4, "a time must be later than the one before, got 30 s after 60 s"),
        ("time,nodes\n0,3\n60,4\n60,5\n", 4, "a time must be later than the one before, got 60 s after 60 s"),
        ("time,nodes\n0,3\n2026-01-01,5\n", 3, "a time must be a number, got '2026-01-01'"),
        (
            "time,nodes\n2026-01-01,5\n60,3\n",
            3,
            "a time must be a number, or in all rows a date like 2026-03-01T12:00:00Z, got '60'",
        ),
        ("0,add,a\n5,add,a\n", 2, "a node that is added must be away, got 'a'"),
        ("0,add,a\n5,remove,b\n", 2, "a node that is removed must be there, got 'b'"),
        ("0,add,a\n5,stop,a\n", 2, "an event must be add or remove, got 'stop'"),
        ("0,add,a\n5,add\n", 2, "a row must be milliseconds,add|remove,node, got '5,add'"),
        ("9,add,a\n5,add,b\n", 2, "a time must not be before the last one, got 0.005 s after 0.009 s"),
        ("x,add,a\n5,add,b\n", 1, "a time must be a number, got 'x'"),
        ("5,add,a\n5,add,b\n", 2, "a recording needs two different times, got one"),
        ('{"metadata": {"gap_seconds": 5},\n "data": [1, 2,}', 2, "the file must be JSON (Expecting value), got '}'"),
        (
            '{"metadata": {"gap_seconds": 5},\n "data": [1,\n -2]}',
            3,
            "a number of devices must be from 0 to 1000000000, got -2",
        ),
        (
            '{"metadata": {"gap_seconds": 5},\n "data": [1,\n 2.5]}',
            3,
            "a number of devices must be a whole number, got 2.5",
        ),
        (
            '{"metadata": {"gap_seconds": 5},\n "data": [1,\n "2"]}',
            3,
            "a number of devices must be a whole number, got '2'",
        ),
        ('{"data": [1],\n "metadata": {\n"gap_seconds": 0}}', 3, "gap_seconds must be a positive number, got 0"),
        ('{"data": [1],\n "metadata": {\n"gap_seconds": true}}', 3, "gap_seconds must be a positive number, got True"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(save, text, line, message):
    path = save(text)
    with pytest.raises(ValueError) as refused:
        Recording.read(path)
    assert str(refused.value).replace(": data[1]", "") == f"{path}:{line}: {message}"


@pytest.mark.parametrize(
    "text", ["[1, 2]", "{}", '{"metadata": 5, "data": [1]}', '{"metadata": {"gap_seconds": 5}, "data": []}']
)
def test_json_of_another_shape_is_refused(save, text):
    with pytest.raises(
        ValueError, match=r':1: the file must be \{"metadata": \{"gap_seconds": g\}, "data": \[counts\]\}'
    ):
        Recording.read(save(text))


def test_json_that_is_nested_too_deep_is_refused(save):
    with pytest.raises(ValueError, match=":1: the file must be JSON, got one that is nested too deep"):
        Recording.read(save("[" * 200_000))


def test_a_format_may_be_forced(save):
    with pytest.raises(ValueError, match=":1: the file must be JSON"):
        Recording.read(save("time,nodes\n0,3\n"), format="json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "xml"}, "`format` must be one of 'csv', 'events', 'json', got 'xml'"),
        ({"time_unit": "d"}, "`time_unit` must be one of 'ms', 's', 'min', 'h', got 'd'"),
        ({"time_column": "time"}, "pass both `time_column` and `count_column` or neither"),
        ({"time_column": "time", "count_column": "x"}, "the header must name the column 'x' once"),
    ],
)
def test_wrong_options_are_refused(save, options, message):
    with pytest.raises(ValueError, match=message):
        Recording.read(save("time,nodes\n0,3\n5,4\n"), **options)


def test_numbers_that_are_no_recording_are_refused():
    with pytest.raises(ValueError, match="`times` must be one more than the counts, got 2 and 2"):
        Recording.from_counts([0, 1], [1, 2])
    with pytest.raises(
        ValueError, match=r"recording\[1\]: a time must be later than the one before, got 0 s after 0 s"
    ):
        Recording.from_counts([0, 0], [1])


GOOD = [
    b"time,nodes\n0,3\n60,4\n90,2\n",
    b",when,n\n0,2026-03-01T12:00:00Z,3\n1,2026-03-01T12:30:00Z,4\n",
    b"0,add,a\n500,add,b\n900,remove,a\n",
    b'{"metadata": {"gap_seconds": 300},\n "data": [1, 2,\n 0, 4]}',
]


@settings(deadline=None, max_examples=300)
@given(
    good=st.sampled_from(GOOD),
    edits=st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 3),
            st.sampled_from([*b'0123456789,.-+eE\n\r"#{}[]: ', 0, 255]) | st.integers(0, 255),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_a_mutated_file_is_read_or_refused_with_a_line(save, good, edits):
    text = bytearray(good)
    for where, cut, byte in edits:
        at = int(where * len(text))
        text[at : at + cut] = [byte]
    try:
        recording = Recording.read(save(bytes(text)))
    except ValueError as error:
        assert f"{save(bytes(text))}:" in str(error)
        assert str(error).split(":")[1].isdecimal()
    else:
        assert len(recording.times) == len(recording.counts) + 1
        assert (recording.durations >= 0).all()
