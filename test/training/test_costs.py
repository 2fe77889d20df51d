"""What steps cost, in numbers that can be counted: collectives, reads from the device, memory."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import variable_batch_size as vbs
from variable_batch_size.cores.distributed import Distributed

RULES = {
    "linear": vbs.LinearRuleOptimizer,
    "momentum": vbs.LinearRuleMomentumOptimizer,
    "adascale": vbs.AdaScaleOptimizer,
    "adamscale": vbs.AdamScaleOptimizer,
}
TRACE = [4 * n for n in (4, 1, 3, 6, 2, 5, 1, 4)]  # on two cores: even, uneven and idle
NUM_WARM = 3  # updates after which everything that stays has been made

Tensor = torch.Tensor


class CountReads(TorchFunctionMode):
    """Counts the calls that wait for the device and bring values to the host."""

    READS = (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__)

    def __init__(self):
        super().__init__()
        self.num_reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.num_reads += func in self.READS
        return func(*args, **(kwargs or {}))


class CountAllocations(TorchDispatchMode):
    """Counts the operations that return new memory of at least so many elements."""

    def __init__(self, num_elements):
        super().__init__()
        self.num_elements = num_elements
        self.num_allocations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.num_allocations += sum(
            isinstance(t, Tensor) and t.numel() >= self.num_elements and t.untyped_storage().data_ptr() not in given
            for t in tree_leaves(result)
        )
        return result


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def live_bytes():
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    tensors = [t for t in found if torch._C._has_storage(t)]  # other tests leave things that have none
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def count(rule, trace=TRACE, model=None, clip_grad_norm=1.0):
    """For every call of step(): whether it ended a step, what it did, and in two of them the bytes of all tensors."""
    model = model or network()
    num_parameters = sum(p.numel() for p in model.parameters())
    inner = torch.optim.AdamW(model.parameters()) if rule == "adamscale" else torch.optim.SGD(model.parameters(), 0.1)
    sampler = vbs.CustomSampler(dataset_size=1000, trace=trace, minibatch_size=4)
    optimizer = RULES[rule](inner, sampler, ref_batchsize=8, model=model, clip_grad_norm=clip_grad_norm)
    inner.step()
    for state in inner.state.values():
        state["step"] = 1.0  # Adam keeps it on the host, in a tensor: reading that waits for nothing
    inner.step = lambda: None  # what that costs is its own affair
    num_collectives = 0
    all_reduce = dist.all_reduce

    def counted(*args, **kwargs):
        nonlocal num_collectives
        num_collectives += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    rows = []
    try:
        for _ in sampler:
            model(torch.randn(4, 6)).square().mean().backward()
            before, num_collectives = optimizer.steps_done, 0
            with CountReads() as reads, CountAllocations(num_parameters) as allocations:
                optimizer.step()
            is_end = optimizer.steps_done > before
            size = live_bytes() if is_end and optimizer.steps_done in (NUM_WARM, len(trace)) else None
            rows.append((is_end, num_collectives, reads.num_reads, allocations.num_allocations, size))
    finally:
        dist.all_reduce = all_reduce
    return rows


def count_all():
    return {rule: count(rule) for rule in RULES}


@pytest.fixture(scope="module")
def rows_on():
    found = {1: [count_all()], 2: vbs.launch(count_all, cores=2, backend="gloo")}
    return lambda cores, rule: [rows[rule] for rows in found[cores]]


on_cores = pytest.mark.parametrize("cores", [1, 2])
for_rules = pytest.mark.parametrize("rule", RULES)


@on_cores
@for_rules
def test_one_collective_ends_a_step_and_there_is_no_other(rows_on, cores, rule):
    for rows in rows_on(cores, rule):
        assert [row[1] for row in rows] == [int(row[0] and cores > 1) for row in rows]
        assert sum(row[0] for row in rows) == len(TRACE)


@on_cores
@for_rules
def test_rules_that_measure_read_from_the_device_once_a_step_and_others_never(rows_on, cores, rule):
    reads = int("scale" in rule)
    for rows in rows_on(cores, rule):
        updates = [row[2] for row in rows if row[0]]
        assert set(updates[1:]) == {reads}  # the first one also finds out which parameters get gradients at all
        assert {row[2] for row in rows if not row[0]} <= {0}


@on_cores
@for_rules
def test_memory_stays_as_it_is(rows_on, cores, rule):
    for rows in rows_on(cores, rule):
        warm, last = [row[4] for row in rows if row[4] is not None]
        assert last == warm


@on_cores
@for_rules
def test_a_step_makes_no_second_copy_of_the_gradients(rows_on, cores, rule):
    for rows in rows_on(cores, rule):
        updates = [row[3] for row in rows if row[0]]
        divided = 2 if rule == "adamscale" else 0  # the gradients by Adam's second moment, of a minibatch and of all
        assert max(updates[NUM_WARM:]) <= divided


def sum_large():
    numbers = torch.arange(2**22 + 3)
    total = Distributed().total(numbers)
    large = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2**20, bias=False))
    return torch.equal(total, 2 * numbers), [row[1] for row in count("linear", trace=[8], model=large)]


def test_on_gloo_a_large_sum_is_made_in_two_parts():
    assert vbs.launch(sum_large, cores=2, backend="gloo") == [(True, [2])] * 2
