"""vbs compare with diverging or failing runs, and with invalid arguments."""

import comparisons
import pytest
from comparisons import rows_by_run, vbs_compare

from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.comparison.experiment import Results, Run

TROUBLED = [
    "--workload",
    "comparisons:troubled",
    "--samples",
    2560,
    "--lr",
    0.45,
    "--seeds",
    2,
    "--rules",
    "linear,constant",
]


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    directory = tmp_path_factory.mktemp("troubled")
    done = vbs_compare(*TROUBLED, "--out", directory, check=False)
    assert done.returncode == 1
    assert "vbs: 5 runs failed: the page has the reasons, and the same command retries them" in done.stderr
    return directory


def test_divergence_is_a_result_and_a_failure_does_not_stop_other_runs(troubled):
    found = rows_by_run(troubled)
    assert len(found) == 10
    assert {row["status"] for key, row in found.items() if key[2] == 1} == {"failed"}
    assert found["ramp", "linear", 1]["reason"] == "RuntimeError: seed 1"
    assert found["ramp", "linear", 0]["status"] == "diverged"
    assert found["ramp", "linear", 0]["reason"].startswith("the test loss is ")
    assert found["ramp", "linear", 0]["final_metric"] == ""
    assert found["ramp", "constant", 0]["status"] == found["reference", "constant", 0]["status"] == "done"


def test_failed_runs_are_repeated_and_diverged_ones_are_not(troubled):
    diverged = Results(troubled).run_directory(Run("ramp", "linear", 0)) / "run.json"
    failed = Results(troubled).run_directory(Run("ramp", "linear", 1)) / "run.json"
    made_at = diverged.stat().st_mtime_ns, failed.stat().st_mtime_ns
    vbs_compare(*TROUBLED, "--out", troubled, check=False)
    assert diverged.stat().st_mtime_ns == made_at[0]
    assert failed.stat().st_mtime_ns > made_at[1]


def test_run_that_depends_on_the_updates_of_a_failed_run_fails(tmp_path):
    options = ["--workload", "comparisons:troubled", "--seeds", 2, "--rules", "linear,adascale", "--samples", 512]
    vbs_compare(*options, "--until", "progress", "--out", tmp_path, check=False)
    found = rows_by_run(tmp_path)
    assert found["ramp", "adascale", 0]["status"] == "done"
    assert found["ramp", "adascale", 0]["updates"] == found["ramp", "linear", 0]["updates"]
    assert found["ramp", "linear", 1]["status"] == "failed"
    assert found["ramp", "linear", 1]["reason"] == (
        "it needs the number of updates of (ramp, adascale, seed 1), which failed"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rules", "linear,magic"], "`rules` must be some of linear, root, constant,"),
        (["--rules", "linear,linear"], "each once, got 'linear,linear'"),
        (["--rules", "linear,legw"], "`rule` legw needs warmup_samples, as in legw:5000, got 'legw'"),
        (["--until", "progress", "--on-end", "stop"], "--until progress needs --on-end hold or cycle: AdaScale may"),
        (["--rules", "adam"], "the rule adam does not support this workload: `inner` must be an Adam-style optimizer"),
        (["--rules", "linear", "--until", "progress"], "--until progress needs adascale or adamscale or surge among"),
        (["--workload", "nothing"], "`workload` must be digits, mnist or module:function, got 'nothing'"),
        (["--workload", "comparisons:nothing"], "comparisons has no function 'nothing'"),
        (["--workload", "comparisons:environment"], "comparisons:environment must return a Workload, got dict"),
        (["--workload", "mnist"], "mnist needs --datadir, the directory of its files"),
        (["--traces", "../../traces/mnist.csv"], "mnist.csv:543: batchsize must be at most"),
        (["--traces", "../../traces/demo.csv", "../../traces/demo.csv"], "each trace needs a unique name"),
        (["--traces", "../../traces/demo.csv", "--samples", "1M"], "samples, got --samples 1000000; --on-end hold or"),
        (["--ref-batchsize", "40"], "batchsize must be a multiple of 16 (the minibatch size), got 40"),
    ],
)
def test_invalid_arguments_raise_before_the_first_run(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(comparisons.HERE)
    assert main(["compare", *options, "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
