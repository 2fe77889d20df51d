"""The language model example: it runs, learns, and gives the same result on two cores."""

import difflib
import re

import forked
import pytest
from documents import ROOT, blocks

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


# ------------------------------------------------------------------------------------------- nanogpt and its plain twin
TWINS = [ROOT / "examples" / "nanogpt_plain.py", ROOT / "examples" / "nanogpt.py"]


def test_nanogpt_is_at_most_12_lines_longer_than_its_plain_twin_and_the_page_shows_the_difference():
    plain, own = (path.read_text().splitlines() for path in TWINS)
    assert len(own) - len(plain) <= 12
    lines = list(difflib.unified_diff(plain[6:], own[6:], lineterm="", n=2))[2:]
    shown = "\n".join(line if line.strip() else "" for line in lines if not line.startswith("@@"))
    (block,) = blocks(ROOT / "docs" / "nanogpt.md", "diff")
    assert block.strip("\n") == shown.strip("\n")


def test_nanogpt_learns_as_its_plain_twin_in_fewer_updates_and_resumes(tmp_path):
    done = [forked.run_script(path, 0.06, folder=tmp_path) for path in TWINS]
    assert [one.returncode for one in done] == [0, 0], done[1].stderr
    plain = re.findall(r"epoch (\d), (\d+) updates, test loss ([\d.]+)", done[0].stdout)
    own = re.findall(r"epoch (\d)  step (\d+) .* test loss ([\d.]+)", done[1].stdout)
    assert [epoch for epoch, *_ in plain] == [epoch for epoch, *_ in own] == ["0", "1"]
    assert int(own[-1][1]) < 0.5 * int(plain[-1][1])
    untrained = 4.6  # the logarithm of the number of characters
    assert float(own[-1][2]) < 0.9 * untrained and float(plain[-1][2]) < 0.9 * untrained
    again = forked.run_script(TWINS[1], 0.06, folder=tmp_path)
    assert again.returncode == 0 and "test loss" not in again.stdout  # it was complete


# ---------------------------------------------------------------------------------------------------- packed documents


def table_of(text):
    """The printed rows; gloo's own lines, which two processes may mix, start with a bracket or a capital."""
    return dict(re.findall(r"^([a-z].*?) {2,}(.+)$", text, re.MULTILINE))


def test_documents_are_packed_without_a_trace_of_their_neighbours_on_any_cores():
    tables = []
    for options in ([], ["--cores", 2], ["--padded"]):
        arguments = ["--documents", 60, *options]
        done = forked.run_script(ROOT / "examples" / "packed_documents.py", *arguments, folder=ROOT)
        assert done.returncode == 0, done.stderr
        tables.append(table_of(done.stdout))
    alone, on_two, padded = tables
    assert on_two == alone
    assert alone["packed"].split()[1] == alone["one by one"].split()[1]
    assert alone["minibatches"].endswith("shapes: 1")
    assert padded["updates"] != "0"


def test_answers_that_are_left_out_leave_steps_of_any_length_on_two_cores():
    for options in ([], ["--cores", 2]):
        done = forked.run_script(ROOT / "examples" / "grpo.py", "--prompts", 36, *options, folder=ROOT)
        assert done.returncode == 0, done.stderr
        table = table_of(done.stdout)
        assert table["updates"] == (
            "5" if options else "9"
        )  # 9 minibatches of prompts, also an odd number on two cores
        low, high = re.match(r"(\d+) to (\d+)", table["minibatches"]).groups()
        assert int(low) < int(high)
