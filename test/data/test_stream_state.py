"""Streams resume from a state: their own, that of a StatefulDataLoader, or that of a Hugging Face stream."""

import copy
from itertools import chain, product

import datasets
import pytest
import torch
from streamed_run import Resumable
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import variable_batch_size as vbs
from variable_batch_size.data.stream import SampleSource

# newer Python versions warn about forking a process with threads, and torch about more workers than processors
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning"
)
some_workers = pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.long), 3])

TRACE, MINIBATCH = [4, 6, 2, 8, 2, 10, 4, 2], 2
ENDS = [0, 4, 10, 12, 20, 22, 32, 36, 38]  # samples before each step


def make(samples, num_replicas=1, rank=0, **kwargs):
    return vbs.Stream(samples, trace=TRACE, minibatch_size=MINIBATCH, num_replicas=num_replicas, rank=rank, **kwargs)


def indexed(steps, num_replicas=1, rank=0):
    """The samples of a core in some steps, according to a sampler."""
    sampler = vbs.CustomSampler(
        dataset_size=ENDS[-1],
        trace=TRACE[: steps.stop],
        minibatch_size=MINIBATCH,
        num_replicas=num_replicas,
        rank=rank,
        shuffle=False,
    )
    sampler.set_epoch(0, steps.start)
    return list(sampler)


def read(loader, number):
    """The samples of the next minibatches, and the loader's state after a round trip through a file."""
    minibatches = iter(loader)
    found = [next(minibatches)["number"].tolist() for _ in range(number)]
    return found, copy.deepcopy(loader.state_dict()) if hasattr(loader, "state_dict") else None


def numbers():
    for number in range(200):
        yield {"number": number}


def hugging_face_stream(**kwargs):
    return datasets.IterableDataset.from_generator(numbers, **kwargs)


# -------------------------------------------------------------------------------------------------------- its own state


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_stream_resumes_from_its_state_on_any_core_without_rereading(num_replicas):
    stream = make(Resumable(), num_replicas=2, rank=1)
    read(DataLoader(stream, batch_size=None), len(indexed(range(5), 2, 1)))
    for rank in range(num_replicas):
        samples = Resumable()
        other = make(samples, num_replicas, rank)
        other.load_state_dict(stream.state_dict())
        other.set_epoch(0, 5)
        rest = [minibatch["number"].tolist() for minibatch in other]
        assert rest == indexed(range(5, 8), num_replicas, rank)
        assert samples.numbers_read == list(range(ENDS[5], ENDS[8]))


def test_state_before_the_step_is_used_and_the_rest_is_skipped():
    stream = make(Resumable())
    read(DataLoader(stream, batch_size=None), len(indexed(range(2))) + 1)
    samples = Resumable()
    other = make(samples)
    other.load_state_dict(stream.state_dict())
    other.set_epoch(0, 3)
    assert [minibatch["number"].tolist() for minibatch in other] == indexed(range(3, 8))
    assert samples.numbers_read == list(range(ENDS[2] + 2, ENDS[8]))


def test_state_after_the_step_is_not_used():
    stream = make(Resumable())
    read(DataLoader(stream, batch_size=None), len(indexed(range(4))))
    other = make(Resumable())
    other.load_state_dict(stream.state_dict())
    other.set_epoch(0, 2)
    assert [minibatch["number"].tolist() for minibatch in other] == indexed(range(2, 8))


def test_pass_after_a_resumed_one_starts_at_the_correct_position():
    stream = make(Resumable())
    read(DataLoader(stream, batch_size=None), len(indexed(range(4))))
    other = make(Resumable())
    other.load_state_dict(stream.state_dict())
    for first_step in (5, 3, 0):
        other.set_epoch(0, first_step)
        assert [minibatch["number"].tolist() for minibatch in other] == indexed(range(first_step, 8))


def test_state_of_another_cores_shard_is_not_used():
    stream = make(Resumable(), 2, 1, is_sharded=True)
    read(DataLoader(stream, batch_size=None), len(indexed(range(4), 2, 1)))
    for rank, first_read in ((0, 0), (1, 8)):
        samples = Resumable()
        other = make(samples, 2, rank, is_sharded=True)
        other.load_state_dict(stream.state_dict())
        other.set_epoch(0, 4)
        next(iter(other))
        assert samples.numbers_read[0] == first_read


def test_samples_read_in_advance_are_part_of_the_state():
    source = SampleSource(Resumable())
    source.begin(epoch=0)
    source.skip(3)
    assert [sample["number"] for sample in source.peek(2)] == [3, 4]
    state = source.state_dict()
    assert state == {"num_read": 5, "stream": {"next": 5}}
    assert [sample["number"] for sample in source.take(3)] == [3, 4, 5]
    source.begin(epoch=0, state=state)
    assert [sample["number"] for sample in source.take(1)] == [5]


# --------------------------------------------------------------------------------------------------- StatefulDataLoader


STREAMS = {"state": Resumable, "hf": hugging_face_stream, "function": lambda: numbers}
CORES = [(1, 1), (2, 3), (3, 1)]
# with loader workers: each stream, and each change of the number of cores, with one and with three of them
WITH_WORKERS = [
    *(((1, 1), "function", 3), ((2, 3), "state", 3), ((3, 1), "hf", 3)),
    *(((1, 1), "hf", 1), ((2, 3), "function", 1), ((3, 1), "state", 1)),
]


@pytest.mark.parametrize(
    ("cores", "stream_of", "num_workers"),
    [
        pytest.param(*case, marks=() if case[2] == 0 or case in WITH_WORKERS else pytest.mark.long)
        for case in product(CORES, STREAMS, (0, 1, 3))
    ],
    ids=str,
)
def test_stateful_loader_resumes_repeatedly_on_any_number_of_cores(cores, stream_of, num_workers):
    samples, state = STREAMS[stream_of], None
    for steps, num_replicas in ((range(3), cores[0]), (range(3, 5), cores[1]), (range(5, 8), cores[0])):
        states = []
        for rank in range(num_replicas):
            stream = make(samples(), num_replicas, rank)
            loader = StatefulDataLoader(stream, batch_size=None, num_workers=num_workers)
            if state is not None:
                loader.load_state_dict(state)
            stream.set_epoch(0, steps.start)
            expected = indexed(steps, num_replicas, rank)
            found, state_there = read(loader, len(expected))
            assert found == expected
            states.append(state_there)
        state = states[0]


@pytest.mark.parametrize(
    ("num_minibatches", "first_step", "num_workers", "loading"),
    # one worker except once: after an error, torch may wait 5 s for each
    [(6, 2, 1, {}), (7, 3, 1, {}), (9, 3, 2, {}), (5, 3, 1, {}), (6, 3, 1, {"snapshot_every_n_steps": 4})],
    ids=["ahead", "one ahead", "within the step", "one behind", "with an earlier snapshot"],
)
def test_state_of_a_loader_at_another_step_raises(num_minibatches, first_step, num_workers, loading):
    loading = {"batch_size": None, "num_workers": num_workers, **loading}
    _, state = read(StatefulDataLoader(make(Resumable()), **loading), num_minibatches)
    stream = make(Resumable())
    loader = StatefulDataLoader(stream, **loading)
    loader.load_state_dict(state)
    stream.set_epoch(0, first_step)
    with pytest.raises(RuntimeError, match=r"the loader's state is not that of step \d of epoch 0, where this pass"):
        next(iter(loader))


PASSES = [(0, 4, []), (1, 0, [[0, 1], [2, 3]]), (1, 1, [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]])]


PERSISTENT = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize(
    ("passes", "loading"),
    [
        *((PASSES, {}), (PASSES[1:], {}), (PASSES, PERSISTENT), (PASSES[1:], {"num_workers": 2})),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((PASSES, {"num_workers": 2}), (PASSES[1:], PERSISTENT))
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "its end" if value is PASSES else "the next epoch",
)
def test_state_of_a_loader_at_its_end_starts_the_next_epoch(passes, loading):
    loader = StatefulDataLoader(make(Resumable(), dataset_size=20), batch_size=None, **loading)
    assert [minibatch["number"].tolist() for minibatch in loader] == indexed(range(4))
    stream = make(Resumable(), dataset_size=20)
    other = StatefulDataLoader(stream, batch_size=None, **loading)
    other.load_state_dict(copy.deepcopy(loader.state_dict()))
    for epoch, first_step, expected in passes:
        stream.set_epoch(epoch, first_step)
        found = [minibatch["number"].tolist() for minibatch in other]
        assert found[: len(expected) or 1] == expected


def test_state_of_a_loader_within_another_epoch_raises():
    _, state = read(StatefulDataLoader(make(Resumable(), dataset_size=20), batch_size=None, num_workers=2), 3)
    stream = make(Resumable(), dataset_size=20)
    loader = StatefulDataLoader(stream, batch_size=None, num_workers=2)
    loader.load_state_dict(state)
    stream.set_epoch(1)
    with pytest.raises(RuntimeError, match=r"the loader's state is not that of step 0 of epoch 1, where this pass"):
        next(iter(loader))


# --------------------------------------------------------------------------------------------------------- Hugging Face


@some_workers
def test_hugging_face_stream_is_read_like_any_other(num_workers):
    for num_replicas in (1, 2):
        for rank in range(num_replicas):
            loader = DataLoader(
                make(hugging_face_stream(), num_replicas, rank), batch_size=None, num_workers=num_workers
            )
            assert [minibatch["number"].tolist() for minibatch in loader] == indexed(range(8), num_replicas, rank)


def shuffled_numbers(num_replicas, num_workers, first_step=0):
    found = []
    for rank in range(num_replicas):
        stream = make(hugging_face_stream().shuffle(seed=3, buffer_size=10), num_replicas, rank)
        stream.set_epoch(0, first_step)
        loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
        found.append([minibatch["number"].tolist() for minibatch in loader])
    return found


def test_shuffled_hugging_face_stream_has_one_order_and_resumes_by_skipping():
    (whole,) = shuffled_numbers(1, 0)
    order = list(chain(*whole))
    assert order != sorted(order)
    for rank, minibatches in enumerate(shuffled_numbers(3, 2)):
        assert minibatches == [[order[i] for i in places] for places in indexed(range(8), 3, rank)]
    assert shuffled_numbers(1, 2, first_step=5) == [whole[len(indexed(range(5))) :]]


def shards(parts):
    for part in parts:
        for number in range(100):
            yield {"number": 1000 * part + number}


def test_shards_of_a_hugging_face_stream_are_read_by_their_cores():
    from datasets.distributed import split_dataset_by_node

    whole = datasets.IterableDataset.from_generator(shards, gen_kwargs={"parts": [0, 1]})
    seen = []
    for rank in range(2):
        part = split_dataset_by_node(whole, rank=rank, world_size=2)
        stream = make(part, 2, rank, is_sharded=True)
        loader = DataLoader(stream, batch_size=None, num_workers=2)
        seen.append([minibatch["number"].tolist() for minibatch in loader])
    assert seen[0] == [[number, number + 1] for number in range(0, 24, 2)]
    own = [minibatch for number, minibatch in enumerate(seen[1]) if number not in (2, 5, 9)]  # padding minibatches
    assert own == [[1000 + number, 1001 + number] for number in range(0, 14, 2)]
    assert torch.tensor(seen[1]).min() >= 1000


# ------------------------------------------------------------------------------------------------------- random numbers


def train_with_dropout(directory, *, stop_after=None, **loading):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, 3))
    stream = make(Resumable())
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = vbs.ConstantOptimizer(inner, stream, model=model)
    checkpoint = vbs.Checkpoint(directory, model=model, optimizer=optimizer, every_steps=4)
    loader = DataLoader(stream, batch_size=None, **loading)
    for _ in checkpoint.epochs(1):
        for minibatch in loader:
            model(minibatch["x"]).square().mean().backward()
            optimizer.step()
            checkpoint.step()
            if optimizer.steps_done == stop_after:
                return None
    return model[1].weight


@pytest.mark.parametrize("loading", [{}, {"num_workers": 2, "generator": torch.Generator()}], ids=["alone", "workers"])
def test_run_with_dropout_resumes_bit_for_bit(tmp_path, loading):
    whole = train_with_dropout(None, **loading)
    assert train_with_dropout(tmp_path, stop_after=4, **loading) is None
    assert torch.equal(train_with_dropout(tmp_path, **loading), whole)
