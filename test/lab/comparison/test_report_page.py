"""report.html: made from the results only, and shows names unchanged, with any content."""

import dataclasses
import json
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from outcomes import HOSTILE, HOSTILE_FOLDER, SETTINGS, ended, write_hostile_results, write_results

from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.comparison.experiment import Results, Run
from variable_batch_size.lab.comparison.report import write_report


class Elements(HTMLParser):
    """All elements of a page, with their attributes and their text."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.found.append(element)
        if tag not in ("meta", "link", "br"):
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def texts(self, tag):
        return [element["text"] for element in self.found if element["tag"] == tag]


def page_of(results):
    write_report(results)
    return Elements(results.page_file.read_text(encoding="utf-8"))


def test_names_cannot_inject_html(tmp_path):
    page = page_of(write_hostile_results(tmp_path))
    assert not page.open
    assert "img" not in {element["tag"] for element in page.found}
    assert len(page.texts("script")) == 3


def test_names_are_shown_unchanged(tmp_path):
    page = page_of(write_hostile_results(tmp_path))
    assert page.texts("title") == page.texts("h1") == [f"Learning-rate rules on {HOSTILE}"]
    assert page.texts("h2") == [HOSTILE_FOLDER, "What is compared", "Runs", "Reproduce"]
    assert page.texts("b") == [HOSTILE_FOLDER]
    assert page.texts("pre") == [HOSTILE]
    assert {HOSTILE_FOLDER, HOSTILE, f"98.00{HOSTILE}", f"SHA-256 of {HOSTILE_FOLDER}"} <= set(page.texts("td"))
    assert [element["data-trace"] for element in page.found if "data-trace" in element] == [HOSTILE_FOLDER]


def test_chart_data_keeps_names_unchanged(tmp_path):
    page = page_of(write_hostile_results(tmp_path))
    (text,) = [element["text"] for element in page.found if element.get("id") == "data"]
    data = json.loads(text)
    assert data["metric"] == HOSTILE + HOSTILE
    assert [arm["rule"] for arm in data["traces"][HOSTILE_FOLDER]] == [HOSTILE_FOLDER, "root"]
    assert data["traces"][HOSTILE_FOLDER][0]["tests"]["metric"] == {"mean": [90.0, 95.0]}


def test_traces_are_in_the_requested_order(tmp_path, capsys):
    results = write_results(tmp_path, {Run(trace, "linear", 0): ended(98.0) for trace in ("late", "early")})
    assert page_of(results).texts("h2") == ["late", "early", "What is compared", "Runs", "Reproduce"]
    assert main(["report", str(tmp_path)]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[:2]] == ["late", "early"]


def test_report_can_be_made_before_a_run_on_a_trace_has_completed(tmp_path):
    results = write_results(tmp_path, {Run("reference", "constant", 0): ended(98.0)})
    assert "No run on a trace has ended yet." in page_of(results).texts("p")


@pytest.mark.parametrize(
    ("until", "words"),
    [
        ("samples", "A run ends with the step that reaches 1,000 samples."),
        ("progress", "AdaScale trains to a progress of 63, and the other rules make as many updates as it does,"),
    ],
)
def test_report_shows_when_runs_end(tmp_path, until, words):
    settings = dataclasses.replace(SETTINGS, until=until)
    results = write_results(tmp_path, {Run("ramp", "linear", 0): ended(98.0)}, settings=settings)
    *_, explanation = page_of(results).texts("p")
    assert words in " ".join(explanation.split())


def test_the_page_opens_with_the_summary_and_explains_below_the_figure(tmp_path):
    write_report(write_results(tmp_path, {Run("ramp", "linear", 0): ended(98.0)}))
    text = Results(tmp_path).page_file.read_text(encoding="utf-8")
    marks = ['<section id="summary">', "linear makes 2 updates", 'class="chart"', "Verdict: best is", "Ranking: linear"]
    marks += ["What is compared", "SGD(lr=0.05)", "95 % interval", "Progress counts"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_report_command_rewrites_the_page_and_the_tables(tmp_path, capsys):
    results = write_results(tmp_path, {Run("ramp", "linear", 0): ended(98.0)})
    write_report(results)
    page = results.page_file.read_bytes()
    results.page_file.unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert results.page_file.read_bytes() == page
    assert capsys.readouterr().out.splitlines()[-1] == str(results.page_file)
    assert "ramp,linear,0,done,2,48,2.5,,98.0,98.0," in (tmp_path / "results.csv").read_text()


def test_report_of_a_directory_without_results_raises(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert f"{tmp_path} has no results of vbs compare" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["jinja2", "plotly", "scipy"])
def test_missing_library_is_named_with_the_package_to_install(tmp_path, capsys, monkeypatch, library):
    outcomes = {Run("ramp", rule, seed): ended(98.0) for rule in ("linear", "root") for seed in (0, 1)}
    write_results(tmp_path, outcomes)
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["report", str(tmp_path)]) == 1
    either = "pip install 'variable_batch_size[compare]', or in a clone pip install '.[compare]'"
    assert f"needs {library}: {either}" in capsys.readouterr().err


def test_missing_libraries_are_reported_before_the_first_run_and_all_at_once(tmp_path, capsys, monkeypatch):
    for library in ("jinja2", "tensorboardX"):
        monkeypatch.setitem(sys.modules, library, None)
    assert main(["compare", "--out", str(tmp_path / "results")]) == 1
    message = "vbs: vbs compare needs jinja2, tensorboardX: pip install 'variable_batch_size[compare]', or in a clone"
    assert capsys.readouterr().err.startswith(message)
    assert not (tmp_path / "results").exists()


def test_libraries_of_the_page_are_loaded_when_it_is_made():
    code = "import sys, variable_batch_size.lab.command.compare; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jinja2", "plotly", "scipy", "torch"} & set(done.stdout.split())
