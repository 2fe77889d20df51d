import csv
import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size.traces import Recording

LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])


def found_in(recording):
    return recording.times.tolist(), recording.counts.tolist()


def rejects(path, line, message):
    return pytest.raises(ValueError, match=rf"^{re.escape(f'{path}:{line}: {message}')}$")


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


def test_quotes_comments_blank_lines_mixed_line_endings_and_byte_order_mark(save):
    text = '\ufeff# recorded\r\n"time", "nodes"\n\r\n0, 3\r5,4 # more\n\n9,1'.encode()
    assert found_in(Recording.read(save(text))) == ([0, 5, 9], [3, 4])


def test_an_event_log_may_have_a_header(save):
    text = "milliseconds,event,node\n500,add,a\n1500,add,b\n2500,remove,a\n"
    assert found_in(Recording.read(save(text))) == ([0, 1, 2], [1, 2])


# -------------------------------------------------------------------------------------------------------------- quotes


def test_cells_may_be_quoted(save):
    text = (
        '"when","nodes"\n"2026-03-01 12:00:00","3"\n "2026-03-01 12:00:30" ,\t"4"  # more\n"2026-03-01 13:00:00","2"\n'
    )
    assert found_in(Recording.read(save(text))) == ([0, 30, 3600], [3, 4])


@pytest.mark.parametrize(
    "note",
    ["a, b", 'the ""big"" one', '""', "# 1", "two\nlines", "two\r\nlines", "\r", " ", '"",""\n""#""', "5,6\n7,8"],
)
def test_quoted_cell_may_contain_separators_and_comments(save, note):
    text = f'time,note,nodes\n0,"{note}",3\n60,"{note}",4 # so\n90,"{note}",2'
    recording = Recording.read(save(text), time_column="time", count_column="nodes")
    assert found_in(recording) == ([0, 60, 90], [3, 4])


def test_quoted_name_may_contain_a_comma_and_quotes(save):
    text = '"time, of day","the ""spot"" nodes"\n0,3\n60,4\n'
    assert found_in(Recording.read(save(text))) == ([0, 60], [3])
    columns = {"time_column": "time, of day", "count_column": 'the "spot" nodes'}
    assert found_in(Recording.read(save(text), **columns)) == ([0, 60], [3])


def test_nodes_of_an_event_log_may_be_quoted(save):
    text = '"0","add","rack 1, slot 2"\n"500","add","rack 1, slot 3"\n900,"remove","rack 1, slot 2"\n'
    assert found_in(Recording.read(save(text))) == ([0, 0.5, 0.9], [1, 2])


@settings(deadline=None)
@given(
    notes=st.lists(st.text().filter(lambda text: "\0" not in text), min_size=2, max_size=6),
    comments=st.lists(st.sampled_from(["", "#", '# a "quote', '# so, "so', " # 1,2,3"]), min_size=7, max_size=7),
    end=LINE_ENDS,
)
def test_error_names_the_first_line_of_a_row_after_any_cells(save, notes, comments, end):
    file = io.StringIO(newline="")
    writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator=end)
    writer.writerow(["time", "note", "nodes"])
    for index, note in enumerate(notes):
        file.write(comments[index] + end)
        writer.writerow([10 * index, note, index])
    good = file.getvalue()
    columns = {"time_column": "time", "count_column": "nodes"}
    recording = Recording.read(save(good), **columns)
    assert recording.counts.tolist() == list(range(len(notes) - 1))
    path = save(f"{good}{comments[-1]}{end}1000,x,few")
    line = len(re.split(r"\r\n|\r|\n", good)) + 1
    with rejects(path, line, "the number of devices must be an integer, got 'few'"):
        Recording.read(path, **columns)


def test_comment_between_different_line_endings_does_not_join_them(save):
    path = save("time,nodes\n0,3\r# one\n60,few\n")
    with rejects(path, 4, "the number of devices must be an integer, got 'few'"):
        Recording.read(path)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('time,nodes\n0,3\n60,"4\n90,2\n', 3, "a row must be CSV (unexpected end of data), got '60,\"4'"),
        ('time,nodes\n0,3\n60,"4"2\n', 3, """a row must be CSV (',' expected after '"'), got '60,"4"2'"""),
        ('time,nodes\n0,3\n60,4"\n', 3, "the number of devices must be an integer, got '4\"'"),
    ],
)
def test_unbalanced_quotes_are_rejected(save, text, line, message):
    path = save(text)
    with rejects(path, line, message):
        Recording.read(path)


# ----------------------------------------------------------------------------------------------------------- bad files


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file must have a header with column names, got an empty file"),
        ("\n\n", 1, "the file must have a header with column names, got an empty file"),
        ("time,nodes\n", 2, "expected a row below the header, got nothing"),
        ("time,nodes\n0,3\n", 2, "a recording needs two different times, got one"),
        ("0,3\n60,4\n", 1, "the first row must be a header with column names, got '0,3'"),
        (
            "time,a,b\n0,3,4\n",
            1,
            "pass `time_column` and `count_column` unless exactly two columns are named, got ['time', 'a', 'b']",
        ),
        ("time,nodes\n0,3\n60\n", 3, "a row must have 2 values, got 1"),
        ("time,nodes\n0,3\n60,4,5\n", 3, "a row must have 2 values, got 3"),
        ("time,nodes\n0,3\n\n# so\n60,-4\n", 5, "the number of devices must be from 0 to 1000000000, got -4"),
        ("time,nodes\n0,3\n60,4.5\n", 3, "the number of devices must be an integer, got '4.5'"),
        ("time,nodes\r0,3\r60,\r", 3, "the number of devices must be an integer, got ''"),
        ("time,nodes\n0,3\nnan,4\n", 3, "a time must be a number, got 'nan'"),
        ("time,nodes\n0,3\n1e400,4\n", 3, "a time must be a number within 1e+15 seconds, got inf"),
        ("time,nodes\n0,3\n60,4\n30,5\n", 4, "a time must be later than the previous one, got 30 s after 60 s"),
        ("time,nodes\n0,3\n60,4\n60,5\n", 4, "a time must be later than the previous one, got 60 s after 60 s"),
        ("time,nodes\n0,3\n2026-01-01,5\n", 3, "a time must be a number, got '2026-01-01'"),
        (
            "time,nodes\n2026-01-01,5\n60,3\n",
            3,
            "times must be all numbers, or all dates like 2026-03-01T12:00:00Z, got '60'",
        ),
        ("0,add,a\n5,add,a\n", 2, "an added node must be absent, got 'a'"),
        ("0,add,a\n5,remove,b\n", 2, "a removed node must be present, got 'b'"),
        ("0,add,a\n5,stop,a\n", 2, "an event must be add or remove, got 'stop'"),
        ("0,add,a\n5,add\n", 2, "a row must be milliseconds,add|remove,node, got '5,add'"),
        ("9,add,a\n5,add,b\n", 2, "a time must not be earlier than the previous one, got 0.005 s after 0.009 s"),
        ("x,add,a\n5,add,b\n", 1, "a time must be a number, got 'x'"),
        ("5,add,a\n5,add,b\n", 2, "a recording needs two different times, got one"),
    ],
)
def test_invalid_table_is_rejected_with_its_line(save, text, line, message):
    path = save(text)
    with rejects(path, line, message):
        Recording.read(path)


# extracts made in the form of published recordings that are not in the zoo

ALIBABA = """\
job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type
1,13,A10,20,1,1,0,2764799,HP
2,57,A100-SXM4-80GB,15,1,16,100,400,Spot
3,57,A100-SXM4-80GB,15,0.5,4,300,100,Spot
4,57,A100-SXM4-80GB,15,8,1,500,50,Spot
"""


def test_jobs_as_published_by_alibaba_are_the_devices_of_spot_jobs(save):
    recording = Recording.read(save(ALIBABA))
    assert recording.times.tolist() == [0, 200, 300, 400, 450]  # since the first one, at 100 s
    assert recording.counts.tolist() == [16, 18, 16, 8]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("15,8,1,500,50", "15,0.5,1,500,50", r":5: a job must have a positive duration and a whole number of devices"),
        ("15,8,1,500,50", "15,8,1,500,0", r":5: a job must have a positive duration"),
        ("4,57,", "4,", r":5: a row must have 9 values, got 8"),
        ("Spot", "HP", r":6: expected a job below the header, got nothing"),
    ],
)
def test_wrong_jobs_are_refused(save, old, new, message):
    with pytest.raises(ValueError, match=message):
        Recording.read(save(ALIBABA.replace(old, new)))


def test_recordings_in_the_forms_of_skypilot_and_parcae_are_read(save):
    skypilot = '{"metadata": {"gap_seconds": 300}, "data": [16, 16, 0, 12]}'
    assert Recording.read(save(skypilot)).counts.tolist() == [16, 16, 0, 12]
    parcae = "0,add,node1\n0,add,node2\n60000,add,node3\n180000,remove,node1\n240000,remove,node2\n"
    recording = Recording.read(save(parcae))
    assert (recording.times.tolist(), recording.counts.tolist()) == ([0, 60, 180, 240], [2, 3, 2])


REPLAY = """\
[0, "add", {"nodes": ["node-0", "node-1", "node-2"], "duration": 60000, "liveput_predict_strategy": [8, 4]}]
[60000, "no-op", {"nodes": [], "duration": 60000}]

[120000, "remove", {"nodes": ["node-2", "node-0"], "duration": 60000}]
[180000, "migration", {"nodes": ["node-1"], "duration": 60000}]
[240000, "add", {"nodes": ["node-3"], "duration": 60000}]
"""


def test_events_that_parcae_replays_are_read(save):
    recording = Recording.read(save(REPLAY))
    assert (recording.times.tolist(), recording.counts.tolist()) == ([0, 60, 120, 180, 240], [3, 3, 1, 1])


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('"node-2", "node-0"', '"node-5"', 4, "a removed node must be present, got 'node-5'"),
        ('"node-3"', '"node-1"', 6, "an added node must be absent, got 'node-1'"),
        (
            REPLAY.splitlines()[3],
            "[1, 2]",
            4,
            'a line must be [milliseconds, "event", {"nodes": [names]}], got \'[1, 2]\'',
        ),
        ("[120000", "[1", 4, "a time must not be earlier than the previous one, got 0.001 s after 60 s"),
        ("[120000", "[1e400", 5, "a time must not be earlier than the previous one, got 180 s after inf s"),
        ('"node-3"], "duration": 60000}]', '"node-3"', 6, "the file must be JSON (Expecting ',' delimiter), got ''"),
    ],
)
def test_wrong_events_in_json_are_rejected_with_their_line(save, old, new, line, message):
    path = save(REPLAY.replace(old, new))
    with rejects(path, line, message):
        Recording.read(path)
