"""vbs cbs: branches of one run at several batch sizes."""

import math
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
    assert found[0].losses != found[1].losses
    assert all(0 < branch.losses[0] < 2.3 for branch in found)
    # the same branch twice is the same to the last bit: neither has left a mark on the other
    twice = branches(workload, **branching(sizes=[16, 16]))
    assert twice[0] == twice[1] == found[0]


def test_branches_of_larger_steps_train_on_no_more_samples():
    found = branches(load_workload("digits", None), **branching(samples=100, sizes=[16, 32, 48]))
    assert [branch.batch_size * branch.updates for branch in found] == [192, 192, 192]


def test_later_start_has_a_lower_initial_loss():
    workload = load_workload("digits", None)
    early, late = (branches(workload, **branching(samples_before=n, samples=16, sizes=[16]))[0] for n in (16, 3200))
    assert late.losses < early.losses


def branch(size, *losses):
    return Branch(size, 1, losses)


def test_increase_is_that_of_pairs_with_its_interval():
    # losses in pairs: +0.01, +0.02 and +0.03 of a mean of 2, so 0.5, 1 and 1.5 %; deviation 0.5 %, t(2) = 4.3027
    gap = branch(64, 1.01, 2.02, 3.03).increase(branch(32, 1.0, 2.0, 3.0))
    assert gap == pytest.approx((0.01, 4.3027 * 0.005 / math.sqrt(3)), rel=1e-4)
    assert branch(64, -1.01, -2.02).increase(branch(32, -1.0, -2.0)).mean == pytest.approx(-0.01)  # a log-likelihood
    assert branch(64, 1.0, float("nan")).increase(branch(32, 1.0, 2.0)) is None


SAME, BETTER, WORSE, UNCLEAR, DIVERGED = (1.0, 1.0), (0.9, 0.91), (1.2, 1.21), (0.9, 1.2), (1.0, float("inf"))


@pytest.mark.parametrize(
    ("losses", "bounds", "text"),
    [
        ([SAME, BETTER], (128, None, ()), "at least 128 (the largest one tried)"),
        ([SAME, WORSE], (64, 128, ()), "at least 64 and below 128"),
        ([SAME, WORSE, SAME], (64, 128, ()), "at least 64 and below 128"),
        ([SAME, UNCLEAR, WORSE], (64, 256, (128,)), "at least 64 and below 256 (128 undecided: use more --seeds)"),
        ([SAME, UNCLEAR, SAME], (64, None, (128, 256)), "at least 64 (128, 256 undecided: use more --seeds)"),
        ([WORSE], (None, 64, ()), "below 64 (start from a smaller --batch-size to find it)"),
        ([DIVERGED, SAME], (None, 64, ()), "below 64 (start from a smaller --batch-size to find it)"),
        ([UNCLEAR, WORSE], (None, 128, (64,)), "below 128 (64 undecided: use more --seeds)"),
        ([UNCLEAR, SAME], (None, None, (64, 128)), "not found (64, 128 undecided: use more --seeds)"),
        ([(1.0,)], (None, None, (64,)), "not found (64 undecided: use more --seeds)"),  # one seed
    ],
)
def test_critical_batch_size_has_the_bounds_that_were_seen(losses, bounds, text):
    base = branch(32, *[1.0] * len(losses[0]))
    found = critical_batch_size([base, *(branch(64 * 2**k, *own) for k, own in enumerate(losses))], tolerance=0.01)
    assert (found, str(found)) == (bounds, text)


def test_a_base_without_a_loss_raises():
    with pytest.raises(ValueError, match=r"the losses of the first branch, with batch size 32, are \(nan, 1.0\)"):
        critical_batch_size([branch(32, float("nan"), 1.0), branch(64, 1.0, 1.0)], tolerance=0.01)


def test_command_prints_every_branch_and_the_result(capsys):
    assert main(shlex.split("cbs digits --after 320 --samples 320 --factors 2 --seeds 2 --rule linear")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["16", "32"]
    assert lines[1].split()[-1] == "–"
    assert lines[2].split()[-3:-1][0] == "±"
    assert lines[-1].startswith("after 320 samples, the largest batch size without an increase above 1 %: ")
    assert lines[-1].split(": ")[1].startswith(("at least 32", "below 32", "not found"))


def test_invalid_numbers_raise(capsys):
    assert main(shlex.split("cbs digits --after 320 --samples 320 --tolerance -1")) == 1
    assert "`tolerance` must be a non-negative number, got -1.0" in capsys.readouterr().err
    assert main(shlex.split("cbs digits --after 320 --samples 320 --seeds 1")) == 1
    assert "--seeds must be at least 2, because one has no interval, got 1" in capsys.readouterr().err
    assert main(shlex.split("cbs digits --after 320 --samples 320 --factors 1 1")) == 1
    assert "--factors must have a number above 1, got only 1: the base size is not an answer" in capsys.readouterr().err
    with pytest.raises(ValueError, match="`samples` must be a positive integer, got 0"):
        branches(load_workload("digits", None), **branching(samples=0))
    with pytest.raises(ValueError, match=r"^`samples` must be at least 1680, .* sizes \[16, 48, 80, 112\], got 1000$"):
        branches(load_workload("digits", None), **branching(samples=1000, sizes=[16, 48, 80, 112]))
