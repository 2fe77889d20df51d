import logging
import re
import tracemalloc
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import variable_batch_size as vbs

# newer Python versions warn about forking a process with threads, and torch about more workers than processors
workers = pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)


def make(dataset_size=1000, trace=(64, 96, 32, 256), minibatch_size=32, num_replicas=1, rank=0, **kwargs):
    return vbs.CustomSampler(
        dataset_size=dataset_size,
        trace=trace,
        minibatch_size=minibatch_size,
        num_replicas=num_replicas,
        rank=rank,
        **kwargs,
    )


def read(sampler, epoch, first_step=0):
    sampler.set_epoch(epoch, first_step)
    return list(sampler)


def read_steps(num_replicas, epoch, first_step=0, **kwargs):
    """The minibatches of every step of an epoch, merged from those of all cores."""
    samplers = [make(num_replicas=num_replicas, rank=rank, **kwargs) for rank in range(num_replicas)]
    cores = [iter(read(sampler, epoch, first_step)) for sampler in samplers]
    schedule = samplers[0].schedule
    steps = []
    for step in schedule.steps(epoch)[first_step:]:
        minibatches = [None] * schedule.num_minibatches(step)
        for rank, core in enumerate(cores):
            share = range(rank, len(minibatches), num_replicas)
            for number in share:
                minibatches[number] = next(core)
        for core in cores[len(minibatches) :]:
            assert next(core) in minibatches
        steps.append(minibatches)
    assert [next(core, None) for core in cores] == [None] * num_replicas
    return steps


@st.composite
def settings_of_samplers(draw):
    """All arguments of a small sampler except the cores."""
    minibatch_size = draw(st.integers(1, 4))
    dataset_size = draw(st.integers(minibatch_size, 60))
    counts = draw(st.lists(st.integers(1, dataset_size // minibatch_size), min_size=1, max_size=10))
    return {
        "dataset_size": dataset_size,
        "trace": [count * minibatch_size for count in counts],
        "minibatch_size": minibatch_size,
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "shuffle": draw(st.booleans()),
        "on_end": draw(st.sampled_from(["stop", "hold", "cycle"])),
    }


def draw_epoch(data, kwargs):
    return data.draw(st.integers(0, (make(**kwargs).schedule.num_epochs or 10) - 1))


# ---------------------------------------------------------------------------------------------------------- properties


@settings(deadline=None, max_examples=80)
@given(kwargs=settings_of_samplers(), num_replicas=st.integers(1, 6), data=st.data())
def test_steps_are_the_same_on_any_number_of_cores(kwargs, num_replicas, data):
    epoch = draw_epoch(data, kwargs)
    assert read_steps(num_replicas, epoch, **kwargs) == read_steps(1, epoch, **kwargs)


@settings(deadline=None, max_examples=80)
@given(kwargs=settings_of_samplers(), num_replicas=st.integers(1, 6), data=st.data())
def test_the_cores_share_exactly_the_samples_of_every_step(kwargs, num_replicas, data):
    epoch = draw_epoch(data, kwargs)
    steps = read_steps(num_replicas, epoch, **kwargs)
    schedule = make(**kwargs).schedule
    assert [sum(map(len, step)) for step in steps] == [schedule.batch_size(step) for step in schedule.steps(epoch)]
    assert {len(minibatch) for minibatch in chain(*steps)} == {kwargs["minibatch_size"]}
    samples = list(chain(*chain(*steps)))
    assert len(samples) == len(set(samples))
    assert set(samples) <= set(range(kwargs["dataset_size"]))


@settings(deadline=None, max_examples=80)
@given(kwargs=settings_of_samplers(), num_replicas=st.integers(1, 6), data=st.data())
def test_length_is_the_number_of_yielded_minibatches(kwargs, num_replicas, data):
    epoch = draw_epoch(data, kwargs)
    sampler = make(num_replicas=num_replicas, rank=data.draw(st.integers(0, num_replicas - 1)), **kwargs)
    first_step = data.draw(st.integers(0, len(sampler.schedule.steps(epoch))))
    sampler.set_epoch(epoch, first_step)
    assert len(sampler) == len(list(sampler))


@settings(deadline=None, max_examples=80)
@given(kwargs=settings_of_samplers(), num_replicas=st.integers(1, 6), data=st.data())
def test_a_first_step_leaves_the_rest_of_the_epoch_on_any_number_of_cores(kwargs, num_replicas, data):
    epoch = draw_epoch(data, kwargs)
    whole = read_steps(1, epoch, **kwargs)
    first_step = data.draw(st.integers(0, len(whole)))
    assert read_steps(num_replicas, epoch, first_step, **kwargs) == whole[first_step:]


@settings(deadline=None, max_examples=50)
@given(kwargs=settings_of_samplers(), others=st.lists(st.integers(1, 10), min_size=1))
def test_the_order_of_the_samples_does_not_depend_on_the_trace(kwargs, others):
    most = kwargs["dataset_size"] // kwargs["minibatch_size"]
    other = {**kwargs, "trace": [min(count, most) * kwargs["minibatch_size"] for count in others]}
    order = list(chain(*read(make(**kwargs), 0)))
    other_order = list(chain(*read(make(**other), 0)))
    num_common = min(len(order), len(other_order))
    assert order[:num_common] == other_order[:num_common]


# --------------------------------------------------------------------------------------------------------------- order


def order(epoch=0, **kwargs):
    return list(chain(*read(make(trace=96, **kwargs), epoch)))


def test_the_order_depends_on_the_seed_and_the_epoch():
    orders = [order(epoch, seed=seed) for seed in (0, 1, -1, 2**63) for epoch in range(3)]
    assert len(set(map(tuple, orders))) == len(orders)
    assert order(2, seed=1) == order(2, seed=1)
    assert order(0) == order(0, seed=0)


def test_the_order_does_not_depend_on_the_random_numbers_of_torch_and_numpy():
    torch.manual_seed(1)
    np.random.seed(1)
    expected = order(seed=3)
    torch.manual_seed(2)
    np.random.seed(2)
    assert order(seed=3) == expected
    before = torch.get_rng_state()
    order()
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_left_over_in_one_epoch_are_used_in_others():
    # 960 of the 1,000 samples are used in an epoch
    assert set(chain(*(order(epoch) for epoch in range(5)))) == set(range(1000))


def test_without_shuffling_samples_are_in_order():
    assert order(shuffle=False) == order(3, shuffle=False) == list(range(960))


def test_samples_of_two_cores_by_hand():
    kwargs = {"dataset_size": 15, "trace": [4, 6, 2], "minibatch_size": 2, "num_replicas": 2, "shuffle": False}
    assert read(make(rank=0, **kwargs), 0) == [[0, 1], [4, 5], [8, 9], [10, 11]]
    assert read(make(rank=1, **kwargs), 0) == [[2, 3], [6, 7], [10, 11]]
    assert read(make(rank=1, **kwargs), 0, first_step=1) == [[6, 7], [10, 11]]


def test_epochs_and_steps_may_be_numpy_integers():
    sampler = make()
    assert read(sampler, np.int64(0), np.int32(2)) == read(make(), 0, 2)
    assert {type(sampler.epoch), type(sampler.first_step)} == {int}


def test_samples_are_plain_integers():
    assert {type(sample) for sample in chain(*read(make(), 0))} == {int}


# ----------------------------------------------------------------------------------------------------------- DataLoader


@workers
@pytest.mark.parametrize(
    "loading",
    [
        {"num_workers": 0},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 8},
        {"num_workers": 1, "prefetch_factor": 1},
    ],
    ids=str,
)
def test_a_loader_yields_the_minibatches_of_every_epoch(loading):
    train_dataset = TensorDataset(torch.arange(1000) * 10, torch.arange(1000) % 10)
    train_sampler = make(dataset_size=len(train_dataset), on_end="cycle", num_replicas=2, rank=1)
    train_loader = DataLoader(train_dataset, batch_sampler=train_sampler, **loading)
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        num_minibatches = len(train_loader)
        batches = list(train_loader)
        expected = read(make(on_end="cycle", num_replicas=2, rank=1), epoch)
        assert [data.tolist() for data, _ in batches] == [[10 * i for i in minibatch] for minibatch in expected]
        assert [target.tolist() for _, target in batches] == [[i % 10 for i in minibatch] for minibatch in expected]
        assert len(batches) == num_minibatches


@workers
@pytest.mark.parametrize("num_workers", [0, 2])
def test_epoch_that_was_left_early_can_be_resumed(num_workers):
    sampler = make(trace=32, dataset_size=500)
    loader = DataLoader(
        TensorDataset(torch.arange(500)),
        batch_sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    sampler.set_epoch(1)
    whole = read(make(trace=32, dataset_size=500), 1)
    for number, (data,) in enumerate(loader):
        assert data.tolist() == whole[number]
        if number == 3:
            break
    sampler.set_epoch(1, first_step=4)
    assert [data.tolist() for (data,) in loader] == whole[4:]


# ------------------------------------------------------------------------------------------------------ calls in order


SECOND_TIME = r"^epoch 0 is read for the second time: call set_epoch\(\) before each pass over the loader, as "


def test_second_pass_without_set_epoch_raises():
    sampler = make()
    assert len(list(sampler)) == 14
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        list(sampler)
    sampler.set_epoch(0)
    assert len(list(sampler)) == 14


@workers
@pytest.mark.parametrize("loading", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_second_pass_over_a_loader_without_set_epoch_raises(loading):
    sampler = make()
    loader = DataLoader(TensorDataset(torch.arange(1000)), batch_sampler=sampler, **loading)
    assert len(list(loader)) == 14
    with pytest.raises(RuntimeError, match=SECOND_TIME):
        list(loader)


def test_unused_iterator_is_harmless():
    sampler = make()
    iter(sampler)
    assert len(list(sampler)) == 14


def test_epoch_beyond_the_trace_raises():
    sampler = make(dataset_size=300)
    found = "trace holds 2 epochs of 300 samples, got epoch 2 (counting from 0)"
    message = f'{found}: train for fewer epochs, or pass on_end="hold" or "cycle" to continue after the last row'
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sampler.set_epoch(2)
    assert sampler.epoch == 0


@pytest.mark.parametrize("on_end", ["hold", "cycle"])
def test_epoch_beyond_the_trace_is_allowed_if_the_trace_continues(on_end):
    assert read(make(dataset_size=300, on_end=on_end), 10**9)


@pytest.mark.parametrize("first_step", [-1, 5, 0.0, True, "1", None])
def test_first_step_outside_the_epoch_raises(first_step):
    message = f"`first_step` must be an integer from 0 to 4, got {first_step!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make().set_epoch(0, first_step)


# ----------------------------------------------------------------------------------------------------------------- log


def test_core_0_warns_once_about_a_trace_that_ends_inside_an_epoch(tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    path = tmp_path / "spot.csv"
    path.write_text("step,batchsize\n0,64\n1,96\n2,32\n3,256\n4,32\n5,64\n")
    for rank in range(2):
        sampler = make(dataset_size=300, trace=path, num_replicas=2, rank=rank)
        for epoch in range(3):
            read(sampler, epoch)
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} ends in epoch 2, after 64 of its 288 samples (22.2 %)"
    ]
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].name == "variable_batch_size.data.sampler"


def test_a_trace_of_less_than_one_epoch_is_a_short_run_and_no_warning(caplog):
    read(make(dataset_size=300, trace=[64, 96]), 0)
    assert caplog.messages == []


@pytest.mark.parametrize(
    "kwargs",
    [{"trace": [96, 192, 288]}, {"trace": [64], "on_end": "hold"}, {"trace": [64], "on_end": "cycle"}, {"trace": 64}],
)
def test_trace_that_ends_with_an_epoch_or_never_does_not_warn(caplog, kwargs):
    sampler = make(dataset_size=300, **kwargs)
    read(sampler, 0)
    read(sampler, 1)
    assert not caplog.records


# ----------------------------------------------------------------------------------------------------------- arguments


def test_a_sampler_is_made_with_a_data_set_or_its_size():
    dataset = TensorDataset(torch.arange(1000))
    given_dataset = vbs.CustomSampler(dataset, trace=[64, 96], minibatch_size=32, num_replicas=1, rank=0)
    assert read(given_dataset, 0) == read(make(trace=[64, 96]), 0)
    with pytest.raises(ValueError, match=r"^pass either `dataset` or `dataset_size`, got both$"):
        vbs.CustomSampler(dataset, dataset_size=1000, trace=[64], minibatch_size=32)
    with pytest.raises(ValueError, match=r"^pass either `dataset` or `dataset_size`, got neither$"):
        vbs.CustomSampler(trace=[64], minibatch_size=32)


def test_empty_data_set_raises():
    with pytest.raises(ValueError, match=r"^`dataset_size` must be a positive integer, got 0$"):
        vbs.CustomSampler([], trace=[64], minibatch_size=32)


def test_without_a_running_backend_there_is_one_core():
    sampler = vbs.CustomSampler(dataset_size=1000, trace=[64, 96], minibatch_size=32)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    assert list(sampler) == read(make(trace=[64, 96]), 0)


@pytest.mark.parametrize("rank", [4, -1, 1.0, True, "1"])
def test_rank_outside_the_cores_raises(rank):
    with pytest.raises(ValueError, match=rf"^`rank` must be an integer from 0 to 3, got {re.escape(repr(rank))}$"):
        make(num_replicas=4, rank=rank)


@pytest.mark.parametrize("seed", [0.0, True, "0", None])
def test_seed_that_is_not_an_integer_raises(seed):
    with pytest.raises(ValueError, match=rf"^`seed` must be an integer, got {re.escape(repr(seed))}$"):
        make(seed=seed)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_replicas": 0}, "`num_replicas` must be a positive integer, got 0"),
        ({"minibatch_size": 0}, "`minibatch_size` must be a positive integer, got 0"),
        ({"dataset_size": -1}, "`dataset_size` must be a positive integer, got -1"),
        ({"on_end": "repeat"}, "`on_end` must be one of 'stop', 'hold', 'cycle', got 'repeat'"),
        ({"trace": 64.0}, "`trace` must be a path, stages, a sequence of batch sizes or an integer, got 64.0"),
        ({"trace": [64, 100]}, "trace[1]: batchsize must be a multiple of 32 (the minibatch size), got 100"),
        ({"trace": 1024}, "trace: batchsize must be at most 992 (all full minibatches in 1000 samples), got 1024"),
    ],
)
def test_arguments_that_make_no_schedule_raise(kwargs, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(**kwargs)


def test_invalid_size_in_a_file_names_its_line(tmp_path):
    path = tmp_path / "spot.csv"
    path.write_text("# one\nstep,batchsize\n0,64\n1,100\n")
    message = f"{path}:4: batchsize must be a multiple of 32 (the minibatch size), got 100"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(trace=str(path))


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("trace", [4096, [100_000_000], [32] * 1000], ids=["constant", "one step", "many steps"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_first_minibatch_of_a_hundred_million_samples_takes_no_memory(trace, shuffle):
    tracemalloc.start()
    try:
        sampler = make(dataset_size=100_000_000, trace=trace, shuffle=shuffle, num_replicas=4)
        minibatch = next(iter(sampler))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(minibatch)) == 32
    assert peak < 3_000_000
