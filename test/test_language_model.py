"""The language model example: it runs, learns, and gives the same result on two cores."""

import re

import forked
import pytest
from documents import ROOT

TOKENS = 12_000


@pytest.fixture(scope="module")
def run():
    """The output of the example: the rows of its table, and the lines before it."""

    def run(*arguments):
        options = ["--tokens", TOKENS, "--log-steps", 2, *arguments]
        done = forked.run_script(ROOT / "examples" / "language_model.py", *options, folder=ROOT)
        assert done.returncode == 0, done.stderr
        records = re.findall(r"^step .*$", done.stdout, re.MULTILINE)
        return dict(re.findall(r"^(\S.*?) {2,}(.+)$", done.stdout.rpartition("\n\n")[2], re.MULTILINE)), records

    return run


def number(cell):
    """The number at the start of a cell of the table."""
    return float(re.match(r"[\d.,]*\d", cell)[0].replace(",", ""))


def test_windows_of_pythons_help_texts(run):
    table, records = run()
    assert table["text"].startswith("pydoc_data.topics")
    assert int(table["tokens"].replace(",", "")) == pytest.approx(TOKENS, rel=0.2)
    assert float(table["noise scale"].split()[0].replace(",", "")) > 0
    losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in records]
    assert losses[-1] < losses[0]
    assert 3 < losses[0] < 6  # per character, although minibatches hold hundreds


def test_padded_paragraphs_of_a_file_on_two_cores(run, tmp_path):
    file = tmp_path / "text.txt"
    words = ["a", "variable", "batch", "size", "is", "what", "it", "says"]
    file.write_text("\n\n".join(" ".join(words[i % 8] for i in range(length)) for length in list(range(1, 60)) * 4))
    alone, records = run("--padded", "--text", str(file))
    on_two, others = run("--padded", "--text", str(file), "--cores", "2")
    assert alone["text"] == str(file)
    for name in ("tokens", "updates"):
        assert on_two[name] == alone[name], name
    for name, of_rounding in (("noise scale", {"abs": 1, "rel": 0.01}), ("test loss", {"abs": 0.002})):
        assert number(on_two[name]) == pytest.approx(number(alone[name]), **of_rounding), name
    assert len(others) == len(records)
