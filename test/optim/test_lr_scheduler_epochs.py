"""optimizer.epochs: sampler and optimizer move through the epochs together."""

import pytest
import torch
from torch import nn

import variable_batch_size as vbs


def make(trace=(2, 1, 3, 1, 1, 2), **options):
    weight = nn.Parameter(torch.zeros(3))
    sampler = vbs.CustomSampler(4, trace, minibatch_size=1)
    inner = torch.optim.SGD([weight], lr=0.1)
    return weight, vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=1, **options)


def steps_of(weight, optimizer, num_epochs, *, stop_after=None, save=None):
    """The epoch, samples and batch size of every minibatch."""
    found = []
    for epoch in optimizer.epochs(num_epochs):
        for indices in optimizer.sampler:
            weight.grad = torch.tensor([1.0, indices[0], epoch])
            optimizer.step()
            found.append((epoch, indices, optimizer.batch_size))
            if optimizer.steps_done == stop_after and optimizer.updated:
                return found
    return found


def test_epochs_follow_one_another():
    weight, optimizer = make()
    sizes = [(epoch, size) for epoch, _, size in steps_of(weight, optimizer, 3)]
    assert sizes == [(0, 2), (0, 2), (0, 1), (1, 3), (1, 3), (1, 3), (1, 1), (2, 1), (2, 2), (2, 2)]


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4, 5, 6])
def test_run_resumes_where_its_state_was_saved(stop_after):
    weight, optimizer = make()
    whole = steps_of(weight, optimizer, 3)
    before_weight, before = make()
    first = steps_of(before_weight, before, 3, stop_after=stop_after)
    after_weight, after = make()
    after.load_state_dict(before.state_dict())
    after_weight.data.copy_(before_weight.data)
    assert first + steps_of(after_weight, after, 3) == whole
    assert torch.equal(after_weight, weight)


def test_completed_run_has_no_epochs_left_and_may_continue_with_more():
    weight, optimizer = make()
    steps_of(weight, optimizer, 2)
    assert list(optimizer.epochs(2)) == []
    assert {epoch for epoch, _, _ in steps_of(weight, optimizer, 3)} == {2}


def test_an_epoch_may_be_left_early(caplog):
    weight, optimizer = make()
    for epoch in optimizer.epochs(3):
        for _ in optimizer.sampler:
            weight.grad = torch.ones(3)
            optimizer.step()
            break
        assert optimizer.epoch == optimizer.sampler.epoch == epoch
    assert [message.split(":")[0] for message in caplog.messages[:2]] == [
        "core 0 left step 0 of epoch 0 unfinished",
        "core 0 left step 0 of epoch 1 unfinished",
    ]


def test_policy_decides_the_epochs():
    def sizes_with(epochs):
        weight, optimizer = make(
            vbs.policies.FunctionPolicy(lambda situation: 1 + situation.steps_done % 3, every=1, lead=1)
        )
        found = []
        for epoch in epochs(optimizer):
            for _ in optimizer.sampler:
                weight.grad = torch.ones(3)
                if optimizer.step():
                    found.append((epoch, optimizer.batch_size))
        return found

    def by_hand(optimizer):
        for epoch in range(4):
            optimizer.sampler.set_epoch(epoch)
            optimizer.set_epoch(epoch)
            yield epoch

    assert sizes_with(lambda optimizer: optimizer.epochs(4)) == sizes_with(by_hand)


def test_invalid_arguments_raise_immediately():
    _, optimizer = make()
    with pytest.raises(ValueError, match="3 epochs"):
        optimizer.epochs(4)
    with pytest.raises(ValueError, match="`num_epochs`"):
        optimizer.epochs(-1)
