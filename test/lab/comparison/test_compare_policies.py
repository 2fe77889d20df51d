"""vbs compare with policies instead of trace files."""

import json
import shlex

import pytest
from comparisons import forked_runs

import variable_batch_size as vbs
from variable_batch_size.lab.command.main import main


def compare(options, capsys):
    with forked_runs():
        code = main(shlex.split(f"compare --workload digits --seeds 1 --jobs 1 --out out {options}"))
    return code, *capsys.readouterr()


def test_policy_is_an_arm_with_its_own_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    vbs.Trace.of([32] * 200).write("steady.csv")
    options = "--rules linear --traces steady.csv policy:autoscale --samples 5760 --tests 2"
    code, out, _ = compare(options, capsys)
    assert code == 0
    assert "policy:autoscale" in out
    run = tmp_path / "out" / "runs" / "policy:autoscale" / "linear" / "seed-0"
    trace = vbs.Trace.read(run / "executed.csv")
    assert trace.comment.startswith("decided by Autoscale(every=20, lead=16, ")
    assert len(trace) == json.loads((run / "run.json").read_text())["updates"]
    assert trace.sizes.max() <= 16 * 16
    assert json.loads((run / "decisions.jsonl").read_text().splitlines()[0])["why"] == "first decision"
    assert "policy:autoscale:max_batch_size=256" in (tmp_path / "out" / "report.html").read_text()
    assert compare(options, capsys)[0] == 0  # which repeats nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--traces policy:per_core:samples=0", "`samples` must be a positive integer, got 0"),
        ("--traces policy:slow", "`policy` must be one of 'autoscale'"),
        ("--traces policy:per_core policy:per_core", "each trace needs a unique name"),
        (
            "--traces policy:per_core:min_batch_size=2000,max_batch_size=3000",
            "no batch size satisfies all bounds on 1 cores",
        ),
    ],
)
def test_unsupported_policies_raise_at_the_start(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = compare(options, capsys)
    assert code == 1
    assert message in err
