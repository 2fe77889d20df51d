"""vbs watch, in a separate process: it serves runs that grow, and ends with Ctrl-C."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from comparisons import on_sigint
from watched_runs import line, write_log

from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.command.watch import answer_forecast

RECORDED = Path(__file__).parents[1] / "planning/forecast_runs/constant"


def test_it_serves_growing_runs_until_it_is_interrupted(tmp_path):
    first, second = (write_log(tmp_path / name, range(1, 4)) for name in "ab")
    command = [sys.executable, "-m", "variable_batch_size", "watch", str(first), str(second), "--samples", "10M"]
    with on_sigint(signal.default_int_handler):  # also if tests run in the background
        process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            url = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0]

            def data(seen=-1):
                with urllib.request.urlopen(f"{url}data?seen={seen}") as answer:
                    return json.load(answer) if answer.status == 200 else None

            found = data()
            assert [run["latest"]["step"] for run in found["runs"]] == [3, 3]
            assert found["runs"][0]["seconds_left"] > 0
            with (first / "log.jsonl").open("a") as file:
                file.write(line(4))
            while (new := data(found["version"])) is None:
                pass
            assert [run["latest"]["step"] for run in new["runs"]] == [4, 3]
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_a_path_that_is_not_a_directory_is_refused(tmp_path, capsys):
    file = tmp_path / "log.jsonl"
    file.touch()
    for run, problem in [(tmp_path / "nothing", "does not exist: start the run first"), (file, "is not one")]:
        assert main(["watch", str(run)]) == 1
        assert f"a run must be a directory or a URL, but {run} {problem}" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("variable_batch_size.lab.watch.server.Server.server_bind", _refuse)
    assert main(["watch", str(tmp_path), "--port", "9"]) == 1
    assert "cannot serve on --host 127.0.0.1 --port 9: taken" in capsys.readouterr().err


def _refuse(server):
    raise OSError("taken")


@pytest.mark.parametrize(
    "options",
    [
        ["--samples", "5", "--steps", "5"],
        ["--samples", "0"],
        ["--progress", "inf"],
        ["--progress", "nan"],
        ["--progress", "-1"],
        ["--port", "65536"],
        ["--port", "-1"],
    ],
)
def test_wrong_options_are_refused(tmp_path, options):
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path), *options])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"samples": "1T"}, r"the rest must have at most 300,000 steps to be forecast here, got 15,624,999,440"),
        ({"samples": "10M", "policies": "16"}, "must have at most 300,000 steps"),
        ({"samples": "100K", "price": "x"}, "`price` must be a number, got 'x'"),
        ({}, "`samples` must be given"),
    ],
)
def test_an_invalid_form_is_refused(query, message):
    with pytest.raises(ValueError, match=message):
        answer_forecast(str(RECORDED), query)


def test_a_number_of_cores_is_forecast_once():
    assert len(answer_forecast(str(RECORDED), {"samples": "100K", "cores": "2 4 2"})["table"]) == 3
