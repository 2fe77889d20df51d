"""A model in DistributedDataParallel trains as without it: even, uneven and idle cores, with and without `model=`."""

import copy
import gc
import sys
import threading
import types

import pytest
import torch
from small_runs import classified, sgd, weights_of
from small_runs import train as train_on
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs

HOOKS = torch.nn.modules.module._global_forward_pre_hooks

DATA = classified(100, 3, num_classes=2)
SIZES = [4 * n for n in (3, 1, 4, 2, 5, 1, 7, 3)]


class Network(nn.Sequential):
    def forward(self, x):  # that of nn.Sequential is not compiled
        for layer in self:
            x = layer(x)
        return x


def network():
    torch.manual_seed(0)
    return Network(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def compiled_function(model):
    return torch.compile(lambda x: model(x), backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


COMPILED = {
    "compile(DDP)": lambda module, **ddp: compiled(DistributedDataParallel(module, **ddp)),
    "DDP(compile)": lambda module, **ddp: DistributedDataParallel(compiled(module), **ddp),
    "DDP.compile()": lambda module, **ddp: compiled_in_place(DistributedDataParallel(module, **ddp)),
    "DDP(compile())": lambda module, **ddp: DistributedDataParallel(compiled_in_place(module), **ddp),
    "function": lambda module, **ddp: compiled_function(DistributedDataParallel(module, **ddp)),
}


def train(wrap, passed, kind=vbs.AdaScaleOptimizer, *, switches=False, **ddp):
    """Train a wrapped model, with the wrapper, the module or nothing passed as `model`.

    Args:
        wrap: when, or how it is compiled, too; or "middle" for its middle layer only, "again" for once more in a later
            epoch, or "run" for a model that has run before the optimizer is made, and whose graph is still in use.
        passed: what is passed.
        kind: the optimizer.
        switches: whether the loop toggles the wrapper's reduction, as many accumulating loops do.
        ddp: options of the wrapper.
    """
    torch._dynamo.reset()
    module, (x, y), before = network(), DATA.tensors, {*HOOKS}
    model = DistributedDataParallel(module, **ddp) if wrap in ("before", "again", "run") else module
    model = COMPILED[wrap](module, **ddp) if wrap in COMPILED else model
    if wrap == "middle":
        module[2] = DistributedDataParallel(module[2])
    graph = model(x[:4]).sum() if wrap == "run" else None
    if graph is not None:
        graph.backward()
        model.zero_grad()
    sampler = vbs.CustomSampler(dataset_size=100, trace=SIZES, minibatch_size=4)
    given = {"wrapper": model, "module": module, "nothing": None}[passed]
    optimizer = kind(sgd(module, momentum=0.9), sampler, ref_batchsize=4, model=given)
    if wrap == "after":
        model = DistributedDataParallel(module, **ddp)
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        if wrap == "again" and epoch == 1:
            model = DistributedDataParallel(module, **ddp)
        for number, indices in enumerate(sampler):
            if switches:
                model.require_backward_grad_sync = number % 2 == 0
            nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
    assert {*HOOKS} <= before
    del graph
    gain = optimizer.gain() if kind is vbs.AdaScaleOptimizer else None
    state = {name.replace("module.", ""): value for name, value in module.state_dict().items()}
    return copy.deepcopy(state), gain


WAYS = [
    {"passed": "wrapper"},
    {"passed": "module"},
    {"passed": "nothing"},
    {"passed": "nothing", "kind": vbs.LinearRuleOptimizer},
    {"passed": "wrapper", "gradient_as_bucket_view": True},
    {"passed": "wrapper", "find_unused_parameters": True},
    {"passed": "wrapper", "switches": True},
    {"passed": "module", "wrap": "middle"},
    {"passed": "nothing", "wrap": "middle"},
    *({"passed": passed, "wrap": wrap} for wrap in ("after", "again", "run") for passed in ("module", "nothing")),
    *({"passed": "nothing", "wrap": wrap} for wrap in COMPILED),
]


def train_all():
    results = [train(**{"wrap": "before", **way}) for way in WAYS]
    return results, [message_of("before", passed, static_graph=True) for passed in ("wrapper", "nothing")]


def message_of(*args, **options):
    try:
        train(*args, **options)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("cores", [2, pytest.param(4, marks=pytest.mark.long)])
def test_wrapped_model_equals_an_unwrapped_one(on_cores, cores):
    expected = {kind: train("never", "module", kind) for kind in (vbs.AdaScaleOptimizer, vbs.LinearRuleOptimizer)}
    for results, messages in on_cores(cores, train_all):
        for way, (state, gain) in zip(WAYS, results, strict=True):
            plain, plain_gain = expected[way.get("kind", vbs.AdaScaleOptimizer)]
            for name in plain:
                torch.testing.assert_close(state[name], plain[name], rtol=0, atol=1e-9, msg=f"{name}, {way}")
            assert gain == (None if plain_gain is None else pytest.approx(plain_gain, rel=1e-9))
        for message in messages:
            assert "DistributedDataParallel(static_graph=True) reduces in every backward pass" in message


def with_a_wrapped_group_added():
    """The middle layer is added after a step; on several cores, wrapped."""
    model = network()
    sampler = vbs.CustomSampler(dataset_size=100, trace=SIZES, minibatch_size=4)
    inner = torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], lr=0.1)
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, model=model)
    x, y = DATA.tensors
    for indices in sampler:
        if optimizer.steps_done == 1 and len(optimizer.param_groups) == 1:
            late = list(model[2].parameters())
            if sampler.num_replicas > 1:
                model[2] = DistributedDataParallel(model[2])
            optimizer.add_param_group({"params": late})
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
    return weights_of(model)


def test_a_group_that_is_added_may_be_wrapped(on_cores):
    expected = with_a_wrapped_group_added()
    for found in on_cores(2, with_a_wrapped_group_added):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def first_forward(model, *, trained=None, passed=None):
    """The error when an optimizer is made, or in the first forward pass; None if there is none."""
    sampler = vbs.CustomSampler(dataset_size=8, trace=[4], minibatch_size=4)
    try:
        optimizer = vbs.LinearRuleOptimizer(
            sgd(model if trained is None else trained), sampler, ref_batchsize=4, model=passed
        )
    except ValueError as error:
        return f"made: {error}"
    for _ in range(2):  # a second attempt must not pass
        try:
            model(torch.ones(4, 2))
        except ValueError as error:
            found = f"run: {error}"
        else:
            found = None
    assert optimizer.steps_done == 0
    return found


def synchronized_norms():
    """Of models without, and with, parameters of the norm in the optimizer; and of none, beside another model."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with_parameters, of_another = (nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)) for _ in range(2))
    without = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)))
    found = [
        first_forward(model, trained=trained, passed=passed)
        for model, trained in [(with_parameters, None), (without, None), (with_parameters, with_parameters[0])]
        for passed in (model, None)
    ]
    assert of_another is not None
    return found, [first_forward(plain, passed=plain), first_forward(plain)]


def test_sync_batch_norm_in_the_model_raises(on_cores):
    for refused, accepted in on_cores(2, synchronized_norms):
        expected = "SyncBatchNorm waits for all ranks in every minibatch, but some may be idle: use BatchNorm"
        assert refused == 3 * [f"made: {expected}", f"run: {expected}"]
        assert accepted == [None, None]


def message_about_join():
    model = DistributedDataParallel(nn.Linear(2, 2))
    sampler = vbs.CustomSampler(dataset_size=8, trace=[4], minibatch_size=4)
    vbs.LinearRuleOptimizer(sgd(model), sampler, ref_batchsize=4)
    with pytest.raises(RuntimeError) as raised, model.join():
        model(torch.ones(4, 2))
    return str(raised.value)


def test_join_raises(on_cores):
    for message in on_cores(2, message_about_join):
        assert message.startswith("DistributedDataParallel.join() waits for all ranks in every forward pass")


def replicated():
    from torch.distributed._composable.replicate import replicate

    models = [replicate(nn.Sequential(nn.Linear(2, 2))) for _ in range(2)]
    return [first_forward(models[0], passed=models[0]), first_forward(models[1])]


def test_replicate_raises(on_cores):
    for made, run in on_cores(2, replicated):
        assert made.startswith(
            "made: replicate() is not supported, because it reduces gradients in every backward pass"
        )
        assert run.startswith("run: replicate() is not supported, because it reduces gradients in every backward pass")


def of_two_parts(wrap):
    """The weights of an encoder and a decoder, called one after the other; the decoder only from the third step on."""
    layers, before = network(), {*HOOKS}
    parts = [layers[:2], layers[2:]]
    encoder, decoder = [DistributedDataParallel(part) for part in parts] if wrap else parts
    sampler = vbs.CustomSampler(dataset_size=100, trace=SIZES, minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(layers), sampler, ref_batchsize=4)
    x, y = DATA.tensors
    for indices in sampler:
        features = (encoder(x[indices]) + encoder(-x[indices])) / 2
        outputs = features if optimizer.steps_done < 2 else decoder(features)
        nn.functional.cross_entropy(outputs, y[indices]).backward()
        optimizer.step()
    assert {*HOOKS} <= before
    return weights_of(layers)


def test_parts_are_found_when_they_run_for_the_first_time(on_cores):
    expected = of_two_parts(False)
    for found in on_cores(2, of_two_parts, True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def other_optimizer(wrap, *, passes_model):
    """The error for a torch optimizer of a layer, after one of another model."""
    model = WRAP[wrap](network())
    *first, weight, bias = model.parameters()
    sampler = vbs.CustomSampler(dataset_size=100, trace=[8] * 3, minibatch_size=4)
    inner, options = torch.optim.SGD(first, lr=0.1), {"model": model} if passes_model else {}
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, **options)
    unrelated, rest = sgd(network()), torch.optim.SGD([weight, bias], lr=0.1)
    x, y = DATA.tensors
    for indices in sampler:
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        optimizer.step()
        unrelated.step()
        break
    with pytest.raises(RuntimeError) as raised:
        rest.step()
    return str(raised.value)


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0])
    fully_shard(model[2])
    return fully_shard(model)


WRAP = {"DDP": DistributedDataParallel, "fully_shard": fully_sharded, "none": lambda model: model}
WHOSE = {
    "DDP": "a model whose DistributedDataParallel no longer reduces",
    "fully_shard": "a fully_shard model",
    "none": "a model on several cores",
}


def other_optimizers():
    return {
        (wrap, passes_model): other_optimizer(wrap, passes_model=passes_model)
        for wrap in WRAP
        for passes_model in (True, False)
    }


def test_a_part_of_the_model_must_not_have_another_optimizer(on_cores):
    for messages in on_cores(2, other_optimizers):
        for (wrap, _), message in messages.items():
            rule = f"all trained parameters of {WHOSE[wrap]} must belong to optimizers of this library"
            assert message == f"{rule}, but SGD has some: pass both optimizers as a list"


def teacher_beside_a_student():
    """Whether an unsharded teacher is still unsharded after training a student without `model=`."""
    teacher = fully_sharded(network().requires_grad_(False))
    teacher.unshard()
    student = fully_sharded(network())
    with torch.no_grad():
        student(torch.ones(1, 3, dtype=torch.float64))
    student.reshard()
    sampler = vbs.CustomSampler(dataset_size=100, trace=SIZES, minibatch_size=4)
    inner = sgd(student)
    student.unshard()
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4)
    is_resharded = [hasattr(student[4].weight, "full_tensor")]
    train_on(student, optimizer, (DATA[indices] for indices in sampler))
    return is_resharded, [not hasattr(p, "full_tensor") for p in teacher[4].parameters()]


def test_modules_of_other_models_are_not_resharded(on_cores):
    for is_resharded, is_unsharded in on_cores(2, teacher_beside_a_student):
        assert is_resharded == [True]
        assert is_unsharded == [True, True]


def group_added():
    """The weights after adding a layer that a graph still uses."""
    model, graphs, before = network(), [], {*HOOKS}
    sampler = vbs.CustomSampler(dataset_size=100, trace=SIZES, minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model[0].parameters()), sampler, ref_batchsize=4, model=model)
    for epoch in optimizer.epochs(2):
        train_on(model, optimizer, (DATA[indices] for indices in sampler))
        if epoch == 0:
            graphs.append(model(DATA.tensors[0]))
            optimizer.add_param_group({"params": list(model[4].parameters())})
    assert {*HOOKS} <= before
    return weights_of(model)


def test_a_group_may_be_added_while_a_graph_uses_it(on_cores):
    expected = group_added()
    for found in on_cores(2, group_added):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def compilations(wrap, passed):
    """How many frames have been compiled after each of five minibatches."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module, (x, _) = network(), DATA.tensors
    model = {**COMPILED, "compile": compiled, "compile()": compiled_in_place}[wrap](module)
    ddp = next((part for part in getattr(model, "modules", list)() if isinstance(part, DistributedDataParallel)), None)
    given = {"wrapper": ddp, "module": module, "nothing": None}[passed]
    sampler = vbs.CustomSampler(dataset_size=100, trace=[8] * 5, minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(module), sampler, ref_batchsize=4, model=given)
    found = []
    for indices in sampler:
        model(x[indices]).sum().backward()
        optimizer.step()
        found.append(torch._dynamo.utils.counters["frames"]["ok"])
    return found


SAME = [("compile(DDP)", "wrapper"), ("DDP(compile)", "wrapper"), ("DDP(compile())", "wrapper"), ("compile", "module")]


def all_compilations():
    return [[compilations(wrap, passed) for passed in (known, "nothing")] for wrap, known in SAME]


def test_watching_the_first_minibatch_compiles_nothing_again(on_cores):
    for counts in on_cores(2, all_compilations):
        for known, watched in counts:
            assert 0 < watched[0] == watched[-1] <= known[-1]


def test_an_optimizer_that_is_not_used_leaves_no_hook(on_cores):
    assert on_cores(2, hooks_of_an_unused_optimizer) == 2 * [[0, 1, 0]]


def hooks_of_an_unused_optimizer():
    gc.collect()
    numbers = [len(HOOKS)]
    sampler = vbs.CustomSampler(dataset_size=8, trace=[4], minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(sgd(network()), sampler, ref_batchsize=4)
    numbers.append(len(HOOKS))
    del optimizer
    gc.collect()
    return [*numbers, len(HOOKS)]


class Reducing(nn.Module):
    """A class in place of one that is refused and may be around a model in a single process."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.fixture
def deepspeed(monkeypatch):
    module = types.ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = Reducing
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)


def test_models_in_other_threads_are_not_mixed_up(deepspeed):
    found, barrier, before = {}, threading.Barrier(4), {*HOOKS}

    def work(number):
        model = nn.Sequential(nn.Linear(2, 2))
        around = Reducing(model) if number == 2 else model
        barrier.wait()
        found[number] = first_forward(around, trained=model)
        barrier.wait()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.pop(2).startswith("run: a DeepSpeed engine is not supported")
    assert found == dict.fromkeys((0, 1, 3))
    gc.collect()
    assert {*HOOKS} <= before
