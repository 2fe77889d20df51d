"""The names of the original module: a script written for it runs unchanged."""

import pytest
import torch
from torch import nn

import variable_batch_size as vbs


def make(*arguments, **options):
    model = nn.Linear(2, 2)
    sampler = vbs.CustomSampler(*arguments, minibatch_size=2, **options)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    inner = torch.optim.SGD(groups, lr=0.25)
    return model, sampler, vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=2)


def test_size_and_trace_may_be_positional():
    _, by_position, _ = make(12, [4, 8, 6])
    _, by_name, _ = make(dataset_size=12, trace=[4, 8, 6])
    _, of_data, _ = make(list(range(12)), [4, 8, 6])
    assert by_position.description == by_name.description == of_data.description
    assert list(by_position) == list(by_name) == list(of_data)


def test_the_trace_of_an_epoch():
    _, sampler, _ = make(12, [4, 8, 6])
    assert sampler.get_epochtrace(0) == [4, 8]
    assert sampler.get_epochtrace(1) == [6]


def test_get_bs_is_the_next_batch_size_and_get_lr_is_unscaled():
    model, sampler, optimizer = make(12, [4, 8, 6])
    seen = [optimizer.get_bs()]
    for _ in optimizer.epochs(1):
        for _ in sampler:
            model(torch.ones(2, 2)).sum().backward()
            optimizer.step()
            seen.append(optimizer.get_bs())
            assert optimizer.get_lr() == (0.25, 0.5)
    assert seen == [4, 4, 8, 8, 8, 8, 0]


def test_verbose_logs_a_summary_of_the_trace(caplog):
    caplog.set_level("INFO")
    make(12, [4, 8, 6], verbose=True)
    make(12, 4, verbose=True)
    make(12, [4, 8, 6])
    assert len(caplog.messages) == 2
    assert caplog.messages[0].endswith(": 2 epochs")
    assert caplog.messages[1].endswith(": endless epochs")


def test_a_sampler_needs_one_size_and_a_trace():
    with pytest.raises(ValueError, match=r"^`trace` must be given: a path, "):
        vbs.CustomSampler(12, minibatch_size=2)
    with pytest.raises(ValueError, match=r"^pass either `dataset` or `dataset_size`, got both$"):
        vbs.CustomSampler(12, 4, dataset_size=12, minibatch_size=2)
    with pytest.raises(ValueError, match="`dataset_size` must be"):
        vbs.CustomSampler(0, 4, minibatch_size=2)
