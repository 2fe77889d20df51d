"""What cannot be right is refused when the optimizer is made, in words that say what to do."""

import sys
import types

import pytest
import sharded_models
import torch
from sharded_models import Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import variable_batch_size as vbs


def sampler_of(**options):
    return vbs.CustomSampler(dataset_size=16, trace=[8, 4], minibatch_size=4, **options)


def message(model, kind=vbs.LinearRuleOptimizer, inner=sharded_models.sgd, sampler=None, **options):
    """What is said where an optimizer is made."""
    try:
        kind(inner(model.parameters()), sampler or sampler_of(), ref_batchsize=4, **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def transformer():
    return sharded_models.model_of(Transformer)


def zero_adam(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(list(parameters), torch.optim.Adam, lr=0.1)


def message_about_unseen_gradients():
    """The whole parameters are others than those that the optimizer has seen."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(2, 2))
    optimizer = vbs.LinearRuleOptimizer(sharded_models.sgd(model.parameters()), sampler_of(), ref_batchsize=4)
    model.unshard()
    for p in model.parameters():
        p._backward_hooks.clear()
    try:
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def message_about_two_backward_passes():
    model, _ = sharded_models.sharded(transformer())
    optimizer = vbs.AdaScaleOptimizer(sharded_models.sgd(model.parameters()), sampler_of(), ref_batchsize=4)
    x, y = sharded_models.data()
    for _ in range(2):
        sharded_models.loss_of(model, x[:4], y[:4]).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def messages():
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.pipelining import PipelineStage

    old = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    staged = nn.Linear(4, 4)
    stage = PipelineStage(staged, torch.distributed.get_rank(), 2, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    split = sharded_models._split(transformer(), mesh["model"])
    both = sharded_models.sharded(sharded_models._split(transformer(), mesh["model"]), mesh=mesh["data"])[0]
    sharded = [sharded_models.sharded(transformer())[0] for _ in range(5)]
    read = sampler_of()
    next(iter(read))
    found = {
        "fsdp1": message(old),
        "pipeline": message(staged),
        "split over cores": message(split),
        "both over cores": message(both),
        "exact": message(sharded[0], exact=True),
        "kept": message(sharded[1], keep_gradients=True),
        "kept split": message(split, sampler=sampler_of(process_group=mesh["data"]), keep_gradients=True),
        "kept lockstep": message(transformer(), sampler=sampler_of(lockstep=True), keep_gradients=True),
        "adamscale": message(sharded[2], vbs.AdamScaleOptimizer, sharded_models.adamw),
        "adamscale zero": message(transformer(), vbs.AdamScaleOptimizer, zero_adam),
        "read": message(sharded[3], sampler=read),
        "unseen": message_about_unseen_gradients(),
        "twice": message_about_two_backward_passes(),
    }
    del stage
    return found


EXPECTED = {
    "fsdp1": "(FSDP1) reduces gradients in a way of its own: use fully_shard (FSDP2), which is in "
    "torch.distributed.fsdp from torch 2.6 on",
    "pipeline": "a pipeline's schedule runs the minibatches by itself",
    "split over cores": "parameters are split over processes that the sampler deals different samples",
    "both over cores": "fully_shard must be over the 2 cores that the sampler deals different samples",
    "exact": "`exact` must be False where parameters are split over processes",
    "kept": "`lockstep` of the sampler must be False with `keep_gradients`",
    "kept split": "`keep_gradients` must be False where parameters are split over processes",
    "kept lockstep": "`lockstep` of the sampler must be False with `keep_gradients`",
    "adamscale": "AdamScaleRule needs whole second moments, and fully_shard splits them",
    "adamscale zero": "AdamScaleRule needs all second moments, and ZeroRedundancyOptimizer has a part of them",
    "read": "the sampler has been read already: make it with `lockstep=True`",
    "unseen": "the gradient of a parameter of the shape (2, 2) was reduced unseen",
    "twice": "gradients must be measured whole, but fully_shard has reduced one of them in several parts",
}


@pytest.fixture(scope="module")
def found():
    return vbs.launch(messages, cores=2, backend="gloo")


@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_refused_on_every_core_with_what_to_do(found, name):
    for core in found:
        assert EXPECTED[name] in core[name]


def test_a_deepspeed_engine_is_refused(monkeypatch):
    class DeepSpeedEngine(nn.Module):
        """Named and placed as theirs is, with the model inside."""

        def __init__(self, module):
            super().__init__()
            self.module = module

    module = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = DeepSpeedEngine
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)
    engine = DeepSpeedEngine(nn.Linear(2, 2))
    assert "a DeepSpeed engine accumulates, reduces and updates by itself" in message(engine)
    assert "a DeepSpeed engine accumulates, reduces and updates by itself" in message(engine.module)
