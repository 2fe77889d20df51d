"""Promise: steps of any number of minibatches on any core give the weights of plain PyTorch, and never hang."""

import open_runs
import pytest
import torch
from held import Hold

import variable_batch_size as vbs

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


# seeds that are multiples of 3 have a step that is not finite, odd ones have weights
@pytest.mark.parametrize(
    ("cores", "seeds"), [(1, (0, 1, 2)), (2, (15, 16)), (3, (19,)), pytest.param(3, (6,), marks=pytest.mark.long)]
)
def test_ragged_programs_equal_plain_pytorch_in_weights_noise_and_buffers(on_cores, cores, seeds):
    results = on_cores(cores, open_runs.differences, seeds) if cores > 1 else [open_runs.differences(seeds)]
    for dtype, difference in (one for result in results for one in result):
        assert difference < TOLERANCE[dtype]


@pytest.mark.parametrize("cores", [2, 3])
def test_in_exact_mode_the_bits_do_not_depend_on_the_cores(on_cores, cores):
    steps = open_runs.program(7, 6)
    alone = open_runs.run_exactly(steps)
    for result in on_cores(cores, open_runs.run_exactly, steps):
        assert all(map(torch.equal, result["weights"], alone["weights"]))
        assert result["noise"] == alone["noise"]


@pytest.fixture(scope="module")
def alone():
    return open_runs.train()


def test_a_run_stopped_within_an_epoch_resumes_on_other_cores_with_the_same_bits(on_cores, tmp_path, alone):
    def run_on(cores, stop):
        return on_cores(cores, open_runs.stop_at, tmp_path, stop)

    first, second = run_on(3, 3), run_on(2, 7)
    third = open_runs.train(tmp_path)
    assert all(map(torch.equal, third["weights"], alone["weights"]))
    # every sample once in each epoch, on whichever core
    seen = sorted(value for results in (first, second, [third]) for result in results for value in result["seen"])
    assert seen == pytest.approx(sorted(alone["seen"]))
    values = open_runs.read_data().tensors[0][:, 0].tolist()
    assert seen == pytest.approx(sorted([*values, *values]))
    rows = [row for row in (tmp_path / "executed.csv").read_text().splitlines() if row[0].isdigit()]
    assert rows == [f"{step},{4 * number}" for step, number in enumerate([*open_runs.COUNTS, *open_runs.COUNTS])]


def test_the_executed_trace_replays_to_the_same_weights(tmp_path):
    open_run = open_runs.train(tmp_path, exact=False)
    replayed = open_runs.train(trace=str(tmp_path / "executed.csv"), exact=False)
    for one, other in zip(open_run["weights"], replayed["weights"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    for one, other in zip(open_run["records"], replayed["records"], strict=True):
        assert one["batch_size"] == other["batch_size"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.parametrize("how", ["", "exact", "lockstep", "lockstep, late"])
def test_a_core_that_never_ends_its_step_is_named(on_new_cores, tmp_path, how):
    error = on_new_cores(2, open_runs.hang, how, Hold(tmp_path))[0]
    own, other = error.split("core 1 has ")
    waits = "has not ended it and waits after 0" if how == "lockstep, late" else "has ended it after 1"
    assert own == f"step 0 of the run, in epoch 0, did not end within 1 seconds: core 0 {waits} minibatches; "
    assert "not ended it" in other
    assert other.endswith("On every core, pass last=True with the last minibatch of each core, or call end_step().")


@pytest.mark.parametrize(("num_samples", "most_reads"), [(1, 1), (7, 1), (13, 4)])
def test_cores_that_have_read_all_take_part_in_the_last_steps_of_the_others(on_cores, num_samples, most_reads):
    results = on_cores(3, open_runs.read_to_the_end, num_samples, most_reads)
    seen = sorted(pair for result in results for pair in result["seen"])
    assert seen == [(epoch, sample) for epoch in range(2) for sample in range(num_samples)]
    assert {result["samples"] for result in results} == {2 * num_samples}
    assert len({(result["steps"], result["weight"]) for result in results}) == 1


def test_a_core_that_begins_to_read_later_gets_the_next_samples(on_cores):
    seen = [sample for result in on_cores(2, open_runs.read_late) for sample in result]
    assert sorted(seen) == list(range(12))


def test_a_core_without_minibatches_learns_from_the_others_that_they_have_weights(on_cores):
    first, second = on_cores(2, open_runs.log_of_a_core_without_minibatches)
    assert first == ([2.0, 2.0], True)
    assert second == ([], True)


def test_the_end_of_an_epoch_ends_its_last_step(on_cores):
    assert open_runs.end_epochs_within_a_step() == (4, 24)
    assert on_cores(2, open_runs.end_epochs_within_a_step) == [(4, 48)] * 2


def test_a_run_ends_at_its_limit_also_on_cores_without_minibatches(on_cores):
    assert open_runs.reach_a_limit() == 8
    assert on_cores(2, open_runs.reach_a_limit) == [8, 8]


def test_weights_must_be_passed_on_all_cores_or_none(on_cores):
    for error in on_cores(2, open_runs.mixed_weights):
        assert "1 of 2 minibatches of the step have one" in error


def test_a_step_without_any_minibatch_does_not_count(on_cores):
    assert on_cores(2, open_runs.empty_step) == [[False, 0, 0, True, 1, 8, 8]] * 2


def test_cores_in_different_passes_are_detected(on_cores):
    for rank, error in enumerate(on_cores(2, open_runs.begin_another_pass_on_one_core)):
        assert f"pass {2 - rank} over the loader" in error


def test_open_steps_need_open_steps():
    optimizer = open_runs.optimizer_of(open_runs.net_of(), trace=[8, 8])
    with pytest.raises(RuntimeError, match=r"end_step\(\) is for vbs.OpenSteps"):
        optimizer.end_step()
    with pytest.raises(RuntimeError, match=r"minibatches\(\) is for vbs.OpenSteps"):
        list(optimizer.minibatches([]))


def test_gradients_that_were_not_taken_raise_at_the_end_of_a_step():
    net = open_runs.net_of()
    optimizer = open_runs.optimizer_of(net)
    net(torch.zeros(4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="pass last=True to step"):
        optimizer.end_step()


def test_a_minibatch_without_step_raises():
    optimizer = open_runs.optimizer_of(open_runs.net_of())
    with pytest.raises(RuntimeError, match=r"step\(\) must be called once for each minibatch"):
        list(optimizer.minibatches([1, 2]))


def train_on(net, optimizer, number, **how):
    """As many minibatches in a loop over minibatches()."""
    for data in optimizer.minibatches([torch.ones(4, 6)] * number):
        net(data).sum().backward()
        yield optimizer.step(**how)


def test_a_loop_over_minibatches_that_was_left_within_a_step_is_detected():
    net = open_runs.net_of()
    optimizer = open_runs.optimizer_of(net)
    assert next(train_on(net, optimizer, 3)) is False
    with pytest.raises(RuntimeError, match=r"minibatches\(\) must begin a step"):
        next(train_on(net, optimizer, 1))
    assert optimizer.end_step()
    assert optimizer.batch_size == 4
    assert list(train_on(net, optimizer, 2)) == [False, True]
    for _ in optimizer.minibatches([0]):
        break
    net(torch.ones(4, 6)).sum().backward()
    assert optimizer.step() is False  # not the last one, as in the loop that was left


@pytest.mark.parametrize("last", [False, True])
def test_last_is_refused_within_minibatches(last):
    net = open_runs.net_of()
    with pytest.raises(ValueError, match=rf"`last` must be None within minibatches\(\), .* got {last}"):
        next(train_on(net, open_runs.optimizer_of(net), 1, last=last))


def test_in_lockstep_steps_must_be_in_a_loop_over_minibatches():
    net = open_runs.net_of()
    sampler = vbs.CustomSampler(dataset_size=64, trace=vbs.OpenSteps(), minibatch_size=4, lockstep=True)
    optimizer = vbs.Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), sampler, rule="linear", ref_batchsize=8)
    net(torch.ones(4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"step\(\) must be called within minibatches\(\) in lockstep"):
        optimizer.step(last=True)
    with pytest.raises(RuntimeError, match=r"end_step\(\) must not be called in lockstep"):
        optimizer.end_step()


@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_within_a_step_settings_are_those_of_the_step_before(rule):
    net = open_runs.net_of()
    optimizer = open_runs.optimizer_of(net, rule=rule)
    assert optimizer.current_lr() == open_runs.LR
    list(train_on(net, optimizer, 4))
    lr = optimizer.current_lr()
    net(torch.ones(4, 6)).sum().backward()
    optimizer.step()
    assert optimizer.batch_size == 0
    assert optimizer.current_lr() == lr
    assert optimizer.report().get("scale", 2.0) == 2.0


def test_steps_end_within_compiled_functions():
    net = open_runs.net_of()
    optimizer = open_runs.optimizer_of(net)

    @torch.compile(backend="eager")
    def train(data, last):
        net(data).sum().backward()
        return optimizer.step(last=last)

    end_step = torch.compile(optimizer.end_step, backend="eager")
    assert [train(torch.ones(4, 6), False), train(torch.ones(4, 6), True), end_step()] == [False, True, False]
    assert (optimizer.steps_done, optimizer.samples_done) == (1, 8)


def test_closures_and_hooks_run_once_for_each_call():
    net, calls = open_runs.net_of(), []
    optimizer = open_runs.optimizer_of(net)
    optimizer.set_epoch(0)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        loss = net(torch.ones(4, 6)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).shape == ()
    assert optimizer.end_step()
    assert calls == ["before", "after"] * 2


def test_last_is_refused_where_the_trace_determines_it():
    net = open_runs.net_of()
    optimizer = open_runs.optimizer_of(net, trace=[8, 8])
    list(optimizer.sampler)
    with pytest.raises(ValueError, match="`last` must be None, got True"):
        optimizer.step(last=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_as_bucket_view": True}, "`gradient_as_bucket_view` must be False with OpenSteps"),
        ({"seed_minibatches": True}, "`seed_minibatches` must be False with OpenSteps"),
        ({"rule": "linear_momentum"}, "`rule` must be one of mean gradients with OpenSteps"),
        ({"measure_noise": "norm layers"}, "`measure_noise` must be True or False with OpenSteps"),
    ],
)
def test_what_needs_steps_of_known_size_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        open_runs.optimizer_of(open_runs.net_of(), **options)


def test_loaders_that_read_ahead_and_other_sources_are_refused():
    with pytest.raises(ValueError, match="`num_workers` must be 0 with OpenSteps"):
        vbs.DataLoader(open_runs.read_data(), vbs.OpenSteps(), minibatch_size=4, num_workers=1)
    with pytest.raises(ValueError, match="`trace` of a Stream must not be OpenSteps"):
        vbs.Stream(range(8), trace=vbs.OpenSteps(), minibatch_size=4)
    for option in ({"max_minibatch_size": 8}, {"assign": "as free"}):
        with pytest.raises(ValueError, match="OpenSteps"):
            vbs.CustomSampler(dataset_size=64, trace=vbs.OpenSteps(), minibatch_size=4, **option)
    with pytest.raises(ValueError, match="`timeout` must be"):
        vbs.OpenSteps(timeout=0)


def test_an_epoch_that_is_over_is_not_begun_again():
    optimizer = open_runs.optimizer_of(open_runs.net_of())
    optimizer.set_epoch(1)
    with pytest.raises(ValueError, match="epoch 0 of open steps is over"):
        optimizer.set_epoch(0)
