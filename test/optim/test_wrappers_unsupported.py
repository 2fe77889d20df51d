"""Unsupported models raise when the optimizer is made, or when they run first, and the error names the alternative."""

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
    """The error raised when an optimizer is made."""
    try:
        kind(inner(model.parameters()), sampler or sampler_of(), ref_batchsize=4, **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def message_when_run(trained, run, **options):
    """The error in the first forward pass, where the optimizer does not know what is around the model."""
    inner = sharded_models.sgd(trained.parameters())
    optimizer = vbs.LinearRuleOptimizer(inner, sampler_of(), ref_batchsize=4, **options)
    found = []
    for _ in range(2):  # a second attempt must not pass
        try:
            run()
        except (ValueError, RuntimeError) as error:
            found.append(str(error.__cause__ or error))  # a stage of a pipeline has one of its own
    assert len(found) == 2 and optimizer.steps_done == 0
    return found[0]


def message_about_a_pipeline():
    """Each rank has a pipeline of one stage."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    groups = [torch.distributed.new_group([rank]) for rank in range(2)]
    model = nn.Linear(4, 4)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=groups[torch.distributed.get_rank()])
    schedule = ScheduleGPipe(stage, 1)
    return message_when_run(model, lambda: schedule.step(torch.ones(4, 4)))


def transformer():
    return sharded_models.model_of(Transformer)


def zero_adam(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(list(parameters), torch.optim.Adam, lr=0.1)


def message_about_unseen_gradients():
    """The unsharded parameters are not those of the optimizer."""
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


def said_while_training(optimizer, model, sampler, *, weight=None, between=lambda: None, after=lambda: None):
    x, y = sharded_models.data()
    try:
        for indices in sampler:
            loss = sharded_models.loss_of(model, x[indices], y[indices])
            between()
            loss.backward()
            optimizer.step(weight=weight)
            after()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def messages_while_training():
    """Errors that can only be detected after the model has run; no core may wait forever."""
    rank, found = torch.distributed.get_rank(), {}

    def say(name, model, parameters=None, options=None, **more):
        sampler = sampler_of()
        inner = sharded_models.sgd(model.parameters() if parameters is None else parameters)
        optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, **(options or {}))
        found[name] = said_while_training(optimizer, model, sampler, **more)
        return optimizer

    early = transformer()
    parameters = list(early.parameters())
    say("sharded since", sharded_models.sharded(early)[0], parameters)
    say("some weights", sharded_models.sharded(transformer())[0], weight=2.0 if rank == 0 else None)
    model = sharded_models.sharded(transformer())[0]
    say("not reduced", model, between=lambda: model.set_requires_gradient_sync(False))
    model = sharded_models.sharded(transformer())[0]
    late, first = list(model.blocks[1].parameters()), [*model.blocks[0].parameters()]
    other = torch.optim.SGD(late, lr=0.1)
    say("foreign", model, first, after=other.step)
    return found


def message_about_a_dropped_minibatch():
    model, sampler = (
        sharded_models.sharded(transformer())[0],
        vbs.CustomSampler(dataset_size=16, trace=[16], minibatch_size=4),
    )
    optimizer = vbs.LinearRuleOptimizer(
        sharded_models.sgd(model.parameters()), sampler, ref_batchsize=4, reduce_scatter_once=True
    )
    x, y = sharded_models.data()
    try:
        for indices in sampler:
            sharded_models.loss_of(model, x[indices], y[indices]).backward()
            if optimizer.is_accumulating:
                optimizer.zero_grad()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def partly_sharded():
    from torch.distributed.fsdp import fully_shard

    model = transformer()
    for block in model.blocks:
        fully_shard(block)
    return model


def run_before():
    """The outermost module has unsharded parameters after a forward pass."""
    model, _ = sharded_models.sharded(transformer())
    with torch.no_grad():
        model(sharded_models.data()[0][:4])
    return model


def messages_about_added_groups(mesh):
    """Parameters sharded in a way that did not exist when the optimizer was made."""

    def added(first, late, group=None):
        sampler = sampler_of(process_group=group)
        optimizer = vbs.LinearRuleOptimizer(sharded_models.sgd(first.parameters()), sampler, ref_batchsize=4)
        try:
            optimizer.add_param_group({"params": list(late.parameters())})
        except ValueError as error:
            assert len(optimizer.param_groups) == 1
            return str(error)
        return "no error"

    split = sharded_models._split(transformer(), mesh["model"])
    both = sharded_models.sharded(sharded_models._split(transformer(), mesh["model"]), mesh=mesh["data"])[0]
    sharded = sharded_models.sharded(transformer())[0]
    return {
        "split later": added(split.norm, split.blocks[0], mesh["data"]),
        "both later": added(both.norm, both.blocks[0].up, mesh["data"]),
        "sharded later": added(nn.Linear(2, 2), sharded),
        "sharded beside split": added(split, both.blocks[0].up, mesh["data"]),
    }


def messages():
    from torch.distributed.fsdp import FullyShardedDataParallel

    old = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    split = sharded_models._split(transformer(), mesh["model"])
    both = sharded_models.sharded(sharded_models._split(transformer(), mesh["model"]), mesh=mesh["data"])[0]
    sharded = [sharded_models.sharded(transformer())[0] for _ in range(5)]
    read = sampler_of()
    next(iter(read))
    found = {
        "fsdp1": message(old),
        "pipeline": message_about_a_pipeline(),
        "split over cores": message(split),
        "both over cores": message(both),
        "exact": message(sharded[0], exact=True),
        "kept": message(sharded[1], gradient_as_bucket_view=True),
        "kept split": message(split, sampler=sampler_of(process_group=mesh["data"]), gradient_as_bucket_view=True),
        "kept lockstep": message(transformer(), sampler=sampler_of(lockstep=True), gradient_as_bucket_view=True),
        "adamscale": message(sharded[2], vbs.AdamScaleOptimizer, sharded_models.adamw),
        "adamscale split": message(
            split, vbs.AdamScaleOptimizer, sharded_models.adamw, sampler=sampler_of(process_group=mesh["data"])
        ),
        "adamscale zero": message(transformer(), vbs.AdamScaleOptimizer, zero_adam),
        "read": message(sharded[3], sampler=read),
        "unseen": message_about_unseen_gradients(),
        "twice": message_about_two_backward_passes(),
        "partly": message(partly_sharded()),
        "run before": message(run_before()),
        "dropped": message_about_a_dropped_minibatch(),
        "other trace": message(split, sampler=other_trace(mesh["data"])),
    }
    return found | messages_about_added_groups(mesh) | messages_while_training()


def other_trace(group):
    """Another trace on one of the processes that share samples."""
    rank = torch.distributed.get_rank()
    return vbs.CustomSampler(dataset_size=16, trace=[8, 4 + 4 * rank], minibatch_size=4, process_group=group)


ADDED = "added parameters must be sharded over the same processes and in the same way as the others"
EXPECTED = {
    "fsdp1": "(FSDP1) is not supported, because it reduces gradients in every backward pass: use fully_shard (FSDP2) "
    "of torch.distributed.fsdp, available since torch 2.6",
    "pipeline": "pipeline parallelism is not supported, because its schedule runs the minibatches itself",
    "split over cores": "Parameters are sharded over ranks that the sampler assigns different samples to.",
    "both over cores": "fully_shard must be over the 2 ranks that the sampler assigns different samples to.",
    "exact": "`exact` must be False for sharded parameters",
    "kept": "`lockstep` of the sampler must be False with `gradient_as_bucket_view`",
    "kept split": "`gradient_as_bucket_view` must be False for sharded parameters",
    "kept lockstep": "`lockstep` of the sampler must be False with `gradient_as_bucket_view`",
    "adamscale": "AdamScaleRule needs the full second moments on every rank, but fully_shard shards them",
    "adamscale split": "needs the full second moments on every rank, but tensor parallelism shards them",
    "adamscale zero": "needs the full second moments on every rank, but ZeroRedundancyOptimizer shards them",
    "read": "the sampler has been read already: construct it with `lockstep=True`",
    "unseen": "fully_shard reduced the gradient of a parameter of shape (2, 2) without calling its hook.",
    "twice": "Cannot measure a gradient that fully_shard reduced in several parts.",
    "partly": "either all parameters must be in fully_shard or none, but 3 are not (of shape (11, 8), (8,), (8,))",
    "run before": "either all parameters must be in fully_shard or none, but 3 are not (of shape (11, 8), (8,), (8,))",
    "dropped": "With `reduce_scatter_once`, zero_grad() cannot drop the gradient of a minibatch that is not the first",
    "other trace": "ranks must have the same settings, but differ in trace",
    **dict.fromkeys(["split later", "both later", "sharded later", "sharded beside split"], ADDED),
    "sharded since": "no parameter of the optimizer has a gradient; fully_shard replaces the parameters of a model",
    "some weights": "`weight` must be passed on all ranks or on none, but 1 of 2 passed none.",
    "not reduced": "fully_shard has not reduced the gradients",
    "foreign": "parameters of a fully_shard model must belong to optimizers of this library, but SGD has some",
}


@pytest.fixture(scope="module")
def found(on_cores):
    return on_cores(2, messages)


@pytest.mark.parametrize("name", EXPECTED)
def test_unsupported_model_raises_on_every_core_with_an_alternative(found, name):
    for core in found:
        assert EXPECTED[name] in core[name]


def test_deepspeed_engine_raises(monkeypatch):
    class DeepSpeedEngine(nn.Module):
        """A class with the name and module of DeepSpeed's engine, with the model inside."""

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    module = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = DeepSpeedEngine
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)
    engine = DeepSpeedEngine(nn.Linear(2, 2))
    expected = "a DeepSpeed engine is not supported, because it accumulates, reduces and updates itself"
    with pytest.raises(ValueError, match=expected):
        optimizer_of(engine)
    for passed in (engine.module, None):
        assert expected in message_when_run(engine.module, lambda: engine(torch.ones(4, 2)), model=passed)


def optimizer_of(model):
    return vbs.LinearRuleOptimizer(sharded_models.sgd(model.parameters()), sampler_of(), ref_batchsize=4, model=model)


@pytest.mark.parametrize("is_wrapped_outside", [True, False])
def test_data_parallel_over_several_devices_is_refused(is_wrapped_outside):
    inside = nn.DataParallel(nn.Linear(2, 2))
    inside.device_ids = [0, 1]  # as on a machine with two
    with pytest.raises(ValueError, match="DataParallel over several devices is not supported, because it runs copies"):
        optimizer_of(inside if is_wrapped_outside else nn.Sequential(inside))


def test_data_parallel_is_found_where_the_model_was_not_passed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # Lightning lets torch ask for the number of devices
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    inner = nn.Linear(2, 2)
    model = nn.DataParallel(inner)
    model.device_ids = [0, 1]
    for passed in (inner, None):
        found = message_when_run(inner, lambda: model(torch.ones(4, 2)), model=passed)
        assert found.startswith("DataParallel over several devices is not supported")


def test_data_parallel_on_one_device_is_the_plain_model():
    assert optimizer_of(nn.DataParallel(nn.Linear(2, 2))).steps_done == 0
