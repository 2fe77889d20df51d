"""EvaluationLoader: every sample once over all cores, equal rounds, and padding that Metrics does not count."""

import itertools

import live_runs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs


def loaders(size, minibatch_size, cores, **options):
    return [
        vbs.EvaluationLoader(range(size), minibatch_size=minibatch_size, num_replicas=cores, rank=rank, **options)
        for rank in range(cores)
    ]


def count(loader):
    """What a core counts: the sum of its samples, and their number."""
    metrics = vbs.Metrics("sum", "seen", device="cpu")
    for samples in loader:
        metrics.add(sum=samples.sum(), seen=len(samples))
    return metrics.read()


@given(size=st.integers(0, 40), minibatch_size=st.integers(1, 9), cores=st.integers(1, 6))
def test_every_sample_is_counted_once_in_as_many_minibatches_on_each_core(size, minibatch_size, cores):
    of_cores = loaders(size, minibatch_size, cores)
    lengths = {len(loader) for loader in of_cores}
    assert lengths == {-(-size // (cores * minibatch_size))}
    sums = [count(loader) for loader in of_cores]
    assert sum(one["seen"] for one in sums) == size
    assert sum(one["sum"] for one in sums) == size * (size - 1) // 2


@given(size=st.integers(0, 40), minibatch_size=st.integers(1, 9), cores=st.integers(1, 6))
def test_without_lockstep_there_is_no_padding(size, minibatch_size, cores):
    of_cores = loaders(size, minibatch_size, cores, lockstep=False)
    read = itertools.chain.from_iterable(minibatch.tolist() for loader in of_cores for minibatch in loader)
    assert sorted(read) == list(range(size))


def test_minibatches_are_those_of_one_core():
    first, second, third = ([minibatch.tolist() for minibatch in loader] for loader in loaders(7, 2, 3, lockstep=False))
    assert (first, second, third) == ([[0, 1], [6]], [[2, 3]], [[4, 5]])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_padding_is_distinguished_whatever_workers_have_read(num_workers):
    (_, loader) = loaders(5, 2, 2, num_workers=num_workers)
    assert count(loader) == {"sum": 5, "seen": 2}
    assert count(loader) == {"sum": 5, "seen": 2}  # again


def test_a_core_with_padding_only_counts_nothing():
    assert [count(loader)["seen"] for loader in loaders(3, 8, 3)] == [3, 0, 0]


@pytest.mark.parametrize(("size", "cores"), [(5, 2), (3, 3), (9, 4)])  # also cores with padding only
def test_loop_without_metrics_raises_on_all_cores_if_one_of_them_has_padding(size, cores):
    for loader in loaders(size, 2, cores):
        with pytest.raises(RuntimeError, match="the last minibatch of some cores was padding"):
            list(loader)


def test_loop_without_metrics_is_possible_where_no_core_has_padding():
    assert [len(list(loader)) for loader in loaders(8, 2, 2)] == [2, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_loop_that_reads_ahead_raises_at_its_end(rank):
    loader = loaders(9, 2, 2)[rank]
    metrics, ahead = vbs.Metrics("seen", device="cpu"), iter(loader)
    pending = next(ahead)
    with pytest.raises(RuntimeError, match="in a loop that reads this loader directly"):
        for samples in ahead:
            metrics.add(seen=len(pending))
            pending = samples


def test_what_is_added_after_a_loop_that_was_left_counts():
    (_, loader) = loaders(5, 2, 2)
    metrics = vbs.Metrics("seen", device="cpu")
    for number, samples in enumerate(loader):
        metrics.add(seen=len(samples))
        if number == 1:  # padding
            break
    metrics.add(seen=10)
    assert metrics.read() == {"seen": 12}


def evaluate_on_cores():
    return count(vbs.EvaluationLoader(range(10), minibatch_size=4))


def test_cores_of_the_backend_share_the_samples(on_cores):
    assert on_cores(2, evaluate_on_cores) == [{"sum": 45, "seen": 10}] * 2


@pytest.mark.parametrize("name", ["batch_size", "batch_sampler", "drop_last", "sampler", "shuffle"])
def test_arguments_that_determine_minibatches_are_refused(name):
    with pytest.raises(ValueError, match=f"`{name}` must not be given"):
        vbs.EvaluationLoader(range(5), minibatch_size=2, **{name: 1})


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="`minibatch_size` must be a positive integer, got 0"):
        vbs.EvaluationLoader(range(5), minibatch_size=0)
    with pytest.raises(ValueError, match="`rank` must be"):
        vbs.EvaluationLoader(range(5), minibatch_size=2, num_replicas=2, rank=2)
    with pytest.raises(ValueError, match="`dataset` must have a length, got generator"):
        vbs.EvaluationLoader((x for x in range(5)), minibatch_size=2)
    with pytest.raises(ValueError, match="`in_order` must be True"):
        vbs.EvaluationLoader(range(5), minibatch_size=2, in_order=False)
    assert torch.equal(next(iter(vbs.EvaluationLoader(range(5), minibatch_size=2))), torch.tensor([0, 1]))


def test_each_sample_is_read_once_by_the_cores_that_are_there_when_they_may_come_and_go():
    with live_runs.alone() as membership:
        loader = vbs.EvaluationLoader(range(10), minibatch_size=2, lockstep=False)
        assert len(torch.cat(list(loader))) == 10
        membership.members = [membership.core, membership.core + 1]
        assert torch.cat(list(loader)).tolist() == [0, 1, 4, 5, 8, 9]
        membership.members = [membership.core]
        assert len(torch.cat(list(loader))) == 10


def test_sums_that_lack_those_of_a_core_that_has_left_are_reported(caplog):
    with live_runs.alone() as membership:
        membership.members = [membership.core, membership.core + 1]
        metrics = vbs.Metrics("correct", "seen", device="cpu")
        metrics.add(correct=1, seen=2)
        membership.members = [membership.core]
        assert metrics.read() == {"correct": 1, "seen": 2}
        assert "the sums of correct, seen lack the values of cores that have left" in caplog.text
        caplog.clear()
        metrics.reset()
        metrics.read()
        assert not caplog.text
