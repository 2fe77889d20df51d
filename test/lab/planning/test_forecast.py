"""Forecasts of the rest of a run, from its files."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.planning import Profile
from variable_batch_size.lab.planning.forecast import RunSoFar, basis_of, forecast, named_policy, with_largest
from variable_batch_size.lab.planning.profile import Measured
from variable_batch_size.traces import Trace

RECORDED = Path(__file__).parent / "forecast_runs"  # by tools/forecast_runs.py
TRACES = {"stages": "0:32 150:64 300:128 450:256"}
STEPS = {"constant": 560, "stages": 520, "autoscale": 1480}


def recorded(name):
    """The lines of the log, and the seconds after each."""
    lines = (RECORDED / name / "log.jsonl").read_text().splitlines(keepends=True)
    seconds, samples = [], 0
    for record in map(json.loads, lines):
        took = (record["samples"] - samples) / record["samples_per_second"]
        seconds.append((seconds[-1] if seconds else 0.0) + took)
        samples = record["samples"]
    return lines, seconds, samples


def cut(name, share, directory):
    """A copy of a recorded run after a share of its time, with the start of another line, and the seconds so far."""
    lines, seconds, _ = recorded(name)
    number = 1 + next(index for index, at in enumerate(seconds) if at >= share * seconds[-1])
    shutil.copy(RECORDED / name / "run.json", directory)
    (directory / "log.jsonl").write_text("".join(lines[:number]) + lines[number][:50])
    return str(directory), seconds[number - 1]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("name", STEPS)
def test_forecast_of_the_rest_is_within_ten_percent(name, share, tmp_path):
    _, seconds, samples = recorded(name)
    directory, done = cut(name, share, tmp_path)
    trace = Trace.of(TRACES[name]) if name in TRACES else None
    run = RunSoFar.read(directory)
    ((_, found),) = forecast(run, {}, samples=samples, trace=trace)
    actual = seconds[-1] - done
    assert found.seconds == pytest.approx(actual, rel=0.1)
    low, high = (end.seconds for end in found.ends)
    assert low < actual < high
    assert found.updates == STEPS[name] - run.step
    assert found.samples == samples - run.samples


def test_the_state_of_a_run_is_read_from_its_files(tmp_path):
    run = RunSoFar.read(cut("autoscale", 0.5, tmp_path)[0])
    assert (run.minibatch_size, run.ref_batchsize, run.capacity, run.cores) == (16, 32, 1792, 1)
    assert run.policy == "autoscale:every=10,lead=4,max_batch_size=512,max_growth=2.0,threshold=1.05"
    # tools/forecast_runs.py: 20 ms for a minibatch, 15 ms more for an update, and pauses
    assert run.seconds[1] == pytest.approx((0.020, 0.035), rel=0.15)
    assert run.spread[0] == pytest.approx(1.05, abs=0.05)
    assert with_largest(run, 64) == "autoscale:every=10,lead=4,max_growth=2.0,threshold=1.05,max_batch_size=64"


def test_other_choices_end_at_the_same_progress(tmp_path):
    run = RunSoFar.read(cut("autoscale", 0.5, tmp_path)[0])
    policies = {name: named_policy(name) for name in ("64", "256")}
    found = dict(forecast(run, policies, samples=100_000, price=3600.0))
    small, large = found["64"], found["256"]
    assert {round(one.progress / small.progress, 1) for one in found.values()} == {1.0}
    # by hand: a step of d minibatches takes (d - 1) a + u, and is worth its gain at the latest noise
    (accumulating, updating), (mean, _), noise = run.seconds[1], run.spread, run.noise[-1][1]
    worth = (noise / 32 + 1) / (noise / 64 + 1)
    updates = (small.progress - run.progress) / worth
    assert small.updates == pytest.approx(updates, abs=2)
    assert small.seconds == pytest.approx(updates * mean * (3 * accumulating + updating), rel=0.01)
    assert small.cost == pytest.approx(small.seconds)
    assert large.updates < small.updates
    assert large.samples > small.samples


def test_more_cores_divide_the_time_and_a_restart_adds_to_it(tmp_path):
    run = RunSoFar.read(cut("constant", 0.5, tmp_path)[0])
    given = {"samples": 100_000, "cores": [1, 2, 4], "restart_seconds": 60.0}
    (_, one), (_, two), (_, four) = forecast(run, {}, **given)
    assert two.seconds == pytest.approx(60 + one.seconds / 2)  # all minibatches take equally long
    assert four.seconds == pytest.approx(60 + one.seconds / 4)
    assert (one.basis, two.basis) == ("measured", "extrapolated")
    measured = Profile((Measured(1, 2, 16, 0.1, 0.2), Measured(1, 4, 16, 0.1, 0.2)))
    ((_, slow),) = forecast(run, {}, samples=100_000, cores=[2], profile=measured)
    assert slow.seconds == pytest.approx(slow.updates * 0.3)
    assert slow.basis == "measured"


def test_a_run_without_noise_counts_samples(tmp_path):
    run = RunSoFar.read(cut("constant", 0.5, tmp_path)[0])
    assert "It measures no noise: progress is counted in samples." in basis_of(run)
    assert "All of them had equally many minibatches" in basis_of(run)
    found = dict(forecast(run, {"128": named_policy("128")}, samples=run.samples + 6400))
    assert (found["64"].updates, found["128"].updates) == (100, 50)


def test_a_run_that_resumed_with_other_settings_is_forecast_with_those(tmp_path):
    directory, _ = cut("autoscale", 0.5, tmp_path)
    before = RunSoFar.read(directory)
    described = json.loads((tmp_path / "run.json").read_text())
    described["settings"] |= {"minibatch_size": 32, "ref_batchsize": 64, "seed": 3}
    described["policy"]["settings"]["max_batch_size"] = 64
    described["changes"] = [
        {"steps_done": 300, "settings": {"minibatch_size": [16, 32], "ref_batchsize": [32, 64]}},
        {"steps_done": 500, "settings": {"seed": [0, 3]}},
    ]
    (tmp_path / "run.json").write_text(json.dumps(described))
    run = RunSoFar.read(directory)
    assert run.policy == before.policy.replace("=512", "=64")
    assert (run.minibatch_size, run.ref_batchsize, run.capacity) == (32, 64, 1792)
    assert len(run.times) == (run.step - 300) // 10 - 1 < len(before.times)  # the others had other minibatches


def test_a_restart_on_other_cores_counts_for_a_trace(tmp_path):
    run = RunSoFar.read(cut("stages", 0.5, tmp_path)[0])
    given = {"trace": Trace.of(TRACES["stages"]), "samples": run.samples + 6400, "cores": [1, 2], "price": 3600.0}
    (_, one), (_, two) = forecast(run, {}, **given)
    (_, same), (_, later) = forecast(run, {}, **given, restart_seconds=60.0)
    assert (same.seconds, same.restarts) == (one.seconds, 0)
    assert (later.seconds, later.restarts) == (pytest.approx(two.seconds + 60), 1)
    assert later.cost == pytest.approx(two.cost + 120)
    assert later.moments[0].seconds == 60


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("samples", float("nan"), "must be an integer of at least 0, got nan"),
        ("step", None, "must be an integer of at least 0, got None"),
        ("batch_size", 0, "must be an integer of at least 1, got 0"),
        ("cores", "two", "must be an integer of at least 1, got 'two'"),
        ("progress", None, "must be a number of at least 0, got None"),
        ("noise_scale", [1], r"must be a number, got \[1\]"),
    ],
)
def test_records_with_values_that_are_not_numbers_are_refused(tmp_path, name, value, rule):
    directory, _ = cut("autoscale", 0.5, tmp_path)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    lines[29] = json.dumps({**json.loads(lines[29]), name: value})
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=f"{tmp_path}/log.jsonl:30: `{name}` {rule}"):
        RunSoFar.read(directory)


def test_one_record_less_or_a_wrong_trace_is_refused(tmp_path):
    directory, _ = cut("stages", 0.5, tmp_path)
    run = RunSoFar.read(directory)
    with pytest.raises(ValueError, match=r"`samples` must be above the \d+ that the run has done, got 10"):
        forecast(run, {}, samples=10)
    with pytest.raises(ValueError, match="`samples` must be given"):
        forecast(run, {})
    with pytest.raises(
        ValueError, match=r"trace must be the trace of .*, which has 451 steps, sha256 \w+, got 2 steps"
    ):
        forecast(run, {}, trace=Trace.of([32, 64]))
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"`minibatch_size` must be given, as there is no .*/run\.json that"):
        RunSoFar.read(directory)
    assert RunSoFar.read(directory, minibatch_size=16, ref_batchsize=32).policy is None
    text = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(text.replace('"cores": 1, ', ""))  # of an earlier version, on any number
    with pytest.raises(ValueError, match="must have at least 3 records of steps, with cores, got 0"):
        RunSoFar.read(directory, minibatch_size=16, ref_batchsize=32)


def test_other_files_of_the_same_name_are_refused(tmp_path):
    directory, _ = cut("stages", 0.5, tmp_path)
    for text in ("{", "[]", '{"updates": 3}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(
            ValueError, match=rf"run\.json must be as a Checkpoint writes it, got {re.escape(repr(text))}$"
        ):
            RunSoFar.read(directory)


@pytest.mark.parametrize("name", STEPS)
def test_recorded_settings_are_those_that_a_checkpoint_writes_now(name, tmp_path):
    autoscale = vbs.Autoscale(max_batch_size=512, every=10, lead=4)
    trace = {"constant": 64, "autoscale": autoscale, **TRACES}[name]
    model = torch.nn.Linear(1, 1)
    sampler = vbs.CustomSampler(dataset_size=1797, trace=trace, minibatch_size=16)
    rule = "linear" if name == "constant" else "adascale"
    optimizer = vbs.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), sampler, rule=rule, ref_batchsize=32)
    vbs.Checkpoint(tmp_path, model=model, optimizer=optimizer).save()
    assert json.loads((tmp_path / "run.json").read_text()) == json.loads((RECORDED / name / "run.json").read_text())


def test_the_trace_of_a_command_may_be_stages(tmp_path, capsys):
    directory, _ = cut("stages", 0.5, tmp_path)
    assert main(["simulate", "--from", directory, "--samples", "60K", "--trace", TRACES["stages"]]) == 0
    assert "One run: " in capsys.readouterr().out
    assert main(["simulate", "--from", directory, "--samples", "60K", "--trace", "0:32"]) == 1
    assert "must be the trace of" in capsys.readouterr().err


def test_the_command_prints_the_forecast(tmp_path, capsys):
    directory, _ = cut("autoscale", 0.5, tmp_path)
    options = [
        "--from",
        directory,
        "--samples",
        "100K",
        "--price",
        "3.6",
        "--max-batch-size",
        "32",
        "--cores",
        "1",
        "2",
    ]
    assert main(["simulate", "64", *options]) == 0
    out = capsys.readouterr().out
    assert "is at step" in out and "95 % interval" in out and "Fastest" in out
    rows = [line for line in out.splitlines() if line.startswith(("64 ", "autoscale:"))]
    assert len(rows) == 6
    assert main(["simulate", "64", *options, "--noise", "500"]) == 1
    assert "--noise cannot be used with --from" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["simulate", "64", "--samples", "100K"])
    assert "--profile, --noise, --minibatch-size, --ref-batchsize, --cores (or --from)" in capsys.readouterr().err
