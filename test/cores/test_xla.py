"""XLA cores: collectives that are called between steps."""

import pytest
import torch
from torch import nn

import variable_batch_size as vbs


def add_group(model, optimizer, metrics):
    late = nn.Parameter(torch.full((2,), float(optimizer.sampler.rank), device=vbs.device()))
    optimizer.add_param_group({"params": [late]})
    return late.tolist()


def share_buffers(model, optimizer, metrics):
    vbs.share_buffers(model)
    return model[1].num_batches_tracked.item()


def make_another_optimizer(model, optimizer, metrics):
    sampler = vbs.CustomSampler(dataset_size=32, trace=[8], minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return vbs.Optimizer(inner, sampler, rule="linear", ref_batchsize=4, model=model).steps_done


def read_metrics(model, optimizer, metrics):
    return metrics.read()["seen"]


COLLECTIVES = {add_group: [0.0, 0.0], share_buffers: 3, make_another_optimizer: 0, read_metrics: 48.0}


def after_operations_of_one_core():
    return [call_after_operations_of_one_core(function) for function in COLLECTIVES]


def call_after_operations_of_one_core(function):
    """The result of a function after three steps, while only core 0 has operations that were not started."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(vbs.device())
    sampler = vbs.CustomSampler(dataset_size=24, trace=[8, 8, 8], minibatch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = vbs.Optimizer(inner, sampler, rule="linear", ref_batchsize=4, model=model)
    metrics = vbs.Metrics("seen", device=vbs.device())
    total = torch.zeros((), device=vbs.device())
    for indices in sampler:
        loss = model(torch.ones(len(indices), 2, device=vbs.device())).square().mean()
        loss.backward()
        optimizer.step()
        metrics.add(seen=2 * len(indices))
        if sampler.rank == 0:
            total += loss.detach()  # as a loop that prints on core 0 only
    return function(model, optimizer, metrics)


@pytest.mark.xla
def test_what_one_core_alone_has_traced_is_not_part_of_a_collective(on_xla):
    assert on_xla(2, after_operations_of_one_core) == [list(COLLECTIVES.values())] * 2
