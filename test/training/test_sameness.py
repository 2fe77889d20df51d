"""All cores begin with the same weights and settings, or say at once in what they differ."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import variable_batch_size as vbs


def build(**different):
    """An optimizer; on rank 1 with other arguments."""
    rank = dist.get_rank()
    how = {
        "trace": [8, 8],
        "minibatch_size": 4,
        "seed": 0,
        "ref_batchsize": 8,
        "lr": 0.1,
        "rule": "linear",
        "clip": None,
        "exact": False,
        "frozen": False,
        "options": {},
    }
    how |= different if rank == 1 else {}
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[1].running_mean.fill_(rank)
    model[1].register_buffer("is_ready", torch.tensor(rank == 0))
    model[1].register_buffer("expanded", torch.full((2, 1), float(rank)).expand(2, 3))
    sampler = vbs.CustomSampler(
        dataset_size=64, trace=how["trace"], minibatch_size=how["minibatch_size"], seed=how["seed"]
    )
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=how["lr"])
    model[2].bias.requires_grad_(not how["frozen"])
    rule = vbs.make_rule(how["rule"])
    options = {"clip_grad_norm": how["clip"], "exact": how["exact"], **how["options"]}
    optimizer = vbs.CustomOptimizer(
        inner, sampler, rule=rule, ref_batchsize=how["ref_batchsize"], model=model, **options
    )
    return model, optimizer


DIFFERENT = [
    ({"seed": 3}, "seed: 0 on rank 0, 3 on rank 1"),
    ({"trace": [8, 16]}, "trace: 2 steps, sha256 .* on rank 0, 2 steps, sha256 .* on rank 1"),
    ({"minibatch_size": 2}, "minibatch_size: 4 on rank 0, 2 on rank 1"),
    ({"ref_batchsize": 16}, "ref_batchsize: 8 on rank 0, 16 on rank 1"),
    ({"rule": "root"}, "rule: LinearRule on rank 0, RootRule on rank 1"),
    ({"lr": 0.2}, "settings: .*0.1.* on rank 0, .*0.2.* on rank 1"),
    ({"frozen": True}, r"frozen parameters: \[\] on rank 0, \[3\] on rank 1"),
    ({"clip": 0.5}, "clip_grad_norm: None on rank 0, 0.5 on rank 1"),
    ({"exact": True}, r"exact \(and in seed_minibatches, threads\): False on rank 0, True on rank 1"),
    (
        {
            "options": {
                "smooth_steps": 3,
                "max_factor": 2.0,
                "skip_nonfinite": True,
                "gradient_as_bucket_view": True,
                "measure_noise": True,
                "reduce_scatter_once": True,
            }
        },
        r"smooth_steps \(and in max_factor, skip_nonfinite, gradient_as_bucket_view, measure_noise, "
        r"reduce_scatter_once\): 0 on rank 0, 3 on rank 1",
    ),
    ({"seed": 3, "ref_batchsize": 16}, r"seed \(and in ref_batchsize\): 0 on rank 0, 3 on rank 1"),
]


def messages():
    found = []
    for different, _ in DIFFERENT:
        with pytest.raises(ValueError) as raised:
            build(**different)
        found.append(str(raised.value))
    return found


def test_cores_that_are_set_up_differently_say_so_all_of_them(on_cores):
    for found in on_cores(2, messages):
        for message, (_, expected) in zip(found, DIFFERENT, strict=True):
            with pytest.raises(ValueError, match="ranks must have the same settings, but differ in " + expected):
                raise ValueError(message)


def with_other_settings_of_the_rule():
    rank = dist.get_rank()
    sampler = vbs.CustomSampler(dataset_size=64, trace=[8], minibatch_size=4)
    inner = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError) as raised:
        vbs.LEGWRuleOptimizer(inner, sampler, ref_batchsize=8, warmup_samples=10 + rank)
    return str(raised.value)


def test_the_settings_of_the_rule_are_compared_too(on_cores):
    for message in on_cores(2, with_other_settings_of_the_rule):
        assert "settings of the rule: {'warmup_samples': 10} on rank 0, {'warmup_samples': 11} on rank 1" in message


def states():
    model, optimizer = build()
    late = nn.Parameter(torch.full((2,), float(dist.get_rank())))
    late.grad = torch.ones(2)
    optimizer.add_param_group({"params": [late]})
    return {**model.state_dict(), "late": late.detach(), "has_gradient": late.grad is not None}


def test_everything_starts_out_as_on_core_0_also_frozen_parameters_buffers_and_added_groups(on_cores):
    first, second = on_cores(2, states)
    for name in first:
        assert torch.equal(torch.as_tensor(first[name]), torch.as_tensor(second[name])), name
    assert first["late"].tolist() == [0.0, 0.0]
    assert second["1.running_mean"].tolist() == [0.0] * 3
    assert bool(second["1.is_ready"])
    assert second["1.expanded"].tolist() == [[0.0] * 3] * 2
    assert not first["has_gradient"]
