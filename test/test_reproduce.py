"""The programs that reproduce tables from the literature: each runs in a small version, resumes, and checks results."""

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import signal
import sys
import time

import forked
import pytest
from documents import ROOT

PROGRAMS = sorted(
    path.stem
    for path in (ROOT / "reproduce").glob("*.py")
    if "EXPERIMENT = experiment.Experiment(" in path.read_text(encoding="utf-8")
)
# mnist_elastic runs `vbs compare`, which has its own tests
NAMES = [name for name in PROGRAMS if name != "mnist_elastic"]


def run_each(names, folder):
    sys.path.insert(0, "reproduce")
    found = {}
    for name in names:
        sys.argv = [f"reproduce/{name}.py", "--small", "--device", "cpu", "--directory", f"{folder}/{name}"]
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            found[name] = (end.code, output.getvalue())
    (folder / "found.json").write_text(json.dumps(found))


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The exit code and the output of every program with --small, and the folder of their runs."""
    folder = tmp_path_factory.mktemp("reproduced")
    done = forked.run(run_each, NAMES, folder, folder=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text()), folder


@pytest.mark.parametrize("name", NAMES)
def test_small_version_of_each_program_ends_within_all_tolerances(name, found):
    results, folder = found
    code, output = results[name]
    assert code == 0, output
    table = output.rpartition("\n\n")[2]
    assert table.startswith("run ")
    assert "holds" in table
    assert "DOES NOT HOLD" not in table
    written = (folder / name / f"{name}.csv").read_text(encoding="utf-8")
    assert re.match(
        r"# command: python reproduce/\w+\.py --small .*\n# machine: .*\n# date: \d{4}-\d\d-\d\d\n", written
    )


def test_counts_of_smith_et_al_are_exact(found):
    table = found[0]["smith_cifar10"][1]
    for updates in ("78,125", "28,875", "6,406", "2,305"):
        assert re.search(rf"updates in 200 epochs +{updates} +{updates} ", table)


def run(*arguments):
    script, options = ROOT / "reproduce" / "adascale_cifar10.py", ["--small", "--device", "cpu", *arguments]
    return forked.start_script(script, *options, folder=ROOT, environment={"PYTHONPATH": str(ROOT)})


def test_stopped_program_resumes_to_the_same_numbers(found, tmp_path):
    process = run("--directory", str(tmp_path), "--jobs", "2")
    deadline = time.monotonic() + 900
    while not list(tmp_path.glob("*/records.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    done = process.finish()
    assert done.returncode == 75, done
    assert "the same command resumes" in done.stdout
    again = run("--directory", str(tmp_path)).finish()
    assert again.returncode == 0, again
    curves = "adascale_cifar10_curves.csv"
    assert (tmp_path / curves).read_text() == (found[1] / "adascale_cifar10" / curves).read_text()


def test_number_out_of_tolerance_is_reported_and_exits_with_1(tmp_path):
    folder = tmp_path / "runs"
    for name, updates in (
        ("SGD-1", 25),
        ("AdaScale-2", 14),
        ("AdaScale-4", 9),
        ("linear-4", 6),
        ("linear-4-warm-up", 6),
    ):
        (folder / name).mkdir(parents=True)
        rule = "adascale" if "AdaScale" in name else "linear"
        scale = int(re.search(r"\d", name)[0])
        row = {"run": name, "rule": rule, "scale": scale, "updates": updates, "curve": [{"step": 1}] * 4}
        (folder / name / "result.json").write_text(json.dumps(row))
    done = run("--directory", str(folder)).finish()
    assert done.returncode == 1, done
    assert re.search(r"SGD-1 +updates .*DOES NOT HOLD", done.stdout)
    assert done.stdout.count("DOES NOT HOLD") == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_committed_result_contains_its_command_and_machine(name):
    path = ROOT / "reproduce" / "results" / f"{name}.csv"
    if path.exists():
        text = path.read_text(encoding="utf-8")
        assert re.match(rf"# command: python reproduce/{name}\.py\b.*\n# machine: .*\n# date: 20\d\d-\d\d-\d\d\n", text)
        assert name in (ROOT / "docs" / "reproduced.md").read_text(encoding="utf-8")


@pytest.fixture
def recommended(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "reproduce"))
    return importlib.import_module("recommended")


def test_the_traces_of_recommended_go_from_the_reference_to_eight_times_it(recommended):
    for trace in recommended.TRACES:
        sizes = recommended.sizes_of(trace, 16, 51_200)
        assert sum(sizes) >= 51_200
        assert set(sizes) <= {16 * scale for scale in range(1, 9)}
        assert max(sizes) == 128


def test_recommended_finds_the_regret_and_what_the_intervals_cover(recommended):
    losses = {"constant": 0.3, "root": 0.2, "linear": 0.2, "adascale": 0.25}  # of the regression, in nats
    runs = {
        ("ramp", rule, seed): {"loss": loss, "metric": loss, "seconds": 1.0}
        for rule, loss in losses.items()
        for seed in range(3)
    }
    runs |= {("reference", "constant", seed): {"loss": 0.15, "metric": 0.15, "seconds": 1.0} for seed in range(3)}
    said = {
        "rule": "adascale",
        "level_with": [],
        "exponent": [0.7, 0.1],
        "lead": [0.05, 0.01],
        "cost": 0.08,
        "seconds": 1.0,
    }
    row = recommended.row_of("regression", "ramp", 0, [0, 1, 2], said, runs)
    assert (row["best"], row["worst"], row["baseline"]) == ("root", "constant", "linear")
    assert (row["regret"], row["regret_of_baseline"]) == pytest.approx((0.05, 0))
    assert (row["is_small"], row["is_small_of_baseline"], row["is_worst"]) == (False, True, False)
    assert row["true_exponent"] == pytest.approx(0.75)
    assert (row["covers_exponent"], row["covers_lead"]) == (True, False)  # 0.25 − 0.15 = 0.1
    assert row["seconds_of_comparison"] == 15
    assert "small regret: 0% of pairs, asked for 90%: DOES NOT HOLD" in recommended.summary([row])
    assert not any("other seeds" in line for line in recommended.summary([row]))
    # with three more seeds, adascale is as good as linear, and the comparison with those alone says so
    for rule in losses:
        for seed in range(10, 13):
            found = 0.1 if rule == "adascale" else losses[rule]
            runs["ramp", rule, seed] = {"loss": found, "metric": found, "seconds": 1.0}
    row = recommended.row_of("regression", "ramp", 0, [0, 1, 2, 10, 11, 12], said, runs)
    assert (row["best_of_other_seeds"], row["regret_of_comparison"]) == ("adascale", pytest.approx(0.05))
    assert (row["regret_by_all_seeds"], row["is_small_by_all_seeds"]) == (pytest.approx(0), True)
