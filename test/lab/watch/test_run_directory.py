"""WatchedRun: what the files of a run show about it."""

import json
import os
import subprocess
import sys
import time

import pytest
from watched_runs import line, record, write_log

from variable_batch_size.lab.watch import run as run_module
from variable_batch_size.lab.watch import tail as tail_module
from variable_batch_size.lab.watch.run import WatchedRun
from variable_batch_size.runs.lock import RunLock


def shown(run, **goal):
    run.poll()
    found = run.as_dict(goal)
    json.dumps(found, allow_nan=False)
    return found


def test_it_never_writes_and_shows_what_is_appended(tmp_path):
    write_log(tmp_path, range(1, 4))
    before = {path.name: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]}
    run = WatchedRun(str(tmp_path))
    assert shown(run)["log"]["step"] == [1, 2, 3]
    assert {path.name: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.iterdir()]} == before
    version = run.version
    run.poll()
    assert run.version == version
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(line(4) + line(5)[:20])
    assert shown(run)["log"]["step"] == [1, 2, 3, 4]
    assert run.version > version
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(line(5)[20:])
    assert shown(run)["latest"]["step"] == 5


def test_a_run_that_resumes_replaces_its_records(tmp_path):
    run = WatchedRun(str(write_log(tmp_path, range(1, 9))))
    assert len(shown(run)["log"]["step"]) == 8
    write_log(tmp_path, range(1, 6), loss=7.0)
    run.poll()
    assert shown(run)["log"]["loss"] == [7.0] * 5


def test_executed_steps_and_decisions_are_shown(tmp_path):
    write_log(tmp_path, (2, 4))
    (tmp_path / "executed.csv").write_text(
        "# executed from Autoscale: x\nstep,batchsize\n0,32\n# from here on: y\n1,64\n2,64\n"
    )
    decisions = [
        {"step": 0, "from_step": 0, "batch_size": 32, "cores": 1, "why": "first decision"},
        {"step": 1, "from_step": 1, "batch_size": 64, "cores": 1, "why": "goodput +9 %"},
        {"step": 2, "from_step": 2, "batch_size": 64, "cores": 1, "why": "no change"},
        {"step": 3, "from_step": 3, "batch_size": 64, "cores": 2, "why": "<b>cores</b>", "noise_scale": float("nan")},
    ]
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(decision) + "\n" for decision in decisions))
    found = shown(WatchedRun(str(tmp_path)))
    assert found["steps"]["step"] == [1, 2, 3, 4]  # the last one by the log, as it was not saved yet
    assert found["steps"]["batch_size"] == [32, 64, 64, 64]
    assert found["steps"]["samples"] == [32, 96, 160, 256]
    assert found["steps"]["progress"] == [1.5, 3.0, 4.5, 6.0]  # between the records of the log
    assert [decision["why"] for decision in found["decisions"]] == ["first decision", "goodput +9 %", "<b>cores</b>"]
    assert found["num_decisions"] == 4


def test_the_expected_end_follows_from_the_latest_rate(tmp_path):
    write_log(tmp_path, range(1, 101))
    run = WatchedRun(str(tmp_path))
    # 20 steps, 1,280 samples, and a progress of 30 in a second
    assert shown(run, step=200)["seconds_left"] == pytest.approx(100 / 20)
    assert shown(run, samples=12_800)["seconds_left"] == pytest.approx(5.0)
    assert shown(run, progress=300.0)["seconds_left"] == pytest.approx(5.0)
    assert shown(run, samples=10)["seconds_left"] == 0.0
    assert shown(run)["seconds_left"] is None


def test_a_run_without_a_lock_is_suspected_to_have_ended_after_a_while(tmp_path):
    write_log(tmp_path, range(1, 5))
    run = WatchedRun(str(tmp_path))
    assert shown(run)["state"] == "running"
    then = time.time() - 600
    os.utime(tmp_path / "log.jsonl", (then, then))
    assert (shown(run)["state"], shown(run)["why"]) == ("stopped", "no record for 10 min: it has ended or died")


def test_the_lock_shows_whether_a_run_is_running_has_stopped_or_died(tmp_path):
    write_log(tmp_path, range(1, 5))
    (tmp_path / "executed.csv").write_text("step,batchsize\n0,64\n")
    run = WatchedRun(str(tmp_path))
    assert shown(run)["state"] == "stopped"
    lock = RunLock(tmp_path, None)
    lock.acquire()
    assert shown(run)["state"] == "running"
    text = (tmp_path / "run.lock").read_text()
    lock.release()
    assert shown(run)["state"] == "stopped"
    other = subprocess.Popen([sys.executable, "-c", "pass"])
    other.wait()
    (tmp_path / "run.lock").write_text(json.dumps({**json.loads(text), "process": other.pid}))
    found = shown(run)
    assert (found["state"], found["why"]) == ("died", "its process has ended without releasing the run")
    (tmp_path / "run.lock").write_text(json.dumps({**json.loads(text), "machine": "another"}))
    assert shown(run)["state"] == "running"  # it was renewed just now
    then = time.time() - 60
    os.utime(tmp_path / "run.lock", (then, then))
    assert shown(run)["state"] == "died"


def test_a_directory_without_files_waits(tmp_path):
    assert shown(WatchedRun(str(tmp_path)))["state"] == "waiting"


def test_a_long_log_is_shown_at_once_and_read_completely_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(tail_module, "_MOST_BYTES", 100_000)
    monkeypatch.setattr(run_module, "_NUM_SAMPLED", 20)
    write_log(tmp_path, range(1, 3001))
    run = WatchedRun(str(tmp_path))
    first = shown(run)
    assert 0 < first["read"] < 0.5
    assert (first["latest"]["step"], len(first["log"]["step"])) == (3000, 20)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(line(3001))
    assert shown(run)["latest"]["step"] == 3001  # although the others are not read yet
    while run.poll():
        pass
    last = shown(run)
    assert (last["read"], last["num_records"], last["latest"]["step"]) == (1.0, 3001, 3001)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write("".join(line(step) for step in range(3002, 3402)))
    found = shown(run)
    assert found["read"] < 1  # again, but all that was read before is shown
    assert found["log"]["step"][:750] == last["log"]["step"][:750]
    while run.poll():
        pass
    write_log(tmp_path, range(1, 3001), loss=7.0)
    run.poll()
    run.poll()
    found = shown(run)
    assert found["read"] < 1
    assert set(found["log"]["loss"]) == {7.0}  # nothing of the log that was replaced


@pytest.mark.parametrize("strange", [{"lr": [0.1, 0.2]}, {"cores": 10**400}, {"loss": "<b>"}, {"gain": {}}])
def test_invalid_records_are_gaps_and_the_others_are_shown(tmp_path, strange):
    lines = [line(1), line(2, **strange), line(3, **strange), "[" * 100_000 + "\n", line(4)]
    (tmp_path / "log.jsonl").write_text("".join(lines))
    (tmp_path / "executed.csv").write_text(f"step,batchsize\n0,64\n1,{'9' * 5000}\n1,64\n")
    found = shown(WatchedRun(str(tmp_path)))
    assert found["log"]["step"] == [1, 2, 3, 4]
    assert found["steps"]["step"] == [1, 2, 3, 4]
    only = write_log(tmp_path / "only", range(1, 4), **strange)
    assert shown(WatchedRun(str(only)))["log"]["step"] == [1, 2, 3]


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    tmp_path.joinpath("log.jsonl").write_text(
        "".join(json.dumps(record(step, loss=float("nan"), gain=float("inf"))) + "\n" for step in (1, 2))
    )
    found = shown(WatchedRun(str(tmp_path)))
    assert "loss" not in found["log"]
    assert found["latest"]["loss"] is None


@pytest.mark.long
def test_a_million_records_are_shown_within_two_seconds_and_in_200_mb(tmp_path):
    """Processor time, which does not depend on the load: until the page has its data, and the peak of all memory."""
    text = line(12345).replace("12345", "%d").replace(str(64 * 12345), "%d", 1)
    with (tmp_path / "log.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            file.write(text.replace("%d", str(step), 1).replace("%d", str(64 * step), 1))
    code = (
        "import json, re, sys, time\n"
        "from variable_batch_size.lab.watch.run import WatchedRun\n"
        "began = time.process_time()\n"
        "run = WatchedRun(sys.argv[1]); run.poll()\n"
        "found = json.dumps(run.as_dict({}))\n"
        "first = time.process_time() - began\n"
        "while run.poll(): pass\n"
        "last = run.as_dict({})\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]\n"
        "print(first, last['num_records'], last['latest']['step'], peak)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    first, number, latest, kilobytes = map(float, done.stdout.split())
    assert (number, latest) == (1_000_000, 1_000_000)
    assert first < 2.0
    assert kilobytes < 200_000
