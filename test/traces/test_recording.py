import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.traces import Recording

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
COUNTS = st.lists(st.integers(0, 64), min_size=1, max_size=20)


def found_in(recording):
    return recording.times.tolist(), recording.counts.tolist()


@settings(deadline=None)
@given(counts=COUNTS, gaps=st.lists(st.integers(1, 10**5), min_size=20, max_size=20), end=LINE_ENDS, data=st.data())
def test_the_three_formats_are_equivalent(save, counts, gaps, end, data):
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


def test_mean_and_gaps_of_a_recording():
    recording = Recording.from_counts([0, 10, 30, 40], [4, 0, 2])
    assert (recording.seconds, recording.seconds_empty, recording.mean_devices) == (40, 20, (4 * 10 + 2 * 10) / 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_unit": "d"}, "`time_unit` must be one of 'ms', 's', 'min', 'h', got 'd'"),
        ({"time_column": "time"}, "pass both `time_column` and `count_column` or neither"),
        ({"time_column": "time", "count_column": "x"}, "the header must name the column 'x' once"),
    ],
)
def test_invalid_options_are_rejected(save, options, message):
    with pytest.raises(ValueError, match=message):
        Recording.read(save("time,nodes\n0,3\n5,4\n"), **options)


def test_invalid_times_and_counts_are_rejected():
    with pytest.raises(ValueError, match="`times` must have one more element than `counts`, got 2 and 2"):
        Recording.from_counts([0, 1], [1, 2])
    with pytest.raises(
        ValueError, match=r"recording\[1\]: a time must be later than the previous one, got 0 s after 0 s"
    ):
        Recording.from_counts([0, 0], [1])


GOOD = [
    b"time,nodes\n0,3\n60,4\n90,2\n",
    b",when,n\n0,2026-03-01T12:00:00Z,3\n1,2026-03-01T12:30:00Z,4\n",
    b"0,add,a\n500,add,b\n900,remove,a\n",
    b'{"metadata": {"gap_seconds": 300},\n "data": [1, 2,\n 0, 4]}',
    b'[{"time": 0, "n": 3},\n {"n": 4, "time": 60},\n {"time": 90.5, "n": 2}]',
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
def test_mutated_file_is_read_or_rejected_with_a_line(save, good, edits):
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


@pytest.mark.parametrize(
    ("text", "format"),
    [("0,add,a\n5,remove,a\n", "events"), ('{"metadata": {"gap_seconds": 1}, "data": [1]}', "JSON counts")],
)
@pytest.mark.parametrize("option", [{"time_unit": "s"}, {"time_column": "time"}, {"count_column": "nodes"}])
def test_options_of_csv_are_rejected_for_other_formats(save, text, format, option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"`{name}` is for CSV files and JSON records, got '{value}' for {format}"):
        Recording.read(save(text), **option)
