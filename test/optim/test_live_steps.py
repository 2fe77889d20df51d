"""LiveSteps: who runs which minibatches of a step as cores come and go."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import variable_batch_size as vbs
from variable_batch_size.optim.live_steps import first_shares, refuse_unsupported, shares_after


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
        ({"trace": lambda situation: 4}, "`elastic` needs a trace that is known, not a policy"),
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
