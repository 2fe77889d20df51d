"""Hints: goodput on other numbers of cores against hand-computed numbers, and the file as a format."""

import json
import math

import pytest
import torch

import variable_batch_size as vbs
from variable_batch_size.policies.hints import HINTS, hints_of
from variable_batch_size.policies.timing import StepTimes

RUN = {"minibatch_size": 32, "ref_batchsize": 64, "batch_size": 128, "noise_scale": 192.0}


def timed(*rows):
    """Times of depths 1 and 2 on numbers of cores."""
    times = StepTimes()
    for cores, first, second in rows:
        for depth, seconds in ((1, first), (2, second)):
            for _ in range(6):
                times.add(cores, depth, seconds)
    return times


def test_goodput_and_throughput_at_each_number_of_cores_are_those_by_hand():
    # one core: a = 1, u = 1; two cores: a = 1, u = 2; policies that hold the batch size of 128, 4 minibatches
    policy = vbs.policies.CriticalBatch(max_batch_size=128)
    hints = hints_of(policy, vbs.policies.Situation(cores=2, **RUN), timed((1, 1.0, 2.0), (2, 2.0, 3.0)))
    worth = (192 / 64 + 1) / (192 / 128 + 1)  # 1.6
    assert hints.goodput == pytest.approx((worth / 4, worth / 3, worth / 3, worth / 2))
    assert hints.throughput == pytest.approx((128 / 4, 128 / 3, 128 / 3, 128 / 2))
    assert hints.batch_sizes == (128, 128, 128, 128)
    assert (hints.cores, hints.min_cores, hints.max_cores) == (2, 1, 4)


def test_autoscale_is_expected_to_choose_its_best_batch_size_on_every_number_of_cores():
    policy, times = vbs.Autoscale(max_batch_size=1024), timed((1, 1.0, 2.0), (2, 2.0, 3.0))
    hints = hints_of(policy, vbs.policies.Situation(cores=2, **RUN), times)
    for cores in (1, 2, 3, 4):
        a, u = times.seconds(cores)
        of = vbs.policies.Goodput(
            cores=cores, minibatch_size=32, ref_batchsize=64, noise_scale=192.0, accumulating=a, updating=u
        )
        assert hints.goodput[cores - 1] == pytest.approx(max(of(number) for number in range(2, 33)))


def test_per_core_is_expected_to_grow_with_the_cores_and_needs_no_noise():
    run = {**RUN, "noise_scale": None}
    hints = hints_of(vbs.policies.PerCore(64), vbs.policies.Situation(cores=1, **run), timed((1, 1.0, 2.0)))
    assert hints.batch_sizes == (64, 128)
    assert hints.goodput == pytest.approx((64 / 64 / 2, 128 / 64 / 2))


def test_no_more_cores_than_minibatches_and_than_twice_those_that_were_timed():
    situation = vbs.policies.Situation(cores=4, **RUN)
    most = [
        hints_of(vbs.Autoscale(max_batch_size=size), situation, timed((2, 2.0, 3.0))).max_cores for size in (160, 4096)
    ]
    assert most == [5, 8]
    bounded = vbs.Autoscale(max_batch_size=4096, min_batch_size=256, max_per_core=96)
    hints = hints_of(bounded, situation, timed((2, 2.0, 3.0)))
    assert hints.min_cores == 3 and hints.goodput[:2] == (0.0, 0.0) and min(hints.goodput[2:]) > 0


@pytest.mark.parametrize(
    ("run", "times"), [({**RUN, "noise_scale": None}, timed((1, 1.0, 2.0))), (RUN, StepTimes())], ids=["noise", "times"]
)
def test_hints_have_nothing_that_is_not_measured_yet(run, times):
    hints = hints_of(vbs.Autoscale(max_batch_size=1024), vbs.policies.Situation(cores=1, **run), times)
    assert hints.goodput is hints.throughput is hints.batch_sizes is None
    assert hints.seconds_left(1) is None and hints.speed(2) == 2.0


def test_times_that_do_not_grow_with_the_depth_claim_nothing_about_one_core():
    situation = vbs.policies.Situation(cores=2, **RUN)
    for policy in (vbs.Autoscale(max_batch_size=1024), vbs.policies.PerCore(64)):
        assert hints_of(policy, situation, timed((2, 3.0, 2.0))).goodput is None


def test_seconds_left_are_by_samples_only_if_no_progress_ends_the_run():
    known = {"cores": 1, "min_cores": 1, "max_cores": 2, "goodput": (1.0, 2.0), "throughput": (10.0, 40.0)}
    by_samples = vbs.policies.Hints(**known, samples=100, samples_goal=300)
    assert (by_samples.seconds_left(1), by_samples.seconds_left(2), by_samples.seconds_left(5)) == (20.0, 5.0, 5.0)
    both = vbs.policies.Hints(**known, samples=100, samples_goal=300, progress=10.0, progress_goal=14.0)
    assert both.seconds_left(2) == 2.0
    assert vbs.policies.Hints(**known).seconds_left(1) is None


def written(tmp_path, **changes):
    hints = vbs.policies.Hints(cores=1, min_cores=1, max_cores=2, goodput=(1.0, 1.5), throughput=(3.0, 4.0))
    path = tmp_path / HINTS
    path.write_text(json.dumps({**hints.as_dict(), **changes}))
    return path, hints


def test_a_file_has_the_hints_and_names_of_later_versions_are_ignored(tmp_path):
    path, hints = written(tmp_path, a_later_name=7)
    assert vbs.policies.Hints.read(path) == hints


@pytest.mark.parametrize("length", [0, 1, 30, 120])
def test_a_truncated_file_is_refused_in_one_sentence(tmp_path, length):
    path, _ = written(tmp_path)
    path.write_text(path.read_text()[:length])
    with pytest.raises(ValueError, match=r"hints.json: hints must be a JSON object, got a truncated or damaged file$"):
        vbs.policies.Hints.read(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "hints must be a JSON object with the format 'variable_batch_size.hints', got"),
        ({"version": 2}, "this version reads hints of version 1, got version 2"),
        ({"cores": 0}, "cores: must be a positive integer, got 0"),
        ({"max_cores": None}, "max_cores: must be a positive integer, got null"),
        ({"min_cores": 3}, "min_cores: must be at most max_cores, which is 2, got 3"),
        ({"goodput": [1.0]}, "goodput: must be null or a non-negative number for each number of cores, got"),
        ({"goodput": [1.0, -1.0]}, "goodput: must be null or a non-negative number"),
        ({"goodput": [1.0, math.nan]}, "goodput: must be null or a non-negative number"),
        ({"goodput": None}, "goodput and throughput must both be measured or both be null, got one of them"),
        ({"progress": "far"}, 'progress: must be a non-negative number, got "far"'),
        ({"progress": None}, "progress: must be a non-negative number, got null"),
    ],
)
def test_wrong_values_in_a_file_are_refused_with_their_names(tmp_path, changes, message):
    path, _ = written(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"hints.json.*{message}"):
        vbs.policies.Hints.read(path)


# --------------------------------------------------------------------------------------------------------- real runs


def trained(directory, trace, **ends):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
    loader = vbs.DataLoader(data, trace, minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = vbs.AdaScaleOptimizer(inner, loader, ref_batchsize=8)
    optimizer.attach(vbs.Checkpoint(directory, model=model, optimizer=optimizer))
    for _ in optimizer.epochs(**ends):
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return optimizer


def test_a_run_writes_hints_beside_its_checkpoints(tmp_path):
    optimizer = trained(tmp_path, vbs.Autoscale(max_batch_size=32, every=4, lead=2), num_epochs=10)
    hints = vbs.policies.Hints.read(tmp_path / HINTS)
    assert hints.max_cores == 2 and min(hints.goodput) > 0 and hints.cores == 1
    assert (hints.samples, hints.steps) == (optimizer.samples_done, optimizer.steps_done)
    assert hints.samples_goal == 10 * 256 and hints.progress_goal is None
    assert hints.seconds_left(1) == pytest.approx((2560 - hints.samples) / hints.throughput[0])
    assert hints.restart_seconds > 0
    assert optimizer.hints()["progress"] == pytest.approx(hints.progress)
    assert hints.seconds[0] > 0 == hints.seconds[1]
    resumed = trained(tmp_path, vbs.Autoscale(max_batch_size=32, every=4, lead=2), num_epochs=11)
    state = resumed.state_dict()
    assert resumed.hints()["seconds"][0] > hints.seconds[0]
    del state["variable_batch_size"]["deciding"]["spent"]  # as of earlier versions
    resumed.load_state_dict(state)
    assert resumed.hints()["seconds"] is None


def test_a_run_that_ends_by_progress_hints_at_it(tmp_path):
    optimizer = trained(tmp_path, vbs.Autoscale(max_batch_size=32, every=4, lead=2), progress=60.0)
    hints = vbs.policies.Hints.read(tmp_path / HINTS)
    assert hints.progress_goal == 60.0 and hints.samples_goal is None
    assert hints.progress == pytest.approx(optimizer.progress) and hints.seconds_left(1) == 0.0


def test_a_run_with_a_trace_has_no_hints(tmp_path):
    optimizer = trained(tmp_path, 16, num_epochs=2)
    assert not (tmp_path / HINTS).exists()
    with pytest.raises(RuntimeError, match="hints are measured by a policy, but this run has a trace"):
        optimizer.hints()
