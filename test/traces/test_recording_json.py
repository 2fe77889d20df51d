import re

import pytest

from variable_batch_size.traces import Recording


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('{"metadata": {"gap_seconds": 5},\n "data": [1, 2,}', 2, "the file must be JSON (Expecting value), got '}'"),
        (
            '{"metadata": {"gap_seconds": 5},\n "data": [1,\n -2]}',
            3,
            "the number of devices must be from 0 to 1000000000, got -2",
        ),
        (
            '{"metadata": {"gap_seconds": 5},\n "data": [1,\n 2.5]}',
            3,
            "the number of devices must be an integer, got 2.5",
        ),
        (
            '{"metadata": {"gap_seconds": 5},\n "data": [1,\n "2"]}',
            3,
            "the number of devices must be an integer, got '2'",
        ),
        ('{"data": [1],\n "metadata": {\n"gap_seconds": 0}}', 3, "gap_seconds must be a positive number, got 0"),
        ('{"data": [1],\n "metadata": {\n"gap_seconds": true}}', 3, "gap_seconds must be a positive number, got True"),
    ],
)
def test_invalid_file_is_rejected_with_its_line(save, text, line, message):
    path = save(text)
    with pytest.raises(ValueError) as error:
        Recording.read(path)
    assert str(error.value).replace(": data[1]", "") == f"{path}:{line}: {message}"


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[]",
        '[{"time": 0, "cores": 1}, 5]',
        "{}",
        '{"metadata": 5, "data": [1]}',
        '{"metadata": {"gap_seconds": 5}, "data": []}',
    ],
)
def test_json_of_another_structure_is_rejected(save, text):
    rule = 'the file must be [{"time": t, "cores": n}, …] or {"metadata": {"gap_seconds": g}, "data": [counts]}'
    with pytest.raises(ValueError, match=re.escape(f":1: {rule}, got {text!r}")):
        Recording.read(save(text))


def test_deeply_nested_json_is_rejected(save):
    with pytest.raises(ValueError, match=":1: the file must be JSON, got JSON that is nested too deeply"):
        Recording.read(save("[" * 200_000))


# ------------------------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ('[{"time": 0, "cores": 3}, {"time": 60, "cores": 4}, {"time": 90.0, "cores": 0}]', {}),
        ('[{"gpus": 3, "time": 5}, {"time": 65, "gpus": 4.0}, {"gpus": 0, "time": 95}]', {}),
        ('[{"time": "2026-03-01T12:00:00Z", "n": 3}, {"time": "2026-03-01T12:01", "n": 4},\n'
         ' {"n": 4, "time": "2026-03-01T12:01:30+00:00"}]', {}),
        ('[{"at": 0, "zone": [{"a": 1}], "n": 3}, {"at": 1, "n": 4, "price": null}, {"at": 1.5, "n": 0}]',
         {"time_column": "at", "count_column": "n", "time_unit": "min"}),
    ],
)  # fmt: skip
def test_records_are_the_rows_of_a_table(save, text, options):
    recording = Recording.read(save(text), **options)
    assert (recording.times.tolist(), recording.counts.tolist()) == ([0, 60, 90], [3, 4])


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (
            '[{"time": 0, "a": 1, "b": 2}]',
            1,
            "pass `time_column` and `count_column` unless records have the field 'time' and one other, "
            "got ['time', 'a', 'b']",
        ),
        (
            '[{"t": 0, "n": 1}]',
            1,
            "pass `time_column` and `count_column` unless records have the field 'time' and one other, got ['t', 'n']",
        ),
        (
            '[\n {"time": 0,\n  "n": 1},\n {"time": 5}]',
            4,
            "a record must have the field 'n', got ['time']",
        ),
        ('[{"time": 0, "n": 1},\n\n{"time": 5, "n": 1.5}]', 3, "the number of devices must be an integer, got '1.5'"),
        ('[{"time": 0, "n": 1},\n{"time": 5, "n": true}]', 2, "the number of devices must be an integer, got 'True'"),
        ('[{"time": 0, "n": 1},\n{"time": null, "n": 1}]', 2, "a time must be a number, got 'None'"),
        (
            '[{"time": 9, "n": 1},\n{"time": 5, "n": 1}]',
            2,
            "a time must be later than the previous one, got 5 s after 9 s",
        ),
        ('[{"time": 0, "n": 1}]', 1, "a recording needs two different times, got one"),
        ('[{"time": 0, "n": 1},\n{"time": 5, "n": }]', 2, "the file must be JSON (Expecting value), got '}]'"),
    ],
)
def test_invalid_records_are_rejected_with_their_line(save, text, line, message):
    path = save(text)
    with pytest.raises(ValueError) as error:
        Recording.read(path)
    assert str(error.value) == f"{path}:{line}: {message}"
