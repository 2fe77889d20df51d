"""The directory of an experiment: adding runs, and reading results."""

import dataclasses
import hashlib

import pytest
from outcomes import SETTINGS, ended, write_results

from variable_batch_size.lab.comparison.experiment import Run, trace_hash
from variable_batch_size.traces.trace import Trace

FIRST = Run("ramp", "linear", 0)


def test_results_of_different_settings_are_not_mixed(tmp_path):
    results = write_results(tmp_path, {FIRST: ended(98.0)})
    others = dataclasses.replace(SETTINGS, optimizer="SGD(lr=0.3)")
    message = r"has results with another optimizer, SGD\(lr=0\.05\) instead of SGD\(lr=0\.3\): choose another --out"
    with pytest.raises(ValueError, match=message):
        results.write_experiment(others, {}, {}, [])


def test_different_trace_with_the_same_name_raises(tmp_path):
    results = write_results(tmp_path, {FIRST: ended(98.0)})
    with pytest.raises(ValueError, match=r"ramp\.csv is a different trace from trace: choose another --out"):
        results.write_experiment(SETTINGS, {}, {"ramp": Trace.from_sequence([16, 16])}, [])


def test_existing_runs_are_added_to_the_planned_ones_with_the_baseline_first(tmp_path):
    write_results(tmp_path, {FIRST: ended(98.0)})
    baseline, more = Run("reference", "constant", 0), Run("early", "root", 1)
    results = write_results(tmp_path, {more: ended(97.0), baseline: ended(99.0)})
    assert results.planned() == [baseline, more, FIRST]
    assert [run for run, _ in results.runs()] == [baseline, more, FIRST]


@pytest.mark.parametrize("text", ["", '{"status": "do', '{"state": "done"}'])
def test_unreadable_result_counts_as_missing(tmp_path, text):
    results = write_results(tmp_path, {FIRST: ended(98.0)})
    assert results.read(FIRST) == ended(98.0)
    (results.run_directory(FIRST) / "run.json").write_text(text)
    assert results.read(FIRST) is None
    assert list(results.runs()) == []


def test_hash_of_a_trace_depends_only_on_its_numbers():
    numbers = bytes([8, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0])
    assert trace_hash(Trace.from_sequence([8, 16])) == hashlib.sha256(numbers).hexdigest()
