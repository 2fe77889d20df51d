"""vbs compare: every combination from the same start, stopped and started again, and what does not end well."""

import csv
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import time

import comparisons
import pytest
import torch
from comparisons import command, environment, vbs_compare

import variable_batch_size as vbs
from variable_batch_size.command.main import main
from variable_batch_size.comparison.experiment import Run
from variable_batch_size.comparison.results import Results

DIGITS = ["--workload", "digits", "--samples", 1440, "--seeds", 2, "--rules", "linear,adascale,constant"]


def rows(directory):
    with open(directory / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def records(directory, *run):
    text = (Results(directory).run_directory(Run(*run)) / "steps.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The results of an experiment that was never interrupted."""
    directory = tmp_path_factory.mktemp("digits")
    done = vbs_compare(*DIGITS, "--out", directory, "--jobs", 2)
    assert "14/14" in done.stderr
    assert done.stdout.splitlines()[-1] == str(directory / "report.html")
    return directory


def test_every_combination_and_the_yardstick_are_run(digits):
    found = [(row["trace"], row["rule"], row["seed"]) for row in rows(digits)]
    combinations = [(t, r, s) for t in ("ramp", "spot") for r in ("adascale", "constant", "linear") for s in "01"]
    assert found == [("reference", "constant", "0"), ("reference", "constant", "1"), *combinations]
    assert {row["status"] for row in rows(digits)} == {"done"}
    assert all(1440 <= int(row["samples"]) < 1440 + 256 for row in rows(digits))
    assert all(int(row["updates"]) == 90 for row in rows(digits)[:2])


def test_each_run_leaves_a_record_of_every_step_and_files_for_tensorboard(digits):
    of_run = records(digits, "ramp", "linear", 1)
    steps = [record for record in of_run if "loss" in record]
    row = next(row for row in rows(digits) if (row["trace"], row["rule"], row["seed"]) == ("ramp", "linear", "1"))
    assert [record["step"] for record in steps] == list(range(1, int(row["updates"]) + 1))
    ramp = list(vbs.Trace.read(digits / "traces" / "ramp.csv"))
    assert [record["batch_size"] for record in steps] == ramp[: len(steps)]
    tested = [record["samples"] for record in of_run if "metric" in record]
    assert tested == [r["samples"] for r in steps if r["samples"] // 72 > (r["samples"] - r["batch_size"]) // 72]
    assert of_run[-1]["metric"] == float(row["final_metric"])
    assert of_run[-1]["progress"] == pytest.approx(sum(record["batch_size"] / 16 for record in steps))
    events = Results(digits).run_directory(Run("ramp", "linear", 1)).glob("tensorboard/*/events*")
    assert len(list(events)) == 2


def test_runs_of_a_seed_start_from_the_same_weights_and_see_the_same_data(digits):
    first = {rule: records(digits, "ramp", rule, 0)[0]["loss"] for rule in ("linear", "adascale", "constant")}
    assert len(set(first.values())) == 1
    assert records(digits, "ramp", "linear", 1)[0]["loss"] not in first.values()


def test_interrupted_half_way_and_started_again_it_ends_with_the_same_results(digits, tmp_path):
    options = [*DIGITS, "--out", tmp_path, "--jobs", 2]
    running = subprocess.Popen(command(*options), cwd=comparisons.HERE, env=environment(), stderr=subprocess.PIPE)
    while len(list(tmp_path.glob("runs/*/*/*/run.json"))) < 5:
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate()
    assert running.returncode == 130
    assert b"interrupted; the same command goes on" in errors
    made = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/*/run.json")}
    assert 5 <= len(made) < 14
    assert 5 <= len(rows(tmp_path)) < 14  # what there is has been written

    vbs_compare(*options)
    assert (tmp_path / "results.csv").read_bytes() == (digits / "results.csv").read_bytes()
    assert all(path.stat().st_mtime_ns == made_at for path, made_at in made.items())


def test_no_process_is_left_behind_by_sigterm(tmp_path):
    running = subprocess.Popen(
        command(*DIGITS, "--out", tmp_path), cwd=comparisons.HERE, env=environment(), start_new_session=True
    )
    while not list(tmp_path.glob("runs/*/*/*/run.json")):
        assert running.poll() is None
        time.sleep(0.05)
    running.terminate()
    assert running.wait() == 130
    with pytest.raises(ProcessLookupError):
        for _ in range(600):  # multiprocessing has a helper of its own that ends a moment later
            os.killpg(running.pid, 0)
            time.sleep(0.05)


def test_results_of_other_settings_are_not_mixed(digits):
    done = vbs_compare(*DIGITS, "--lr", 0.3, "--out", digits, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"vbs: {digits} holds results with another optimizer, SGD(lr=0.05, momentum=0.9) there and "
        "SGD(lr=0.3, momentum=0.9) here: choose another --out\n"
    )


def test_a_directory_with_another_trace_of_that_name_or_another_comparison_at_work_is_refused(tmp_path):
    (tmp_path / "traces").mkdir()
    vbs.Trace.from_sequence([16] * 100).write(tmp_path / "traces" / "ramp.csv")
    done = vbs_compare(*DIGITS, "--out", tmp_path, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        f"vbs: {tmp_path / 'traces' / 'ramp.csv'} is another trace than trace: choose another --out\n",
    )
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = vbs_compare(*DIGITS, "--out", tmp_path, check=False)
    assert done.stderr == f"vbs: another vbs compare is at work in {tmp_path}\n"


def test_more_rules_and_a_broken_result_are_made_beside_what_is_there(tmp_path):
    options = ["--workload", "comparisons:own_random_data", "--seeds", 1, "--out", tmp_path, "--jobs", 1]
    vbs_compare(*options, "--rules", "linear")
    before = rows(tmp_path)
    broken = Results(tmp_path).run_directory(Run("ramp", "linear", 0)) / "run.json"
    broken.write_text("")
    page = (tmp_path / "report.html").read_text()
    assert "runs have ended" not in page
    vbs_compare(*options, "--rules", "linear,root")
    assert [row for row in rows(tmp_path) if row["rule"] != "root"] == before  # though in another process
    assert len(rows(tmp_path)) == len(before) + 2
    page = (tmp_path / "report.html").read_text()
    assert "--rules linear<br>vbs compare" in page  # both commands made it

    broken.write_text("")
    assert main(["report", str(tmp_path)]) == 0
    assert "4 of 5 runs have ended: what follows is not complete." in (tmp_path / "report.html").read_text()


# ------------------------------------------------------------------------------------------------ what the numbers are


def plain_curve(workload, trace, *, seed, factor):
    """Step, loss, metric and test loss of training each step of a trace as one big batch, in plain PyTorch."""
    torch.manual_seed(seed)
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    lr = optimizer.param_groups[0]["lr"]
    schedule = workload.schedule or (lambda fraction: 1.0)
    sampler = vbs.CustomSampler(
        workload.train, trace=trace, minibatch_size=workload.minibatch_size, num_replicas=1, rank=0, seed=seed
    )
    test = [torch.stack(part) for part in zip(*workload.test, strict=True)]
    losses, tests, samples = [], [], 0
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        indices = [index for minibatch in sampler for index in minibatch]
        for step in sampler.schedule.steps(epoch):
            size = sampler.schedule.batch_size(step)
            batch, indices = indices[:size], indices[size:]
            inputs, targets = (torch.stack(part) for part in zip(*(workload.train[i] for i in batch), strict=True))
            optimizer.param_groups[0]["lr"] = (
                lr * factor(size / workload.ref_batchsize) * schedule(min(1.0, samples / workload.num_samples))
            )
            optimizer.zero_grad()
            loss = workload.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            samples += size
            losses.append(loss.item())
            with torch.no_grad():
                outputs = model(test[0])
                tests.append((workload.loss(outputs, test[1]).item(), workload.metric(outputs, test[1]).item()))
    return losses, tests


@pytest.mark.parametrize(("rule", "cores", "factor"), [("linear", 2, lambda s: s), ("root", 1, lambda s: s**0.5)])
def test_the_curve_is_that_of_a_plain_pytorch_loop(tmp_path, rule, cores, factor):
    trace = tmp_path / "jumps.csv"
    vbs.Trace.from_sequence([8, 24, 16, 40, 8, 8, 64, 16, 32, 24] * 2).write(trace)
    out = tmp_path / "results"
    options = ["--workload", "comparisons:line", "--traces", trace, "--seeds", 2, "--rules", rule, "--cores", cores]
    vbs_compare(*options, "--out", out, "--tests", 480)  # after every step
    for seed in (0, 1):
        losses, tests = plain_curve(comparisons.line(), trace, seed=seed, factor=factor)
        found = records(out, "jumps", rule, seed)
        assert [record["loss"] for record in found if "loss" in record] == pytest.approx(losses, rel=1e-5)
        assert [record["test_loss"] for record in found if "metric" in record] == pytest.approx(
            [loss for loss, _ in tests], rel=1e-5
        )
        assert [record["metric"] for record in found if "metric" in record] == pytest.approx(
            [metric for _, metric in tests], rel=1e-5
        )
        row = next(row for row in rows(out) if (row["trace"], row["seed"]) == ("jumps", str(seed)))
        assert float(row["final_metric"]) == pytest.approx(tests[-1][1], rel=1e-5)
        assert float(row["best_metric"]) == pytest.approx(min(metric for _, metric in tests), rel=1e-5)


@pytest.mark.xla
def test_on_xla_cores_the_curve_is_the_same(tmp_path):
    vbs.Trace.from_sequence([8, 24, 40, 16, 32] * 2).write(tmp_path / "jumps.csv")
    options = [
        "--traces",
        tmp_path / "jumps.csv",
        "--seeds",
        1,
        "--rules",
        "adascale",
        "--workload",
        "comparisons:line",
    ]
    vbs_compare(*options, "--out", tmp_path / "cpu")
    vbs_compare(*options, "--out", tmp_path / "xla", "--device", "xla", "--cores", 2)
    for here, there in zip(rows(tmp_path / "cpu"), rows(tmp_path / "xla"), strict=True):
        assert here["status"] == there["status"] == "done"
        assert float(here["final_metric"]) == pytest.approx(float(there["final_metric"]), rel=1e-5)
        assert float(here["progress"]) == pytest.approx(float(there["progress"]), rel=1e-5)


def test_until_progress_other_rules_make_as_many_updates_as_adascale(tmp_path):
    options = ["--samples", 960, "--seeds", 2, "--rules", "linear,adascale", "--until", "progress"]
    vbs_compare("--workload", "comparisons:line", *options, "--out", tmp_path)
    found = {(row["trace"], row["rule"], row["seed"]): row for row in rows(tmp_path)}
    for trace in ("ramp", "spot"):
        for seed in "01":
            adascale, linear = found[trace, "adascale", seed], found[trace, "linear", seed]
            assert float(adascale["progress"]) >= 120  # the updates of the yardstick
            assert int(adascale["updates"]) == int(linear["updates"]) < 120
            assert int(adascale["samples"]) > 960
            lrs = [r["lr"] / r["factor"] for r in records(tmp_path, trace, "linear", int(seed)) if "lr" in r]
            assert lrs[0] == pytest.approx(0.02)  # the schedule is stretched over all updates: 1 − 0.9 · fraction
            assert lrs[-1] == pytest.approx(0.02 * (1 - 0.9 * (1 - 1 / int(linear["updates"]))), rel=1e-6)


def test_the_workload_of_the_documentation_works_as_its_command_says(tmp_path):
    page = (comparisons.HERE.parent / "docs" / "comparing.md").read_text()
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "vbs.Workload(" in block]
    assert len(block.splitlines()) <= 36  # 30 and the imports
    (tmp_path / "spirals.py").write_text(block)
    (line,) = re.findall(r"^vbs compare --workload spirals.*$", page, re.MULTILINE)
    arguments = shlex.split(line)[2:]
    done = subprocess.run(command(*arguments, "--seeds", 1), cwd=tmp_path, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "results" / "spirals")
    assert [row["status"] for row in found] == ["done"] * 5
    assert all(float(row["final_metric"]) > 90 for row in found)


# -------------------------------------------------------------------------------------------- what does not end well


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    directory = tmp_path_factory.mktemp("troubled")
    options = ["--workload", "comparisons:troubled", "--seeds", 2, "--rules", "linear,constant"]
    done = vbs_compare(*options, "--out", directory, check=False)
    assert done.returncode == 1
    assert "vbs: 5 runs failed: the page says why, and the same command tries them again" in done.stderr
    return directory


def test_divergence_is_a_result_and_a_failure_ends_no_other_run(troubled):
    found = {(row["trace"], row["rule"], row["seed"]): row for row in rows(troubled)}
    assert len(found) == 10
    assert {row["status"] for key, row in found.items() if key[2] == "1"} == {"failed"}
    assert found["ramp", "linear", "1"]["reason"] == "RuntimeError: seed 1"
    assert found["ramp", "linear", "0"]["status"] == "diverged"
    assert found["ramp", "linear", "0"]["reason"].startswith("the test loss is ")
    assert found["ramp", "linear", "0"]["final_metric"] == ""
    assert found["ramp", "constant", "0"]["status"] == found["reference", "constant", "0"]["status"] == "done"


def test_failed_runs_are_made_again_and_diverged_ones_are_not(troubled):
    diverged = Results(troubled).run_directory(Run("ramp", "linear", 0)) / "run.json"
    failed = Results(troubled).run_directory(Run("ramp", "linear", 1)) / "run.json"
    made_at = diverged.stat().st_mtime_ns, failed.stat().st_mtime_ns
    options = ["--workload", "comparisons:troubled", "--seeds", 2, "--rules", "linear,constant"]
    vbs_compare(*options, "--out", troubled, check=False)
    assert diverged.stat().st_mtime_ns == made_at[0]
    assert failed.stat().st_mtime_ns > made_at[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules", "linear,magic"], "`rules` must be some of linear, root, constant,"),
        (["--rules", "linear,linear"], "each once, got 'linear,linear'"),
        (["--until", "progress", "--on-end", "stop"], "--until progress needs --on-end hold or cycle: AdaScale takes"),
        (["--rules", "adam"], "the rule adam does not go with this workload: `inner` must be Adam or of its kind"),
        (["--rules", "linear", "--until", "progress"], "--until progress needs adascale or adamscale among the rules"),
        (["--workload", "nothing"], "`workload` must be digits, mnist, cifar10 or module:function, got 'nothing'"),
        (["--workload", "comparisons:nothing"], "comparisons has no function 'nothing'"),
        (["--workload", "comparisons:environment"], "comparisons:environment must return a Workload, got dict"),
        (["--workload", "mnist"], "mnist needs --datadir, where its files are"),
        (["--traces", "../traces/mnist.csv"], "mnist.csv:543: batchsize must be at most"),
        (["--traces", "../traces/demo.csv", "../traces/demo.csv"], "each trace needs a name of its own"),
        (["--traces", "../traces/demo.csv", "--samples", "1M"], "samples, got --samples 1000000; --on-end hold or"),
        (["--ref-batchsize", "40"], "batchsize must be a multiple of 16 (the minibatch size), got 40"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_run(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(comparisons.HERE)
    assert main(["compare", *options, "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
