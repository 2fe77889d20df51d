"""vbs cbs: branches of one run at several batch sizes."""

import math
import re
import shlex

import pytest

from variable_batch_size.lab.command.main import main
from variable_batch_size.lab.comparison.measure import Branch, branches, critical_batch_size
from variable_batch_size.lab.comparison.workload import load_workload


def branching(**options):
    return {"sizes": [16, 64], "samples_before": 320, "samples": 640, "rule": "linear", "seeds": 1, **options}


def test_branches_train_on_the_same_number_of_samples_from_the_same_state():
    workload = load_workload("digits", None)
    found = branches(workload, **branching())
    assert [(branch.batch_size, branch.updates) for branch in found] == [(16, 40), (64, 10)]
    assert found[0].losses != found[1].losses
    assert all(0 < branch.losses[0] < 2.3 for branch in found)
    # tested at the start and after each tenth
    assert [[samples for samples, _ in branch.curves[0]] for branch in found] == [list(range(0, 641, 64))] * 2
    assert found[0].curves[0][0] == found[1].curves[0][0]
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


def branch(size, *curves):
    """With a loss of 1 at the start, and the given ones after 100, 200 and so on samples, for each seed."""
    of_seeds = (tuple(zip(range(0, 100 * len(losses) + 1, 100), (1.0, *losses), strict=True)) for losses in curves)
    return Branch(size, 1, tuple(of_seeds))


def factor(mine, theirs):
    return math.exp(branch(64, mine).cost(branch(32, theirs)).mean)


def test_the_cost_is_in_samples_to_the_lowest_loss_that_both_have_reached():
    # 0.7 after 400 samples; the other has 0.8 after 100 and 0.6 after 200, so 0.7 after 150
    assert factor((0.9, 0.8, 0.75, 0.7), (0.8, 0.6, 0.5, 0.4)) == pytest.approx(400 / 150)
    assert factor((0.8, 0.6, 0.5, 0.4), (0.9, 0.8, 0.75, 0.7)) == pytest.approx(150 / 400)
    assert factor((0.8, 0.6, 0.5), (0.8, 0.6, 0.5)) == 1
    # 0.5 % of the whole loss, but twice the samples
    assert factor((0.998, 0.995), (0.995, 0.990)) == pytest.approx(2)
    # the lowest loss counts, not the last one, and the first time that it is reached: 0.6 after 200, and after 80
    assert factor((0.9, 0.6, 0.9, 0.6), (0.5, 0.6, 0.7, 0.8)) == pytest.approx(200 / 80)
    # a branch with fewer steps is tested less often
    large = Branch(128, 1, (((0, 1.0), (200, 0.8), (400, 0.6)),))
    assert math.exp(large.cost(branch(32, (0.8, 0.6, 0.5, 0.4))).mean) == pytest.approx(2)


def test_the_cost_is_that_of_pairs_with_its_interval():
    # factors of 1, 2 and 4: the logarithms have mean log 2 and deviation log 2; t(2) = 4.3027
    base = branch(32, *[(0.75, 0.5, 0.25, 0.2)] * 3)
    mine = branch(64, (0.75, 0.5, 0.25, 0.2), (0.875, 0.75, 0.625, 0.5), (0.9375, 0.875, 0.8125, 0.75))
    expected = (math.log(2), 4.3027 * math.log(2) / math.sqrt(3))
    assert mine.cost(base) == pytest.approx(expected, rel=1e-4)


def test_a_branch_that_diverges_or_never_lowers_the_loss_has_no_cost():
    base = branch(32, (0.5, 0.4))
    assert branch(64, (0.5, float("nan"))).cost(base) is None
    assert branch(64, (0.5, float("inf"))).cost(base) is None
    assert branch(64, (1.1, 1.0)).cost(base) is None
    for spike in (float("nan"), float("inf")):  # from which it has recovered
        assert branch(64, (spike, 0.4)).cost(base).mean == pytest.approx(0)


BASE = (0.8, 0.6, 0.4, 0.2)
SAME, WORSE = (BASE, BASE), ((0.9, 0.8, 0.7, 0.6), (0.9, 0.8, 0.7, 0.59))
BETTER = ((0.6, 0.4, 0.2, 0.1), (0.6, 0.4, 0.2, 0.11))
UNCLEAR, DIVERGED = (BASE, WORSE[0]), (BASE, (0.8, 0.6, 0.4, float("inf")))


@pytest.mark.parametrize(
    ("curves", "bounds", "text"),
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
        ([(BASE,)], (None, None, (64,)), "not found (64 undecided: use more --seeds)"),  # one seed
    ],
)
def test_critical_batch_size_has_the_bounds_that_were_seen(curves, bounds, text):
    base = branch(32, *[BASE] * len(curves[0]))
    found = critical_batch_size([base, *(branch(64 * 2**k, *own) for k, own in enumerate(curves))], tolerance=0.2)
    assert (found, str(found)) == (bounds, text)


def test_a_base_that_does_not_lower_the_loss_raises():
    rule = "the first branch, with batch size 32, must lower the test loss, got 1 before and {} after 200 samples"
    for losses, last in (((0.5, float("nan")), "nan"), ((1.1, 1.2), "1.2")):
        with pytest.raises(ValueError, match=rule.format(last)):
            critical_batch_size([branch(32, losses), branch(64, BASE)], tolerance=0.2)


def test_command_prints_every_branch_and_the_result(capsys):
    assert main(shlex.split("cbs digits --after 320 --samples 320 --factors 2 --seeds 2 --rule linear")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["16", "32"]
    assert lines[1].endswith("× 1")
    assert re.search(r"× \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)$", lines[2])
    within = "with at most 20 % more samples to the same loss: "
    assert lines[-1].startswith(f"after 320 samples, the largest batch size {within}")
    assert lines[-1].split(": ")[1].startswith(("at least 32", "below 32", "not found"))


def test_invalid_numbers_raise(capsys):
    assert main(shlex.split("cbs digits --after 320 --samples 320 --tolerance -1")) == 1
    assert "`tolerance` must be a non-negative number, got -1.0" in capsys.readouterr().err
    assert main(shlex.split("cbs digits --after 320 --samples 320 --seeds 1")) == 1
    assert "--seeds must be at least 2, because a single seed gives no interval, got 1" in capsys.readouterr().err
    assert main(shlex.split("cbs digits --after 320 --samples 320 --factors 1 1")) == 1
    assert "--factors must have a number above 1, got only 1: the base size is not an answer" in capsys.readouterr().err
    with pytest.raises(ValueError, match="`samples` must be a positive integer, got 0"):
        branches(load_workload("digits", None), **branching(samples=0))
    with pytest.raises(ValueError, match=r"^`samples` must be at least 1680, .* sizes \[16, 48, 80, 112\], got 1000$"):
        branches(load_workload("digits", None), **branching(samples=1000, sizes=[16, 48, 80, 112]))
