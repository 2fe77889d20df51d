"""The assignment of GPUs to the processes of a comparison."""

import os

import pytest
from comparisons import forked_runs

from variable_batch_size.lab.comparison import compare
from variable_batch_size.lab.comparison.compare import LocalProcesses
from variable_batch_size.lab.comparison.experiment import Outcome, Run


@pytest.mark.parametrize(
    ("jobs", "cores", "first"), [(4, 1, ["4", "5", "6", "4"]), (3, 2, ["4", "6", "5"]), (2, 3, ["4", "4"])]
)
def test_processes_start_with_different_gpus_and_each_core_has_its_own(monkeypatch, jobs, cores, first):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    found = [environment["CUDA_VISIBLE_DEVICES"].split(",") for environment in compare.environments(jobs, cores)]
    assert [visible[0] for visible in found] == first
    assert all(len(set(visible[:cores])) == cores for visible in found)


def visible_gpus():
    return Outcome(status="done", reason=os.environ["CUDA_VISIBLE_DEVICES"])


def die():
    os._exit(9)


def test_replacement_process_gets_the_gpus_of_the_dead_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    runs = [Run("spot", "linear", seed) for seed in range(3)]
    with forked_runs(), LocalProcesses(2, environments=compare.environments(2, 1)) as workers:
        workers.start(runs[0], (visible_gpus, (), {}))
        workers.start(runs[1], (die, (), {}))
        outcomes = dict(workers.next_outcome() for _ in range(2))
        assert outcomes[runs[0]].reason == "4,5"
        workers.start(runs[0], (visible_gpus, (), {}))
        workers.start(runs[2], (visible_gpus, (), {}))
        outcomes = dict(workers.next_outcome() for _ in range(2))
    assert sorted(outcome.reason for outcome in outcomes.values()) == ["4,5", "5,4"]
