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
    "text", ["[1, 2]", "{}", '{"metadata": 5, "data": [1]}', '{"metadata": {"gap_seconds": 5}, "data": []}']
)
def test_json_of_another_structure_is_rejected(save, text):
    with pytest.raises(
        ValueError, match=r':1: the file must be \{"metadata": \{"gap_seconds": g\}, "data": \[counts\]\}'
    ):
        Recording.read(save(text))


def test_deeply_nested_json_is_rejected(save):
    with pytest.raises(ValueError, match=":1: the file must be JSON, got JSON that is nested too deeply"):
        Recording.read(save("[" * 200_000))
