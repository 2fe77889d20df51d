"""Wrappers are found despite ``gc.freeze()``, with at most one heap search, and other models are not touched."""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import variable_batch_size as vbs
from variable_batch_size.optim import wrappers

SIZES = [4 * n for n in (3, 1, 4, 2, 5)]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def fully_sharded(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0])
    fully_shard(model[2])
    return fully_shard(model)


WRAP = {"DDP": DistributedDataParallel, "fully_shard": fully_sharded, "none": lambda model: model}


def train(wrap, passed, freeze, searches=None):
    """Train on this core, and return the weights; or the error.

    Args:
        wrap: how the model is wrapped.
        passed: what is passed as `model`: the wrapper, the module inside, or nothing.
        freeze: when gc.freeze() is called: "before" the model is wrapped, "between" wrapping and making the optimizer,
            "after" the optimizer is made; or "late" if the model is wrapped after the optimizer is made, too.
        searches: receives the number of searches at construction and in each pass.
    """
    gc.collect()
    gc.unfreeze()
    module = model = network()
    if freeze == "before":
        gc.freeze()
    if freeze != "late":
        model = WRAP[wrap](module)
    if freeze == "between":
        gc.freeze()
    wrappers._ddp_made.clear()  # as for the first optimizer of a process
    sampler = vbs.CustomSampler(dataset_size=40, trace=SIZES, minibatch_size=4)
    given = {"wrapper": model, "module": module, "nothing": None}[passed]
    with counted_searches() as count:
        try:
            inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4, model=given)
            counts = [len(count)]
            if freeze == "late":
                model = WRAP[wrap](module)
            if freeze in ("after", "late"):
                gc.freeze()
            run(model, sampler, optimizer, lambda: counts.append(len(count)))
        except (ValueError, RuntimeError) as error:
            return str(error)
    if searches is not None:
        searches[wrap, passed] = [counts[0], *(late - early for early, late in itertools.pairwise(counts))]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in module.state_dict().values()]


def run(model, sampler, optimizer, after_pass):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (40,), generator=generator)
    for epoch in range(sampler.schedule.num_epochs):
        sampler.set_epoch(epoch)
        optimizer.set_epoch(epoch)
        for indices in sampler:
            nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
            optimizer.step()
        after_pass()


@contextlib.contextmanager
def counted_searches():
    count, real = [], gc.get_referrers

    def counted(*things):
        count.append(1)
        return real(*things)

    gc.get_referrers = counted
    try:
        yield count
    finally:
        gc.get_referrers = real


def teacher_beside_a_student():
    """Whether an unsharded teacher is still unsharded after training a student without `model=`."""
    gc.unfreeze()
    teacher = fully_sharded(network().requires_grad_(False))
    teacher.unshard()
    student = fully_sharded(network())
    with torch.no_grad():
        student(torch.ones(1, 3, dtype=torch.float64))
    student.reshard()
    sampler = vbs.CustomSampler(dataset_size=40, trace=SIZES, minibatch_size=4)
    inner = torch.optim.SGD(student.parameters(), lr=0.1)
    student.unshard()
    optimizer = vbs.LinearRuleOptimizer(inner, sampler, ref_batchsize=4)
    is_resharded = [hasattr(student[4].weight, "full_tensor")]
    run(student, sampler, optimizer, lambda: None)
    return is_resharded, [not hasattr(p, "full_tensor") for p in teacher[4].parameters()]


def other_optimizer(wrap):
    """The error for a torch optimizer of the last layer that gc.freeze() hides."""
    gc.collect()
    gc.unfreeze()
    model = WRAP[wrap](network())
    *first, weight, bias = model.parameters()
    sampler = vbs.CustomSampler(dataset_size=40, trace=SIZES, minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(first, lr=0.1), sampler, ref_batchsize=4, model=model)
    other = torch.optim.SGD([weight, bias], lr=0.1)
    gc.freeze()
    try:
        run(model, sampler, optimizer, other.step)
    except RuntimeError as error:
        return str(error)
    return "no error"


def group_added():
    """The weights after adding a layer, still referenced by a graph, after gc.freeze() between two steps."""
    gc.collect()
    gc.unfreeze()
    model = network()
    sampler = vbs.CustomSampler(dataset_size=40, trace=SIZES, minibatch_size=4)
    optimizer = vbs.LinearRuleOptimizer(torch.optim.SGD(model[0].parameters()), sampler, ref_batchsize=4, model=model)
    gc.freeze()
    graphs = []

    def add():
        if len(optimizer.param_groups) == 1:
            graphs.append(model(torch.ones(1, 3, dtype=torch.float64)))
            optimizer.add_param_group({"params": list(model[4].parameters())})

    run(model, sampler, optimizer, add)
    return [p.detach() for p in model.parameters()]


PASSED = [("DDP", "wrapper"), ("DDP", "module"), ("DDP", "nothing"), ("fully_shard", "wrapper")]
PASSED += [("fully_shard", "nothing"), ("none", "module"), ("none", "nothing")]
WAYS = [(*way, freeze) for way in PASSED for freeze in ("never", "before", "between", "after")]
WAYS += [("DDP", "module", "late"), ("DDP", "nothing", "late")]
WAYS += [("fully_shard", "module", "late"), ("fully_shard", "nothing", "late")]
# in the long form only: the wrapper was passed, or nothing is hidden that other ways do not hide
LONG = [("DDP", "wrapper", "before"), ("DDP", "wrapper", "after"), ("DDP", "module", "before")]
LONG += [("fully_shard", "wrapper", "before"), ("fully_shard", "wrapper", "between")]
LONG += [("none", "module", "before"), ("none", "module", "after"), ("none", "nothing", "before")]
LATE = "wrapped in DistributedDataParallel after the optimizer was made"
REPLACED = "no parameter of the optimizer has a gradient; fully_shard replaces the parameters of a model"
ERRORS = {
    ("DDP", "module", "late"): LATE,
    ("DDP", "nothing", "late"): LATE,
    ("fully_shard", "module", "late"): REPLACED,
    ("fully_shard", "nothing", "late"): REPLACED,
}
# at construction and in each of two passes; other objects would not be found in the passed model
SEARCHES = {("DDP", "module"): 1, ("DDP", "nothing"): 1, ("fully_shard", "nothing"): 1, ("none", "nothing"): 1}


def everything(ways):
    searches = {}
    outcomes = {way: train(*way, searches=searches if way[2] == "never" else None) for way in ways}
    others = [other_optimizer(wrap) for wrap in ("DDP", "fully_shard")]
    return outcomes, searches, teacher_beside_a_student(), others, group_added()


@pytest.fixture(scope="module")
def found(on_new_cores, request):
    with_long = "long" in request.config.option.markexpr
    return on_new_cores(2, everything, [way for way in WAYS if with_long or way not in LONG])


@pytest.fixture(scope="module")
def expected():
    return train("none", "nothing", "never")


@pytest.mark.parametrize(
    "way", [pytest.param(way, id="-".join(way), marks=pytest.mark.long if way in LONG else ()) for way in WAYS]
)
def test_gc_freeze_gives_correct_weights_or_a_clear_error(found, expected, way):
    for outcomes, *_ in found:
        if way in ERRORS:
            assert ERRORS[way] in outcomes[way]
        else:
            assert not isinstance(outcomes[way], str), outcomes[way]
            torch.testing.assert_close(outcomes[way], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("way", PASSED, ids="-".join)
def test_the_heap_is_searched_at_most_once(found, way):
    for _, searches, *_ in found:
        assert searches[way] == [SEARCHES.get(way, 0), 0, 0]


def test_modules_of_other_models_are_not_resharded(found):
    for _, _, (is_resharded, is_unsharded), *_ in found:
        assert is_resharded == [True]
        assert is_unsharded == [True, True]


def test_torch_optimizer_hidden_by_gc_freeze_raises(found):
    for *_, messages, _ in found:
        for message in messages:
            assert "must belong to optimizers of this library, but SGD has some" in message


def test_a_model_that_was_frozen_by_a_search_is_freed_by_the_next_one():
    gc.freeze()
    try:
        model = network()
        model.register_forward_hook(lambda *_, model=model: None)  # a cycle, which only a collection frees
        reference = weakref.ref(model)
        assert any(one is model for one in wrappers._alive(nn.Sequential))
        del model
        gc.collect()
        assert reference() is not None
        wrappers._alive(nn.Sequential)
        assert reference() is None
    finally:
        gc.unfreeze()


def test_group_may_be_added_after_gc_freeze(found):
    expected = group_added()
    gc.unfreeze()
    for *_, weights in found:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)
