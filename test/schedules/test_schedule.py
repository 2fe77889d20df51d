import re
from collections import Counter
from itertools import chain, cycle, product, repeat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from variable_batch_size import Schedule, Trace


@st.composite
def settings_of_schedules(draw, on_end=("stop", "hold", "cycle")):
    """Arguments of small schedules."""
    minibatch_size = draw(st.integers(1, 5))
    dataset_size = draw(st.integers(minibatch_size, 20 * minibatch_size))
    counts = draw(st.lists(st.integers(1, dataset_size // minibatch_size), min_size=1, max_size=12))
    return {
        "trace": Trace.from_sequence([count * minibatch_size for count in counts]),
        "dataset_size": dataset_size,
        "minibatch_size": minibatch_size,
        "num_replicas": draw(st.integers(1, 6)),
        "on_end": draw(st.sampled_from(on_end)),
        "lockstep": draw(st.booleans()),
    }


def epochs_by_hand(sizes, capacity, on_end, num_epochs):
    """The batch sizes of the first epochs, by the definition."""
    endless = {"stop": sizes, "hold": chain(sizes, repeat(sizes[-1])), "cycle": cycle(sizes)}[on_end]
    epochs, left = [], 0
    for size in endless:
        if size > left:
            if len(epochs) == num_epochs:
                break
            epochs.append([])
            left = capacity
        epochs[-1].append(size)
        left -= size
    return epochs


def model(schedule, num_epochs):
    return epochs_by_hand(list(schedule.trace), schedule.capacity, schedule.on_end, num_epochs)


def starts(minibatches):
    return np.concatenate([part.starts for part in minibatches]).tolist()


def assert_offsets(schedule, epoch, rank, at_once, sizes, first_step=0):
    """Compare a core's minibatches of an epoch with the definition, one by one."""
    blocks = list(schedule.offsets(epoch, rank, at_once=at_once, first_step=first_step))
    assert all(len(starts) <= at_once and starts.dtype == np.int64 for starts, _ in blocks)
    found = [(start, size) for starts, size in blocks for start in starts.tolist()]
    assert all(size == schedule.minibatch_size for _, size in found)
    found = iter([start for start, _ in found])
    begin = sum(sizes[:first_step])
    num_yielded = num_idle = 0
    for size in sizes[first_step:]:
        starts = range(begin, begin + size, schedule.minibatch_size)
        share = starts[rank :: schedule.num_replicas]
        busiest = starts[0 :: schedule.num_replicas]
        num_rounds = len(busiest) if schedule.lockstep else max(1, len(share))
        assert [next(found) for _ in share] == list(share)
        assert all(next(found) in starts for _ in range(num_rounds - len(share)))
        num_yielded += num_rounds
        num_idle += not share
        begin += size
    assert next(found, None) is None
    assert schedule.num_minibatches_for(epoch, rank, first_step) == num_yielded
    if first_step == 0:
        assert schedule.core_idle_steps(schedule.steps(epoch))[rank] == num_idle


# -------------------------------------------------------------------------------------------------------------- epochs


@settings(deadline=None, max_examples=80)
@given(kwargs=settings_of_schedules(), data=st.data())
def test_epochs_follow_the_definition_in_any_order_of_access(kwargs, data):
    schedule = Schedule(**kwargs)
    epochs = model(schedule, num_epochs=60)
    starts = np.cumsum([0, *map(len, epochs)]).tolist()
    for epoch in data.draw(st.lists(st.integers(0, len(epochs) - 1), min_size=1, max_size=20)):
        steps = schedule.steps(epoch)
        assert steps == range(starts[epoch], starts[epoch + 1])
        assert [schedule.batch_size(step) for step in steps] == epochs[epoch]


@settings(deadline=None, max_examples=50)
@given(kwargs=settings_of_schedules())
def test_samples_are_counted_through_the_whole_run(kwargs):
    schedule = Schedule(**kwargs)
    sizes = list(chain(*model(schedule, num_epochs=20)))
    assert [schedule.samples_before(step) for step in range(len(sizes) + 1)] == np.cumsum([0, *sizes]).tolist()


@settings(deadline=None, max_examples=50)
@given(kwargs=settings_of_schedules(on_end=("stop",)))
def test_number_of_epochs_of_a_trace_that_stops(kwargs):
    schedule = Schedule(**kwargs)
    num_epochs = len(model(schedule, num_epochs=None))
    assert schedule.num_epochs == num_epochs
    assert schedule.steps(num_epochs - 1).stop == len(schedule.trace)
    for epoch in (num_epochs, num_epochs + 1, 10**12):
        with pytest.raises(ValueError, match=rf"^trace holds {num_epochs} epochs? of .*, got epoch {epoch} "):
            schedule.steps(epoch)


@settings(deadline=None, max_examples=50)
@given(kwargs=settings_of_schedules(on_end=("hold", "cycle")), far=st.integers(10**11, 10**12))
def test_distant_epochs_are_contiguous(kwargs, far):
    schedule = Schedule(**kwargs)
    assert schedule.num_epochs is None
    steps, following = schedule.steps(far), schedule.steps(far + 1)
    sizes = [schedule.batch_size(step) for step in steps]
    assert steps.stop == following.start
    assert sum(sizes) <= schedule.capacity < sum(sizes) + schedule.batch_size(following.start)
    assert schedule.samples_before(steps.stop) - schedule.samples_before(steps.start) == sum(sizes)
    assert_offsets(schedule, far, 0, 7, sizes)


def test_distant_epoch_of_a_constant_trace():
    # 992 of the 1,000 samples are whole minibatches, and 10 steps of 96 fit into them
    schedule = Schedule(Trace.constant(96), dataset_size=1000, minibatch_size=32, num_replicas=2)
    assert schedule.steps(10**12) == range(10**13, 10**13 + 10)
    assert schedule.num_minibatches_for(10**12, rank=0) == 20
    assert schedule.num_minibatches_for(10**12, rank=1) == 10
    assert schedule.samples_before(10**13) == 96 * 10**13
    assert schedule.num_epochs is None


def test_distant_epoch_of_a_held_trace():
    # epoch 0 takes 64 and 2 times 96, and every one after it 3 times 96
    schedule = Schedule(Trace.of([64, 96]), dataset_size=300, minibatch_size=32, on_end="hold")
    assert [schedule.steps(epoch) for epoch in range(3)] == [range(3), range(3, 6), range(6, 9)]
    assert schedule.steps(10**12) == range(3 * 10**12, 3 * 10**12 + 3)
    assert schedule.batch_size(3 * 10**12) == 96
    assert schedule.samples_before(3 * 10**12) == 64 + 96 * (3 * 10**12 - 1)


def test_distant_epoch_of_a_cycled_trace():
    # 64, 96 and 32 make up an epoch, and 256 one more: two epochs for four steps
    schedule = Schedule(Trace.of([64, 96, 32, 256]), dataset_size=300, minibatch_size=32, on_end="cycle")
    assert [schedule.steps(epoch) for epoch in range(4)] == [range(3), range(3, 4), range(4, 7), range(7, 8)]
    assert schedule.steps(10**12) == range(2 * 10**12, 2 * 10**12 + 3)
    assert schedule.steps(10**12 + 1) == range(2 * 10**12 + 3, 2 * 10**12 + 4)
    assert schedule.batch_size(2 * 10**12 + 3) == 256
    assert schedule.samples_before(2 * 10**12 + 3) == 448 * (10**12 // 2) + 192


def test_cycled_trace_whose_later_epochs_never_start_with_the_first_row():
    # 1 3 | 2 1 | 3 | 2 1 | 3 | …: after the first epoch, two epochs for three steps
    schedule = Schedule(Trace.of([1, 3, 2]), dataset_size=4, minibatch_size=1, on_end="cycle")
    found = [[schedule.batch_size(step) for step in schedule.steps(epoch)] for epoch in range(6)]
    assert found == [[1, 3], [2, 1], [3], [2, 1], [3], [2, 1]]
    assert schedule.steps(2 * 10**12 + 1) == range(3 * 10**12 + 2, 3 * 10**12 + 4)


@pytest.mark.parametrize("on_end", ["stop", "hold", "cycle"])
@pytest.mark.parametrize("num_rows", [63, 64, 65, 128, 511, 512, 513, 5000])
def test_epochs_of_a_long_trace_follow_the_definition(on_end, num_rows):
    sizes = np.random.default_rng(num_rows).integers(1, 20, num_rows)
    schedule = Schedule(Trace.of(sizes), dataset_size=300, minibatch_size=1, on_end=on_end)
    epochs = model(schedule, num_epochs=1000)
    starts = np.cumsum([0, *map(len, epochs)]).tolist()
    assert [schedule.steps(epoch) for epoch in range(len(epochs))] == list(map(range, starts, starts[1:]))
    samples = np.cumsum([0, *chain(*epochs)]).tolist()
    assert [schedule.samples_before(step) for step in range(len(samples))] == samples


def test_ten_billion_samples_are_counted():
    schedule = Schedule(Trace.constant(64), dataset_size=10**10, minibatch_size=32, num_replicas=3)
    assert [schedule.num_minibatches_for(0, rank) for rank in range(3)] == [156_250_000] * 3
    assert schedule.core_idle_steps(schedule.steps(0)).tolist() == [0, 0, 156_250_000]
    assert schedule.num_minibatches_for(10**6, rank=0, first_step=156_249_999) == 1
    first = next(schedule.offsets(10**6, rank=1, at_once=3, first_step=156_249_990))
    assert first.starts.tolist() == [64 * 156_249_990 + 32, 64 * 156_249_991 + 32, 64 * 156_249_992 + 32]


def test_step_as_large_as_the_capacity_is_one_epoch():
    schedule = Schedule(Trace.of([96, 96, 32]), dataset_size=127, minibatch_size=32)
    assert schedule.capacity == 96
    assert [schedule.steps(epoch) for epoch in range(3)] == [range(1), range(1, 2), range(2, 3)]


def test_a_trace_is_described_by_its_sizes():
    rows, constant = (Schedule(Trace.of(trace), dataset_size=300, minibatch_size=32) for trace in ([64, 96, 32], 64))
    assert rows.description == "3 steps, sha256 76c5556c1e56a62d"
    assert constant.description == "always 64"


# --------------------------------------------------------------------------------------------------------------- cores


@settings(deadline=None, max_examples=50)
@given(kwargs=settings_of_schedules(), at_once=st.integers(1, 30), data=st.data())
def test_minibatches_of_every_core_follow_the_definition(kwargs, at_once, data):
    schedule = Schedule(**kwargs)
    epochs = model(schedule, num_epochs=8)
    epoch = data.draw(st.integers(0, len(epochs) - 1))
    first_step = data.draw(st.integers(0, len(epochs[epoch])))
    for rank in range(schedule.num_replicas):
        assert_offsets(schedule, epoch, rank, at_once, epochs[epoch])
        assert_offsets(schedule, epoch, rank, at_once, epochs[epoch], first_step)


@pytest.mark.parametrize("on_end", ["stop", "hold", "cycle"])
@pytest.mark.parametrize("first_step", [0, 1, 4096, 5000, 9000])
def test_minibatches_of_a_long_epoch_follow_the_definition(on_end, first_step):
    sizes = np.random.default_rng(0).integers(1, 6, 9000) * 2
    schedule = Schedule(Trace.of(sizes), dataset_size=60_001, minibatch_size=2, num_replicas=3, on_end=on_end)
    epochs = model(schedule, num_epochs=2)
    assert len(epochs[0]) >= 9000
    for rank in range(3):
        assert_offsets(schedule, 0, rank, 1000, epochs[0], first_step)


@settings(deadline=None, max_examples=50)
@given(kwargs=settings_of_schedules(), step=st.integers(0, 11))
def test_minibatches_of_a_step_are_partitioned_over_cores(kwargs, step):
    schedule = Schedule(**kwargs)
    step %= len(schedule.trace)
    shares = [schedule.minibatches(step, rank) for rank in range(schedule.num_replicas)]
    assert sorted(chain(*shares)) == list(range(schedule.num_minibatches(step)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [schedule.is_idle(step, rank) for rank in range(schedule.num_replicas)] == [not share for share in shares]


@settings(deadline=None, max_examples=50)
@given(kwargs=settings_of_schedules(), data=st.data())
def test_counts_equal_the_sums_over_single_steps(kwargs, data):
    schedule = Schedule(**kwargs)
    last = len(schedule.trace) if schedule.on_end == "stop" else 60
    start = data.draw(st.integers(0, last))
    steps = range(start, data.draw(st.integers(start, last)))
    sizes, counts = schedule.size_counts(steps)
    assert dict(zip(sizes.tolist(), counts.tolist(), strict=True)) == Counter(map(schedule.batch_size, steps))
    assert sizes.tolist() == sorted(sizes.tolist())
    cores = range(schedule.num_replicas)
    shares = [sum(len(schedule.minibatches(step, rank)) for step in steps) for rank in cores]
    assert schedule.core_minibatches(steps).tolist() == shares
    idle_steps = [sum(schedule.is_idle(step, rank) for step in steps) for rank in cores]
    assert schedule.core_idle_steps(steps).tolist() == idle_steps


@pytest.mark.parametrize(
    ("on_end", "counts"), [("hold", [1, 1, 10**12 - 2]), ("cycle", [333_333_333_333, 333_333_333_334, 333_333_333_333])]
)
def test_a_trillion_steps_are_counted(on_end, counts):
    schedule = Schedule(Trace.of([64, 32, 96]), dataset_size=1000, minibatch_size=32, num_replicas=2, on_end=on_end)
    found = schedule.size_counts(range(10**12))
    assert [array.tolist() for array in found] == [[32, 64, 96], counts]
    counted = (*found, schedule.core_minibatches(range(3)), schedule.core_idle_steps(range(3)))
    assert {array.dtype for array in counted} == {np.dtype(np.int64)}


def test_no_steps_have_no_batch_sizes():
    schedule = Schedule(Trace.of([64, 32]), dataset_size=1000, minibatch_size=32)
    for found in schedule.size_counts(range(1, 1)):
        assert (found.tolist(), found.dtype) == ([], np.int64)


def test_in_lockstep_all_cores_run_the_same_number_of_rounds_with_padding():
    # 5, 2 and 8 minibatches on 4 cores: 2, 1 and 2 rounds
    schedule = Schedule(Trace.of([5, 2, 8]), dataset_size=20, minibatch_size=1, num_replicas=4, lockstep=True)
    for rank in range(4):
        assert [schedule.rounds_for(step, rank) for step in range(3)] == [2, 1, 2]
        assert schedule.num_minibatches_for(0, rank) == 5
    padding = [
        [
            [round >= len(schedule.minibatches(step, rank)) for round in range(schedule.rounds_for(step, rank))]
            for rank in range(4)
        ]
        for step in range(3)
    ]
    assert padding[0] == [[False, False], [False, True], [False, True], [False, True]]
    assert padding[1] == [[False], [False], [True], [True]]
    assert padding[2] == [[False, False]] * 4
    found = [starts(schedule.offsets(0, rank, at_once=3)) for rank in range(4)]
    assert found == [[0, 4, 5, 7, 11], [1, 0, 6, 8, 12], [2, 1, 5, 9, 13], [3, 2, 6, 10, 14]]


def test_schedule_in_lockstep_has_the_same_steps_after_resuming():
    how = {"dataset_size": 9, "minibatch_size": 1, "num_replicas": 4}
    schedule = Schedule(Trace.of([5, 2, 8]), **how)
    together = Schedule(Trace.of([5, 2, 8]), lockstep=True, **how)
    assert [together.steps(epoch) for epoch in range(2)] == [schedule.steps(epoch) for epoch in range(2)]
    assert [schedule.rounds_for(0, rank) for rank in range(4)] == [2, 1, 1, 1]
    assert together.after(together.past(0, 1)).lockstep


def test_minibatches_of_four_cores_by_hand():
    schedule = Schedule(Trace.of([64, 96, 32, 256]), dataset_size=1000, minibatch_size=32, num_replicas=4)
    assert [schedule.num_minibatches(step) for step in range(4)] == [2, 3, 1, 8]
    counts = [[len(schedule.minibatches(step, rank)) for step in range(4)] for rank in range(4)]
    assert counts == [[1, 1, 1, 2], [1, 1, 0, 2], [0, 1, 0, 2], [0, 0, 0, 2]]
    assert [list(schedule.minibatches(3, rank)) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [schedule.num_minibatches_for(0, rank) for rank in range(4)] == [5, 5, 5, 5]
    assert schedule.core_idle_steps(schedule.steps(0)).tolist() == [0, 1, 2, 3]


def test_offsets_by_hand():
    schedule = Schedule(Trace.of([64, 96, 32]), dataset_size=1000, minibatch_size=32, num_replicas=2)
    assert starts(schedule.offsets(0, 0, at_once=2)) == [0, 64, 128, 160]
    # in the last step, of one minibatch, core 1 repeats that of core 0 as padding
    assert starts(schedule.offsets(0, 1, at_once=2)) == [32, 96, 160]
    assert starts(schedule.offsets(0, 1, at_once=2, first_step=1)) == [96, 160]


# ----------------------------------------------------------------------------------------------------- without a length


def test_data_without_a_length_have_one_epoch():
    schedule = Schedule(Trace.of([64, 96, 32] * 2000), dataset_size=None, minibatch_size=32, num_replicas=2)
    assert schedule.steps(0) == range(6000)
    assert (schedule.num_epochs, schedule.is_endless, schedule.dataset_size) == (1, False, None)
    assert schedule.num_minibatches_for(0, 1) == 2000 * (1 + 1 + 1)
    assert schedule.samples_before(6000) == 192 * 2000


@pytest.mark.parametrize(("on_end", "size"), [("hold", 32), ("cycle", 96)])
def test_data_without_a_length_are_endless_if_the_trace_is(on_end, size):
    schedule = Schedule(Trace.of([64, 96, 32]), dataset_size=None, minibatch_size=32, on_end=on_end)
    assert (schedule.num_epochs, schedule.is_endless) == (1, True)
    assert 10**15 < len(schedule.steps(0)) < 2**63
    assert schedule.batch_size(schedule.steps(0)[10**15 + 3]) == size
    first, second = (schedule.num_minibatches_for(0, 0, step) for step in (10**15, 10**15 + 3))
    assert first - second == {"hold": 3, "cycle": 6}[on_end]


def test_data_without_a_length_have_no_second_epoch():
    schedule = Schedule(Trace.of(64), dataset_size=None, minibatch_size=32)
    message = "data without a `dataset_size` have only epoch 0, got epoch 1"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        schedule.steps(1)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *product(["dataset_size", "minibatch_size", "num_replicas"], [0, -32, 32.0, True, "32", float("nan")]),
        ("minibatch_size", None),
        ("num_replicas", None),
    ],
)
def test_counts_must_be_positive_integers(name, value):
    counts = {"dataset_size": 1000, "minibatch_size": 32, "num_replicas": 1, name: value}
    with pytest.raises(ValueError, match=rf"^`{name}` must be a positive integer, got {re.escape(repr(value))}$"):
        Schedule(Trace.of([64]), **counts)


def test_counts_may_be_numpy_integers():
    schedule = Schedule(
        Trace.of([64, 96]), dataset_size=np.int64(100), minibatch_size=np.int32(32), num_replicas=np.uint8(2)
    )
    assert schedule.steps(np.int64(1)) == range(1, 2)
    assert {type(count) for count in (schedule.dataset_size, schedule.minibatch_size, schedule.num_replicas)} == {int}


def test_dataset_smaller_than_a_minibatch_is_rejected():
    with pytest.raises(ValueError, match=r"^`dataset_size` must be at least one minibatch of 32, got 31$"):
        Schedule(Trace.of([32]), dataset_size=31, minibatch_size=32)


@pytest.mark.parametrize(("on_end", "hint"), [("Stop", " (did you mean 'stop'?)"), ("", ""), (1, "")])
def test_unknown_on_end_is_rejected(on_end, hint):
    message = f"`on_end` must be one of 'stop', 'hold', 'cycle', got {on_end!r}{hint}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Schedule(Trace.of([64]), dataset_size=1000, minibatch_size=32, on_end=on_end)


@pytest.fixture
def path(tmp_path):
    """A trace file whose fourth step, of 100, is in line 8."""
    path = tmp_path / "spot.csv"
    path.write_text("# one\n\nstep,batchsize\n0,64\n1,96\n# two\n2,32\n3,100\n4,7\n5,2000\n")
    return path


def test_size_that_is_not_a_multiple_of_the_minibatch_size_names_its_line(path):
    message = f"{path}:8: batchsize must be a multiple of 32 (the minibatch size), got 100"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Schedule(Trace.read(path), dataset_size=1000, minibatch_size=32)


def test_a_size_above_the_capacity_names_its_line(path):
    message = f"{path}:10: batchsize must be at most 1001 (all full minibatches in 1001 samples), got 2000"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Schedule(Trace.read(path), dataset_size=1001, minibatch_size=1)


def test_size_one_minibatch_above_the_capacity_is_rejected():
    message = "trace[1]: batchsize must be at most 96 (all full minibatches in 127 samples), got 128"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Schedule(Trace.of([96, 128]), dataset_size=127, minibatch_size=32)


def test_invalid_constant_size_is_rejected():
    with pytest.raises(
        ValueError, match=r"^trace: batchsize must be a multiple of 32 \(the minibatch size\), got 100$"
    ):
        Schedule(Trace.constant(100), dataset_size=1000, minibatch_size=32)
    with pytest.raises(ValueError, match=r"^trace: batchsize must be at most 992 \(.*\), got 1024$"):
        Schedule(Trace.constant(1024), dataset_size=1000, minibatch_size=32)


@pytest.mark.parametrize("epoch", [-1, 0.0, True, "0", None])
def test_epoch_must_be_a_non_negative_integer(epoch):
    schedule = Schedule(Trace.of([64]), dataset_size=1000, minibatch_size=32)
    with pytest.raises(ValueError, match=rf"^`epoch` must be a non-negative integer, got {re.escape(repr(epoch))}$"):
        schedule.steps(epoch)


def test_epoch_after_the_end_names_the_number_of_epochs(tmp_path):
    path = tmp_path / "spot.csv"
    path.write_text("step,batchsize\n0,64\n1,96\n2,32\n3,256\n")
    schedule = Schedule(Trace.read(path), dataset_size=300, minibatch_size=32)
    found = f"{path} holds 2 epochs of 300 samples, got epoch 2 (counting from 0)"
    message = f'{found}: train for fewer epochs, or pass on_end="hold" or "cycle" to continue after the last row'
    for question in (schedule.steps, lambda epoch: schedule.num_minibatches_for(epoch, rank=0)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            question(2)


@pytest.mark.parametrize("trace", [[64, 96], 64])
@pytest.mark.parametrize("on_end", ["stop", "hold", "cycle"])
def test_negative_step_is_rejected(trace, on_end):
    schedule = Schedule(Trace.of(trace), dataset_size=1000, minibatch_size=32, on_end=on_end)
    for question in (schedule.batch_size, schedule.num_minibatches, lambda step: schedule.is_idle(step, rank=0)):
        with pytest.raises(ValueError, match=r"^`step` must be a non-negative integer, got -1$"):
            question(-1)


def test_step_after_the_trace_is_rejected():
    schedule = Schedule(Trace.of([64, 96]), dataset_size=1000, minibatch_size=32)
    with pytest.raises(ValueError, match=r"^trace holds 2 steps, got step 2 \(counting from 0\)$"):
        schedule.batch_size(2)
    with pytest.raises(ValueError, match=r"^trace holds 1 step, got step 1 \(counting from 0\)$"):
        Schedule(Trace.of([64]), dataset_size=1000, minibatch_size=32).batch_size(1)
    with pytest.raises(ValueError, match=r"^trace holds 2 steps, got step 4 \(counting from 0\)$"):
        schedule.size_counts(range(5))


def test_larger_steps_have_larger_minibatches():
    how = {"dataset_size": 10_000, "minibatch_size": 32, "max_minibatch_size": 300}
    sizes = [32, 64, 96, 128, 192, 256, 512, 1024, 3072]
    found = {
        cores: [Schedule(sizes, num_replicas=cores, **how).minibatch_size_of(size) for size in sizes]
        for cores in (1, 4)
    }
    assert found[1] == [32, 32, 32, 64, 64, 128, 256, 256, 256]
    # 192 samples on four cores: two minibatches of 32 on the busiest one are as many as one of 64
    assert found[4] == [32, 32, 32, 32, 64, 64, 128, 256, 256]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 20),
    st.booleans(),
    st.integers(1, 9),
)
def test_larger_minibatches_are_of_the_same_steps_and_no_slower(units, cores, largest, lockstep, at_once):
    how = {"dataset_size": 160, "minibatch_size": 4, "num_replicas": cores, "lockstep": lockstep}
    trace = [4 * unit for unit in units]
    small, large = Schedule(trace, **how), Schedule(trace, max_minibatch_size=4 * largest, **how)
    assert small.num_epochs == large.num_epochs
    for epoch in range(small.num_epochs):
        assert small.steps(epoch) == large.steps(epoch)
        for rank in range(cores):
            parts = list(large.offsets(epoch, rank, at_once=at_once))
            read = iter([(start, size) for starts, size in parts for start in starts.tolist()])
            assert sum(len(part.starts) for part in parts) == large.num_minibatches_for(epoch, rank)
            for step in large.steps(epoch):
                size, begin = large.minibatch_size_of(trace[step]), large.samples_before(step)
                begin -= large.samples_before(large.steps(epoch).start)
                number = large.num_minibatches(step)
                assert size * number == trace[step]
                assert size <= max(4, 4 * largest)
                assert number >= min(2, small.num_minibatches(step))
                assert large.rounds_for(step, 0) * size <= small.rounds_for(step, 0) * 4
                for round in range(large.rounds_for(step, rank)):
                    place = (rank + round * cores) % number
                    assert next(read) == (begin + place * size, size)
            assert next(read, None) is None
    assert len({large.minibatch_size_of(size) for size in trace}) <= 1 + largest.bit_length()


def test_largest_minibatch_size_must_not_be_below_the_smallest():
    with pytest.raises(ValueError, match="`max_minibatch_size` must be at least `minibatch_size`, which is 32, got 16"):
        Schedule([64], dataset_size=100, minibatch_size=32, max_minibatch_size=16)
