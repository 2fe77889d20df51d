"""vbs cbs: branches of one run at several batch sizes."""

import shlex

import pytest

from variable_batch_size.command.main import main
from variable_batch_size.comparison.measure import Branch, branches, critical_batch_size
from variable_batch_size.comparison.workload import load_workload


def branching(**options):
    return {"sizes": [16, 64], "samples_before": 320, "samples": 640, "rule": "linear", "seeds": 1, **options}


def test_branches_train_on_the_same_number_of_samples_from_the_same_state():
    workload = load_workload("digits", None)
    found = branches(workload, **branching())
    assert [(branch.batch_size, branch.updates) for branch in found] == [(16, 40), (64, 10)]
    assert found[0].loss != found[1].loss
    assert all(0 < branch.loss < 2.3 for branch in found)
    # the same branch twice is the same to the last bit: neither has left a mark on the other
    twice = branches(workload, **branching(sizes=[16, 16]))
    assert twice[0] == twice[1] == found[0]


def test_branches_of_larger_steps_train_on_no_more_samples():
    found = branches(load_workload("digits", None), **branching(samples=100, sizes=[16, 32, 48]))
    assert [branch.batch_size * branch.updates for branch in found] == [192, 192, 192]


def test_later_start_has_a_lower_initial_loss():
    workload = load_workload("digits", None)
    early, late = (branches(workload, **branching(samples_before=n, samples=16, sizes=[16]))[0] for n in (16, 3200))
    assert late.loss < early.loss


def test_critical_batch_size_is_the_one_before_the_first_worse_branch():
    losses = [1.0, 1.009, 1.02, 1.0]
    found = [Branch(32 * 2**k, 1, loss) for k, loss in enumerate(losses)]
    assert critical_batch_size(found, tolerance=0.01) == 64
    assert critical_batch_size(found, tolerance=0.1) == 256
    assert critical_batch_size([Branch(32, 1, 1.0), Branch(64, 1, float("nan"))], tolerance=0.5) == 32
    assert critical_batch_size([Branch(32, 1, -1.0), Branch(64, 1, -0.995)], tolerance=0.01) == 64  # a log-likelihood
    with pytest.raises(ValueError, match="the loss of the first branch, with batch size 32, is nan"):
        critical_batch_size([Branch(32, 1, float("nan")), Branch(64, 1, 1.0)], tolerance=0.01)


def test_command_prints_every_branch_and_the_result(capsys):
    assert main(shlex.split("cbs digits --after 320 --samples 320 --factors 2 --seeds 1 --rule linear")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["16", "32"]
    assert lines[-1].startswith("after 320 samples, a batch size of ")


def test_invalid_numbers_raise(capsys):
    assert main(shlex.split("cbs digits --after 320 --samples 320 --tolerance -1")) == 1
    assert "--tolerance must not be negative, got -1.0" in capsys.readouterr().err
    with pytest.raises(ValueError, match="`samples` must be a positive integer, got 0"):
        branches(load_workload("digits", None), **branching(samples=0))
    with pytest.raises(ValueError, match=r"^`samples` must be at least 1680, .* sizes \[16, 48, 80, 112\], got 1000$"):
        branches(load_workload("digits", None), **branching(samples=1000, sizes=[16, 48, 80, 112]))
