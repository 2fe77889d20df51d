"""LiveSteps: which core runs which minibatches of a step as cores come and go."""

from types import SimpleNamespace

import live_runs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from variable_batch_size.cores.live import Change
from variable_batch_size.optim.live_steps import LiveSteps, first_shares, refuse_unsupported, shares_after


def test_minibatches_of_a_dead_core_go_to_those_with_the_fewest():
    shares = first_shares([0, 1, 2, 3], num_minibatches=6)
    assert shares == {0: [0, 4], 1: [1, 5], 2: [2], 3: [3]}
    assert shares_after(shares, [0, 2, 3]) == {0: [0, 4], 2: [2, 1], 3: [3, 5]}


def test_the_last_core_runs_everything():
    assert shares_after(first_shares([3, 7], num_minibatches=3), [7]) == {7: [1, 0, 2]}


def test_an_idle_core_takes_over_first():
    assert shares_after(first_shares([1, 2, 3], num_minibatches=2), [2, 3]) == {2: [1], 3: [0]}


@given(
    st.integers(1, 6),
    st.integers(1, 20),
    st.lists(st.sets(st.integers(0, 5), min_size=1), max_size=4),
)
def test_no_minibatch_is_lost_or_repeated_and_no_core_gives_one_away(num_cores, number, left):
    members = list(range(num_cores))
    shares = first_shares(members, number)
    for gone in left:
        remaining = [core for core in members if core not in gone]
        if remaining:
            before, shares, members = shares, shares_after(shares, remaining), remaining
            assert all(shares[core][: len(before[core])] == before[core] for core in members)
        assert sorted(place for places in shares.values() for place in places) == list(range(number))


def optimizer_of(model, loader):
    return vbs.Optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), loader, rule="linear", ref_batchsize=4, model=model
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"lockstep": True}, "`lockstep` of the sampler must be False with `elastic`"),
        ({"max_minibatch_size": 8}, "`max_minibatch_size` of the sampler must be None with `elastic`"),
        ({"trace": lambda situation: 4}, "`elastic` needs a trace that is known in advance, not a policy"),
    ],
)
def test_what_depends_on_the_number_of_cores_is_refused(how, message):
    loader = vbs.DataLoader(
        torch.utils.data.TensorDataset(torch.ones(16, 2)), **{"trace": [4], "minibatch_size": 2, **how}
    )
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(optimizer_of(torch.nn.Linear(2, 1), loader))


@pytest.mark.parametrize("how", [{"samples": iter(range(8))}, {"samples": range(8), "is_sharded": True}])
def test_a_stream_that_cannot_be_read_again_is_refused(how):
    stream = vbs.Stream(trace=[4], minibatch_size=2, **how)
    with pytest.raises(ValueError, match="needs a stream that can be read again"):
        refuse_unsupported(optimizer_of(torch.nn.Linear(2, 1), stream))


def test_synchronized_norms_and_a_second_optimizer_are_refused():
    loader = vbs.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)), trace=[4], minibatch_size=2)
    with pytest.raises(ValueError, match="use BatchNorm with `elastic`"):
        refuse_unsupported(optimizer_of(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.SyncBatchNorm(1)), loader))
    both = [optimizer_of(torch.nn.Linear(2, 1), loader) for _ in range(2)]
    with pytest.raises(ValueError, match="a sampler for each optimizer"):
        refuse_unsupported(both[0])


def test_sharded_models_are_refused_with_the_alternative():
    loader = vbs.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)), trace=[4], minibatch_size=2)
    optimizer = optimizer_of(torch.nn.Linear(2, 1), loader)
    optimizer._wrappers.fsdp = [object()]
    with pytest.raises(ValueError, match=r"shards die with their core: use vbs\.Checkpoint under torchrun"):
        refuse_unsupported(optimizer)


def test_what_cores_that_have_begun_a_step_leave_is_run_by_those_that_have_not():
    """One dies before the group that replaces that of the other can be formed: the others learn of both at once."""
    loader = vbs.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 2)), trace=[12], minibatch_size=2)
    optimizer = optimizer_of(torch.nn.Linear(2, 1), loader)
    changes = [Change([1, 2], [], 5, 0, False, 0), Change([2], [], 5, None, False, 0)]
    membership = SimpleNamespace(core=2, members=[2], changes=changes)
    parts = optimizer._cursor, optimizer._accumulator, optimizer._buffers, optimizer._loss_scale
    steps = LiveSteps(optimizer, SimpleNamespace(membership=membership), *parts)
    steps._members = [1, 2, 3]
    steps._apply_changes()
    assert {core: sorted(places) for core, places in steps._shares.items()} == {2: [0, 1, 2, 3, 4, 5]}


class Run:
    """A run of this process alone, which cores could leave and join."""

    def __init__(self, num_workers=0, **options):
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        data = torch.utils.data.TensorDataset(torch.randn(24, 2))
        self.loader = vbs.DataLoader(data, trace=[8, 4, 12], minibatch_size=4, num_workers=num_workers)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        how = {"rule": "linear", "ref_batchsize": 4, "model": self.model}
        self.optimizer = vbs.Optimizer(self.inner, self.loader, **how, **options)

    def minibatch(self, x, **options):
        loss = self.model(x).mean()
        loss.backward()
        return self.optimizer.step(loss=loss, **options)


@pytest.fixture
def alone():
    with live_runs.alone() as membership:
        yield membership


def one_ahead(minibatches):
    """As some loaders of frameworks do."""
    iterator = iter(minibatches)
    previous = next(iterator)
    for following in iterator:
        yield previous
        previous = following
    yield previous


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loop_that_reads_ahead_is_refused(alone, num_workers):
    run = Run(num_workers)
    for _ in run.optimizer.epochs():
        with pytest.raises(RuntimeError, match=r"a minibatch must not be read before step\(\) of the previous one"):
            for (x,) in one_ahead(run.loader):
                run.minibatch(x)
        break


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_core_alone_trains_as_without_others(alone, num_workers):
    run = Run(num_workers)
    for _ in run.optimizer.epochs():
        for (x,) in run.loader:
            run.minibatch(x)
    assert run.optimizer.steps_done == 3


def test_another_optimizer_with_its_own_loader_is_refused(alone):
    first, second = Run(), Run()
    first.optimizer.epochs()
    with pytest.raises(ValueError, match="needs one optimizer for all parameters, but another one has joined"):
        second.optimizer.epochs()


def test_the_buffers_of_a_skipped_step_are_those_before_it_although_a_core_has_died_within(alone):
    run = Run(skip_nonfinite=True)
    norm, steps = run.model[1], run.optimizer._engine.steps
    for _ in run.optimizer.epochs():
        for number, (x,) in enumerate(run.loader):
            if not number:
                before = norm.running_mean.clone()
                run.minibatch(x * torch.nan)
                steps._reassign(0, [1])  # a core has left: this one continues with its minibatches
            elif run.minibatch(x):
                break
        break
    assert run.optimizer.steps_skipped == 1
    assert torch.equal(norm.running_mean, before)
