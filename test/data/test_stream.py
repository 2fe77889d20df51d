import contextlib
import logging
import re
from itertools import chain, count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import variable_batch_size as vbs

# newer Python versions warn about forking a process with threads, and torch about more workers than processors
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)
all_workers = pytest.mark.parametrize("num_workers", [0, 1, 3])
some_workers = pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long), 3])

SETTINGS = {"trace": [4, 6, 2, 8, 2, 10], "minibatch_size": 2}


def make(samples=range(1000), num_replicas=1, rank=0, **kwargs):
    return vbs.Stream(samples, num_replicas=num_replicas, rank=rank, **{**SETTINGS, **kwargs})


def load(stream, num_workers=0, **loading):
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers, **loading)
    return [minibatch.tolist() for minibatch in loader]


def indexed(first_step=0, epoch=0, dataset_size=32, **kwargs):
    sampler = vbs.CustomSampler(dataset_size=dataset_size, shuffle=False, **{**SETTINGS, **kwargs})
    sampler.set_epoch(epoch, first_step)
    return list(sampler)


class SplitByWorkers(IterableDataset):
    """Shards itself among loader workers, as a stream outside of this library must."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(1000) if worker is None else range(worker.id, 1000, worker.num_workers))


# --------------------------------------------------------------------------------------------------- the right samples


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    minibatch_size=st.integers(1, 3),
    num_replicas=st.integers(1, 5),
    data=st.data(),
)
def test_minibatches_equal_those_of_a_sampler_without_shuffling(counts, minibatch_size, num_replicas, data):
    trace = [number * minibatch_size for number in counts]
    first_step = data.draw(st.integers(0, len(counts)))
    for rank in range(num_replicas):
        cores = {"trace": trace, "minibatch_size": minibatch_size, "num_replicas": num_replicas, "rank": rank}
        stream = make(lambda: count(), **cores)
        stream.set_epoch(0, first_step)
        assert [minibatch.tolist() for minibatch in stream] == indexed(first_step, dataset_size=sum(trace), **cores)


@some_workers
@pytest.mark.parametrize(
    "samples", [range(1000), lambda: iter(range(1000)), SplitByWorkers()], ids=["range", "function", "split"]
)
def test_loader_workers_read_each_minibatch_once_and_in_order(num_workers, samples):
    for num_replicas in (1, 2, 3) if num_workers == 0 else (1, 3):
        for rank in range(num_replicas):
            cores = {"num_replicas": num_replicas, "rank": rank}
            assert load(make(samples, **cores), num_workers) == indexed(**cores)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_generator_can_be_read_only_once(num_workers):
    stream = make(number for number in range(1000))
    assert load(stream, num_workers) == indexed()
    if num_workers == 0:
        stream.set_epoch(0)
        with pytest.raises(RuntimeError, match=r"^the stream is an iterator, which can be read once: pass an iterable"):
            load(stream)


@pytest.mark.parametrize("loading", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_with_a_data_set_size_every_epoch_reads_the_stream_from_its_beginning(loading):
    stream = make(dataset_size=20)
    loader = DataLoader(stream, batch_size=None, **loading)
    for epoch in range(2):
        stream.set_epoch(epoch)
        assert [minibatch.tolist() for minibatch in loader] == indexed(epoch=epoch, dataset_size=20)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pass_that_was_left_early_can_be_resumed(num_workers):
    stream = make()
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0)
    for number, _ in enumerate(loader):
        if number == 4:
            break
    stream.set_epoch(0, 2)
    assert [minibatch.tolist() for minibatch in loader] == indexed(2)


def test_a_worker_that_is_spawned_reads_the_same():
    stream = make(range(100))
    stream.on_first_read(lambda: None)  # a generator cannot be pickled
    assert load(stream, 1, multiprocessing_context="spawn") == indexed()


class WithEpochs(list):
    def set_epoch(self, epoch):
        self[:] = range(100 * epoch, 100 * epoch + 50)


def test_set_epoch_of_the_samples_is_called():
    stream = make(WithEpochs(), dataset_size=32)
    assert list(chain(*load(stream))) == list(range(32))
    stream = make(WithEpochs(), dataset_size=22)
    stream.set_epoch(1)
    assert list(chain(*load(stream))) == list(range(100, 110))


def test_samples_are_collated_as_by_a_loader_or_with_collate_fn():
    samples = [{"x": np.ones(3), "n": number} for number in range(100)]
    minibatch = next(iter(make(samples)))
    assert (minibatch["x"].shape, minibatch["n"].tolist()) == ((2, 3), [0, 1])
    assert next(iter(make(range(100), collate_fn=sum))) == 1


# ------------------------------------------------------------------------------------------------------------- the end


ENDS = [(32, 6), (31, 5), (28, 5), (22, 5), (21, 4), (3, 0), (0, 0)]  # samples of a stream, and its complete steps


# with loader workers, some ends on one number of cores and the others on another
WITH_WORKERS = [((2, 3), ENDS[::2]), ((3, 1), ENDS[1::2])]
LONG = [(how, end) for how, ends in WITH_WORKERS for end in ENDS if end not in ends]
LONG += [(how, end) for how in ((1, 1), (2, 1), (1, 3), (3, 3)) for end in ENDS]


@pytest.mark.parametrize(
    ("num_samples", "num_steps", "num_replicas", "num_workers"),
    [
        *((*end, num_replicas, 0) for num_replicas in (1, 2, 3) for end in ENDS),
        *((*end, *how) for how, ends in WITH_WORKERS for end in ends),
        *(pytest.param(*end, *how, marks=pytest.mark.long) for how, end in LONG),
    ],
)
def test_no_core_completes_a_step_in_which_the_stream_ends(num_samples, num_steps, num_replicas, num_workers):
    for rank in range(num_replicas):
        cores = {"num_replicas": num_replicas, "rank": rank}
        whole, found = indexed(**cores), load(make(range(num_samples), **cores), num_workers)
        schedule = make(**cores).schedule
        of_steps = [max(1, len(schedule.minibatches(step, rank))) for step in range(6)]
        num_whole = sum(of_steps[:num_steps])
        assert found == whole[: len(found)]
        assert num_whole <= len(found)
        assert len(found) < num_whole + (*of_steps, 1)[num_steps]


def messages(caplog, **kwargs):
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        for rank in range(2):
            list(make(num_replicas=2, rank=rank, **kwargs))
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_core_0_reports_the_end_of_a_stream_once(caplog):
    ended = "the stream ended after {} samples, so epoch 0 ends after {} steps"
    left_over = "; the last 7 samples do not fill a step and are not used"
    assert messages(caplog, samples=range(29)) == [("WARNING", ended.format(29, 5) + left_over)]
    assert messages(caplog, samples=range(22)) == [("WARNING", ended.format(22, 5))]
    assert messages(caplog, samples=range(42), on_end="cycle") == [("INFO", ended.format(42, 8))]
    assert messages(caplog, samples=range(32)) == []


def test_stream_shorter_than_the_start_of_a_pass_raises():
    stream = make(range(15))
    stream.set_epoch(0, 4)
    message = "the stream ended after 15 samples, but this pass begins at step 4 of epoch 0, after 20 samples"
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        list(stream)


def test_nothing_is_read_if_no_steps_are_left():
    stream = make(lambda: 1 / 0)
    stream.set_epoch(0, 6)
    assert list(stream) == []


@pytest.mark.parametrize("kwargs", [{"on_end": "hold"}, {"on_end": "cycle"}, {"trace": 4}], ids=str)
def test_an_endless_stream_has_no_length(kwargs):
    stream = make(lambda: count(), **kwargs)
    with pytest.raises(TypeError, match=r'^a stream with on_end="(hold|cycle)" is endless and has no length$'):
        len(stream)
    stream.set_epoch(0, 10**6)
    with contextlib.closing(iter(make(lambda: count(), **kwargs))) as minibatches:
        assert list(chain(*(next(minibatches).tolist() for _ in range(100)))) == list(range(200))


def test_a_stream_with_a_trace_that_stops_has_a_length():
    stream = make(num_replicas=3, rank=2)
    assert len(stream) == len(indexed(num_replicas=3, rank=2))
    stream.set_epoch(0, 3)
    assert len(stream) == len(DataLoader(stream, batch_size=None)) == len(indexed(3, num_replicas=3, rank=2))


# -------------------------------------------------------------------------------------------------------- own parts


def parts(num_replicas, num_workers=0, first_step=0, size=1000, **kwargs):
    """The shard of each core: the samples with its remainder."""
    streams = [
        make(range(rank, size, num_replicas), num_replicas, rank, is_sharded=True, **kwargs)
        for rank in range(num_replicas)
    ]
    for stream in streams:
        stream.set_epoch(0, first_step)
    return [load(stream, num_workers) for stream in streams]


@all_workers
def test_core_reads_its_shard_without_gaps(num_workers):
    first, second, third = parts(3, num_workers)
    assert first == [[0, 3], [6, 9], [12, 15], [18, 21], [24, 27], [30, 33], [36, 39], [42, 45]]
    # its second minibatch of the trace is padding: its latest, or its next one if its worker has none
    assert second[:2] == [[1, 4], [7, 10]]
    assert second[2] in ([7, 10], [13, 16])
    assert second[3] == [13, 16]
    assert third[0] == third[1] == [2, 5]  # idle in the first step, before it has read anything


@pytest.mark.parametrize(
    ("first_step", "num_workers"),
    [
        *((first_step, 0) for first_step in (1, 3, 5)),
        *((1, 3), (3, 1), (5, 3)),
        *(pytest.param(*how, marks=pytest.mark.long) for how in ((1, 1), (3, 3), (5, 1))),
    ],
)
def test_shards_resume_after_a_step(num_workers, first_step):
    schedule = make(num_replicas=3).schedule
    for rank, (whole, rest) in enumerate(zip(parts(3), parts(3, num_workers, first_step), strict=True)):
        idle = [schedule.is_idle(step, rank) for step in range(6) for _ in schedule.minibatches(step, rank) or [0]]
        own = [minibatch for minibatch, is_idle in zip(whole, idle, strict=True) if not is_idle]
        own_rest = [m for m, is_idle in zip(rest, idle[len(idle) - len(rest) :], strict=True) if not is_idle]
        assert own_rest == own[len(own) - len(own_rest) :]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shard_that_ends_before_the_trace_raises(num_workers):
    message = (
        "the shard of core 0 ended after 5 samples, in step 1 of epoch 0, which the other cores still run: repeat the "
        "shard, or shorten the trace"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        parts(2, num_workers, size=10)


def test_sharded_stream_on_another_number_of_cores_is_a_different_run():
    assert make(is_sharded=True, num_replicas=3).description["cores"] == 3
    assert make(num_replicas=3).description == make(num_replicas=2).description


# ------------------------------------------------------------------------------------------------------ calls in order


@pytest.mark.parametrize("loading", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_second_pass_without_set_epoch_raises(loading):
    loader = DataLoader(make(), batch_size=None, **loading)
    assert len(list(loader)) == 16
    with pytest.raises(RuntimeError, match=r"epoch 0 is read for the second time: call set_epoch\(\) before"):
        list(loader)


def test_unused_iterator_is_harmless():
    stream = make()
    iter(stream)
    assert len(list(stream)) == 16


def test_set_epoch_within_a_pass_raises():
    stream = make()
    minibatches = iter(stream)
    next(minibatches)
    stream.set_epoch(0, 3)
    with pytest.raises(RuntimeError, match=r"^set_epoch\(\) was called after the loader was set up: call it before"):
        next(minibatches)


@pytest.mark.parametrize("loading", [{}, {"batch_size": 32}, {"num_workers": 2}], ids=str)
def test_loader_that_would_merge_minibatches_raises(loading):
    loader = DataLoader(make(), **loading)
    with pytest.raises(ValueError, match=r"a stream yields full minibatches: pass batch_size=None to its loader"):
        next(iter(loader))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_first_read_is_called_before_the_first_minibatch(num_workers):
    stream, called = make(), []
    stream.set_epoch(0)
    stream.on_first_read(lambda: called.append(torch.initial_seed()))
    minibatches = iter(DataLoader(stream, batch_size=None, num_workers=num_workers))
    next(minibatches)
    assert len(called) == (1 if num_workers else 2)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"samples": 3}, "`samples` must be an iterable or a function that returns one, got int"),
        ({"samples": None}, "`samples` must be an iterable or a function that returns one, got NoneType"),
        ({"dataset_size": 0}, "`dataset_size` must be a positive integer, got 0"),
        ({"dataset_size": 8}, "trace[5]: batchsize must be at most 8 (all full minibatches in 8 samples), got 10"),
        ({"trace": [4, 5]}, "trace[1]: batchsize must be a multiple of 2 (the minibatch size), got 5"),
        ({"rank": 3}, "`rank` must be an integer from 0 to 0, got 3"),
    ],
)
def test_invalid_arguments_raise(kwargs, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(**kwargs)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_random_numbers_of_a_minibatch_depend_on_the_seed_of_the_stream(num_workers):
    def draws_with(seed):
        stream = vbs.Stream(range(100), trace=[4, 6], minibatch_size=2, seed=seed)
        inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        optimizer = vbs.ConstantOptimizer(inner, stream, seed_minibatches=True)
        found = []
        for _ in DataLoader(stream, batch_size=None, num_workers=num_workers):
            found.append(np.random.rand())
            optimizer.step()
        return found

    assert draws_with(3) == draws_with(3)
    assert len(set(draws_with(3) + draws_with(4))) == 10


def test_invalid_seed_raises_and_another_seed_is_a_different_run():
    with pytest.raises(ValueError, match=r"^`seed` must be an integer, got 0\.5$"):
        vbs.Stream(range(4), trace=[2], minibatch_size=2, seed=0.5)
    assert vbs.Stream(range(4), trace=[2], minibatch_size=2, seed=7).description["seed"] == 7


@some_workers
def test_in_lockstep_every_core_gets_the_same_number_of_minibatches(num_workers):
    for cores in (3,) if num_workers else (2, 3, 4):
        apart = [load(make(num_replicas=cores, rank=rank)) for rank in range(cores)]
        streams = [make(num_replicas=cores, rank=rank, lockstep=True) for rank in range(cores)]
        together = [load(stream, num_workers) for stream in streams]
        schedule = streams[0].schedule
        for rank in range(cores):
            rounds = [(step, round) for step in range(6) for round in range(schedule.rounds_for(step, rank))]
            assert len(together[rank]) == len(rounds) == len(streams[rank])
            found = zip(rounds, together[rank], strict=True)
            idle = [step for step in range(6) if schedule.is_idle(step, rank)]
            own = [m for (step, round), m in found if step in idle or round < len(schedule.minibatches(step, rank))]
            assert own == apart[rank]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_lockstep_a_shard_is_read_once(num_workers):
    # 2, 3, 1, 4, 1, 5 minibatches on 2 cores: core 1 has a padding minibatch if their number is odd
    stream = make(num_replicas=2, rank=1, is_sharded=True, lockstep=True)
    found = load(stream, num_workers)
    assert len(found) == len(stream) == 1 + 2 + 1 + 2 + 1 + 3
    own = [found[i] for i in (0, 1, 4, 5, 7, 8)]
    assert own == [[2 * i, 2 * i + 1] for i in range(6)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_lockstep_all_cores_stop_at_the_same_round_when_the_stream_ends(num_workers):
    for size in (8, 19) if num_workers else range(1, 33):
        for cores in (3,) if num_workers else (2, 3, 4):
            how = {"trace": [6, 14, 2, 10], "num_replicas": cores, "lockstep": True}
            found = [load(make(range(size), rank=rank, **how), num_workers) for rank in range(cores)]
            assert len(set(map(len, found))) == 1, (size, cores)
