"""The countable cost of steps: collectives, reads from the device, copies to it, memory."""

import gc
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from count_reads import CountReads
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import variable_batch_size as vbs
from variable_batch_size.cores.detect import ProcessGroups

RULES = ("linear", "linear_momentum", "adascale", "adamscale")
WEIGHTED = ("linear weighted", "adascale weighted", "linear measured")
TRACE = [4 * n for n in (4, 1, 3, 6, 2, 5, 1, 4)]  # on two cores: even, uneven and idle
NUM_WARM = 3  # updates after which all persistent memory is allocated

Tensor = torch.Tensor


class CountOperations(TorchDispatchMode):
    """Counts operations that allocate at least a given number of elements, and those that make tensors on the host.

    Tensors made from Python numbers on the host, by ``torch.tensor(…)`` or ``tensor[0] = number``, synchronize when
    they are copied to the device.
    """

    def __init__(self, num_elements):
        super().__init__()
        self.num_elements = num_elements
        self.num_allocations = self.num_sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_sent += func is torch.ops.aten.lift_fresh.default
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.num_allocations += sum(
            isinstance(t, Tensor) and t.numel() >= self.num_elements and t.untyped_storage().data_ptr() not in given
            for t in tree_leaves(result)
        )
        return result


class Call(NamedTuple):
    """The counts of one call of step(): reductions, numbers read and sent, large allocations, and bytes after it."""

    ends_step: bool
    is_idle: bool
    num_collectives: int
    num_reads: int
    num_sent: int
    num_allocations: int
    live_bytes: int | None


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def live_bytes():
    gc.collect()
    # without other types of tensors that earlier tests leave, or that have memory elsewhere
    found = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    tensors = [t for t in found if torch._C._has_storage(t)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def count(rule, trace=TRACE, model=None, clip_grad_norm=1.0):
    """The counts of every call of step()."""
    model = model or network()
    num_parameters = sum(p.numel() for p in model.parameters())
    rule, *way = rule.split()
    inner = torch.optim.AdamW(model.parameters()) if rule == "adamscale" else torch.optim.SGD(model.parameters(), 0.1)
    sampler = vbs.CustomSampler(dataset_size=1000, trace=trace, minibatch_size=4)
    optimizer = vbs.CustomOptimizer(
        inner,
        sampler,
        rule=vbs.rules.make_rule(rule),
        ref_batchsize=8,
        model=model,
        clip_grad_norm=clip_grad_norm,
        measure_noise="measured" in way,
    )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    inner.step()
    for p in model.parameters():
        p.grad = None
    for state in inner.state.values():
        state["step"] = 1.0  # Adam's step count is a tensor on the host: reading it does not synchronize
    inner.step = lambda: None  # the cost of the inner optimizer is not counted
    num_collectives = 0
    all_reduce = dist.all_reduce

    def counted(*args, **kwargs):
        nonlocal num_collectives
        num_collectives += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    calls = []
    gc.freeze()  # what exists does not grow; a search of it takes most of the time
    try:
        for _ in sampler:
            model(torch.randn(4, 6)).square().mean().backward()
            before, num_collectives = optimizer.steps_done, 0
            with CountReads() as reads, CountOperations(num_parameters) as operations:
                optimizer.step(weight=3 if "weighted" in way else None)
            ends_step = optimizer.steps_done > before
            is_looked_at = ends_step and optimizer.steps_done in (NUM_WARM, len(trace))
            calls.append(
                Call(
                    ends_step=ends_step,
                    is_idle=optimizer.is_idle,
                    num_collectives=num_collectives,
                    num_reads=reads.num_reads,
                    num_sent=operations.num_sent,
                    num_allocations=operations.num_allocations,
                    live_bytes=live_bytes() if is_looked_at else None,
                )
            )
    finally:
        gc.unfreeze()
        dist.all_reduce = all_reduce
    return calls


def count_all():
    return {rule: count(rule) for rule in (*RULES, *WEIGHTED)}


@pytest.fixture(scope="module")
def calls_on(on_cores):
    """The calls of each core."""
    found = {1: [count_all()], 2: on_cores(2, count_all)}
    return lambda cores, rule: [calls[rule] for calls in found[cores]]


on_one_and_two = pytest.mark.parametrize("cores", [1, 2])
for_rules = pytest.mark.parametrize("rule", (*RULES, *WEIGHTED))


@on_one_and_two
@for_rules
def test_step_has_exactly_one_collective(calls_on, cores, rule):
    for calls in calls_on(cores, rule):
        assert [call.num_collectives for call in calls] == [int(call.ends_step and cores > 1) for call in calls]
        assert sum(call.ends_step for call in calls) == len(TRACE)


@on_one_and_two
@for_rules
def test_measuring_rules_read_from_the_device_once_per_step_and_others_never(calls_on, cores, rule):
    # on a CPU, several cores check for zero weight and compare checksums at once, without waiting
    compares = int(cores > 1)
    reads = int("scale" in rule or "measured" in rule) + compares * (1 + ("weighted" in rule))
    for calls in calls_on(cores, rule):
        # in the first step, cores check that all or none have weights, and the same frozen parameters
        num_first = next(number for number, call in enumerate(calls, start=1) if call.ends_step)
        assert sum(call.num_reads for call in calls[:num_first]) == reads + compares
        calls = calls[num_first:]
        assert {call.num_reads for call in calls if call.ends_step and not call.is_idle} <= {reads}
        # an idle core receives from the others which parameters have a gradient
        assert {call.num_reads for call in calls if call.is_idle} <= {reads + 1}
        assert {call.num_reads for call in calls if not call.ends_step} <= {0}
        assert all(call.num_reads for call in calls if call.ends_step) == bool(reads)


@on_one_and_two
@for_rules
def test_no_number_is_copied_to_the_device(calls_on, cores, rule):
    for calls in calls_on(cores, rule):
        # an idle core sends which parameters have no gradient
        assert all(call.num_sent == int(call.is_idle) for call in calls)
        assert any(call.is_idle for call in calls_on(cores, rule)[-1]) == (cores > 1)


def sent_by_sharded():
    """The numbers that some steps of a model in fully_shard copy to the device."""
    from torch.distributed.fsdp import fully_shard

    sent = []
    for rule in ("linear", "adascale weighted"):
        model = network()
        for layer in model:
            fully_shard(layer)
        sent.append(sum(call.num_sent for call in count(rule, trace=TRACE[:3], model=fully_shard(model))))
    return sent


def test_no_number_is_copied_to_the_device_with_fully_shard(on_cores):
    assert on_cores(2, sent_by_sharded) == [[0, 0]] * 2


@on_one_and_two
@for_rules
def test_memory_does_not_grow(calls_on, cores, rule):
    for calls in calls_on(cores, rule):
        warm, last = [call.live_bytes for call in calls if call.live_bytes is not None]
        assert last == warm


@on_one_and_two
@for_rules
def test_step_does_not_copy_the_gradients(calls_on, cores, rule):
    for calls in calls_on(cores, rule):
        updates = [call.num_allocations for call in calls if call.ends_step]
        divided = 2 if rule == "adamscale" else 0  # preconditioned gradients of a minibatch and of the step
        assert max(updates[NUM_WARM:]) <= divided


def sum_large():
    numbers = torch.arange(2**22 + 3)
    total = ProcessGroups().total(numbers)
    large = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2**20, bias=False))
    return torch.equal(total, 2 * numbers), [call.num_collectives for call in count("linear", trace=[8], model=large)]


def test_large_sum_on_gloo_is_split_in_two(on_cores):
    assert on_cores(2, sum_large) == [(True, [2])] * 2
