"""vbs compare: every combination from the same start, stopped, resumed and extended."""

import fcntl
import os
import re
import shlex
import signal
import sys
import time
import warnings

import comparisons
import forked
import pytest
from comparisons import (
    fork_vbs_compare,
    records,
    rows,
    rows_by_run,
    vbs_compare,
    wait_for_runs,
)
from held import Hold

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.comparison.experiment import Results, Run

DIGITS = ["--workload", "digits", "--samples", 1440, "--seeds", 2, "--rules", "linear,adascale,constant"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The results of an experiment that was never interrupted."""
    directory = tmp_path_factory.mktemp("digits")
    done = vbs_compare(*DIGITS, "--out", directory, "--jobs", 2)
    assert "14/14" in done.stderr
    assert done.stdout.splitlines()[-1] == str(directory / "report.html")
    return directory


def test_every_combination_and_the_baseline_are_run(digits):
    found = [(row["trace"], row["rule"], row["seed"]) for row in rows(digits)]
    combinations = [(t, r, s) for t in ("ramp", "spot") for r in ("adascale", "constant", "linear") for s in "01"]
    assert found == [("reference", "constant", "0"), ("reference", "constant", "1"), *combinations]
    assert {row["status"] for row in rows(digits)} == {"done"}
    assert all(1440 <= int(row["samples"]) < 1440 + 256 for row in rows(digits))
    assert all(int(row["updates"]) == 90 for row in rows(digits)[:2])


def test_each_run_writes_a_record_of_every_step_and_tensorboard_files(digits):
    row, found = rows_by_run(digits)["ramp", "linear", 1], records(digits, "ramp", "linear", 1)
    steps = [record for record in found if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, int(row["updates"]) + 1))
    ramp = list(vbs.Trace.read(digits / "traces" / "ramp.csv"))
    assert [record["batch_size"] for record in steps] == ramp[: len(steps)]
    assert found[-1]["metric"] == float(row["final_metric"])
    assert found[-1]["progress"] == pytest.approx(sum(record["batch_size"] / 16 for record in steps))
    events = Results(digits).run_directory(Run("ramp", "linear", 1)).glob("tensorboard/*/events*")
    assert len(list(events)) == 2


def test_model_is_tested_after_each_twentieth_of_the_samples(digits):
    found = records(digits, "ramp", "linear", 1)
    ends = [(record["samples"], record["samples"] - record["batch_size"]) for record in found if "loss" in record]
    expected = [after for after, before in ends if after // 72 > before // 72]
    assert [record["samples"] for record in found if "metric" in record] == expected


def test_runs_of_a_seed_start_from_the_same_weights_and_use_the_same_data(digits):
    first = {rule: records(digits, "ramp", rule, 0)[0]["loss"] for rule in ("linear", "adascale", "constant")}
    assert len(set(first.values())) == 1
    assert records(digits, "ramp", "linear", 1)[0]["loss"] not in first.values()


def test_interrupted_comparison_resumes_to_the_same_results(digits, tmp_path):
    options = [*DIGITS, "--out", tmp_path, "--jobs", 2]
    running = fork_vbs_compare(*options, hold=Hold(tmp_path / "hold"), after=5)
    wait_for_runs(5, running, tmp_path)
    running.send_signal(signal.SIGINT)
    done = running.finish()
    assert done.returncode == 130
    assert "interrupted; the same command resumes" in done.stderr
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/*/run.json")}
    assert 5 <= len(made) < 14
    assert 5 <= len(rows(tmp_path)) < 14  # existing results were written

    vbs_compare(*options)
    assert (tmp_path / "results.csv").read_bytes() == (digits / "results.csv").read_bytes()
    assert all(path.stat().st_mtime_ns == made_at for path, made_at in made.items())


def test_background_process_ignores_ctrl_c_of_the_foreground(tmp_path):
    options = ["--workload", "comparisons:line", "--seeds", 1, "--rules", "linear", "--out", tmp_path]
    hold = Hold(tmp_path / "hold")
    running = fork_vbs_compare(*options, is_in_background=True, hold=hold, after=1)
    hold.wait(running.poll)
    running.send_signal(signal.SIGINT)
    hold.release()
    assert running.finish().returncode == 0
    assert len(rows(tmp_path)) == 3


def lead_session(arguments):
    """The command in a separate session, with runs in spawned processes, as for a user."""
    os.setsid()
    warnings.simplefilter("error")
    sys.exit(main(arguments))


def test_sigterm_leaves_no_process_running(tmp_path):
    # so many seeds that it does not end before the signal
    options = ["--workload", "comparisons:line", "--seeds", 200, "--rules", "linear", "--jobs", 1, "--out", tmp_path]
    running = forked.Program(lead_session, ["compare", *map(str, options)], folder=comparisons.HERE)
    wait_for_runs(1, running, tmp_path)
    running.send_signal(signal.SIGTERM)
    assert running.finish().returncode == 130
    with pytest.raises(ProcessLookupError):
        for _ in range(12_000):  # a helper process of multiprocessing exits a moment later
            os.killpg(running.pid, 0)
            time.sleep(0.05)


def test_results_of_different_settings_are_not_mixed(digits):
    done = vbs_compare(*DIGITS, "--lr", 0.3, "--out", digits, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"vbs: {digits} has results with another optimizer, SGD(lr=0.05, momentum=0.9) instead of "
        "SGD(lr=0.3, momentum=0.9): choose another --out\n"
    )


def test_second_comparison_in_the_same_directory_raises(tmp_path):
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = vbs_compare(*DIGITS, "--out", tmp_path, check=False)
    assert (done.returncode, done.stderr) == (1, f"vbs: another vbs compare is running in {tmp_path}\n")


def test_added_rules_and_broken_results_are_run_and_existing_results_kept(tmp_path):
    options = ["--workload", "comparisons:own_random_data", "--seeds", 1, "--out", tmp_path, "--jobs", 1]
    vbs_compare(*options, "--rules", "linear")
    before = rows(tmp_path)
    broken = Results(tmp_path).run_directory(Run("ramp", "linear", 0)) / "run.json"
    broken.write_text("")
    page = (tmp_path / "report.html").read_text()
    assert "runs have ended" not in page
    vbs_compare(*options, "--rules", "linear,root")
    assert [row for row in rows(tmp_path) if row["rule"] != "root"] == before  # even in another process
    assert len(rows(tmp_path)) == len(before) + 2
    page = (tmp_path / "report.html").read_text()
    assert "--rules linear<br>vbs compare" in page  # both commands made it

    broken.write_text("")
    assert main(["report", str(tmp_path)]) == 0
    assert "4 of 5 runs have ended: the results below are incomplete." in (tmp_path / "report.html").read_text()


def test_workload_of_the_documentation_runs_with_its_command(tmp_path):
    page = (comparisons.ROOT / "docs" / "comparing.md").read_text()
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "vbs.Workload(" in block]
    assert len(block.splitlines()) <= 36  # 30 and the imports
    (tmp_path / "spirals.py").write_text(block)
    (line,) = re.findall(r"^vbs compare --workload spirals.*$", page, re.MULTILINE)
    arguments = shlex.split(line)[2:]
    done = fork_vbs_compare(*arguments, "--seeds", 1, "--samples", 8 * 4096, folder=tmp_path).finish()
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "results" / "spirals")
    assert [row["status"] for row in found] == ["done"] * 5
    assert all(float(row["final_metric"]) > 90 for row in found)
