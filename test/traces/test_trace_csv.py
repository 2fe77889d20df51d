import os
import random
import re
import threading
from contextlib import nullcontext
from importlib import import_module
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size import Trace

BATCH_SIZES = st.lists(st.integers(1, 2**63 - 1), min_size=1, max_size=30)
NOISE = st.sampled_from(["", " ", "\t ", "#", "# 0,64", "  # indented", "# step,batchsize", '# a "quote', "# ünïcode"])
BLANKS = st.sampled_from(["", "", " ", "  ", "\t"])
LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])


def reading(*, at_once):
    """In this context, pandas reads even small files, and what it rejects is read by row; or all is read by row."""
    return patch.object(import_module("variable_batch_size.traces.trace"), "_FEW_BYTES", 0 if at_once else 2**63)


@pytest.fixture(autouse=True, scope="module", params=["small ones by row", "by pandas"])
def reader(request):
    """Small files are read as they are for users, or by pandas as large ones."""
    with reading(at_once=True) if request.param == "by pandas" else nullcontext():
        yield


def rejects(path, line, message):
    return pytest.raises(ValueError, match=rf"^{re.escape(f'{path}:{line}: {message}')}$")


# ------------------------------------------------------------------------------------------------------------- reading


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.tuples(st.integers(1, 10**6), BLANKS, BLANKS, BLANKS, st.lists(NOISE, max_size=2)), min_size=1),
    above=st.lists(NOISE, max_size=3),
    end=LINE_ENDS,
    has_mark=st.booleans(),
    ends_last_line=st.booleans(),
)
def test_spaces_comments_and_line_endings_do_not_matter(save, rows, above, end, has_mark, ends_last_line):
    lines = [*above, "step,batchsize"]
    for step, (size, before, between, after, noise) in enumerate(rows):
        lines += [f"{before}{step},{between}{size}{after}", *noise]
    text = "\ufeff" * has_mark + end.join(lines) + end * ends_last_line
    assert list(Trace.read(save(text))) == [size for size, *_ in rows]


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=10),
    where=st.integers(0, 9),
    bad=st.sampled_from(["x,64", "{step},-1", "{step},0", "{step},", "{step}", "7777,64", "{step},6.5", "{step},64,1"]),
    noise=st.lists(st.lists(NOISE, max_size=3), min_size=12, max_size=12),
    end=LINE_ENDS,
)
def test_error_names_the_line_of_the_first_invalid_row(save, sizes, where, bad, noise, end):
    where %= len(sizes)
    lines = [*noise[0], "step,batchsize"]
    for step, size in enumerate(sizes):
        lines += noise[step + 1]
        if step == where:
            bad_line = len(lines) + 1
            lines.append(bad.format(step=step))
        else:
            lines.append(f"{step},{size}")
    lines.append("and, a, worse, one")
    path = save(end.join(lines))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}:{bad_line}: "):
        Trace.read(path)


VALID_FILES = [
    b"step,batchsize\n0,64\n1,96\n2,32\n3,128\n",
    b"# made by hand\n\nstep,batchsize\r\n0, 64\r\n1, 96\r\n# middle\r\n\r\n2, 32\r\n3, 256",
    b"\xef\xbb\xbfstep,batchsize\r0,64\r1,96\r0,32\r1,64\r",
    b',"step",batchsize,time\n0,0,64,1.5\n1,1,96,2.5\n2,2,32,now # fast\n',
]
SPECIAL = [b",", b"\n", b"\r", b"#", b" #\n", b'"', b"-", b".", b"\x00", b"\xff", b"nan", b"9" * 25]


def piece(draws):
    """Up to three random bytes or characters, or something special."""
    kind, length = draws.randrange(3), draws.randint(0, 3)
    if kind == 0:
        return draws.randbytes(length)
    if kind == 1:
        return "".join(
            chr(draws.choice([draws.randrange(128), draws.randrange(0xD800)])) for _ in range(length)
        ).encode()
    return draws.choice(SPECIAL)


def test_damaged_file_is_read_or_rejected_with_the_line(save):
    draws = random.Random(0)
    for _ in range(500):
        text = draws.choice(VALID_FILES)
        for _ in range(draws.randint(1, 4)):
            start = draws.randint(0, len(text))
            stop = draws.randint(start, min(start + 3, len(text)))
            text = text[:start] + piece(draws) + text[stop:]
        assert_is_read_or_rejected_with_the_line(save(text))


@settings(deadline=None, max_examples=80)
@given(text=st.one_of(st.text(), st.text(alphabet="0123456789,#\r\n \"'-+.\x00e").map("step,batchsize\n".__add__)))
def test_any_text_is_read_or_rejected_with_the_line(save, text):
    assert_is_read_or_rejected_with_the_line(save(text))


def assert_is_read_or_rejected_with_the_line(path):
    num_lines = len(re.split(rb"\r\n|\r|\n", path.read_bytes()))
    sizes, error = outcome = outcome_of(path)
    if error:
        named = re.match(rf"{re.escape(str(path))}:([0-9]+): ", error)
        assert named, error
        assert 1 <= int(named[1]) <= num_lines + 1
    else:
        assert 1 <= len(sizes) < num_lines
        assert min(sizes) > 0
    with reading(at_once=False):
        assert outcome_of(path) == outcome


def outcome_of(path):
    """The batch sizes in a file, or the error."""
    try:
        return list(Trace.read(path)), None
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize(
    "text",
    [
        "step,batchsize\n0,64\n1,96\n2,32\n",
        "step,batchsize\n0, 64\n1,  96\n2,\t32\n",
        " step , batchsize \n 0 , 64 \n 1 , 96 \n 2 , 32 \n",
        "step,batchsize\r\n0,64\r\n1,96\r\n2,32\r\n",
        "step,batchsize\r0,64\r1,96\r2,32\r",
        "\rstep,batchsize\n0,64\n1,96\n2,32\n",
        "step,batchsize\n0,64\n1,96\n2,32",
        "\ufeffstep,batchsize\n0,64\n1,96\n2,32\n",
        "\ufeff# recorded on Monday\nstep,batchsize\n0,64\n1,96\n2,32\n",
        "# recorded on Monday\n\n# again\nstep,batchsize\n0,64\n# 1,128\n1,96 # big\n\n  # last\n2,32\n",
        "\n\nstep,batchsize\n\n0,64\n \n1,96\n\t\n2,32\n\n\n",
        "batchsize,step\n64,0\n96,1\n32,2\n",
        "time,step,loss,batchsize,note\n1.5,0,nan,64,a\n2.5,1,0.3,96,\n3.5,2,0.2,32,b c\n",
        "step,batchsize,note\n0,64\n1,96\n2,32\n",
        ",step,batchsize\n0,0,64\n1,1,96\n2,2,32\n",
        '"step","batchsize"\n0,64\n1,96\n2,32\n',
        "step,batchsize\n0,64,\n1,96,\n2,32,\n",
        "step,batchsize\n0,64\n1,96,,\n2,32\n",
        "step,batchsize\n+0,064\n1,+96\n2,32\n",
    ],
)
def test_common_variants_of_files_are_read(save, text):
    assert list(Trace.read(save(text))) == [64, 96, 32]


def test_invalid_utf_8_is_allowed_outside_the_numbers(save):
    assert list(Trace.read(save(b"# \xff\xfe\nstep,batchsize,note\n0,64,\xe9t\xe9\n1,96,\x00\n"))) == [64, 96]


def test_step_may_restart_at_zero(save):
    assert list(Trace.read(save("step,batchsize\n0,64\n1,96\n0,32\n0,64\n1,128\n2,32\n"))) == [64, 96, 32, 64, 128, 32]


def test_step_counts_from_zero_after_a_restart(save):
    path = save("step,batchsize\n0,64\n1,96\n0,32\n1,64\n2,32\n4,96\n")
    with rejects(path, 7, "step must be 3 (or 0, to start again), got 4"):
        Trace.read(path)


def test_repeated_first_row_is_not_lost(save):
    assert list(Trace.read(save("\rstep,batchsize\n0,64\n0,96\n"))) == [64, 96]


def test_the_largest_integer_is_read(save):
    assert Trace.read(save(f"step,batchsize\n0,{2**63 - 1}\n"))[0] == 2**63 - 1


def test_file_name_of_an_archive(tmp_path):
    path = tmp_path / "trace.gz"
    path.write_text("step,batchsize\n0,64\n")
    assert list(Trace.read(path)) == [64]


def test_file_name_that_is_almost_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("~", "https:", "s3:"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trace.csv").write_text("step,batchsize\n0,64\n")
        assert list(Trace.read(f"{name}/trace.csv")) == [64]
    assert list(Trace.read("~//trace.csv")) == list(Trace.read(f"file://{tmp_path}/~/trace.csv")) == [64]


def test_a_pipe_is_read_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=["# made by hand\nstep,batchsize\n0,64\n1,96\n"])
    writer.start()
    trace = Trace.read(path)
    writer.join()
    path.unlink()
    assert list(trace) == [64, 96]
    assert trace.comment == "made by hand"
    assert trace.place(1) == f"{path}:4"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "no.csv"))):
        Trace.read(tmp_path / "no.csv")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "the file is empty, expected the columns step,batchsize"),
        ("\ufeff", 1, "the file is empty, expected the columns step,batchsize"),
        ("\n# nothing here\n \n", 1, "the file is empty, expected the columns step,batchsize"),
        ("step,size\n0,64\n", 1, "the header must name the column 'batchsize' once, got ['step', 'size']"),
        (
            "\n\nbatchsize\n64\n",
            3,
            "the header must name the column 'step' once, with commas between columns, got ['batchsize']",
        ),
        (
            "# one\nstep,batchsize,step\n0,64,0\n",
            2,
            "the header must name the column 'step' once, got ['step', 'batchsize', 'step']",
        ),
        (
            "step,batchsize,batchsize\n0,64,64\n",
            1,
            "the header must name the column 'batchsize' once, got ['step', 'batchsize', 'batchsize']",
        ),
        ("0,64\n1,96\n", 1, "the header must name the column 'step' once, got ['0', '64']"),
        (
            "step;batchsize\n0;64\n",
            1,
            "the header must name the column 'step' once, with commas between columns, got ['step;batchsize']",
        ),
        ("step,batchsize", 2, "expected a row below the header, got nothing"),
        ("\n# one\nstep,batchsize\n\n# two\n", 4, "expected a row below the header, got nothing"),
    ],
)
def test_file_without_header_or_rows_is_rejected(save, text, line, message):
    path = save(text)
    with rejects(path, line, message):
        Trace.read(path)


def test_long_invalid_header_is_truncated_in_the_error(save):
    path = save(",".join(f"column_{i}" for i in range(100)))
    with pytest.raises(ValueError, match="got ") as caught:
        Trace.read(path)
    assert len(str(caught.value)) < len(str(path)) + 150


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,many", "batchsize must be an integer, got many"),
        ("one,64", "step must be an integer, got one"),
        ("1,64.0", "batchsize must be an integer, got 64.0"),
        ("1.5,64", "step must be an integer, got 1.5"),
        ("1,1e3", "batchsize must be an integer, got 1e3"),
        ("1,NaN", "batchsize must be an integer, got NaN"),
        ("nan,64", "step must be an integer, got nan"),
        ("1,", "batchsize must be an integer, got nothing"),
        ("1, ", "batchsize must be an integer, got nothing"),
        ("1", "batchsize must be an integer, got nothing"),
        (",64", "step must be an integer, got nothing"),
        (",", "step must be an integer, got nothing"),
        ("1,True", "batchsize must be an integer, got True"),
        ('1,"64"', 'batchsize must be an integer, got "64"'),
        ("1;64", "step must be an integer, got 1;64"),
        ("1,0x40", "batchsize must be an integer, got 0x40"),
        ("1,6_4", "batchsize must be an integer, got 6_4"),
        ("1,64 96", "batchsize must be an integer, got 64 96"),
        ("1,٣", "batchsize must be an integer, got ٣"),
        ("1,0", "batchsize must be a positive integer, got 0"),
        ("1,-64", "batchsize must be a positive integer, got -64"),
        (f"1,{-(2**63)}", f"batchsize must be a positive integer, got {-(2**63)}"),
        (f"1,{2**63}", f"batchsize must be below 2**63, got {2**63}"),
        (f"1,{2**64}", f"batchsize must be below 2**63, got {2**64}"),
        (f"{10**30},64", f"step must be below 2**63, got {10**30}"),
        ("1," + "9" * 5000, "batchsize must be an integer, got " + "9" * 5000),
        ("1,64,7", "a row must have 2 values, got 3"),
        ("1,64,,7", "a row must have 2 values, got 4"),
        ("2,64", "step must be 1 (or 0, to start again), got 2"),
        ("-1,64", "step must be 1 (or 0, to start again), got -1"),
    ],
)
@pytest.mark.parametrize(
    ("above", "below"),
    [
        ("step,batchsize\n0,64\n", "\n2,32\n"),
        ("step,batchsize\r\n0,64\r\n", ""),
        ("# one\n\nstep,batchsize\n\n# two\n  # three\n0,64\n\n", "\nworse,still\n"),
        ("\rstep,batchsize\r0,64\r", "\r2,32"),
    ],
)
def test_invalid_row_is_rejected_with_its_line(save, above, below, row, message):
    path = save(above + row + below)
    line = len(re.split(r"\r\n|\r|\n", above))
    with rejects(path, line, message):
        Trace.read(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,64,7", "a row must have 2 values, got 3"),
        ("0,64,7,8", "a row must have 2 values, got 4"),
        ("1,64", "step must be 0, got 1"),
        ("0,0", "batchsize must be a positive integer, got 0"),
        ("0,few", "batchsize must be an integer, got few"),
    ],
)
@pytest.mark.parametrize("above", ["step,batchsize\n", "# one\n\nstep,batchsize\n\n  # two\n"])
def test_invalid_first_row_is_rejected_with_its_line(save, above, row, message):
    path = save(f"{above}{row}\n2,64\n3,64\n")
    with rejects(path, above.count("\n") + 1, message):
        Trace.read(path)


def test_invalid_row_after_many_valid_ones_is_rejected_with_its_line(save):
    """In another piece of the file, with a type of its own: pandas reads 16384 rows of 32 columns at a time."""
    header = ",".join(["step", "batchsize", *(f"other{number}" for number in range(30))])
    rows = "".join(f"{step},{64 + 32 * (step % 3)}\n" for step in range(20_000))
    path = save(f"{header}\n{rows}20000,sixty\n20001,64\n")
    with rejects(path, 20_002, "batchsize must be an integer, got sixty"):
        Trace.read(path)


# ------------------------------------------------------------------------------------------------------------- writing


@settings(deadline=None, max_examples=40)
@given(sizes=BATCH_SIZES, comment=st.one_of(st.none(), st.text()))
def test_what_is_written_is_read_back(tmp_path_factory, sizes, comment):
    path = tmp_path_factory.getbasetemp() / "written.csv"
    trace = Trace.from_sequence(sizes)
    trace.write(path, comment=comment)
    assert Trace.read(path) == trace


def test_written_file_has_the_comment_at_the_top_and_line_feeds(tmp_path):
    Trace.from_sequence([64, 96]).write(tmp_path / "trace.csv", comment="recorded on Monday\nin Zürich")
    expected = "# recorded on Monday\n# in Zürich\nstep,batchsize\n0,64\n1,96\n"
    assert (tmp_path / "trace.csv").read_bytes().decode() == expected


def test_a_written_file_without_comment_starts_with_the_header(tmp_path):
    Trace.from_sequence([64]).write(str(tmp_path / "trace.csv"))
    assert (tmp_path / "trace.csv").read_bytes() == b"step,batchsize\n0,64\n"
